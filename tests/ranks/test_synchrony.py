"""check_synchronized: the ranks' common state is compared bit for bit."""

import re

import pytest
import torch
import torch.distributed as dist
from support.groups import make_by_hand, messages_sent
from support.ranks import Failure
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from syncbn import SyncBatchNorm, check_synchronized, freeze_statistics

TENSORS = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


def make_model(channels=3, group=None):
    model = nn.Sequential()
    model.add_module("conv", nn.Conv1d(3, channels, 1))  # drawn anew: not compared
    model.add_module("norm", SyncBatchNorm(channels, process_group=group))
    model.add_module("head", nn.Sequential(SyncBatchNorm(channels, process_group=group)))
    return model


def change(rank, world_size, tensor, rank_that_differs):
    torch.manual_seed(rank)
    model = make_model()
    freeze_statistics(model)
    if rank == rank_that_differs:
        with torch.no_grad():
            values = getattr(model.head[0], tensor)
            values.view(-1)[-1] += (
                torch.finfo(torch.float32).eps if values.is_floating_point() else 1
            )
    check_synchronized(model)


@pytest.mark.works("`check_synchronized` compares layers between ranks bit for bit")
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.trouble(
    "Evaluation differs between ranks; `check_synchronized` raises",
    "A checkpoint was loaded on one rank only, or a module was made after "
    "DistributedDataParallel wrapped the model",
    "Load the same checkpoint on every rank",
)
def test_one_bit_on_one_rank_is_found_on_all(three_ranks, tensor):
    three_ranks.run(change, tensor, None)
    kind = r"int64 \[\]" if tensor == "num_batches_tracked" else r"float32 \[3\]"
    for that in range(3):
        others = ", ".join(str(rank) for rank in range(3) if rank != that)
        words = (
            rf"'head\.0': {tensor} is {kind} on ranks {others}, of other values on rank {that}\n"
        )
        results = three_ranks.run(message_of, "change", tensor, that)
        check_messages(results, words)


def message_of(rank, world_size, name, *arguments):
    with pytest.raises(RuntimeError) as caught:
        globals()[name](rank, world_size, *arguments)
    return str(caught.value)


def check_messages(messages, words):
    for message in messages:
        assert message == messages[0]
        assert message.startswith("expected the SyncBatchNorm layers of all ranks of a group to")
        assert re.search(words, message), message


def check_sharded(rank, world_size, what):
    model = make_model(4)
    if what == "statistics" and rank == 1:
        model.norm.running_mean[0] = 1.0
    with torch.no_grad():
        model.norm.weight.copy_(torch.arange(4.0))
    if what == "replicated":
        weight = torch.full((4,), float(rank))
        mesh = init_device_mesh("cpu", (world_size,))
        weight = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
        model.norm.weight = nn.Parameter(weight)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    check_synchronized(model)


def test_tensors_of_fsdp2(two_ranks):
    """Parts of a weight differ. All else is compared, also tensors that a mesh replicates."""
    two_ranks.run(check_sharded, "weight")
    words = "'norm': running_mean is float32 .* on rank 0, of other values on rank 1"
    check_messages(two_ranks.run(message_of, "check_sharded", "statistics"), words)
    words = "'norm': weight is float32 .* on rank 0, of other values on rank 1"
    check_messages(two_ranks.run(message_of, "check_sharded", "replicated"), words)


def special_values(rank, world_size, negative_zero):
    model = make_model()
    model.norm.running_mean[0] = torch.nan
    if rank == 1 and negative_zero:
        model.norm.running_mean[1] = -0.0
    check_synchronized(model)


def test_nan_equals_itself_and_the_sign_of_zero_counts(pair_anywhere):
    pair_anywhere.run(special_values, False)
    results = pair_anywhere.run(message_of, "special_values", True)
    check_messages(
        results, "'norm': running_mean is float32 .* on rank 0, of other values on rank 1"
    )


