"""Defects of torch.nn.SyncBatchNorm that this layer must not have: one test for each.

The numbers are PyTorch's issues. A NaN where an empty rank meets a CUDA graph (78656) is in
tests/ranks/test_cuda_ranks.py. Uncoalesced reads of a gradient in another layout than its input
show on a GPU only; the result is tested here.
"""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from support import ops
from support.cases import make_input
from support.groups import messages_sent
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def record_operators(rank, world_size, momentum):
    layer = SyncBatchNorm(3, momentum=momentum)
    x = make_input((4, 3, 5), "contiguous", torch.float32)[: 4 * (1 - rank)]
    layer(x)  # the first forward meets the other ranks
    with Operators() as operators:
        layer(x)
    return operators.names


@pytest.mark.works("training without host synchronization")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_78656_no_host_synchronization_and_no_masks_for_empty_ranks(two_ranks, momentum):
    for names in two_ranks.run(record_operators, momentum):
        # Under a dispatch mode, as here, the all-reduce is functional; else it is c10d's own.
        collective = ["_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"]
        ours = ["syncbn::batch_norm_stats", *collective, "syncbn::batch_norm_apply"]
        # Detaching and views of bookkeeping do not touch data.
        assert [n for n in names if n not in ("aten::detach", "aten::view_as")] == ours


def message_of(rank, world_size, dtype):
    message = ops.batch_norm_stats(torch.ones(4 * rank, 3, 2, dtype=dtype))
    dist.all_reduce(message)
    return message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_37198_empty_rank_sends_the_dtype_of_the_others(two_ranks, dtype):
    for message in two_ranks.run(message_of, dtype):
        assert message.dtype == torch.float64 and message[-1] == 8


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_76642_half_input_without_running_statistics(dtype, training):
    layer = SyncBatchNorm(3, track_running_stats=False).train(training)
    y = layer(make_input((4, 3, 5), "contiguous", dtype))
    assert y.dtype == dtype and torch.isfinite(y).all()


def count_past_half(rank, world_size):
    layer = SyncBatchNorm(2).half()
    y = layer(torch.full((1, 2, 200, 200), float(rank)).half())
    return y[0, 0, 0, 0].item(), layer.running_var[0].item()


def test_70901_half_module_counts_past_65504(two_ranks):
    for rank, (value, running_var) in enumerate(two_ranks.run(count_past_half)):
        assert value == 2 * rank - 1  # mean 0.5, variance 0.25 over 80,000 values; half's rounding
        assert running_var == torch.tensor(0.9 + 0.1 * 0.25).half().item()


def tiny_variance(rank, world_size):
    layer = SyncBatchNorm(1, momentum=1.0, dtype=torch.float64)
    layer(1e-9 * make_input((8, 1), "contiguous", torch.float64, mean=0.0, seed=rank))
    return layer.running_var.item()


def test_variance_far_below_eps_is_not_lost(two_ranks):
    values = [make_input((8, 1), "contiguous", torch.float64, mean=0.0, seed=s) for s in (0, 1)]
    expected = (1e-9 * torch.cat(values)).var().item()
    for variance in two_ranks.run(tiny_variance):
        assert variance == pytest.approx(expected, rel=1e-12)


def test_count_past_int32_and_float32():
    count = 2.0**33 + 1
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    totals = torch.tensor([2 * count, 5 * count, count], dtype=torch.float64)
    mean, var = torch.zeros(1).double(), torch.zeros(1).double()
    output, *_, saved = ops.batch_norm_apply(x, totals, None, None, mean, var, None, 1.0, 0.0)
    assert output.flatten().tolist() == [-1.0, 1.0] and saved.item() == count
    assert var.item() == count / (count - 1)


def message_size(rank, world_size):
    with messages_sent() as messages:
        SyncBatchNorm(5)(torch.rand(3, 5)).sum()
    return [message.nbytes for message in messages]


def test_39358_bytes_do_not_grow_with_the_world(ranks):
    assert ranks(2).run(message_size) == [[112]] * 2
    assert ranks(3).run(message_size) == [[112]] * 3


def train_under_ddp(rank, world_size):
    model = DistributedDataParallel(convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))))
    model(torch.rand(4, 3)).sum().backward()
    return model.module[0].weight.grad is not None


def test_78081_runs_on_cpu_and_under_ddp_there(two_ranks):
    assert two_ranks.run(train_under_ddp) == [True, True]


