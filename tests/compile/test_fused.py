"""A residual and an activation in compiled, exported and recorded layers."""

import pytest
import torch
from support.fusing import FUSED
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, fuse_activations


class Block(nn.Module):
    """Every kind of fused place, followed by a Sequential's and timm's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)
        self.bn1, self.bn2, self.bn3 = SyncBatchNorm(3), SyncBatchNorm(3), SyncBatchNorm(3)
        self.tail = nn.Sequential(SyncBatchNorm(3), nn.SiLU())

    def forward(self, x, addend):
        y = self.relu(self.bn1(self.conv(x)))
        y = self.relu(self.bn2(y) + addend)
        y = self.bn3(self.conv(y))
        y += x
        return self.tail(self.relu(y))


def make_block():
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    timms = timm_layers.BatchNormAct2d(3, act_layer=nn.SiLU)
    block = Block().double()
    block.tail.append(convert_sync_batchnorm(nn.Sequential(timms.double())))
    return fuse_activations(block)


def train_block(x, addend, backend):
    torch._dynamo.reset()
    block = make_block()
    call = block if backend is None else torch.compile(block, backend=backend, fullgraph=True)
    x = x.clone().requires_grad_()
    y = call(x, addend)
    y.sin().sum().backward()
    with torch.no_grad():
        block.eval()
        evaluated = call(x, addend)
    gradients = [p.grad for p in block.parameters()]
    return [y.detach(), x.grad, evaluated, *gradients, *block.buffers()]


# A residual, a broadcast bias and a number: only Dynamo distinguishes them.
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ((4, 3, 5, 5), "eager"),
        ((3, 1, 1), "eager"),
        (None, "eager"),
        ((4, 3, 5, 5), "inductor"),
    ],
)
@pytest.mark.works("`torch.compile` of a model after `fuse_activations`, without a graph break")
def test_compiled_fused_models_compute_the_same(shape, backend):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((4, 3, 5, 5), generator=generator, dtype=torch.float64)
    addend = 0.5
    if shape is not None:
        addend = torch.randn(shape, generator=generator, dtype=torch.float64)
    eager = train_block(x, addend, None)
    for ours, right in zip(train_block(x, addend, backend), eager, strict=True):
        torch.testing.assert_close(ours, right)  # float64, by its default tolerances


@pytest.mark.works("`torch.export` of a model after `fuse_activations`, in evaluation")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_fused_models(strict):
    block = make_block().eval()
    inputs = torch.rand(4, 3, 5, 5).double(), torch.rand(4, 3, 5, 5).double()
    program = torch.export.export(block, inputs, strict=strict)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("syncbn" in target for target in called)
    torch.testing.assert_close(program.module()(*inputs), block(*inputs))


@pytest.mark.parametrize(("activation", "with_residual"), FUSED)
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
