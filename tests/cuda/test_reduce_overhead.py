"""Compiled with mode="reduce-overhead": Inductor records all of a model in CUDA graphs.

On the stand-in Triton's kernels do nothing: there only the graphs are tested, not their numbers.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from support import ops
from support.cases import make_input
from support.cuda_device import IS_STANDIN
from support.ranks import Ranks
from torch import nn

from syncbn import _compat, convert_sync_batchnorm
from syncbn.ops import batch_norm

STEPS = 5  # one that warms up, one that records, replays


def counted(name, calls):
    def call(original, *args):
        calls.append(name)
        return original(*args)

    return call


def step(network, run, x):
    """Train; return the numbers of operators and collectives that the host has called."""
    calls = []
    counting = {name: counted(name, calls) for name in batch_norm._OVERLOADS}
    before = _compat.count_operations(dist.group.WORLD, x.device)
    with ops.replaced(**counting):
        network.zero_grad(set_to_none=True)
        run(x).pow(3).sum().backward()
    num_collectives = _compat.count_operations(dist.group.WORLD, x.device) - before
    return len(calls), num_collectives


def train(rank, world_size):
    if IS_STANDIN:
        import triton_stub

        triton_stub.install()
    torch.manual_seed(0)
    eager = convert_sync_batchnorm(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8))
    )
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    called = []
    # An error if CUDA graphs are not used; torch would only log it.
    with torch._inductor.config.patch("triton.cudagraph_or_error", True):
        for seed in range(STEPS):
            x = make_input((16, 6), "contiguous", torch.float32, seed=10 * rank + seed)
            torch.compiler.cudagraph_mark_step_begin()
            called.append(step(model, compiled, x))  # a group's first pass is in a graph's pool
            step(eager, eager, x)
            if not IS_STANDIN:
                pairs = zip(eager.parameters(), model.parameters(), strict=True)
                for a, b in pairs:  # float32 sums
                    torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-3)
    if not IS_STANDIN:
        for a, b in zip(eager.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)  # five updates in float32
        assert model[1].num_batches_tracked == STEPS
    assert called[0][0] > 0 and called[0][1] == (4 if world_size > 1 else 0), called
    assert called[2:] == [(0, 0)] * (STEPS - 2), called  # a replay calls nothing


@pytest.mark.filterwarnings("ignore")  # Inductor's own, of several kinds
@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_of_a_model_is_in_cuda_graphs(world_size):
    with Ranks(world_size, backend="nccl", device="cuda", case_seconds=240) as ranks:
        ranks.run(train)