def other_models(rank, world_size, kind):
    model = make_model()
    if rank == 1 and kind == "channels":
        model = make_model(4)
    elif rank == 1 and kind == "dtype":
        model.norm.double()
    elif rank == 1 and kind == "bias":
        model.norm.bias = None
    elif rank == 1 and kind == "layers":
        del model.head
    elif rank == 1 and kind == "no layers":
        model = model.conv
    elif rank == 1 and kind == "order":
        head = model.head
        del model.head
        model = nn.Sequential()
        model.add_module("head", head)
        model.add_module("norm", make_model().norm)
    check_synchronized(model)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("channels", r"'norm': weight is float32 \[3\] on rank 0, float32 \[4\] on rank 1\n"),
        ("dtype", r"'norm': running_var is float32 \[3\] on rank 0, float64 \[3\] on rank 1\n"),
        ("bias", r"'norm': bias is float32 \[3\] on rank 0, missing on rank 1\n"),
        ("layers", r"'head\.0': weight is float32 \[3\] on rank 0, missing on rank 1\n"),
        ("no layers", r"'norm': weight is float32 \[3\] on rank 0, missing on rank 1\n"),
        ("order", "the layers stand in another order on some ranks"),
    ],
)
def test_other_models_on_a_rank(two_ranks, kind, words):
    check_messages(two_ranks.run(message_of, "other_models", kind), words)


def groups_of_some(rank, world_size, differs):
    """Ranks 0 and 2 share two layers, with rank 1 outside; all ranks share a third."""
    pair = dist.new_group([0, 2])
    model = make_model(group=pair)
    model.add_module("all", SyncBatchNorm(2))
    model.norm.running_mean.fill_(1.0 if rank == 1 else 2.0)
    if rank == 2 and differs:
        model.norm.running_var.fill_(3.0)
    check_synchronized(model)


def test_each_group_by_itself(three_ranks):
    three_ranks.run(groups_of_some, False)
    outcomes = three_ranks.outcomes(groups_of_some, True)
    assert outcomes[1] is None
    for outcome in outcomes[::2]:
        assert isinstance(outcome, Failure) and outcome.kind == "RuntimeError"
        assert "'norm': running_var is float32 [3] on rank 0, of other values on rank 2" in str(
            outcome
        )


def group_by_hand(rank, world_size, path, differs):
    model = make_model(group=make_by_hand(path, rank, world_size))
    if differs:
        model.norm.running_mean.fill_(rank)
    check_synchronized(model)


def test_a_group_that_torch_has_not_made(two_ranks, tmp_path):
    two_ranks.run(group_by_hand, str(tmp_path / "same"), False)
    messages = two_ranks.run(message_of, "group_by_hand", str(tmp_path / "other"), True)
    check_messages(messages, "'norm': running_mean .* rank 0, of other values on rank 1")


def groups_in_another_order(rank, world_size):
    groups = {name: dist.new_group([0, 1]) for name in ("first", "second")}
    model = nn.Sequential()
    for name in sorted(groups, reverse=rank == 1):
        model.add_module(name, SyncBatchNorm(2, process_group=groups[name]))
        model[-1].running_mean.fill_(rank)
    check_synchronized(model)


def test_groups_are_compared_in_one_order(two_ranks):
    messages = two_ranks.run(message_of, "groups_in_another_order")
    check_messages(messages, r"(?s)'first': running_mean .*'second': running_mean ")


def count_collectives(rank, world_size):
    with messages_sent() as messages:
        check_synchronized(make_model())
    return [message.nbytes for message in messages]


def test_one_small_collective_if_all_is_equal(any_world):
    expected = [64] if any_world.world_size > 1 else []
    assert any_world.run(count_collectives) == [expected] * any_world.world_size


def many_differences(rank, world_size):
    model = nn.Sequential(*(SyncBatchNorm(3) for _ in range(7)))
    for parameter in (*model.parameters(), *model.buffers()):
        parameter.detach().fill_(rank)
    check_synchronized(model)


def test_long_reports_are_cut(two_ranks):
    (message, _) = two_ranks.run(message_of, "many_differences")
    assert message.count("\n") == 22 and "\n  and 15 more\n" in message


def no_layers_anywhere(rank, world_size):
    with pytest.raises(ValueError, match="this Conv1d has none"):
        check_synchronized(nn.Conv1d(3, 3, 1))


def test_models_without_our_layers(any_world):
    any_world.run(no_layers_anywhere)
    with pytest.raises(ValueError, match="this Conv1d has none"):
        check_synchronized(nn.Conv1d(3, 3, 1))
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        check_synchronized(None)
    check_synchronized(make_model())  # in one process
