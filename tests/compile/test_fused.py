"""A residual and an activation in compiled, exported and recorded layers."""

import pytest
import torch
from fusing import ACTIVATIONS, make_operands
from torch import nn

from syncbn import SyncBatchNorm

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

FUSED = [(a, r) for a in ACTIVATIONS for r in (False, True) if a is not None or r]
fused = pytest.mark.parametrize(("activation", "with_residual"), FUSED)


def run(operands, activation, backend):
    torch._dynamo.reset()
    leaves = operands.as_leaves()
    layer = SyncBatchNorm(3, dtype=torch.float64, activation=activation, negative_slope=0.25)
    layer.weight, layer.bias = nn.Parameter(leaves.weight), nn.Parameter(leaves.bias)
    call = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    y = call(leaves.x, leaves.residual)
    y.backward(leaves.dy)
    gradients = [leaves.x.grad, layer.weight.grad, layer.bias.grad]
    if leaves.residual is not None:
        gradients.append(leaves.residual.grad)
    return [y.detach(), *gradients, layer.running_var]


@fused
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_compute_the_same(activation, with_residual, backend):
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float64, with_residual=with_residual)
    eager = run(operands, activation, None)
    for ours, right in zip(run(operands, activation, backend), eager, strict=True):
        torch.testing.assert_close(ours, right)  # float64, by its default tolerances


def test_compiled_layer_refuses_a_residual_that_does_not_fit():
    torch._dynamo.reset()
    compiled = torch.compile(SyncBatchNorm(3, activation="relu"), backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match="residual to have shape"):
        compiled(torch.rand(4, 3, 5), torch.rand(4, 3, 4))


@fused
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_exported_evaluation_holds_torchs_operators(activation, with_residual):
    layer = SyncBatchNorm(3, activation=activation).eval()
    inputs = (torch.rand(4, 3, 5, 5), torch.rand(4, 3, 5, 5))[: 1 + with_residual]
    program = torch.export.export(layer, inputs)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    wanted = {f"aten.{activation}.default"} if activation else set()
    wanted |= {"aten.add.Tensor"} if with_residual else set()
    assert wanted <= called and not any("syncbn" in target for target in called)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))
