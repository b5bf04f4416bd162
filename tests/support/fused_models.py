"""A model before and after its activations are fused: the same results, in the same places."""

import copy

import torch
from torch import Tensor, nn

from syncbn import fuse_activations


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
