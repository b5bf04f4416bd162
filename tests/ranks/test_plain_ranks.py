"""Layers on several ranks whose device has no operators of ours: a stand-in with its backend."""

import time

import pytest
import torch
from support import plain_device
from support.cases import make_input
from support.groups import messages_sent
from support.ranks import COLLECTIVE_SECONDS, Failure, Ranks
from torch.utils.flop_counter import FlopCounterMode

from syncbn import SyncBatchNorm, check_synchronized, recompute_statistics
from syncbn.ops import reference

# It is raised once in a process, in the first case that runs.
pytestmark = pytest.mark.filterwarnings("ignore:syncbn has no operators for 'plain'")


@pytest.fixture(params=[2, 3], ids=lambda n: f"world{n}")
def world(request, ranks):
    return ranks(request.param, "plain", "plain")


@pytest.fixture
def pair(ranks):
    return ranks(2, "plain", "plain")


def one_value(rank, world_size):
    layer = SyncBatchNorm(3)
    layer(torch.rand(rank, 3))


def test_one_value_in_the_whole_group_is_an_error_on_all_ranks(pair):
    for outcome in pair.outcomes(one_value):
        assert outcome.kind == "ValueError"
        assert "Expected more than 1 value per channel when training, got 1" in outcome.message


SPLITS = {2: [(3, 3), (1, 5), (0, 6)], 3: [(2, 2, 2), (1, 2, 3), (0, 0, 6)]}
CHANNELS = 5


def whole_batch(dtype):
    with torch.device("cpu"):
        x = make_input((6, CHANNELS, 3, 7), "contiguous", dtype)
        dy = make_input((6, CHANNELS, 3, 7), "contiguous", dtype, mean=0.1, seed=1)
    return x, dy


def train_masked(rank, world_size, activation):
    with messages_sent() as messages:
        x = torch.rand(4, CHANNELS, 7, device="plain", requires_grad=True)
        mask = torch.arange(7, device="plain").expand(4, 7) < 5
        layer = SyncBatchNorm(CHANNELS, activation=activation).to("plain")
        layer(x, mask=mask).square().sum().backward()
    return [message.requires_grad for message in messages]


@pytest.mark.parametrize("activation", [None, "silu"])
def test_messages_of_masked_passes_record_no_gradients(pair, activation):
    """Otherwise torch warns in each backward pass that a collective has no formula."""
    for sent in pair.run(train_masked, activation):
        assert sent == [False, False]


def train_on_device(rank, world_size, dtype, split, activation=None, create_graph=False):
    """Return results on the CPU, and the bytes and the device of each all-reduce."""
    x, dy = (t.split(split)[rank].to("plain") for t in whole_batch(dtype))
    x.requires_grad_()
    layer = SyncBatchNorm(CHANNELS, activation=activation)
    with messages_sent() as messages:
        y = layer(x)
        if create_graph:
            (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
            dx.square().sum().backward()
        else:
            y.backward(dy)
    calls = [(message.nbytes, message.device.type) for message in messages]
    results = (y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers())
    return [None if t is None else t.cpu() for t in results], calls


def expected_results(dtype, create_graph=False):
    x, dy = (t.double() for t in whole_batch(dtype))
    x.requires_grad_()
    weight, bias = torch.ones(CHANNELS).double(), torch.zeros(CHANNELS).double()
    weight.requires_grad_()
    bias.requires_grad_()
    y = reference.batch_norm(x, weight, bias)
    if create_graph:
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        dx.square().sum().backward()
    else:
        y.backward(dy)
    flat = x.detach().transpose(0, 1).flatten(1)
    return y.detach(), x.grad, weight.grad, bias.grad, 0.1 * flat.mean(1), 0.9 + 0.1 * flat.var(1)


# One rounding to the dtype, and a handful to float32 of sums of 126 values of order one.
TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (8e-3, 1e-5),
    torch.float16: (1e-3, 1e-5),
}


