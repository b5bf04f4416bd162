"""Several ranks on CUDA, over gloo and over NCCL, also if they share one GPU.

The layer on several ranks against the whole batch is in test_multi_rank.py.
"""

import importlib.util
import time

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from support.cuda_device import COMPILER
from support.ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm
from syncbn.distributed.state import group_state

pytestmark = pytest.mark.cuda

ON_CUDA = [(2, "gloo", "cuda"), (2, "nccl", "cuda"), (3, "nccl", "cuda")]


@pytest.fixture(params=ON_CUDA, ids=lambda world: "world{}-{}".format(*world))
def world(request, ranks):
    return ranks(*request.param)


@pytest.fixture
def pair(ranks):
    return ranks(2, "nccl", "cuda")


def train_beside_torchs(rank, world_size, shape, layout, dtype):
    """One step of our layer and one of torch's, each rank on a batch of another size."""
    shape = (shape[0] + rank, *shape[1:])
    dy = make_input(shape, layout, dtype, mean=0.1, seed=10 + rank)
    results = []
    for kind in (SyncBatchNorm, nn.SyncBatchNorm):
        layer = kind(shape[1])
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 1.5, shape[1]))
        x = make_input(shape, layout, dtype, seed=rank).requires_grad_()
        y = layer(x)
        y.backward(dy)
        gradients = (x.grad, layer.weight.grad, layer.bias.grad)
        results.append([y.detach(), *gradients, *layer.buffers()])
    assert all(tensor.is_cuda for tensor in results[0])
    return results


@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        ((4, 8, 6, 6), "contiguous", torch.float32),
        ((4, 8, 6, 6), "channels_last", torch.bfloat16),
        ((5, 33), "contiguous", torch.float32),
    ],
)
def test_results_are_those_of_torchs_layer(world, shape, layout, dtype):
    # Both round their outputs to dtype, and work in float32 on sums of a few hundred values.
    eps = max(1e-5, 2 * torch.finfo(dtype).eps)
    for ours, theirs in world.run(train_beside_torchs, shape, layout, dtype):
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=eps, atol=eps)
        for a, b in zip(ours[2:], theirs[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def build(name):
    torch.manual_seed(0)
    with torch.device("cpu"):  # the same parameters on every device
        if name == "resnet18":
            import torchvision

            model = torchvision.models.resnet18(num_classes=10)
        else:
            model = nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 12, 3, bias=False),
                nn.BatchNorm2d(12),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(12, 10),
            )
    return model.double().to(torch.get_default_device())


