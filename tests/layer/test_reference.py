"""Derivatives of every order, in one process and on two ranks, against the whole batch."""

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input

from syncbn import sync_batch_norm
from syncbn.ops import reference


class Replicate(torch.autograd.Function):
    """An input that is equal on all ranks: its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return SumReplicas.apply(grad)


class SumReplicas(torch.autograd.Function):
    """The adjoint of Replicate: the sum over the ranks, which is equal on all of them."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Replicate.apply(grad)


def whole_batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 3, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, dtype=torch.float64, generator=generator)
    bias = torch.randn(2, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def layer_of_rank(rank, world_size, normalize):
    """A function of the whole batch. Each rank computes a share."""

    def layer(x, weight, bias):
        shares = Replicate.apply(x).tensor_split(world_size)
        y = normalize(shares[rank], Replicate.apply(weight), Replicate.apply(bias))
        zeros = [torch.zeros_like(share) for share in shares]
        return SumReplicas.apply(torch.cat([*zeros[:rank], y, *zeros[rank + 1 :]]))

    return layer


EPS = 0.1


def ours(x, weight, bias):
    return sync_batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def check_gradients(rank, world_size):
    layer = layer_of_rank(rank, world_size, ours)
    arguments = whole_batch()
    return torch.autograd.gradcheck(layer, arguments), torch.autograd.gradgradcheck(
        layer, arguments
    )


def test_gradgradcheck_on_two_ranks(two_ranks):
    assert two_ranks.run(check_gradients) == [(True, True)] * 2


def derivatives(layer):
    """First, second and third derivatives of a scalar of the layer, in x and weight."""
    x, weight, bias = whole_batch()
    loss = (layer(x, weight, bias) ** 3).sum()
    results = []
    for _ in range(3):
        grads = torch.autograd.grad(loss, (x, weight), create_graph=True)
        results.extend(g.detach() for g in grads)
        loss = sum((g**2).sum() for g in grads)
    return results


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
}


def derivatives_on_ranks(rank, world_size, layout):
    def layer(x, weight, bias):
        return ours(LAYOUTS[layout](x), weight, bias)

    return derivatives(layer_of_rank(rank, world_size, layer))


@pytest.mark.works("double backward, and third derivatives")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_of_second_and_third_order_are_those_of_the_whole_batch(any_world, layout):
    def plain(x, weight, bias):  # no batch norm operator: torch's third derivative is wrong
        mean = x.mean((0, 2), keepdim=True)
        var = (x - mean).square().mean((0, 2), keepdim=True)
        return (x - mean) / (var + EPS).sqrt() * weight.view(1, -1, 1) + bias.view(1, -1, 1)

    expected = derivatives(plain)
    for results in any_world.run(derivatives_on_ranks, layout):
        for actual, wanted in zip(results, expected, strict=True):
            # float64; third derivatives are sums of products that grow to 1e4 and cancel
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max())


def gradient_penalty(rank, world_size):
    """As in WGAN-GP: a gradient of the input's gradient, with an empty rank."""
    x = make_input((4, 2, 3), "contiguous", torch.float64)
    x = (x if rank == 0 else x[:0]).requires_grad_()
    y = sync_batch_norm(x, None, None, training=True)
    (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


@pytest.mark.works("gradient penalties with an empty rank")
def test_gradient_penalty_with_an_empty_rank(two_ranks):
    x = make_input((4, 2, 3), "contiguous", torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad((reference.batch_norm(x) ** 3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    actual, empty = two_ranks.run(gradient_penalty)
    torch.testing.assert_close(actual, x.grad)  # float64 rounding
    assert empty.shape == (0, 2, 3)