@pytest.mark.works("several ranks on devices without operators of ours")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_ranks_give_the_results_of_the_whole_batch(world, dtype):
    expected = expected_results(dtype)
    for split in SPLITS[world.world_size]:
        outcomes = world.run(train_on_device, dtype, split)
        results = [result for result, _ in outcomes]
        tolerance = dict(zip(("rtol", "atol"), TOLERANCES[dtype], strict=True))
        for index in (0, 1):
            whole = torch.cat([result[index] for result in results])
            torch.testing.assert_close(whole.double(), expected[index], **tolerance)
        for index in (2, 3):  # sums over 126 values that were rounded to the dtype's outputs
            whole = sum(result[index].double() for result in results)
            torch.testing.assert_close(whole, expected[index], rtol=1e-5, atol=1e-4)
        for mean, var, tracked in (result[4:] for result in results):
            torch.testing.assert_close(mean.double(), expected[4], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(var.double(), expected[5], rtol=1e-6, atol=1e-7)
            assert torch.equal(mean, results[0][4]) and torch.equal(var, results[0][5])
            assert tracked.item() == 1


def test_one_collective_each_way(world):
    num_bytes = 8 * (2 * CHANNELS + 4)
    split = SPLITS[world.world_size][0]
    for _, calls in world.run(train_on_device, torch.float32, split):
        assert calls == [(num_bytes, "plain")] * 2


def test_double_backward_on_ranks(world):
    expected = expected_results(torch.float32, create_graph=True)
    split = SPLITS[world.world_size][0]
    outcomes = world.run(train_on_device, torch.float32, split, None, True)
    whole = torch.cat([result[1] for result, _ in outcomes])
    # dx of order one, rounded to float32 a few times
    torch.testing.assert_close(whole.double(), expected[1], rtol=1e-6, atol=1e-6)


def count_flops(rank, world_size):
    """A dispatch mode, under which collectives are operators that it sees."""
    layer = SyncBatchNorm(3)
    with FlopCounterMode(display=False):
        layer(torch.full((4, 3), float(rank)))
    return layer.running_mean.tolist()


def test_under_a_dispatch_mode(pair):
    for mean in pair.run(count_flops):
        assert mean == pytest.approx([0.05] * 3)  # 0.1 times the mean of 0 and 1


def recompute(rank, world_size):
    batches = [
        make_input((4 + rank, 5), "contiguous", torch.float32, seed=10 * rank + i)
        for i in range(2 + rank)
    ]
    layer = SyncBatchNorm(5)
    recompute_statistics(layer, batches)
    check_synchronized(layer)
    return torch.cat([batch.cpu() for batch in batches]), [b.cpu() for b in layer.buffers()]


def test_recomputed_statistics_of_ranks(world):
    outcomes = world.run(recompute)
    whole = torch.cat([values for values, _ in outcomes]).double()
    for _, (mean, var, tracked) in outcomes:
        torch.testing.assert_close(mean, whole.mean(0).float())
        torch.testing.assert_close(var, whole.var(0).float())
        assert tracked.item() == 1 + world.world_size


def not_synchronized(rank, world_size):
    layer = SyncBatchNorm(3)
    layer.running_mean.fill_(float(rank))
    with pytest.raises(RuntimeError, match="running_mean is float32"):
        check_synchronized(layer)
    return True


def test_ranks_with_different_statistics_raise(pair):
    assert pair.run(not_synchronized) == [True, True]


# A failure of one rank fails all at once, as on CPUs.


def step(layer, *shape):
    x = torch.rand(*shape).requires_grad_()
    layer(x).sum().backward()


def named(channels, name="body.bn1"):
    layer = SyncBatchNorm(channels)
    layer._syncbn = layer._syncbn.with_name(name)
    return layer


def bad_input(rank, world_size, steps):
    layer = named(3)
    for _ in range(steps):
        step(layer, 4, 3)
    begin = time.monotonic()
    try:
        step(layer, 4, 3 if rank == 0 else 5)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


@pytest.mark.parametrize("steps", [0, 2])
def test_bad_input_on_one_rank_fails_all(steps, ranks):
    (kind, words, seconds), (own_kind, own_words, _) = ranks(2, "plain", "plain").run(
        bad_input, steps
    )
    assert (kind, own_kind) == ("RuntimeError", "ValueError")
    assert "[layer 'body.bn1', rank 1 of 2]" in own_words
    assert "aborted" in words and "expected input to have 3 channels" in words
    assert "[layer 'body.bn1', rank 0 of 2]" in words
    assert seconds < COLLECTIVE_SECONDS


def stay_on_the_cpu(rank, world_size):
    layer = named(3)
    if rank == 1:
        layer.cpu()
    begin = time.monotonic()
    try:
        layer(torch.rand(2, 3) if rank == 0 else torch.rand(2, 5, device="cpu"))
    except (ValueError, RuntimeError) as error:
        return str(error), time.monotonic() - begin
    return None


def test_rank_that_fails_on_the_cpu_aborts_where_the_group_has_its_backend():
    with Ranks(2, case_seconds=90, backend="plain", device="plain") as ranks:
        (words, seconds), (own_words, _) = ranks.run(stay_on_the_cpu)
    assert "expected input to have 3 channels" in own_words
    assert "aborted" in words and "expected input to have 3 channels" in words
    assert seconds < COLLECTIVE_SECONDS


def different_channels(rank, world_size, steps):
    for _ in range(steps):
        step(named(3), 4, 3)
    step(named(3 + rank), 4, 3 + rank)


@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_with_different_channels_all_fail(steps, ranks):
    outcomes = ranks(3, "plain", "plain").outcomes(different_channels, steps)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Failure) and outcome.kind in ("ValueError", "RuntimeError")
        assert f"rank {rank} of 3]" in outcome.message


