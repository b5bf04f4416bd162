"""torch.compile: one graph, equal to eager, on several ranks."""

import copy
import sys

import pytest
import torch
from support.cases import make_input
from support.compiling import (
    Backend,
    Gan,
    Residual,
    assert_equal,
    batch,
    build,
    compiled,
    frozen,
    resnet10,
    resnet10t,
    small,
    step,
)
from support.groups import messages_sent
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm, sync_batch_norm

BACKENDS = [
    pytest.param(
        backend, marks=pytest.mark.works(f"torch.compile(fullgraph=True), {backend}"), id=backend
    )
    for backend in ("aot_eager", "inductor")
]


def compare(rank, world_size, make, backend_name, pixels, batches):
    """Train compiled and eager on each batch; return the number of graphs after each."""
    backend = Backend(backend_name)
    eager = build(make)
    model = copy.deepcopy(eager)
    fast, graphs = compiled(model, backend), []
    for seed, sizes in enumerate(batches):
        x = batch(rank, sizes, pixels, seed)
        assert_equal(step(fast, x), step(eager, x))
        graphs.append(backend.graphs)
    return graphs


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_equals_eager_in_one_graph(compiling_ranks, backend):
    """A second batch size compiles once more, with a dynamic size; a third one does not."""
    for graphs in compiling_ranks.run(compare, small, backend, 6, [(4,), (4,), (5,), (7,)]):
        assert graphs == [1, 1, 2, 2]


@pytest.mark.works("torch.compile of layers without weight and bias, without statistics, or frozen")
def test_optional_parts(compiling_ranks):
    assert compiling_ranks.run(compare, frozen, "aot_eager", 6, [(4,)]) == [[1]] * 2


def test_one_tensor_as_weight_and_bias():
    """Its gradient is the sum of both."""
    both = torch.full((3,), 1.5, requires_grad=True)

    def normalize(x):
        return sync_batch_norm(x, None, None, both, both, training=True)

    x = make_input((4, 3, 5), "contiguous", torch.float64)
    eager, fast = (
        torch.autograd.grad(run(x).square().sum(), both)[0]
        for run in (normalize, compiled(normalize, Backend("aot_eager")))
    )
    torch.testing.assert_close(fast, eager)  # float32; other products and sums are contracted


@pytest.mark.works("torch.compile, a rank with an empty batch")
def test_uneven_and_empty_batches(compiling_ranks):
    batches = [(4, 4), (2, 5), (3, 0), (0, 0), (6, 3)]
    first, second = compiling_ranks.run(compare, small, "aot_eager", 6, batches)
    # torch compiles sizes 0 and 1 apart from all others
    assert first == [1, 2, 2, 3, 3] and second == [1, 2, 3, 3, 3]


@pytest.mark.works("torch.compile of whole models: torchvision, timm, a GAN")
@pytest.mark.parametrize(
    ("make", "pixels"),
    [pytest.param(resnet10, 32, marks=pytest.mark.any_torch), (resnet10t, 32), (Gan, 6)],
    ids=["torchvision", "timm", "GAN"],
)
def test_whole_models(compiling_ranks, make, pixels):
    assert compiling_ranks.run(compare, make, "aot_eager", pixels, [(4,)]) == [[1]] * 2


@pytest.mark.works("torch.compile in evaluation")
def test_evaluation_equals_eager_and_is_torchs_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    eager = build(small)
    model = copy.deepcopy(eager)
    step(eager, batch(0, (4,), 6, 0))
    eager.zero_grad()
    model.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    x = batch(0, (5,), 6, 1)
    assert_equal(step(compiled(model, backend), x, training=False), step(eager, x, training=False))
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.nn.functional.batch_norm) == 2
    assert not any("syncbn" in str(call) for call in calls)


