"""Graphs recorded in training mode by torch's tracers: right when differentiated, or refused."""

import copy
import re

import pytest
import torch
from support.cases import make_input
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm

pytestmark = [
    # torch's own warning: 2.11 copies its tree specifications through a deprecated class.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # In a group, strict export warns that a pass has recorded itself in the group's state.
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
]

# Each takes a model and an input and returns the graph as a module or function, and the module that
# has its parameters and buffers.


def export(model, x):
    graph = torch.export.export(model, (x,)).module()
    return graph, graph


def export_strict(model, x):
    graph = torch.export.export(model, (x,), strict=True).module()
    return graph, graph


def export_dynamic(model, x):
    shapes = ({0: torch.export.Dim("batch", min=2), 2: torch.export.Dim.DYNAMIC},)
    graph = torch.export.export(model, (torch.cat([x, x]),), dynamic_shapes=shapes).module()
    return graph, graph


def dynamo_export(model, x):
    return torch._dynamo.export(model)(x).graph_module, model


def real_make_fx(model, x, **options):
    state = copy.deepcopy(model.state_dict())
    graph = make_fx(model, **options)(x)  # runs the layer
    model.load_state_dict(state)
    return graph, model


def pre_dispatch_make_fx(model, x):
    return real_make_fx(model, x, pre_dispatch=True)


def symbolic_make_fx(model, x):
    def call(state, x):
        return torch.func.functional_call(model, state, (x,))

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    graph = make_fx(call, tracing_mode="symbolic")(state, x)
    return lambda x: graph(state, x), model


def aot_module(model, x):
    from functorch.compile import aot_module, nop

    return aot_module(model, nop), model


def pipeline(model, x):
    from torch.distributed.pipelining import SplitPoint
    from torch.distributed.pipelining import pipeline as split

    stages = split(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    assert stages.num_stages == 2

    def run(x):
        for stage in range(stages.num_stages):
            x = stages.get_stage_module(stage)(x)
            x = x[0] if isinstance(x, tuple) else x
        return x

    return run, stages.split_gm


def symbolic_trace(model, x):
    return torch.fx.symbolic_trace(model), model


TRACERS = {
    export: "torch.export",
    export_strict: "torch.export(strict=True)",
    export_dynamic: "torch.export with dynamic shapes",
    dynamo_export: "torch._dynamo.export",
    real_make_fx: "make_fx",
    pre_dispatch_make_fx: "make_fx(pre_dispatch=True)",
    symbolic_make_fx: 'make_fx(tracing_mode="symbolic")',
    aot_module: "AOTAutograd's aot_module",
    pipeline: "torch.distributed.pipelining.pipeline",
    symbolic_trace: "torch.fx.symbolic_trace",
}


def build(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 1), SyncBatchNorm(3, **options)).double()
    if model[1].affine:
        nn.init.normal_(model[1].weight)
    return model


def batch(rank):
    return make_input((4 + rank, 2, 5), "contiguous", torch.float64, seed=rank)


def step(run, owner, x):
    x = x.clone().requires_grad_()
    y = run(x)
    parameters = dict(owner.named_parameters())
    grads = torch.autograd.grad(y.pow(3).sum(), [x, *parameters.values()])
    state = {f"{name} grad": g for name, g in zip(["x", *parameters], grads, strict=True)}
    state.update((name, buffer.clone()) for name, buffer in owner.named_buffers())
    # A pipeline prefixes the names with its stages.
    return {"output": y.detach(), **{re.sub(r"submod_pp_\d\.", "", n): t for n, t in state.items()}}


def compare(rank, world_size, trace, options):
    eager = build(**options)
    run, owner = globals()[trace](copy.deepcopy(eager), batch(rank))
    for seed in range(2):
        x = batch(rank) + seed
        expected = step(eager, eager, x)
        actual = step(run, owner, x)
        assert actual.keys() == expected.keys()
        for name in expected:
            # float64; in one process torch's own operator, with another order of sums
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]