def compile_whole(rank, world_size):
    torch._dynamo.reset()
    layer = SyncBatchNorm(3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = make_input((4, 3), "contiguous", torch.float32, seed=rank).requires_grad_()
    compiled(x).square().sum().backward()
    return torch.isfinite(x.grad).all().item()


def test_161302_no_graph_break(two_ranks):
    assert two_ranks.run(compile_whole) == [True, True]


def penalty_gradient(normalize, x):
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    (grad,) = torch.autograd.grad((normalize(x) ** 3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def differentiate_twice(rank, world_size):
    x = make_input((4, 3, 2, 2), "contiguous", torch.float64)
    return penalty_gradient(SyncBatchNorm(3).double(), x.chunk(world_size)[rank].clone())


@pytest.mark.works("double backward, and third derivatives")
def test_61222_double_backward(two_ranks):
    x = make_input((4, 3, 2, 2), "contiguous", torch.float64)
    expected = penalty_gradient(nn.BatchNorm2d(3).double(), x)
    actual = torch.cat(two_ranks.run(differentiate_twice))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)  # float64, grown cubes


def recompute(rank, world_size):
    layer = SyncBatchNorm(3)
    x = make_input((4, 3), "contiguous", torch.float32, seed=rank).requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    return layer.num_batches_tracked.item()


def test_96136_checkpointing_updates_statistics_once(two_ranks):
    assert two_ranks.run(recompute) == [1, 1]


def test_41081_conversion_has_an_inverse_and_keeps_subclasses_and_hooks():
    class Named(nn.BatchNorm2d):
        pass

    layer, calls = Named(3), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    reverted = revert_sync_batchnorm(convert_sync_batchnorm(nn.Sequential(layer)))
    reverted(torch.rand(2, 3, 4, 4))
    assert type(reverted[0]) is Named and calls == [1]


def copy_with_group(rank, world_size):
    group = dist.new_group([0, 1])
    return copy.deepcopy(SyncBatchNorm(3, process_group=group)).process_group is group


def test_76927_module_with_a_group_can_be_copied(two_ranks):
    assert two_ranks.run(copy_with_group) == [True, True]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradient_in_another_layout_costs_one_copy(layout):
    other = "channels_last" if layout == "contiguous" else "contiguous"
    x = make_input((4, 3, 5, 6), layout, torch.float64).requires_grad_()
    dy = make_input((4, 3, 5, 6), other, torch.float64, seed=1)
    layer = SyncBatchNorm(3).double()
    y = layer(x)
    with Operators() as operators:
        (grad,) = torch.autograd.grad(y, x, dy)
    assert sum("copy" in n or "clone" in n for n in operators.names) == 1
    (expected,) = torch.autograd.grad(layer(x), x, dy.clone(memory_format=torch.preserve_format))
    torch.testing.assert_close(grad, expected)  # float64 rounding


def overflow(rank, world_size):
    layer = SyncBatchNorm(2)
    x = make_input((4, 2), "contiguous", torch.float16, seed=rank)
    if rank == 1:
        x[0, 0] = float("inf")
    y = layer(x)
    return y.detach(), layer.running_mean, layer.running_var


@pytest.mark.works("running statistics stay finite when a step overflows")
@pytest.mark.trouble(
    "A channel of the output is NaN",
    "The input has a NaN or an infinity in this channel, such as after an overflow in float16",
    "Find the first layer whose output is not finite. The running statistics keep their "
    "values, except with [`momentum=None`](numerics.md)",
)
def test_88474_overflow_does_not_poison_running_statistics(two_ranks):
    for y, mean, var in two_ranks.run(overflow):
        assert torch.isnan(y[:, 0]).all() and torch.isfinite(y[:, 1]).all()
        assert mean[0] == 0 and var[0] == 1 and mean[1] != 0 and var[1] != 1


def disagree(rank, world_size):
    layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3 + rank)))
    layer(torch.rand(4, 3 + rank))


@pytest.mark.works("an error with the layer's name if ranks run different layers")
def test_44957_ranks_that_disagree_fail_with_the_layers_name(two_ranks):
    for rank, outcome in enumerate(two_ranks.outcomes(disagree)):
        assert outcome.kind in ("ValueError", "RuntimeError")
        assert f"[layer '0', rank {rank} of 2]" in outcome.message


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_bias_gradient_of_a_permuted_grad_output(order):
    """torch's CPU operator sums wrong values: for (1, 5, 3, 1), in 11 of these 24 orders."""
    x = make_input((1, 5, 3, 1), "contiguous", torch.float64)
    stored = torch.rand([x.size(d) for d in order], dtype=torch.float64)
    grad_output = stored.permute([order.index(d) for d in range(4)])
    layer = SyncBatchNorm(5).double()
    layer(x).backward(grad_output)
    torch.testing.assert_close(layer.bias.grad, grad_output.sum((0, 2, 3)), rtol=1e-15, atol=0)
