"""CUDA graphs: a captured step follows its inputs, its buffers and its stream."""

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import ops
from support.cases import make_input
from torch import nn

from syncbn import SyncBatchNorm, _compat, convert_sync_batchnorm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("on_cuda"),
    # torch's own warning if a backward pass is the first matrix multiplication of its thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


def capture(call):
    """Return a graph of ``call()``, and the results, which each replay overwrites.

    The call runs once before, on its own stream, so that the capture sets nothing up.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def train(layer, x, dy):
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)


def same_bits(results, others):
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(64, 4, 28, 28), (8, 130, 7, 7)])
def test_replays_follow_inputs_and_running_statistics(shape, layout, dtype, momentum):
    eager, captured = (SyncBatchNorm(shape[1], momentum=momentum) for _ in range(2))
    x = make_input(shape, layout, dtype).requires_grad_()
    dy = make_input(shape, layout, dtype)
    graph, results = capture(lambda: train(captured, x, dy))
    captured.reset_running_stats()
    for seed in range(1, 4):
        with torch.no_grad():
            x.copy_(make_input(shape, layout, dtype, mean=seed, seed=seed))
            dy.copy_(make_input(shape, layout, dtype, seed=10 + seed))
        graph.replay()
        assert same_bits(results, train(eager, x, dy))
        assert same_bits(captured.buffers(), eager.buffers())
    assert captured.num_batches_tracked.item() == 3


def test_empty_batch_in_a_graph_updates_nothing():
    layer = SyncBatchNorm(3)
    x = torch.empty(0, 3, 4, 4, requires_grad=True)
    graph, results = capture(lambda: train(layer, x, torch.empty(0, 3, 4, 4)))
    graph.replay()
    assert same_bits(layer.buffers(), SyncBatchNorm(3).buffers())
    assert not any(result.any() for result in results)


@pytest.mark.parametrize("shape", [(64, 4, 28, 28), (4099, 48)])
def test_graphs_that_replay_at_once_do_not_disturb_each_other(shape):
    """Both are captured on the stream that torch captures on, and replayed on two others."""
    inputs = [make_input(shape, "contiguous", torch.float32, seed=seed) for seed in range(2)]
    expected = [ops.batch_norm_stats(x) for x in inputs]
    graphs = [capture(lambda x=x: ops.batch_norm_stats(x)) for x in inputs]
    torch.cuda.synchronize()
    found = [[], []]
    streams = [torch.cuda.Stream() for _ in graphs]
    for stream in streams:
        with torch.cuda.stream(stream):
            # An allocation from the system would wait for the sleeping GPU.
            del [graphs[0][1].clone() for _ in range(50)][:]
            torch.cuda._sleep(
                50_000_000
            )  # about 30 ms, in which the host launches all of the following
    for _ in range(50):
        for stream, (graph, message), results in zip(streams, graphs, found, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                results.append(message.clone())
    torch.cuda.synchronize()
    for messages, right in zip(found, expected, strict=True):
        assert all(torch.equal(message, right) for message in messages)


FIRST_USE = """
import torch
from syncbn import ops

x = torch.randn(64, 4, 28, 28, device="cuda")  # a channel is split over blocks
{before}
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    message = ops.usual.batch_norm_stats(x)
graph.replay()
assert torch.equal(message, ops.usual.batch_norm_stats(x))
"""


@pytest.mark.parametrize(
    "before",
    ["", "ops.usual.batch_norm_apply(x, torch.ones(9).double().cuda(), *[None] * 5, 0.1, 1e-5)"],
)
def test_first_split_reduction_of_a_process_may_be_captured(before):
    """Also if nothing has run before, or only an operator without counters."""
    script = FIRST_USE.format(before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# torch's own warning: it keeps the graph that it has captured on its own stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_make_graphed_callables():
    torch.manual_seed(0)
    eager = convert_sync_batchnorm(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    )
    model = copy.deepcopy(eager)
    sample = make_input((16, 6), "contiguous", torch.float32)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    model[1].reset_running_stats()  # the warm-up has trained on the sample
    networks = (eager, eager), (model, graphed)
    for seed in range(1, 4):
        x = make_input((16, 6), "contiguous", torch.float32, mean=seed, seed=seed)
        outputs = []
        for network, run in networks:
            outputs.append(run(x))
            outputs[-1].square().mean().backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        # The same kernels, except those of cuBLAS: float32 sums of a few values.
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert model[1].num_batches_tracked.item() == 3


def test_other_threads_capture_nothing():
    """Torch 2.11 has the manager of Inductor's graphs in some threads only."""
    import torch._inductor.cudagraph_trees

    tensor = torch.ones(1)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(_compat.is_in_cuda_graph, tensor).result()