MARKED = [
    pytest.param(
        tracer.__name__,
        id=tracer.__name__,
        marks=pytest.mark.works(f"a graph recorded in training, differentiated: {name}"),
    )
    for tracer, name in TRACERS.items()
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("trace", MARKED)
def test_alone(trace, options):
    compare(0, 1, trace, options)


@pytest.mark.parametrize("trace", MARKED)
def test_in_a_group(compiling_ranks, trace):
    compiling_ranks.run(compare, trace, {})


# Dynamo reads gradients of tensors that are no leaves: torch warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("begin", ["before the forward pass", "before the backward pass"])
def test_compiled_autograd(begin):
    """It traces the backward pass of an eager layer, or breaks its graph around one of C++."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    eager = build()
    traced = copy.deepcopy(eager)
    x = batch(0)
    is_traced = begin == "before the forward pass"

    def compile(graph):
        return torch.compile(graph, backend="aot_eager", fullgraph=is_traced)

    if not is_traced:
        output = traced(x)
    with compiled_autograd._enable(compile):
        if is_traced:
            output = traced(x)
        output.pow(3).sum().backward()
    eager(x).pow(3).sum().backward()
    for actual, expected in zip(traced.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_exported_graph_of_one_process_holds_torchs_operator():
    graph, _ = export(build(), batch(0))
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert "aten.batch_norm.default" in calls
    assert not any("syncbn" in call for call in calls)


def differentiate_twice(rank, world_size):
    model = build()
    graph, _ = export(model, batch(rank))
    results = []
    for run in (graph, model):
        x = batch(rank).requires_grad_()
        (grad,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)  # float64, the same formula


def test_exported_graph_of_a_group_differentiates_twice(compiling_ranks):
    compiling_ranks.run(differentiate_twice)


def save_and_load(rank, world_size, folder):
    model = build()
    path = f"{folder}/{rank}.pt2"
    torch.export.save(torch.export.export(model, (batch(rank),)), path)
    graph = torch.export.load(path).module()
    expected, actual = step(model, model, batch(rank)), step(graph, graph, batch(rank))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


# torch's own warning: it reads the file into bytes.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_exported_graph_of_a_group_can_be_saved(compiling_ranks, tmp_path):
    compiling_ranks.run(save_and_load, str(tmp_path))


def test_bad_input_to_an_export_is_named():
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    with pytest.raises(ValueError, match=r"3 channels .* but got 5 .*\[layer 'body\.bn1'\]"):
        torch.export.export(layer, (torch.rand(4, 5),))


def recorded_checkpoint(rank, world_size):
    model = build()

    def gradient(x):
        return torch.autograd.grad(checkpoint(model, x, use_reentrant=False).pow(3).sum(), x)[0]

    x = batch(rank).requires_grad_()
    graph = make_fx(gradient)(x)
    before = model[1].num_batches_tracked.item()
    graph(x)
    return before, model[1].num_batches_tracked.item()


def test_recorded_checkpoint_updates_once(compiling_ranks):
    assert recorded_checkpoint(0, 1) == (1, 2)
    assert compiling_ranks.run(recorded_checkpoint) == [(1, 2)] * 2


def export_under_join(rank, world_size):
    graph, _ = export(SyncBatchNorm(3).double(), torch.rand(4, 3).double())
    model = DistributedDataParallel(graph)
    with model.join():
        model(torch.rand(4, 3).double())


def test_exported_graph_refuses_join(compiling_ranks):
    for failed in compiling_ranks.outcomes(export_under_join):
        assert failed.kind == "NotImplementedError"
        assert "DistributedDataParallel.join()" in failed.message


def test_functionalize_is_refused_in_training():
    with pytest.raises(NotImplementedError, match=r"cannot be transformed by torch\.func"):
        torch.func.functionalize(build())(batch(0))
