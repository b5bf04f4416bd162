"""Compiled with mode="reduce-overhead": Inductor records all of a model in CUDA graphs.

On the stand-in Triton's kernels do nothing: there only the graphs are tested, not their numbers.
"""

import copy

import pytest
import torch
from support.cases import make_input
from support.cuda_device import IS_STANDIN
from support.ranks import Ranks
from torch import nn

from syncbn import convert_sync_batchnorm

STEPS = 5  # one that warms up, one that records, replays


def train(rank, world_size):
    if IS_STANDIN:
        import triton_stub

        triton_stub.install()
    torch.manual_seed(0)
    eager = convert_sync_batchnorm(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8))
    )
    model = copy.deepcopy(eager)
    networks = [(eager, eager), (model, torch.compile(model, mode="reduce-overhead"))]
    # An error if CUDA graphs are not used; torch would only log it.
    with torch._inductor.config.patch("triton.cudagraph_or_error", True):
        for step in range(STEPS):
            x = make_input((16, 6), "contiguous", torch.float32, seed=10 * rank + step)
            torch.compiler.cudagraph_mark_step_begin()
            for network, run in networks:
                network.zero_grad(set_to_none=True)
                run(x).pow(3).sum().backward()
            if not IS_STANDIN:
                pairs = zip(eager.parameters(), model.parameters(), strict=True)
                for a, b in pairs:  # float32 sums
                    torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-3)
    if not IS_STANDIN:
        for a, b in zip(eager.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)  # five updates in float32
    return model[1].num_batches_tracked.item()


@pytest.mark.filterwarnings("ignore")  # Inductor's own, of several kinds
@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_of_a_model_is_in_cuda_graphs(world_size):
    with Ranks(world_size, backend="nccl", device="cuda", case_seconds=240) as ranks:
        counts = ranks.run(train)
    assert counts == [STEPS] * world_size