def test_evaluation_adds_no_call_to_the_graph_of_torchs_layer():
    """Inductor fuses a convolution with a frozen layer only if the convolution has one user."""

    def calls(model):
        torch._dynamo.reset()
        found = []

        def backend(graph_module, _):
            found.extend(n.target for n in graph_module.graph.nodes if n.op.startswith("call"))
            return graph_module.forward

        torch.compile(model, backend=backend, fullgraph=True)(x)
        return found

    x = torch.rand(2, 3, 9, 9)
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    model = convert_sync_batchnorm(copy.deepcopy(theirs))
    assert calls(model) == calls(theirs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(efficient_conv_bn_eval_fx_passes=True):
        y = torch.compile(model)(x)
    assert torch._dynamo.utils.counters["inductor"]["efficient_conv_bn_eval"] == 1
    torch.testing.assert_close(y, theirs(x))  # another order of float32 products


def test_inductor_computes_the_constants_of_a_channel_once():
    layer = torch.compile(SyncBatchNorm(5))
    x = torch.rand(4, 5, 6, 7, requires_grad=True)
    _, (forward, backward) = torch._inductor.utils.run_fw_bw_and_get_code(lambda: layer(x))
    assert "empty_strided_cpu((3, 5)" in forward and "empty_strided_cpu((4, 5)" in backward


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arithmetic_is_that_of_the_operators(dtype, layout):
    """Also at a mean of a thousand standard deviations and with a value that is not finite."""
    torch.manual_seed(0)
    eager = SyncBatchNorm(3)
    nn.init.normal_(eager.weight)
    nn.init.normal_(eager.bias)
    model = copy.deepcopy(eager)
    x = make_input((4, 3, 5, 6), layout, dtype, mean=1000 if dtype == torch.float32 else 1, std=1)
    x[0, 1, 0, 0] = torch.nan
    grad_output = torch.randn_like(x)
    results = []
    for run in (eager, compiled(model, Backend("aot_eager"))):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, grad_output)))
    for a, b in zip(*results, strict=True):
        assert a.stride() == b.stride() == x.stride()
        # The same operations, except that the operators' compiler may contract a product and a sum:
        # a rounding or two of values below 8.
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.isnan(results[0][0][:, 1]).all()
    assert eager.running_mean[1] == 0 and eager.running_mean[0] != 0
    for a, b in zip(eager.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


def compare_under_ddp(rank, world_size):
    backend = Backend("aot_eager")
    eager, model = DistributedDataParallel(build(small)), build(small)
    fast = DistributedDataParallel(compiled(model, backend))
    for seed in range(2):
        x = batch(rank, (4,), 6, seed)
        assert_equal(step(fast, x), step(eager, x))
    return backend.graphs


@pytest.mark.works("DistributedDataParallel(torch.compile(model)), fullgraph=True")
def test_under_ddp(compiling_ranks):
    assert compiling_ranks.run(compare_under_ddp) == [1, 1]


def compare_around_ddp(rank, world_size):
    backend = Backend("aot_eager")
    eager = DistributedDataParallel(build(Residual))
    fast = torch.compile(DistributedDataParallel(build(Residual)), backend=backend)
    for seed in range(2):
        x = batch(rank, (4,), 6, seed)
        assert_equal(step(fast, x), step(eager, x))
    return backend.graphs


@pytest.mark.works("torch.compile(DistributedDataParallel(model))")
def test_around_ddp(compiling_ranks):
    """DDP itself breaks the graph of any model; the wrapped model is one graph."""
    assert compiling_ranks.run(compare_around_ddp) == [1, 1]


def compile_each_block(rank, world_size):
    """Blocks that differ only in the name of their layer and in the group object's name."""
    backend = Backend("aot_eager")
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(4)]
    model = convert_sync_batchnorm(nn.Sequential(*blocks))
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    model(make_input((4, 3, 5, 5), "contiguous", torch.float32).requires_grad_())
    return backend.graphs


# Dynamo looks at the gradients of its inputs, leaves or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.works("torch.compile of each block: one graph for all blocks")
def test_no_compilation_for_each_layer(compiling_ranks):
    assert compiling_ranks.run(compile_each_block) == [1, 1]


class Scaled(nn.Module):
    def __init__(self, layer, momentum=0.1, eps=1e-5):
        super().__init__()
        self.convolution, self.layer = nn.Conv1d(3, 3, 1), layer(3, momentum=momentum, eps=eps)

    def forward(self, x):
        return self.layer(self.convolution(x))


