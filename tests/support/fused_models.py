"""Small models, and the comparison of one before and after its activations are fused."""

import copy

import torch
from torch import Tensor, nn

from syncbn import SyncBatchNorm, explain_fusion, fuse_activations


def make_input(seed=0, shape=(4, 3, 5, 5)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(channels=3):
    return SyncBatchNorm(channels, dtype=torch.float64)


class Block(nn.Module):
    """Two layers, two convolutions and modules for tests' code; ``code`` is its forward."""

    def __init__(self, code=None):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 1).double(), nn.Conv2d(3, 3, 1).double()
        self.bn1, self.bn2 = norm(), norm()
        self.relu, self.identity = nn.ReLU(inplace=True), nn.Identity()
        self.leaky, self.silu = nn.LeakyReLU(0.2), nn.SiLU()
        self.down = nn.Sequential(nn.Conv2d(3, 3, 1).double(), norm())


class Called(Block):
    """A block that pickles find."""

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)

    def features(self, x):
        return self.relu(self.bn1(self.conv1(x)))


def block(code, inputs=1):
    """A block with the code as its forward, of a class that pickles do not find."""
    if inputs == 1:
        forward = lambda self, x: code(self, x)  # noqa: E731
    else:
        forward = lambda self, x, other: code(self, x, other)  # noqa: E731
    return type("Block", (Block,), {"forward": forward})()


def names(report):
    return [(f.name, f.activation, f.residual) for f in report.fused]


def reason(model, name="bn1"):
    return dict(explain_fusion(model).left)[name]


def run(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Two training steps' worth of results, then evaluation: outputs, gradients and buffers."""
    results = {}
    model.train()
    for step in range(2):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        torch.manual_seed(step)  # of dropout
        output = model(*leaves)
        output.backward(torch.rand(output.shape, dtype=output.dtype))
        results[f"output {step}"] = output.detach()
        results.update({f"input {i} of {step}": leaf.grad for i, leaf in enumerate(leaves)})
    results.update({f"gradient of {name}": p.grad for name, p in model.named_parameters()})
    results.update(model.named_buffers())
    results["evaluation"] = model.eval()(*inputs).detach()
    model.train().zero_grad()
    return {name: value for name, value in results.items() if value is not None}


def assert_same(model: nn.Module, other: nn.Module, *inputs: Tensor) -> None:
    expected, results = run(copy.deepcopy(model), [*inputs]), run(copy.deepcopy(other), [*inputs])
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name].dtype == value.dtype, name
        # float64; gradients are sums in another order, through layers that divide by deviations.
        torch.testing.assert_close(results[name], value, rtol=1e-7, atol=1e-9, msg=name)


def fuse_a_copy(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """Return a fused copy that does the same, with the same state."""
    fused = fuse_activations(copy.deepcopy(model))
    assert [*fused.state_dict()] == [*model.state_dict()]
    assert [*dict(fused.named_parameters())] == [*dict(model.named_parameters())]
    assert_same(model, fused, *inputs)
    return fused
