"""Tails and statuses of the CUDA kernels."""

import pytest
import torch
from cases import make_input, reference_moments
from emulated import Device, on_all_devices

from syncbn.distributed import sync

FINGERPRINT, NEXT_SIZE = 77.0, 12.0
SHAPES = [(5, 3), (40, 300), (2, 3, 101, 103), (0, 3)]  # whole and split over blocks


@pytest.mark.parametrize("shape", SHAPES)
def test_tail_stands_behind_the_same_sums(library, shape):
    x = make_input(shape, "contiguous", torch.float32)
    dy = make_input(shape, "contiguous", torch.float32, seed=1)
    channels = shape[1]
    mean, var = torch.zeros(channels).double(), torch.ones(channels).double()

    def run(device):
        plain = device.batch_norm_stats(x)
        announced = device.batch_norm_stats(x, FINGERPRINT, NEXT_SIZE)
        assert torch.equal(announced[: 2 * channels + 1], plain)
        plain_sums, *_ = device.batch_norm_backward_reduce(dy, x, mean, var)
        sums, *_ = device.batch_norm_backward_reduce(
            dy, x, mean, var, fingerprint=FINGERPRINT, next_size=NEXT_SIZE
        )
        assert torch.equal(sums[: 2 * channels], plain_sums)
        return announced, sums

    for _, (announced, sums) in on_all_devices(library, run, x):
        end = [FINGERPRINT, NEXT_SIZE, NEXT_SIZE**2]
        assert announced[2 * channels + 1 :].tolist() == end
        assert sums[2 * channels :].tolist() == [0.0, *end]


def verified(device, what, momentum, status):
    """The results of both operators for sums of two ranks, and the running statistics."""
    x = make_input((40, 3, 5), "contiguous", torch.float32)
    mean, var = reference_moments(x)
    sums = torch.cat([400 * mean, 400 * (var + mean.square())])
    count = float("nan") if what == "aborted" else 400.0
    fingerprints = 2 * FINGERPRINT + (what == "different")
    totals = torch.cat([sums, torch.tensor([count, fingerprints, 24, 288]).double()])
    running = torch.zeros(3), torch.ones(3), torch.tensor([4])
    output, *_ = device.batch_norm_apply(
        x, totals, None, None, *running, momentum, 1e-5, 2 * FINGERPRINT, status
    )
    totals[6] = 0 * count
    ones = torch.ones(3).double()
    grad = device.batch_norm_backward_apply(
        x, x, mean, ones, None, totals, ones[:1], 2 * FINGERPRINT, status
    )
    return output, grad, running


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("what", ["sound", "aborted", "different"])
def test_pass_that_is_not_sound_gives_nan_and_changes_nothing(library, what, momentum):
    device = Device(library, 8, "shuffled")
    status = torch.zeros(1).double()
    output, grad, (mean, _, tracked) = verified(device, what, momentum, status)
    assert output.isnan().all() == grad.isnan().all() == (what != "sound")
    assert bool(mean.any()) == (what == "sound")
    assert tracked.item() == (5 if what == "sound" else 4)
    assert (
        status.item()
        == {"sound": 0, "aborted": -2 * FINGERPRINT, "different": 2 * FINGERPRINT}[what]
    )


def test_first_status_stays(library):
    status = torch.tensor([-5.0]).double()
    verified(Device(library, 8, "forward"), "different", 0.1, status)
    assert status.item() == -5


def test_no_status_is_asked_for(library):
    output, *_ = verified(Device(library, 8, "forward"), "different", 0.1, None)
    assert output.isnan().all()


@pytest.mark.parametrize("count", [400.0, 0.0])  # of a forward and of a backward pass
@pytest.mark.parametrize("what", ["sound", "aborted", "different"])
def test_sums_of_compiled_layers(library, monkeypatch, what, count):
    device = Device(library, 8, "shuffled")
    monkeypatch.setattr(sync.ops, "batch_norm_apply", device.batch_norm_apply)
    count = float("nan") if what == "aborted" else count
    fingerprints = 2 * FINGERPRINT + (what == "different")
    totals = torch.tensor([1.0, 2.0, 3.0, 4.0, count, fingerprints, 16.0, 128.0]).double()
    status = torch.zeros(1).double()
    inconsistent = sync.is_inconsistent(totals[-4:], 2 * FINGERPRINT, status)
    assert inconsistent.tolist() == [what != "sound"]
    assert (
        status.item()
        == {"sound": 0, "aborted": -2 * FINGERPRINT, "different": 2 * FINGERPRINT}[what]
    )