def count_the_sums(rank, world_size, budget):
    torch._dynamo.reset()
    model, x = build(small), batch(rank, (4,), 6, 0)
    eager = copy.deepcopy(model)
    with functorch_config.patch(activation_memory_budget=budget):
        fast = compiled(model, Backend("aot_eager_decomp_partition"))
        with messages_sent() as messages:
            actual = step(fast, x)
    assert_equal(actual, step(eager, x))
    return len(messages)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_partitions_by_a_memory_budget(compiling_ranks, budget):
    """A budget of 0 keeps only the inputs: everything else is computed, and sent, again."""
    expected = 6 if budget == 0 else 4
    assert compiling_ranks.run(count_the_sums, budget) == [expected] * 2


def whole_dynamic(layer, compile):
    """Every size and number of the program is dynamic from the start."""
    model = Scaled(layer)
    run = compile(model, dynamic=True)
    for batch_size in (4, 6):
        yield run(make_input((batch_size, 3, 5), "contiguous", torch.float32))


def schedule(layer, compile):
    model = Scaled(layer)
    run = compile(model)
    for step_number in range(1, 4):
        model.layer.momentum, model.layer.eps = 0.1 / step_number, 1e-5 * step_number
        yield run(make_input((4, 3, 5), "contiguous", torch.float32))


def two_blocks(layer, compile):
    for momentum, eps in ((0.1, 1e-5), (0.2, 1e-4), (0.3, 1e-3)):
        torch.manual_seed(0)
        run = compile(Scaled(layer, momentum, eps))
        yield run(make_input((4, 3, 5), "contiguous", torch.float32))


def numbers_of_the_function(layer, compile):
    function = sync_batch_norm if layer is SyncBatchNorm else nn.functional.batch_norm
    mean, var = torch.zeros(3), torch.ones(3)

    def normalize(x, momentum, eps):
        return function(x, mean, var, training=True, momentum=momentum, eps=eps)

    run = compile(normalize, dynamic=True)
    for step_number in range(1, 4):
        x = make_input((4, 3, 5), "contiguous", torch.float32)
        yield run(x, 0.1 / step_number, 1e-5 * step_number) + mean[:, None]


# docs/pytorch2.md has the program.
KEEPS_NUMBERS = pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0) and torch.__version__.startswith("2.11."),
    reason="torch 2.11 does not see in Python 3.13.0 that an attribute has changed",
)


@pytest.mark.works("torch.compile(dynamic=True), schedules of momentum and eps: one graph")
@pytest.mark.parametrize(
    "program",
    [
        whole_dynamic,
        pytest.param(schedule, marks=KEEPS_NUMBERS),
        two_blocks,
        numbers_of_the_function,
    ],
)
def test_variable_numbers_break_no_graph(program):
    """They also compile no more often than with torch's layer."""

    def outputs_and_graphs(layer):
        backend = Backend("aot_eager")
        torch.manual_seed(0)

        def compile(module, **options):
            return torch.compile(module, backend=backend, fullgraph=True, **options)

        return list(program(layer, compile)), backend.graphs

    torch.manual_seed(0)
    expected = list(program(SyncBatchNorm, lambda module, **options: module))
    outputs, graphs = outputs_and_graphs(SyncBatchNorm)
    _, torchs_graphs = outputs_and_graphs(nn.BatchNorm1d)
    assert graphs <= torchs_graphs
    for output, right in zip(outputs, expected, strict=True):
        # float32 roundings of values below 4
        torch.testing.assert_close(output, right, rtol=1e-6, atol=1e-6)


def compile_itself(model, backend):
    model[1].compile(backend=backend)
    return model


def compile_wrapped(model, backend):
    model[1] = torch.compile(model[1], backend=backend)
    return model


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("compiled", [compile_itself, compile_wrapped, compile_whole])
def test_layers_compiled_before_are_compiled_again(compiled, cls):
    layer, x = cls(3), torch.rand(2, 3, 4, *[4] * (cls is not nn.BatchNorm1d))
    model = nn.Sequential(nn.ReLU(), layer)
    convert_sync_batchnorm(model)
    call = compiled(model, "eager")

    def node():
        return type(call(x).grad_fn).__name__

    synchronized = node()
    revert_sync_batchnorm(model)
    assert node() == "NativeBatchNormBackward0" != synchronized
    convert_sync_batchnorm(model)
    assert node() == synchronized
