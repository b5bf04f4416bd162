"""Tails and statuses of the CUDA kernels."""

import pytest
import torch
from support.cases import make_input, reference_moments
from support.emulated import Device, on_all_devices

FIRST = 77.0
TAIL = torch.tensor([FIRST, 12.0, 144.0], dtype=torch.float64)
SHAPES = [(5, 3), (40, 300), (2, 3, 101, 103), (0, 3)]  # whole and split over blocks


@pytest.mark.parametrize("shape", SHAPES)
def test_tail_follows_the_same_sums(library, shape):
    x = make_input(shape, "contiguous", torch.float32)
    dy = make_input(shape, "contiguous", torch.float32, seed=1)
    channels = shape[1]
    mean, var = torch.zeros(channels).double(), torch.ones(channels).double()

    def run(device):
        plain = device.batch_norm_stats(x)
        message = device.batch_norm_stats(x, TAIL)
        assert torch.equal(message[: 2 * channels + 1], plain)
        plain_sums, *_ = device.batch_norm_backward_reduce(dy, x, mean, var)
        sums, *_ = device.batch_norm_backward_reduce(dy, x, mean, var, tail=TAIL)
        assert torch.equal(sums[: 2 * channels], plain_sums)
        return message, sums

    for _, (message, sums) in on_all_devices(library, run, x):
        assert message[2 * channels + 1 :].tolist() == TAIL.tolist()
        assert sums[2 * channels :].tolist() == [0.0, *TAIL.tolist()]


def verified(device, what, momentum, statuses):
    """The results of both operators for sums of two ranks, and the running statistics."""
    x = make_input((40, 3, 5), "contiguous", torch.float32)
    mean, var = reference_moments(x)
    sums = torch.cat([400 * mean, 400 * (var + mean.square())])
    count = float("nan") if what == "aborted" else 400.0
    tail_sum = 2 * FIRST + (what == "different")
    totals = torch.cat([sums, torch.tensor([count, tail_sum, 24, 288]).double()])
    running = torch.zeros(3), torch.ones(3), torch.tensor([4])
    output, *_ = device.batch_norm_apply(
        x, totals, None, None, *running, momentum, 1e-5, 2 * FIRST, statuses[0]
    )
    totals[6] = 0 * count
    ones = torch.ones(3).double()
    grad = device.batch_norm_backward_apply(
        x, x, mean, ones, None, totals, ones[:1], 2 * FIRST, statuses[1]
    )
    return output, grad, running


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("what", ["sound", "aborted", "different"])
def test_inconsistent_pass_gives_nan_and_changes_nothing(library, what, momentum):
    device = Device(library, 8, "shuffled")
    statuses = torch.zeros(2, 1).double()
    output, grad, (mean, _, tracked) = verified(device, what, momentum, statuses)
    assert output.isnan().all() == grad.isnan().all() == (what != "sound")
    assert bool(mean.any()) == (what == "sound")
    assert tracked.item() == (5 if what == "sound" else 4)
    status = {"sound": 0, "aborted": -2 * FIRST, "different": 2 * FIRST}[what]
    assert statuses.tolist() == [[status]] * 2  # of each operator


def test_first_status_stays(library):
    status = torch.tensor([-5.0]).double()
    verified(Device(library, 8, "forward"), "different", 0.1, [status, status])
    assert status.item() == -5


def test_status_is_optional(library):
    output, *_ = verified(Device(library, 8, "forward"), "different", 0.1, [None, None])
    assert output.isnan().all()


@pytest.mark.parametrize("size", [1, 7, 600])  # up to several blocks
@pytest.mark.parametrize("what", ["sound", "other", "aborted", "different"])
def test_verified_sums(library, what, size):
    device = Device(library, 8, "shuffled")
    count = float("nan") if what == "aborted" else 400.0
    tail_sum = {"other": 3, "different": 4}.get(what, 2) * FIRST
    end = torch.tensor([count, tail_sum, 16.0, 128.0]).double()
    sums = torch.cat([torch.arange(size - 1.0).double(), end])
    status = torch.zeros(1).double()
    verified = device.verify_sums(sums, 2 * FIRST, 3 * FIRST, status)
    if what in ("sound", "other"):
        assert torch.equal(verified, sums[:-3]) and status.item() == 0
    else:
        assert verified.isnan().all()
        assert status.item() == (-2 if what == "aborted" else 2) * FIRST