def train(model, share):
    """Two steps on a share of each batch; return the losses and the state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        x = make_input((6, 3, 64, 64), "contiguous", torch.float64, seed=step)
        target = torch.arange(6) * (3 + 4 * step) % 10
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[share]), target[share]).backward()
        optimizer.step()
    return model.state_dict()


def train_share(rank, world_size, name):
    model = DistributedDataParallel(convert_sync_batchnorm(build(name)))
    return train(model, slice(rank * 6 // world_size, (rank + 1) * 6 // world_size))


def check_training(ranks, name):
    expected = train(build(name), slice(0, 6))
    for state in ranks.run(train_share, name):
        for key, value in expected.items():
            # float64; two steps through some twenty layers that divide by small variances
            torch.testing.assert_close(
                state[f"module.{key}"], value, rtol=1e-9, atol=1e-11, msg=key
            )


def test_ddp_training_equals_that_of_the_whole_batch(world):
    check_training(world, "small")


def test_ddp_training_of_a_whole_net(pair):
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    check_training(pair, "resnet18")


def abort(rank, world_size, compiles):
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    x = make_input((4, 3), "contiguous", torch.float32, seed=rank)
    run = torch.compile(layer, backend=COMPILER) if compiles else layer
    run(x)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    if rank == 1:
        with pytest.raises(TypeError, match="but got int64"):
            layer(x.long())
        return True
    y = run(x)
    unchanged = [torch.equal(value, before[key]) for key, value in layer.state_dict().items()]
    torch.cuda.synchronize()  # else the next pass may precede the status
    with pytest.raises(RuntimeError, match=r"forward pass of layer 'body\.bn1' gave NaN: another"):
        run(x)
    return y.isnan().all().item() and all(unchanged)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.trouble(
    "“gave NaN: another” on CUDA, after a loss of NaN",
    "Another rank failed in the pass that the message names",
    "Discard the step; correct the quoted error. [Details](failures.md#on-cuda)",
)
def test_rank_that_aborts_makes_the_others_nan_and_changes_nothing(compiles):
    """CUDA never waits to see the count: the error comes with the next pass."""
    times = {"case_seconds": 150, "collective_seconds": 120}
    with Ranks(2, backend="nccl", device="cuda", **times) as own:
        assert own.run(abort, compiles) == [True] * 2


def fail_and_go_on(rank, world_size, what, num_ahead):
    """Rank 1 fails; the host of rank 0 is several passes ahead when it learns of that."""
    layers = [SyncBatchNorm(channels) for channels in (3, 5, 3, 4)]
    for number, layer in enumerate(layers):
        layer._syncbn = layer._syncbn.with_name(f"bn{number}")
    inputs = [torch.rand(4, layer.num_features) for layer in layers]
    state = group_state(dist.group.WORLD)

    def step():
        sum(layer(x).sum() for layer, x in zip(layers, inputs, strict=True)).backward()

    step()
    torch.cuda.synchronize()
    with pytest.raises((RuntimeError, TypeError)) as error:
        if rank == 1 and what == "aborts":
            layers[0](inputs[0].long())
        first = 2 if rank == 1 else 0  # two layers of one size
        torch.cuda._sleep(10**8)
        layers[first](inputs[first])
        for layer, x in zip(layers[1:][: 0 if rank == 1 else num_ahead], inputs[1:], strict=False):
            layer(x)
        while state.statuses.read() == 0:  # without waiting for the device
            time.sleep(0.01)
        layers[3](inputs[3])
    one = torch.ones(1).item()  # a wait outside of the group
    for layer in layers:
        layer.zero_grad()
        layer.reset_running_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    trained = [layer.num_batches_tracked.item() for layer in layers]
    finite = [layer.running_var.isfinite().all().item() for layer in layers]
    return str(error.value), one, trained, finite


# Over gloo no host is a whole pass ahead.
@pytest.mark.parametrize("num_ahead", [0, 3])
@pytest.mark.parametrize("what", ["aborts", "differs"])
def test_group_continues_after_ranks_learn_of_a_failure_at_different_passes(world, what, num_ahead):
    if world.backend == "gloo" and num_ahead:
        pytest.skip("over gloo the host waits in each pass")
    heard = world.run(fail_and_go_on, what, num_ahead)
    for rank, (words, *state) in enumerate(heard):
        assert state == [1.0, [2] * 4, [True] * 4]
        if what == "differs":
            assert "made another pass in its place" in words
        elif rank != 1:
            assert "'bn0' gave NaN: another rank of the process group aborted" in words
            assert "rank 1: TypeError: expected input of dtype" in words


def fail_and_continue_at_once(rank, world_size, waits):
    """Ranks run different passes, and learn of it in the next one, while their devices lag."""
    layers = [SyncBatchNorm(3), SyncBatchNorm(3)]
    for number, layer in enumerate(layers):
        layer._syncbn = layer._syncbn.with_name(f"bn{number}")
    x = torch.rand(4, 3)
    layers[0](x)
    layers[rank % 2](x)
    if waits:
        torch.cuda.synchronize()
    torch.cuda._sleep(10**8)  # the status is cleared after this
    with pytest.raises(RuntimeError, match="made another pass in its place"):
        layers[0](x)
    return layers[0](x).isfinite().all().item()


def test_failure_is_raised_once_though_devices_lag(world):
    """Over gloo in the very next pass; over NCCL in the first one after the device is done."""
    assert all(world.run(fail_and_continue_at_once, world.backend == "nccl"))


def fail_before_a_layer_on_the_cpu(rank, world_size):
    """Rank 1 fails in a layer on CUDA; rank 0 goes on, without waiting, to a layer on the CPU."""
    on_cuda, on_cpu = SyncBatchNorm(3), SyncBatchNorm(3, device="cpu")
    x = torch.rand(4, 3)
    for _ in range(2):
        on_cuda(x)
        on_cpu(x.cpu())
    x_on_cpu = x.cpu()
    with pytest.raises((RuntimeError, TypeError)) as error:
        on_cuda(x.long() if rank == 1 else x)
        on_cpu(x_on_cpu)
    return str(error.value), on_cpu(x_on_cpu).isfinite().all().item()


def test_layer_on_the_cpu_hears_of_a_failure_on_cuda(ranks):
    (heard, trains), (said, also_trains) = ranks(2, "gloo", "cuda").run(
        fail_before_a_layer_on_the_cpu
    )
    assert "another rank of the process group aborted it" in heard
    assert "expected input of dtype" in said
    assert trains and also_trains


def fail_last(rank, world_size):
    """Rank 1 fails and stops; rank 0 runs another pass, learns of it, and uses its device."""
    layer = SyncBatchNorm(3)
    x = torch.rand(4, 3)
    layer(x)
    if rank == 1:
        with pytest.raises(TypeError, match="but got int64"):
            layer(x.long())
        return True
    layer(x)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="raised in a later pass because the host does not wait"):
        layer(x)
    return bool(torch.ones(1).item())


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_rank_that_learns_late_aborts_no_pass(backend):
    with Ranks(2, backend=backend, device="cuda", collective_seconds=15) as own:
        assert own.run(fail_last) == [True, True]


def fail_backward(rank, world_size, twice):
    """Rank 1 skips a backward pass in which the others need no gradient of their inputs."""
    layers = [SyncBatchNorm(3), SyncBatchNorm(3)]
    for number, layer in enumerate(layers):
        layer._syncbn = layer._syncbn.with_name(f"bn{number}")
    x = torch.rand(4, 3, requires_grad=twice)
    outputs = [layer(x).square().sum() for layer in layers]
    if rank == 1:
        outputs.reverse()
    with pytest.raises(RuntimeError) as error:
        for output in outputs:
            if twice:
                torch.autograd.grad(output, x, create_graph=True)
            else:
                output.backward()
            torch.cuda.synchronize()
        layers[0](x)
    return str(error.value)


@pytest.mark.parametrize("twice", [False, True])
def test_every_backward_pass_notes_its_status(world, twice):
    for words in world.run(fail_backward, twice):
        assert f"{'double ' * twice}backward pass of layer 'bn" in words and "gave NaN" in words


def train_without_waiting(rank, world_size):
    layer = SyncBatchNorm(8)
    x = make_input((4, 8, 6, 6), "contiguous", torch.float32, seed=rank).requires_grad_()
    for _ in range(2):  # no forward pass follows a backward pass before the second step
        layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def test_host_never_waits_for_the_collectives(pair):
    assert pair.run(train_without_waiting) == [True, True]


def replay(rank, world_size):
    """Forward and backward in a graph, with the collectives, while rank 1 has no samples."""
    group = dist.new_group()
    shape = (4 * (1 - rank), 3, 5, 5)
    x = make_input(shape, "contiguous", torch.float32).requires_grad_()
    dy = make_input(shape, "contiguous", torch.float32, seed=1)
    eager, captured = (SyncBatchNorm(3, process_group=group) for _ in range(2))

    def step(layer):
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # NCCL sets up in the first
            step(captured)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events from a thread of its own, which a global capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step(captured)
    captured.reset_running_stats()
    same = []
    for seed in range(1, 4):
        with torch.no_grad():
            x.copy_(make_input(shape, "contiguous", torch.float32, mean=seed, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        expected = step(eager)
        same += [torch.equal(a, b) for a, b in zip(results, expected, strict=True)]
        same += [
            torch.equal(a, b) for a, b in zip(captured.buffers(), eager.buffers(), strict=True)
        ]
        same += [torch.isfinite(result).all().item() for result in results]
    return same


def test_graph_with_collectives_and_an_empty_rank():
    # A separate world: a communicator used in a graph must not affect other tests.
    with Ranks(2, backend="nccl", device="cuda", case_seconds=90) as own:
        for same in own.run(replay):
            assert all(same), same


def replay_graphs_that_differ(rank, world_size):
    """Replay a graph, of another layer on each rank; return the error of the next eager pass."""
    layers = [SyncBatchNorm(3), SyncBatchNorm(3)]
    for number, layer in enumerate(layers):
        layer._syncbn = layer._syncbn.with_name(f"bn{number}")
    x = make_input((4, 3, 5, 5), "contiguous", torch.float32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in layers * 2:
            layer(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    before = [buffer.clone() for layer in layers for buffer in layer.buffers()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = layers[rank](x)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    after = [buffer for layer in layers for buffer in layer.buffers()]
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        layers[0](x[:0])
    is_unchanged = all(map(torch.equal, before, after))
    return output.isnan().all().item(), is_unchanged, str(error.value)


def test_empty_pass_reports_graphs_that_differ():
    with Ranks(2, backend="nccl", device="cuda", case_seconds=90) as own:
        for is_nan, is_unchanged, words in own.run(replay_graphs_that_differ):
            assert is_nan and is_unchanged
            assert "gave NaN: another rank made another pass in its place" in words


def compile_and_train(rank, world_size):
    torch._dynamo.reset()

    def layer(x, mean, var):
        return sync_batch_norm(x, mean, var, training=True)

    compiled = torch.compile(layer, backend=COMPILER, fullgraph=True)
    errors = []
    for seed in range(2):
        x = make_input((4, 3, 6), "contiguous", torch.float64, seed=2 * seed + rank)
        results = []
        for function in (layer, compiled):
            leaf = x.clone().requires_grad_()
            running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
            y = function(leaf, *running)
            y.pow(3).sum().backward()
            results.append((y.detach(), leaf.grad, *running))
        errors += [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]
    return max(errors)


def test_compiled_equals_eager():
    # Compilation takes time, also while the other rank waits.
    times = {"case_seconds": 150, "collective_seconds": 120}
    with Ranks(2, backend="nccl", device="cuda", **times) as own:
        # float64, in another order of operations
        assert max(own.run(compile_and_train)) < 1e-12
