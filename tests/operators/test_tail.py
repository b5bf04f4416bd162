"""The tail after the sums: operators write it and verify it."""

import pytest
import torch
from support import ops
from support.cases import arguments, make_input, operator

pytestmark = pytest.mark.any_torch

FIRST = 77.0
TAIL = torch.tensor([FIRST, 12.0, 144.0], dtype=torch.float64)
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
    with_tail = one_or_first(operator(name)(*args, TAIL))
    assert plain.numel() == SENDERS[name]
    same, end = with_tail[: SENDERS[name]], with_tail[2 * CHANNELS :].tolist()
    torch.testing.assert_close(same, plain, rtol=0, atol=0, equal_nan=True)  # mean of no values
    assert end == [values if name == "batch_norm_stats" else 0, *TAIL.tolist()]


@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (TAIL[:2], r"tail to have shape \[3\], but got \[2\]"),
        (TAIL.float(), "tail to be contiguous float64 on the CPU"),
        (torch.stack([TAIL, TAIL], 1)[:, 0], "tail to be contiguous float64 on the CPU"),
    ],
)
def test_bad_tail_is_named(each_device, name, bad, message):
    args = arguments(name, make_input((5, CHANNELS), "contiguous", torch.float32))
    with pytest.raises(RuntimeError, match=message):
        operator(name)(*args, bad)


def received(name, what, samples=5):
    """Arguments of an operator whose sums are those of two ranks."""
    args = list(arguments(name, make_input((samples, CHANNELS), "contiguous", torch.float32)))
    sums = args[RECEIVERS[name]][: 2 * CHANNELS]
    count = float("nan") if what == "aborted" else 5.0 if name == "batch_norm_apply" else 0.0
    tail_sum = 2 * FIRST + (what == "different")
    args[RECEIVERS[name]] = torch.cat([sums, sums.new_tensor([count, tail_sum, 24, 288])])
    return args


@pytest.mark.parametrize("name", RECEIVERS)
def test_sound_sums_give_the_same_result(each_device, name):
    args = received(name, "sound")
    plain = list(args)
    end = 2 * CHANNELS + (name == "batch_norm_apply")
    plain[RECEIVERS[name]] = args[RECEIVERS[name]][:end].clone()
    expected = one_or_first(operator(name)(*plain))
    assert torch.equal(one_or_first(operator(name)(*args, 2 * FIRST)), expected)
    assert torch.equal(one_or_first(operator(name)(*args)), expected)  # not verified


@pytest.mark.parametrize("what", ["aborted", "different"])
@pytest.mark.parametrize("name", RECEIVERS)
def test_error_on_the_cpu_changes_nothing(name, what):
    args = received(name, what)
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises(RuntimeError, match=WORDS[what]) as error:
        getattr(ops, name)(*args, 2 * FIRST)
    kind = ops.AbortedError if what == "aborted" else ops.PassesDifferError
    assert type(error.value) is kind
    for arg, old in zip(args, before, strict=True):
        if isinstance(arg, torch.Tensor):
            torch.testing.assert_close(arg, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", RECEIVERS)
def test_sums_to_verify_must_have_a_tail(each_device, name):
    args = arguments(name, make_input((5, CHANNELS), "contiguous", torch.float32))
    with pytest.raises(RuntimeError, match=r"to have shape \[10\]"):
        operator(name)(*args, 2 * FIRST)


@pytest.mark.cuda
@pytest.mark.parametrize("what", ["sound", "aborted", "different"])
@pytest.mark.parametrize("name", RECEIVERS)
@pytest.mark.parametrize("samples", [5, 0])
def test_status_on_cuda(on_cuda, samples, name, what):
    args = received(name, what, samples)
    status = torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=True)
    output = one_or_first(operator(name)(*args, 2 * FIRST, status))
    torch.cuda.synchronize()
    assert output.isnan().tolist() == [[what != "sound"] * CHANNELS] * samples
    assert status.item() == {"sound": 0, "aborted": -2 * FIRST, "different": 2 * FIRST}[what]


# The verification by itself.


def to_verify(count, tail_sum=2 * FIRST, size=6):
    return torch.cat([torch.arange(size).double(), torch.tensor([count, tail_sum, 24, 288])])


@pytest.mark.parametrize("size", [0, 6, 1000])
def test_consistent_sums_without_their_tail(each_device, size):
    sums = to_verify(98.0, size=size).to(each_device)
    assert torch.equal(ops.verify_sums(sums, 2 * FIRST), sums[:-3])
    assert torch.equal(ops.verify_sums(sums, 1.0, 2 * FIRST), sums[:-3])


@pytest.mark.parametrize(
    ("count", "tail_sum", "kind"),
    [
        (float("nan"), 2 * FIRST, ops.AbortedError),
        (98.0, 2 * FIRST + 1, ops.PassesDifferError),
        (1.0, 2 * FIRST, ValueError),
    ],
)
def test_inconsistent_sums_are_an_error_on_the_cpu(count, tail_sum, kind):
    with pytest.raises(kind) as error:
        ops.verify_sums(to_verify(count, tail_sum), 2 * FIRST, 3 * FIRST)
    assert type(error.value) is kind


@pytest.mark.cuda
@pytest.mark.parametrize("noted", [0.0, 5.0])
@pytest.mark.parametrize(
    ("count", "tail_sum", "note"),
    [
        (98.0, 2 * FIRST, 0.0),
        (98.0, 3 * FIRST, 0.0),
        (float("nan"), 2 * FIRST, -2 * FIRST),
        (98.0, 2 * FIRST + 1, 2 * FIRST),
    ],
)
def test_inconsistent_sums_are_nan_on_cuda(on_cuda, count, tail_sum, note, noted):
    sums = to_verify(count, tail_sum, size=300).cuda()
    status = torch.full((1,), noted, dtype=torch.float64, device="cpu").pin_memory()
    verified = ops.verify_sums(sums, 2 * FIRST, 3 * FIRST, status)
    torch.cuda.synchronize()
    assert status.item() == (noted or note)
    if note == 0:
        assert torch.equal(verified, sums[:-3])
    else:
        assert verified.isnan().all()


@pytest.mark.parametrize("bad", [torch.zeros(3).double(), torch.zeros(2, 4).double()])
def test_sums_without_a_tail_cannot_be_verified(each_device, bad):
    with pytest.raises(RuntimeError, match=r"sums to have shape \[n \+ 3\]"):
        ops.verify_sums(bad.to(each_device), 1.0)
