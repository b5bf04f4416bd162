"""torch's own ProcessGroupNCCL on the stand-in's NCCL, and DDP, FSDP and ZeRO on top of it."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch_ranks import started

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def ranks():
    with started(WORLD_SIZE) as processes:
        yield processes


# --- Collectives


def reduces(rank, world_size, dtype):
    x = torch.tensor([1, 2, 3], dtype=dtype) * (rank + 1)
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
    results = [x.clone() for _ in ops]
    for result, op in zip(results, ops, strict=True):
        dist.all_reduce(result, op)
    return [result.tolist() for result in results]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64],
    ids=str,
)
def test_all_reduce(ranks, dtype):
    expected = [[3, 6, 9], [2, 8, 18], [2, 4, 6], [1, 2, 3]]
    assert ranks.run(reduces, dtype) == [expected] * 2


def averages(rank, world_size):
    average = torch.tensor([1.0, 2.0]) * rank
    dist.all_reduce(average, dist.ReduceOp.AVG)
    multiplied = torch.tensor([1.0, 2.0])
    dist.all_reduce(multiplied, dist._make_nccl_premul_sum(0.5 * (rank + 1)))
    half = torch.tensor([1.0, 2.0], dtype=torch.float16)
    dist.all_reduce(half, dist._make_nccl_premul_sum(torch.tensor([4.0], dtype=half.dtype)))
    return average.tolist(), multiplied.tolist(), half.tolist()


def test_averages_and_factors(ranks):
    assert ranks.run(averages) == [([0.5, 1.0], [1.5, 3.0], [8.0, 16.0])] * 2


def moves(rank, world_size):
    x = torch.arange(4, dtype=torch.bfloat16) + 10 * rank
    root = torch.empty(4, dtype=torch.bfloat16) if rank == 0 else x.clone()
    dist.broadcast(root, 1)
    lists = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(lists, x)
    whole = torch.empty(8, dtype=x.dtype)
    dist.all_gather_into_tensor(whole, x)
    half = torch.empty(2, dtype=x.dtype)
    dist.reduce_scatter_tensor(half, x)
    uneven = [torch.empty(1 + 2 * r, dtype=x.dtype) for r in range(world_size)]
    dist.all_gather(uneven, x[: 1 + 2 * rank].contiguous())
    gathered = [torch.empty_like(x) for _ in range(world_size)] if rank == 1 else None
    dist.gather(x, gathered, 1)
    scattered = torch.empty(2, dtype=x.dtype)
    dist.scatter(scattered, list(x.split(2)) if rank == 0 else None, 0)
    results = [root, *lists, whole, half, *uneven, *(gathered or []), scattered]
    return [result.tolist() for result in results]


def test_collectives_that_move(ranks):
    zero, one = [0, 1, 2, 3], [10, 11, 12, 13]
    for rank, outcome in enumerate(ranks.run(moves)):
        sums = [[10, 12], [14, 16]][rank]
        gathered = [zero, one] if rank == 1 else []
        scattered = zero[2 * rank : 2 * rank + 2]
        uneven = [[0], [10, 11, 12]]
        assert outcome == [one, zero, one, zero + one, sums, *uneven, *gathered, scattered]


def exchanges(rank, world_size):
    x = torch.arange(4.0) + 10 * rank
    even = torch.empty(4)
    dist.all_to_all_single(even, x)
    sent = [1, 3] if rank == 0 else [2, 2]
    taken = [1, 2] if rank == 0 else [3, 2]
    uneven = torch.empty(sum(taken))
    dist.all_to_all_single(uneven, x, taken, sent)
    lists = [torch.empty(2) for _ in range(world_size)]
    dist.all_to_all(lists, list(x.split(2)))
    return [even.tolist(), uneven.tolist(), [part.tolist() for part in lists]]


def test_all_to_all(ranks):
    assert ranks.run(exchanges) == [
        [[0, 1, 10, 11], [0, 10, 11], [[0, 1], [10, 11]]],
        [[2, 3, 12, 13], [1, 2, 3, 12, 13], [[2, 3], [12, 13]]],
    ]


# --- Sends and receives


def sends(rank, world_size, count):
    peer = 1 - rank
    mine, theirs = torch.full((count,), float(rank)), torch.empty(count)
    if rank == 0:
        dist.send(mine, peer)
        dist.recv(theirs, peer)
    else:
        dist.recv(theirs, peer)
        dist.send(mine, peer)
    both = torch.empty(count)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, both, peer)]
    )
    for work in works:
        work.wait()
    return [theirs.unique().tolist(), both.unique().tolist()]


@pytest.mark.parametrize("count", [1, 100_000])
def test_send_and_receive(ranks, count):
    assert ranks.run(sends, count) == [[[1.0], [1.0]], [[0.0], [0.0]]]


def coalesces(rank, world_size):
    tensors = [torch.full((i + 1,), float(rank)) for i in range(3)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [tensor.tolist() for tensor in tensors]


def test_coalesced_collectives(ranks):
    assert ranks.run(coalesces) == [[[1.0], [1.0] * 2, [1.0] * 3]] * 2


# --- Groups


def makes_groups(rank, world_size):
    both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(world_size)]
    results = []
    for group in [both, alone[rank], None]:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        results.append(x.item())
    dist.destroy_process_group(both)
    return results


def test_new_groups(ranks):
    assert ranks.run(makes_groups) == [[2.0, 1.0, 2.0]] * 2


def starts_again(rank, world_size, folder):
    results = []
    for attempt in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store-{attempt}",
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", 0),  # joins at once; groups are splits
        )
        for group in (None, dist.new_group([0, 1])):
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            results.append(x.item())
    return results


def test_destroyed_group_starts_again(ranks, tmp_path):
    assert ranks.run(starts_again, str(tmp_path)) == [[2.0] * 4] * 2


def captures(rank, world_size):
    x, total = torch.ones(3), torch.zeros(3)
    peer = torch.zeros(3)
    dist.all_reduce(x.clone())  # NCCL joins outside of a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        dist.all_reduce(y)
        total += y
        dist.all_to_all_single(peer[:2], y[:2])
    results = []
    for value in (1.0, 3.0):
        x.fill_(value + rank)
        graph.replay()
        results.append(total.tolist())
    return results


def test_captured_collectives(ranks):
    assert ranks.run(captures) == [[[6.0] * 3, [20.0] * 3]] * 2


def captures_two_streams(rank, world_size):
    """Three collectives that only NCCL's own order keeps apart."""
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    dist.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        works = [dist.all_reduce(x, async_op=True)]
        dist.all_reduce(y)
        works.append(dist.all_reduce(z, async_op=True))
        for work in works:
            work.wait()
    results = []
    for value in (1.0, 3.0):
        for tensor in (x, y, z):
            tensor.fill_(value + rank)
        graph.replay()
        results.append(torch.cat([x, y, z]).tolist())
    return results


