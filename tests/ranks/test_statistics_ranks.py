"""recompute_statistics on several ranks, against the values of all of them at once in float64."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from support.cases import reduced_dims
from support.groups import make_by_hand
from support.ranks import COLLECTIVE_SECONDS, Failure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import SyncBatchNorm, convert_sync_batchnorm, freeze_statistics, recompute_statistics
from syncbn.distributed.state import group_state

# Sums over some 200 values of order ten, in float64.
FLOAT64 = {"rtol": 1e-13, "atol": 1e-13}
# Numbers of batches of each rank, by world size.
NUMBERS = {1: [(3,)], 2: [(3, 3), (1, 4)], 3: [(2, 2, 2), (4, 1, 2)]}


def make_batches(rank, number):
    """Batches that differ in size, mean and scale, between ranks as well."""
    generator = torch.Generator(device="cpu").manual_seed(rank)
    batches = [
        torch.randn(
            2 + (rank + i) % 3, 3, 4, generator=generator, dtype=torch.float64, device="cpu"
        )
        * (1 + i + rank)
        + 3 * i
        - rank
        for i in range(number)
    ]
    return [batch.to(torch.get_default_device()) for batch in batches]


def make_model(group=None, other_group=None):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 4, 1).double(),
        SyncBatchNorm(4, process_group=group, dtype=torch.float64),
        nn.Conv1d(4, 2, 1).double(),
        SyncBatchNorm(2, process_group=other_group or group, dtype=torch.float64),
    )
    return model.eval()


def watch(model):
    seen = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm):
            seen[name] = []
            layer.register_forward_pre_hook(lambda _, inputs, to=seen[name]: to.append(inputs[0]))
    return seen


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def run_recomputation(rank, world_size, numbers, wrap=False):
    model = make_model()
    seen = watch(model)
    called = DistributedDataParallel(model) if wrap else model
    recompute_statistics(called, make_batches(rank, numbers[rank]))
    assert not any(module.training for module in model.modules())
    return {name: torch.cat(values) for name, values in seen.items()}, statistics(model)


def check_population(results, num_batches, name):
    population = torch.cat([seen[name] for seen, _ in results])
    dims = reduced_dims(population)
    for _, buffers in results:
        mean, var = buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"]
        torch.testing.assert_close(mean, population.mean(dims), **FLOAT64)
        torch.testing.assert_close(var, population.var(dims), **FLOAT64)
        assert buffers[f"{name}.num_batches_tracked"] == num_batches
        assert torch.equal(mean, results[0][1][f"{name}.running_mean"])
        assert torch.equal(var, results[0][1][f"{name}.running_var"])


@pytest.mark.works("`recompute_statistics` over ranks, with equal or different numbers of batches")
def test_equals_the_population_of_all_ranks(world_anywhere):
    for numbers in NUMBERS[world_anywhere.world_size]:
        results = world_anywhere.run(run_recomputation, numbers)
        for name in ("1", "3"):
            check_population(results, max(numbers), name)


def test_in_distributed_data_parallel(pair_anywhere):
    results = pair_anywhere.run(run_recomputation, (3, 1), wrap=True)
    check_population(results, 3, "3")


def groups_of_some(rank, world_size, apart):
    """Ranks 0 and 2, or 0 and 1 for the second layer; ``apart`` has the others stay away."""
    pair = dist.new_group([0, 2])
    if apart:
        if rank == 1:
            return None
        model = make_model(pair)
    else:
        other = dist.new_group([0, 1])
        alone = dist.new_group([2])
        single = dist.new_group([1])
        first = single if rank == 1 else pair
        model = make_model(first, alone if rank == 2 else other)
        model.append(SyncBatchNorm(2, dtype=torch.float64))  # of all ranks
    seen = watch(model)
    recompute_statistics(model, make_batches(rank, 1 + rank))
    return {name: torch.cat(values) for name, values in seen.items()}, statistics(model)


def test_a_group_of_some_ranks_needs_no_others(three_ranks):
    results = three_ranks.run(groups_of_some, apart=True)
    assert results[1] is None
    for name in ("1", "3"):
        check_population([results[0], results[2]], 3, name)


def test_layers_of_several_groups(three_ranks):
    first, second, third = three_ranks.run(groups_of_some, apart=False)
    # the layer ignores a batch in which its group has no values
    check_population([first, third], 3, "1")
    check_population([second], 2, "1")
    check_population([first, second], 2, "3")
    check_population([third], 3, "3")
    check_population([first, second, third], 3, "4")


def group_by_hand(rank, world_size, path):
    group = make_by_hand(path, rank, world_size)
    model = make_model(group)
    seen = watch(model)
    recompute_statistics(model, make_batches(rank, 1 + rank))
    with pytest.raises(ValueError, match="but rank 0 had none"):
        recompute_statistics(model, make_batches(rank, rank))
    return {name: torch.cat(values) for name, values in seen.items()}, statistics(model)


def test_a_group_that_torch_has_not_made(two_ranks, tmp_path):
    check_population(two_ranks.run(group_by_hand, str(tmp_path / "store")), 2, "1")


def as_outsider(rank, world_size):
    """A rank outside of the group, which torch gives no group."""
    pair = dist.new_group([0, 2])
    model = make_model(pair)
    before = statistics(model)
    recompute_statistics(model, make_batches(rank, 2))
    after = statistics(model)
    return all(torch.equal(after[name], value) for name, value in before.items())


def test_ranks_outside_of_the_group_keep_their_statistics(three_ranks):
    assert three_ranks.run(as_outsider) == [False, True, False]


def train_on(rank, model):
    """Run a training step, for which the ranks must have left the failure together."""
    model.train()
    model(make_batches(rank, 1)[0]).square().sum().backward()
    return model[1].running_mean.tolist()


class OwnError(Exception):
    pass


def fail(rank, world_size, case, failing, after, several):
    pair = dist.new_group([0, world_size - 1]) if several else None
    other = dist.new_group([1]) if several else None
    group = other if several and 0 < rank < world_size - 1 else pair
    model = make_model(group)
    if several:
        model.insert(2, SyncBatchNorm(4, dtype=torch.float64))  # of all ranks
    batches, forward = make_batches(rank, 4), None
    if after == "later":  # the ranks expect the sizes
        recompute_statistics(model, batches)
    if after == "long":  # as after training with a thousand comparisons
        state = group_state(dist.group.WORLD)
        state.num_comparisons, state.sizes_compared = 1000, set(range(100))
    before, modes = statistics(model), [module.training for module in model.modules()]
    calls = []

    def fail_at_last(*_):
        calls.append(0)
        if rank == failing and len(calls) == (1 if after in ("first", "long") else 3):
            raise OwnError("boom")

    def broken(batches):
        for batch in batches:
            fail_at_last()
            yield batch

    if case == "batches":
        batches = broken(batches)
    elif case in ("forward", "wrapped"):

        def forward(model, batch):
            fail_at_last()
            model(batch)
    elif case == "between":
        model[-2].register_forward_pre_hook(fail_at_last)
    elif case == "behind":
        model[-1].register_forward_hook(fail_at_last)
    elif case == "input":
        number = 0 if after in ("first", "long") else 2
        if rank == failing:
            batches[number] = batches[number][0, 0]
    elif case == "no layers" and rank == failing:
        model = nn.Sequential(nn.Conv1d(3, 4, 1).double())
    elif case == "frozen" and rank == failing:
        freeze_statistics(model)
    elif case == "not a batch" and rank == failing:
        batches = ["words"]
    elif case == "not iterable" and rank == failing:
        batches = 3
    called = DistributedDataParallel(model) if case == "wrapped" else model
    began = time.monotonic()
    try:
        recompute_statistics(called, batches, forward)
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - began
    if case not in ("no layers", "frozen"):
        after = statistics(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert [module.training for module in model.modules()] == modes
    fresh = make_model()
    return error, seconds, train_on(rank, fresh)


CASES = {
    "batches": "OwnError: boom",
    "forward": "OwnError: boom",
    "wrapped": "OwnError: boom",  # before DistributedDataParallel's forward, which communicates
    "between": "OwnError: boom",
    "behind": "OwnError: boom",
    "input": "RuntimeError: .*conv1d",
    "no layers": "ValueError: expected a model with SyncBatchNorm layers",
    "frozen": "ValueError: .*is frozen",
    "not a batch": "TypeError: .*expected each batch to be a tensor",
    "not iterable": "TypeError: 'int' object is not iterable",
}


def check_failures(results, failing, words):
    for rank, (error, seconds, running_mean) in enumerate(results):
        assert error is not None and seconds < COLLECTIVE_SECONDS, (rank, error, seconds)
        assert running_mean == results[0][2]
        if rank == failing:
            assert re.match(words, error, re.DOTALL), error
        else:
            assert re.match("RuntimeError: another rank of the process group aborted", error)
            assert re.search(words.split(": ", 1)[1], error), error


@pytest.mark.works("`recompute_statistics`: if a rank fails, all ranks raise")
@pytest.mark.parametrize("after", ["first", "third", "later", "long"])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_fails_makes_the_others_fail(two_ranks, case, after):
    for failing in (0, 1):
        results = two_ranks.run(fail, case, failing, after, several=False)
        check_failures(results, failing, CASES[case])


@pytest.mark.parametrize("after", ["first", "third", "later"])
@pytest.mark.parametrize("case", ["batches", "forward", "between", "behind"])
def test_a_rank_that_fails_among_several_groups(three_ranks, case, after):
    for failing in (0, 1):
        results = three_ranks.run(fail, case, failing, after, several=True)
        check_failures(results, failing, CASES[case])


def uneven(rank, world_size, numbers, with_forward):
    model = make_model()
    before = statistics(model)
    forward = (lambda model, batch: model(batch)) if with_forward else None
    with pytest.raises(ValueError) as caught:
        recompute_statistics(model, make_batches(rank, numbers[rank]), forward)
    after = statistics(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value), train_on(rank, model)


@pytest.mark.parametrize(
    ("numbers", "with_forward", "words"),
    [
        ((2, 0, 1), False, "at least one batch on each rank, but rank 1 had none;"),
        ((0, 0, 0), False, "at least one batch on each rank, but ranks 0, 1, 2 had none;"),
        ((2, 2, 1), True, "same number of batches on all ranks, .* at batch 2 rank 2 had none;"),
        (
            (1, 3, 1),
            True,
            "same number of batches on all ranks, .* at batch 2 ranks 0, 2 had none;",
        ),
    ],
)
def test_too_few_batches_are_an_error_on_all_ranks(three_ranks, numbers, with_forward, words):
    results = three_ranks.run(uneven, numbers, with_forward)
    for message, mean in results:
        assert re.search(words, message), message
        assert mean == results[0][1]


def other_layers(rank, world_size):
    model = make_model() if rank == 0 else make_model()[:2]
    recompute_statistics(model, make_batches(rank, 2))


@pytest.mark.trouble(
    "“different passes”",
    "The ranks have different layers, or run them in another order",
    "Build and run the same layers in the same order on all ranks",
)
def test_ranks_with_other_layers_fail(ranks):
    for outcome in ranks(2).outcomes(other_layers):
        assert isinstance(outcome, Failure) and outcome.kind == "RuntimeError"
        assert "different passes" in outcome.message
        assert "step of recompute_statistics" in outcome.message


def converted(rank, world_size):
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):  # trains before and after
        model(make_batches(rank, 1)[0]).square().sum().backward()
        optimizer.step()
        recompute_statistics(model, make_batches(rank, 2 + rank))
    return model[1].running_mean.tolist(), model[1].num_batches_tracked.item()


def test_in_the_midst_of_training(two_ranks):
    first, second = two_ranks.run(converted)
    assert first == second and first[1] == 3
