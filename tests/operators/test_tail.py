"""The tail after the sums: operators write it and verify it."""

import pytest
import torch
from cases import arguments, make_input, operator

from syncbn import ops

pytestmark = pytest.mark.any_torch

FINGERPRINT, NEXT_SIZE = 77.0, 12.0
CHANNELS = 3
SENDERS = {"batch_norm_stats": 2 * CHANNELS + 1, "batch_norm_backward_reduce": 2 * CHANNELS}
RECEIVERS = {"batch_norm_apply": 1, "batch_norm_backward_apply": 5}  # the position of the sums
WORDS = {
    "aborted": "another rank of the process group aborted this pass",
    "different": "the ranks of the process group run different passes",
}


def one_or_first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize(
    ("shape", "values"), [((5, CHANNELS), 5), ((0, CHANNELS), 0), ((2, CHANNELS, 7, 7), 98)]
)
def test_sums_are_the_same_before_a_tail(each_device, name, shape, values):
    args = arguments(name, make_input(shape, "contiguous", torch.float32))
    plain = one_or_first(operator(name)(*args))
    announced = one_or_first(operator(name)(*args, FINGERPRINT, NEXT_SIZE))
    assert plain.numel() == SENDERS[name]
    same, end = announced[: SENDERS[name]], announced[2 * CHANNELS :].tolist()
    torch.testing.assert_close(same, plain, rtol=0, atol=0, equal_nan=True)  # mean of no values
    assert end == [
        values if name == "batch_norm_stats" else 0,
        FINGERPRINT,
        NEXT_SIZE,
        NEXT_SIZE**2,
    ]


def received(name, what):
    """Arguments of an operator whose sums are those of two ranks."""
    args = list(arguments(name, make_input((5, CHANNELS), "contiguous", torch.float32)))
    sums = args[RECEIVERS[name]][: 2 * CHANNELS]
    count = float("nan") if what == "aborted" else 5.0 if name == "batch_norm_apply" else 0.0
    fingerprints = 2 * FINGERPRINT + (what == "different")
    args[RECEIVERS[name]] = torch.cat([sums, sums.new_tensor([count, fingerprints, 24, 288])])
    return args


@pytest.mark.parametrize("name", RECEIVERS)
def test_sound_sums_give_the_same_result(each_device, name):
    args = received(name, "sound")
    plain = list(args)
    end = 2 * CHANNELS + (name == "batch_norm_apply")
    plain[RECEIVERS[name]] = args[RECEIVERS[name]][:end].clone()
    expected = one_or_first(operator(name)(*plain))
    assert torch.equal(one_or_first(operator(name)(*args, 2 * FINGERPRINT)), expected)
    assert torch.equal(one_or_first(operator(name)(*args)), expected)  # not verified


@pytest.mark.parametrize("what", ["aborted", "different"])
@pytest.mark.parametrize("name", RECEIVERS)
def test_error_on_the_cpu_changes_nothing(name, what):
    args = received(name, what)
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises(RuntimeError, match=WORDS[what]) as error:
        getattr(ops, name)(*args, 2 * FINGERPRINT)
    kind = ops.AbortedError if what == "aborted" else ops.PassesDifferError
    assert type(error.value) is kind
    for arg, old in zip(args, before, strict=True):
        if isinstance(arg, torch.Tensor):
            torch.testing.assert_close(arg, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", RECEIVERS)
def test_sums_to_verify_must_have_a_tail(each_device, name):
    args = arguments(name, make_input((5, CHANNELS), "contiguous", torch.float32))
    with pytest.raises(RuntimeError, match=r"to have shape \[10\]"):
        operator(name)(*args, 2 * FINGERPRINT)


@pytest.mark.cuda
@pytest.mark.parametrize("what", ["sound", "aborted", "different"])
@pytest.mark.parametrize("name", RECEIVERS)
def test_status_on_cuda(on_cuda, name, what):
    args = received(name, what)
    status = torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=True)
    output = one_or_first(operator(name)(*args, 2 * FINGERPRINT, status))
    torch.cuda.synchronize()
    assert output.isnan().all().item() == (what != "sound")
    assert (
        status.item()
        == {"sound": 0, "aborted": -2 * FINGERPRINT, "different": 2 * FINGERPRINT}[what]
    )
