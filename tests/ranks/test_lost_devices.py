"""Ranks over NCCL whose device is full or has failed, and failures in one of several groups."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from support.cuda_device import IS_STANDIN, fail_launch
from support.ranks import Ranks

from syncbn import SyncBatchNorm, ops

pytestmark = pytest.mark.cuda

on_standin = pytest.mark.skipif(
    not IS_STANDIN, reason="a GPU is shared by the ranks, and cannot be made to fail for one"
)


OVER_NCCL = {
    "STANDIN_STREAMS": "async",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # NCCL's watchdog would end the process of the failed device after some 0.1 s.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


def named(channels, name, group=None):
    layer = SyncBatchNorm(channels, process_group=group)
    layer._syncbn = layer._syncbn.with_name(name)
    return layer


def has_arrived(seconds):
    """Whether the device has done its work in this time; if not, the host continues."""
    event = torch.cuda.current_stream().record_event()
    end = time.monotonic() + seconds
    while not event.query() and time.monotonic() < end:
        time.sleep(0.01)
    return event.query()


def step(layers, inputs):
    outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    sum(output.square().sum() for output in outputs).backward()


def heard(run, num_steps=12):
    """Return the first error of a number of steps, and the seconds until then."""
    start = time.monotonic()
    for _ in range(num_steps):
        try:
            run()
        except (RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
        has_arrived(1)
    return "", time.monotonic() - start


def fill_device():
    """Return tensors that fill the device's memory."""
    kept, size = [], 1 << 28
    while size:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8))
        except torch.OutOfMemoryError:
            size //= 2
    return kept


def run_with_full_device(rank, world_size, is_first):
    layer, x = named(8, "bn0"), torch.rand(4, 8, 8, 8)
    dist.all_reduce(torch.zeros(1))  # NCCL takes memory for the first collective
    if not is_first:
        step([layer], [x])
        step([layer], [x])
    torch.cuda.synchronize()
    before = [buffer.clone() for buffer in layer.buffers()]
    kept = fill_device() if rank == 1 else []
    words, seconds = heard(lambda: layer(x))
    if is_first:
        return words, seconds, True
    kept.clear()
    torch.cuda.synchronize()
    return words, seconds, all(map(torch.equal, before, layer.buffers()))


@on_standin
@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])
def test_rank_with_a_full_device_tells_the_others(is_first):
    """Its abort uses memory allocated before, or in a first pass, without any, the store."""
    env = {**OVER_NCCL, "STANDIN_MEMORY": str(64 << 20)}
    with Ranks(2, env, backend="nccl", device="cuda", case_seconds=60) as ranks:
        results = ranks.run(run_with_full_device, is_first)
    (words, seconds, is_unchanged), (own, _, own_unchanged) = results
    assert own.startswith("OutOfMemoryError: CUDA out of memory"), own
    if is_first:
        assert "this rank's device waits in an earlier pass: another rank has failed" in words
    else:
        assert "the forward pass of layer 'bn0' gave NaN: another rank of the" in words
    assert "rank 1: OutOfMemoryError: CUDA out of memory" in words
    assert is_unchanged and own_unchanged
    assert seconds < 15


DIRECTIONS = {
    "statistics": ("forward", 1),
    "apply": ("forward", 2),
    "backward-apply": ("backward", 3),
    "question": ("question", 1),
}


def run_with_failed_device(rank, world_size, point):
    """The device of rank 1 fails at a launch; the other ranks train on in a new group."""
    layers = [named(4, "bn0"), named(4, "bn1"), named(6, "bn2")]
    inputs = [torch.rand(5, layer.num_features).requires_grad_() for layer in layers]
    for _ in range(2):
        step(layers, inputs)
    torch.cuda.synchronize()

    def run():
        direction, number = DIRECTIONS[point]
        if rank == 1 and direction == "question":
            fail_launch(number, ends_device=True)
            with contextlib.suppress(RuntimeError):
                ops.usual.batch_norm_stats(inputs[0].detach())
            time.sleep(1.1)  # after a second a pass asks the device
        if rank == 1 and direction == "forward":
            fail_launch(number, ends_device=True)
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        loss = sum(output.square().sum() for output in outputs)
        if rank == 1 and direction == "backward":
            fail_launch(number, ends_device=True)
        loss.backward()

    words, seconds = heard(run)
    if rank == 1:
        return words, seconds, []
    again, _ = heard(run, num_steps=1)
    return words, seconds, again


