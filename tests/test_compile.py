"""torch.compile: one graph, equal to eager, on several ranks."""

import pytest
import torch
from cases import make_input
from torch import nn

from syncbn import convert_sync_batchnorm

# torch's own: inductor on 2.11 imports modules that script functions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def build():
    torch.manual_seed(0)
    return convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
    ).double()


def compile_and_train(rank, world_size, backend, sizes):
    torch._dynamo.reset()
    eager, layered = build(), build()
    compiled = torch.compile(layered, backend=backend, fullgraph=True)
    errors = []
    for step, size in enumerate(sizes):
        x = make_input((size[rank % len(size)], 3, 6, 6), "contiguous", torch.float64, seed=step)
        ya, yb = eager(x), compiled(x)
        ya.square().sum().backward()
        yb.square().sum().backward()
        errors.append((ya - yb).abs().max().item() if ya.numel() else 0.0)
    pairs = zip(
        [*eager.buffers(), *(p.grad for p in eager.parameters())],
        [*layered.buffers(), *(p.grad for p in layered.parameters())],
        strict=True,
    )
    return max(errors), max((a - b).abs().max().item() / (1 + a.abs().max()) for a, b in pairs)


def check(ranks, backend, sizes):
    for output_error, state_error in ranks.run(compile_and_train, backend, sizes):
        # float64, in another order of operations; gradients that cancel to zero among them
        assert output_error < 1e-12 and state_error < 1e-12


def test_fullgraph_training_equals_eager(any_world):
    check(any_world, "aot_eager", [(4,), (4,)])


def test_inductor_equals_eager(two_ranks):
    check(two_ranks, "inductor", [(4,), (4,)])


def test_uneven_and_empty_batches(two_ranks):
    check(two_ranks, "aot_eager", [(4, 4), (2, 5), (3, 0)])