def test_captured_collectives_of_two_streams(ranks):
    assert ranks.run(captures_two_streams) == [[[3.0] * 6, [7.0] * 6]] * 2


# --- Training


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)]
    return torch.nn.Sequential(*layers).to(torch.float64)


def batch(rank):
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4) * (rank + 1)


def train(net, optimizer, x, backward=None):
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def trains(rank, world_size, kind):
    whole = model()
    every = torch.cat([batch(r) for r in range(world_size)])
    train(whole, torch.optim.Adam(whole.parameters(), lr=0.1), every)
    net = model()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net[0])
        fully_shard(net)
        train(net, torch.optim.Adam(net.parameters(), lr=0.1), batch(rank))
        trained = [p.full_tensor() for p in net.parameters()]
    else:
        parallel = torch.nn.parallel.DistributedDataParallel(net)
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
        else:
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        train(parallel, optimizer, batch(rank))
        trained = list(net.parameters())
    for value, expected in zip(trained, whole.parameters(), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp"])
def test_training(ranks, kind):
    ranks.run(trains, kind)


# --- Failures


def disagrees(rank, world_size):
    dist.all_reduce(torch.ones(3 + rank))
    torch.cuda.synchronize()


def test_ranks_that_disagree():
    # The watchdog lets the process live.
    with started(WORLD_SIZE, TORCH_NCCL_ASYNC_ERROR_HANDLING="0") as ranks:
        for failure in ranks.outcomes(disagrees):
            assert "invalid usage" in failure
            assert "all_reduce of 3 float32 values (sum)" in failure
            assert "all_reduce of 4 float32 values (sum)" in failure


def disagrees_unseen(rank, world_size):
    with contextlib.suppress(RuntimeError):  # the later rank may see it at once
        dist.all_reduce(torch.ones(3 + rank), async_op=True)
    time.sleep(8)


def test_watchdog_sees_later_failures(capfd):
    env = {"STANDIN_STREAMS": "async", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with started(WORLD_SIZE, **env) as ranks:
        ranks.run(disagrees_unseen)
    words = capfd.readouterr().err
    seen = ("raised the following async exception: NCCL error: invalid", "nccl hit async error")
    assert any(text in words for text in seen)
