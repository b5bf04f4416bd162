"""Masks in compiled, exported and recorded layers, against eager ones."""

import copy

import pytest
import torch
from support.cases import make_input, make_mask
from support.fusing import FUSED, make_layer, make_operands
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from syncbn import SyncBatchNorm, sync_batch_norm


def spoiled(tensor, mask):
    return None if tensor is None else torch.where(mask.unsqueeze(1), tensor, torch.nan)


def run(operands, mask, activation, backend):
    torch._dynamo.reset()
    leaves = operands.as_leaves()
    layer = make_layer(leaves, activation)
    call = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    y = call(leaves.x, leaves.residual, mask=mask)
    y.backward(leaves.dy)
    gradients = [leaves.x.grad, layer.weight.grad, layer.bias.grad]
    if leaves.residual is not None:
        gradients.append(leaves.residual.grad)
    return [y.detach(), *gradients, layer.running_mean, layer.running_var]


# Inductor takes many times as long, and adds the plain and the longest expressions.
CASES = [(*case, "aot_eager") for case in [(None, False), *FUSED]]
CASES += [(*case, "inductor") for case in [(None, False), ("silu", True)]]


@pytest.mark.works("torch.compile of a layer with a mask, fullgraph=True")
@pytest.mark.parametrize(("activation", "with_residual", "backend"), CASES)
def test_compiled_layers_compute_the_same(activation, with_residual, backend):
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float64, with_residual=with_residual)
    mask = make_mask(operands.x)
    masked = {name: spoiled(getattr(operands, name), mask) for name in ("x", "dy", "residual")}
    operands = operands._replace(**masked)
    eager = run(operands, mask, activation, None)
    assert not any(value.isnan().any() for value in eager)
    for ours, right in zip(run(operands, mask, activation, backend), eager, strict=True):
        torch.testing.assert_close(ours, right)  # float64, by its default tolerances


def test_compiled_evaluation_computes_the_same():
    x = make_input((4, 3, 7), "contiguous", torch.float64)
    mask = make_mask(x)
    layer = SyncBatchNorm(3, dtype=torch.float64, activation="silu").eval()
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(
        compiled(spoiled(x, mask), mask=mask), layer(spoiled(x, mask), mask=mask)
    )


def run_in_a_group(rank, world_size, is_compiled):
    torch._dynamo.reset()
    x = make_input((4, 3, 7), "contiguous", torch.float64)
    mask = make_mask(x)
    own, of_own = spoiled(x, mask).chunk(world_size)[rank], mask.chunk(world_size)[rank]
    layer = SyncBatchNorm(3, dtype=torch.float64)
    # One rank is compiled and the other is not: they still meet.
    call = torch.compile(layer, fullgraph=True) if is_compiled[rank] else layer
    own.requires_grad_()
    y = call(own, mask=of_own)
    (grad,) = torch.autograd.grad(y.square().sum(), own)
    return y.detach(), grad, layer.running_var


@pytest.mark.parametrize("is_compiled", [(True, True), (True, False)])
def test_compiled_layers_meet_in_a_group(compiling_ranks, is_compiled):
    ours = compiling_ranks.run(run_in_a_group, is_compiled)
    theirs = compiling_ranks.run(run_in_a_group, (False, False))
    for mine, right in zip(ours, theirs, strict=True):
        for a, b in zip(mine, right, strict=True):
            torch.testing.assert_close(a, b)  # float64, by its default tolerances


def test_compiled_layer_refuses_a_mask_that_does_not_fit():
    torch._dynamo.reset()
    compiled = torch.compile(SyncBatchNorm(3), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"mask to have shape \[4, 5\] or \[4, 1, 5\]"):
        compiled(torch.rand(4, 3, 5), mask=torch.ones(4, 4, dtype=torch.bool))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = SyncBatchNorm(3, dtype=torch.float64)

    def forward(self, x, mask):
        return self.norm(x, mask=mask)


# torch's own warning: strict export runs deprecated code.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
def test_exported_layer_computes_the_same(training):
    x = make_input((4, 3, 7), "contiguous", torch.float64)
    mask, net = make_mask(x), Net().train(training)
    exported = torch.export.export(net, (x, mask)).module()
    leaves = [spoiled(x, mask).requires_grad_() for _ in range(2)]
    results = []
    for model, leaf in zip((exported, net), leaves, strict=True):
        y = model(leaf, mask)
        (grad,) = torch.autograd.grad(y.square().sum(), leaf)
        results.append((y.detach(), grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)  # float64, by its default tolerances
    torch.testing.assert_close(dict(exported.named_buffers()), dict(net.named_buffers()))


def test_make_fx_records_a_differentiable_graph():
    x = make_input((4, 3, 7), "contiguous", torch.float64)
    mask = make_mask(x)

    def step(x, mask):
        x = x.detach().requires_grad_()
        y = sync_batch_norm(x, None, None, training=True, mask=mask)
        return torch.autograd.grad(y.square().sum(), x)[0]

    recorded = make_fx(step)(x, mask)
    torch.testing.assert_close(recorded(spoiled(x, mask), mask), step(spoiled(x, mask), mask))


def test_recorded_half_module_updates_its_statistics():
    """The statistics are float16 like the input; the sums are float64."""
    layer = SyncBatchNorm(3).half()
    x, mask = torch.randn(4, 3, 5).half(), torch.rand(4, 5) > 0.3
    eager = copy.deepcopy(layer)
    graph = torch.export.export(layer, (x, None, mask)).module()
    torch.testing.assert_close(graph(x, None, mask), eager(x, None, mask))
    assert torch.equal(graph.running_mean, eager.running_mean)
    assert torch.equal(graph.running_var, eager.running_var)