def different_layers(rank, world_size):
    layers = named(3, "first"), named(3, "second")
    for layer in layers:
        step(layer, 4, 3)
    step(layers[rank], 4, 3)


def test_ranks_that_run_different_layers_all_fail(ranks):
    outcomes = ranks(2, "plain", "plain").outcomes(different_layers)
    for outcome in outcomes:
        assert outcome.kind == "RuntimeError"
        assert "layer 'first'" in outcome.message and "layer 'second'" in outcome.message


def change_size(rank, world_size):
    """Each rank's next message has another size than all ranks expect."""
    first, second, third = named(3, "first"), named(5, "second"), named(7, "third")
    for _ in range(2):
        step(first, 4, 3)
        step(second, 4, 5)
    step(first, 4, 3)
    step(third, 4, 7)
    return True


def test_ranks_that_change_size_together_continue(world):
    assert world.run(change_size) == [True] * world.world_size


def change_size_on_one_rank(rank, world_size):
    first, second, third = named(3, "first"), named(5, "second"), named(7, "third")
    for _ in range(2):
        step(first, 4, 3)
        step(second, 4, 5)
    step(first, 4, 3)
    step(third, 4, 7) if rank == 1 else step(second, 4, 5)


def test_rank_that_changes_size_without_the_others_fails_all(ranks):
    outcomes = ranks(2, "plain", "plain").outcomes(change_size_on_one_rank)
    for outcome in outcomes:
        assert isinstance(outcome, Failure) and outcome.kind in ("ValueError", "RuntimeError")
        assert "layer 'third'" in outcome.message or "different passes" in outcome.message


def fail_in_the_loader(rank, world_size):
    def batches():
        yield torch.rand(4, 3)
        if rank == 1:
            raise OSError("the disk is gone")
        yield torch.rand(4, 3)

    try:
        recompute_statistics(named(3), batches())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def test_rank_that_fails_between_passes_fails_all(ranks):
    words, own = ranks(2, "plain", "plain").run(fail_in_the_loader)
    assert own == "the disk is gone"
    assert "aborted" in words and "the disk is gone" in words


# A device without float64.


def train_without_float64(rank, world_size, backend):
    layer = named(3)
    with plain_device.without_float64():
        if backend == "gloo" and rank == 0:
            layer.cpu()(torch.rand(4, 3, device="cpu"))
        layer(torch.rand(4, 3))


@pytest.mark.parametrize("backend", ["gloo", "plain"])
def test_device_without_float64_fails_all_ranks(backend):
    """With gloo, rank 0 trains on the CPU; the stand-in's backend takes no float64 message."""
    with Ranks(2, backend=backend, device="plain") as ranks:
        first, second = ranks.outcomes(train_without_float64, backend)
    error = "expected a device with float64, in which statistics are computed, but got 'plain:0'"
    assert second.kind == "NotImplementedError" and second.message.startswith(error)
    assert "[layer 'body.bn1', rank 1 of 2]" in second.message
    assert first.kind == ("RuntimeError" if backend == "gloo" else "NotImplementedError")
    assert "aborted" in first.message or backend != "gloo"
    assert error in first.message and "[layer 'body.bn1', rank 0 of 2]" in first.message