@on_standin
@pytest.mark.parametrize("point", DIRECTIONS)
def test_rank_with_a_failed_device_tells_the_others(point):
    with Ranks(2, OVER_NCCL, backend="nccl", device="cuda", case_seconds=90) as ranks:
        (words, seconds, again), (own, *_) = ranks.run(run_with_failed_device, point)
    assert ("CUDA error" if point == "question" else "a planted failure") in own, own
    text = "CUDA error" if point == "question" else "RuntimeError: syncbn: a CUDA kernel"
    assert f"another rank has failed; rank 1: {text}" in words.replace("AcceleratorError: ", "")
    assert "rank 1 can take part in no collective any more" in words
    assert seconds < 15
    assert "rank 1 can take part in no collective any more" in again


def fail_in_one_of_two_groups(rank, world_size, point, members):
    """Rank 1 fails in one group; each rank learns of it, and then trains on in both."""
    first, second = dist.new_group(), dist.new_group(members)
    layers = [named(4, "a0", first), named(6, "a1", first)]
    if rank in members:
        layers = [layers[0], named(4, "b0", second), layers[1], named(6, "b1", second)]
    inputs = [torch.rand(5, layer.num_features).requires_grad_() for layer in layers]
    for _ in range(2):
        step(layers, inputs)
    torch.cuda.synchronize()
    given = [*inputs]
    if rank == 1:
        given[point] = given[point].long()
    words, seconds = heard(lambda: step(layers, given))
    for layer in layers:
        layer.reset_running_stats()
    step(layers, inputs)
    step(layers, inputs)
    arrived = has_arrived(10)
    trains = arrived and all(layer.running_var.isfinite().all() for layer in layers)
    return words, seconds, trains


@pytest.mark.parametrize("world_size", [2, 3])
def test_failure_in_one_group_is_heard_in_all(world_size):
    """Of three ranks, one is not in the group of the failure."""
    env = {"STANDIN_STREAMS": "async"} if IS_STANDIN else {}
    with Ranks(world_size, env, backend="nccl", device="cuda", case_seconds=60) as ranks:
        for point in (1, 3):
            for words, seconds, trains in ranks.run(fail_in_one_of_two_groups, point, [0, 1]):
                assert "TypeError: expected input of dtype" in words
                assert seconds < 15
                assert trains


def wait_for_rank_that_stays_away(rank, world_size):
    """Rank 1 skips a pass; the next one of rank 0 has a new size."""
    layers = [named(4, "bn0"), named(6, "bn1")]
    step(layers[:1], [torch.rand(5, 4)])
    torch.cuda.synchronize()
    if rank == 1:
        return "", 0.0
    layers[0](torch.rand(5, 4))
    return heard(lambda: layers[1](torch.rand(5, 6)), num_steps=1)


@on_standin
def test_host_waits_for_its_device_no_longer_than_the_groups_timeout():
    times = {"case_seconds": 60, "collective_seconds": 5}
    with Ranks(2, OVER_NCCL, backend="nccl", device="cuda", **times) as ranks:
        (words, seconds), _ = ranks.run(wait_for_rank_that_stays_away)
    assert "the forward all-reduce of a SyncBatchNorm layer failed: another rank has" in words
    assert "the sums of an earlier pass did not come in 5 s" in words
    assert 5 <= seconds < 9


def differentiate_in_batches(rank, world_size):
    layer, x = named(3, "bn0"), torch.rand(4, 3, requires_grad=True)
    output = layer(x)
    batch = torch.stack([torch.ones_like(output)] * 2)
    with pytest.raises(NotImplementedError, match="gradients of several ranks cannot be batched"):
        torch.autograd.grad(output, x, batch, is_grads_batched=True)
    step([layer], [x])
    return has_arrived(5)


def test_error_outside_of_nccl_leaves_the_group_unchanged():
    with Ranks(2, backend="nccl", device="cuda", case_seconds=60) as ranks:
        assert ranks.run(differentiate_in_batches) == [True, True]
