"""One rank differs from the others: all ranks raise in time, or none does.

The faults and their outcomes are in `tests/support/faults.py`.
"""

import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import trial
from support.cuda_device import IS_STANDIN
from support.faults import FAULTS
from support.groups import Exchangeable, make_by_hand
from support.ranks import Failure, Ranks

from syncbn import SyncBatchNorm

# Dynamo reads gradients of tensors that are no leaves: torch warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

BUFFERS = ("running_mean", "running_var")


def run(rank, world_size, name, *case):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    return trial.run(rank, world_size, fault, *case)


def outcomes_of(fault, where, world_size, mode, folder):
    with Ranks(
        world_size,
        case_seconds=120,
        after_failure_seconds=60,  # the survivors go on in a new group
    ) as ranks:
        return ranks.outcomes(run, fault.name, where, mode, str(folder))


CASES = [
    pytest.param(fault, *case, id="-".join(map(str, (fault.name, *case))))
    for fault in FAULTS
    for case in fault.cases()
]


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    """The cases that will be tested, three at a time: many of them only wait."""
    pool = ThreadPoolExecutor(3)
    test = test_what_becomes_of_the_ranks
    cases = [item.callspec.id for item in request.session.items if item.function is test]
    values = {case.id: case.values for case in CASES}
    yield {
        case: pool.submit(outcomes_of, *values[case], tmp_path_factory.mktemp("fault"))
        for case in cases
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("fault", "where", "world_size", "mode"), CASES)
@pytest.mark.trouble(
    "Training hangs, is stuck or freezes (a deadlock), until the group's timeout",
    "One rank makes no pass: it alone runs in `eval()`, raised outside of the layers and "
    "continues, or is stopped",
    "Do the same on all ranks; end a rank that fails. `init_process_group(timeout=...)` "
    "shortens the wait. [All cases](failures.md)",
)
def test_what_becomes_of_the_ranks(fault, where, world_size, mode, started, request):
    check(fault, where, world_size, mode, started[request.node.callspec.id].result())


# Over NCCL. Work must not run in the call that enqueues it: hosts go on while devices wait. Torch's
# watchdog would end the processes, which survive and serve many cases.
OVER_NCCL = {
    "STANDIN_STREAMS": "async",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # else a failed group lasts a minute
}
NCCL_CASES = [
    pytest.param(fault, *case, id="-".join(map(str, (fault.name, *case))))
    for fault in FAULTS
    for case in fault.cases_over_nccl()
]


def run_in_group_of_its_own(rank, world_size, name, where, mode, folder):
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/first", world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    return run(rank, world_size, name, where, mode, folder)


@pytest.fixture(scope="module")
def started_over_nccl(request, tmp_path_factory):
    """The cases that will be tested, on the stand-in three at a time."""
    idle = [{} for _ in range(3 if IS_STANDIN else 1)]

    def outcomes(folder, fault, where, world_size, mode):
        processes = idle.pop()
        if world_size not in processes:
            processes[world_size] = Ranks(world_size, OVER_NCCL, backend="nccl", device="cuda")
        case = (fault.name, where, mode, str(folder))
        try:
            return processes[world_size].outcomes(run_in_group_of_its_own, *case)
        finally:
            idle.append(processes)

    test = test_what_becomes_of_the_ranks_over_nccl
    cases = [item.callspec.id for item in request.session.items if item.function is test]
    values = {case.id: case.values for case in NCCL_CASES}
    with ThreadPoolExecutor(len(idle)) as pool:
        yield {
            case: pool.submit(outcomes, tmp_path_factory.mktemp("fault"), *values[case])
            for case in cases
        }
        pool.shutdown(cancel_futures=True)
    for processes in idle:
        for ranks in processes.values():
            ranks.__exit__()


@pytest.mark.cuda
@pytest.mark.parametrize(("fault", "where", "world_size", "mode"), NCCL_CASES)
def test_what_becomes_of_the_ranks_over_nccl(
    fault, where, world_size, mode, started_over_nccl, request
):
    outcomes = started_over_nccl[request.node.callspec.id].result()
    *others, that = outcomes
    if fault.ends:
        assert isinstance(that, Failure) and that.message == fault.ends
        outcomes = others
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Failure), f"rank {rank}: {outcome} {outcome.text}"
    errors = [(outcome["error"], outcome["seconds"]) for outcome in outcomes]
    for outcome in outcomes:
        fate = (fault.that_rank if outcome is that else fault.others).late
        error = outcome["error"]
        assert re.match(fate.pattern, error, re.DOTALL) if fate.pattern else not error, errors
        assert fault.waits or outcome["seconds"] < fault.timeout, errors
        assert outcome["renewed"] == "", outcome["renewed"]
        check_buffers(outcome["before"], outcome["after"], may_only_count=True)


def check(fault, where, world_size, mode, outcomes):
    *others, that = outcomes
    if fault.ends:
        assert isinstance(that, Failure) and that.message == fault.ends
        outcomes = others
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Failure), f"rank {rank}: {outcome}"
    for rank, outcome in enumerate(outcomes):
        differs = outcome is that
        fate = fault.that_rank if differs else fault.others
        check_error(fate, outcome["error"], where, mode, rank)
        if mode == "eager" and where in fault.passes:
            check_passes(*fault.passes[where][:: -1 if differs else 1], outcome["error"])
        if not (differs and fault.leaves):
            assert fault.waits or outcome["seconds"] < fault.timeout, outcome["error"]
            assert outcome["renewed"] == "", outcome["renewed"]
        check_buffers(outcome["before"], outcome["after"])
    check_equal([outcome["after"] for outcome in outcomes])
    if fault.name == "channels":
        errors = " ".join(outcome["error"] for outcome in outcomes)
        assert re.search(r"this rank normalizes (\d) while another normalizes (?!\1)[46]", errors)


def check_error(fate, error, where, mode, rank):
    if not fate.pattern:
        assert error == "", error
        return
    if where == "between":  # the next collective is the others'
        where = "recomputation" if mode == "checkpointed" else "backward"
    noun = where if where == "recomputation" else f"{where} pass"
    pattern = fate.pattern.replace("{where}", where).replace("{pass}", noun)
    assert re.match(pattern, error, re.DOTALL), error
    if fate.own:
        return
    assert re.search(rf"rank {rank} (of|is)\b", error), error
    assert re.search(r"\[layer 'norm\d'", error), error


def check_passes(this, other, error):
    assert re.search(rf"this rank runs {this}.* rank \d runs {other}", error, re.DOTALL), error


def check_buffers(before, after, may_only_count=False):
    """Each layer has been updated as a whole, or not at all.

    An H200 has shown a third outcome after NCCL had lost a rank: a layer counts a batch and keeps
    its statistics, as it does for an input of NaN.
    """
    for name, (*new, new_count) in after.items():
        *old, old_count = before[name]
        updated = new_count != old_count
        for buffer, old_values, new_values in zip(BUFFERS, old, new, strict=True):
            assert all(map(math.isfinite, new_values)), (name, buffer)
            changed = {a != b for a, b in zip(old_values, new_values, strict=True)}
            only_counted = may_only_count and updated and changed == {False}
            assert changed == {updated} or only_counted, (name, buffer)


def check_equal(states):
    """Layers with the same number of updates have the same statistics on all ranks."""
    known = {}
    for state in states:
        for name, (mean, variance, count) in state.items():
            key = (name, len(mean), count)
            assert known.setdefault(key, (mean, variance)) == (mean, variance), key


def train_compiled_in_two_groups(rank, world_size, folder):
    trial.Training(rank, "compiled").step()
    training = trial.train_in_new_group(rank, world_size, Path(folder), "compiled")
    return trial.is_of_whole_batch(training, [range(world_size)])


def test_compiled_layers_train_in_a_new_group(tmp_path):
    with Ranks(2, case_seconds=120) as ranks:
        assert ranks.run(train_compiled_in_two_groups, str(tmp_path)) == [True] * 2


def train_without_default_group(rank, world_size, path, wraps, mode):
    dist.barrier()  # a rank that is still connecting would find its connections closed
    dist.destroy_process_group()
    warnings.filterwarnings("ignore", "a SyncBatchNorm layer runs uncompiled")
    group = make_by_hand(path, rank, world_size)
    training = trial.Training(rank, mode)
    trial.hold(training, Exchangeable(group) if wraps else group)
    training.step()
    training.step()
    return trial.is_of_whole_batch(training, [range(world_size)] * 2)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("wraps", [False, True], ids=["by-hand", "subclass"])
def test_group_without_a_default_group_is_used(wraps, mode, tmp_path):
    with Ranks(2, case_seconds=90) as ranks:
        results = ranks.run(train_without_default_group, str(tmp_path / "store"), wraps, mode)
    assert results == [True] * 2


def train_while_the_group_changes(rank, world_size, mode):
    warnings.filterwarnings("ignore", "a SyncBatchNorm layer runs uncompiled")
    members = [range(3), range(2), range(3), range(1), range(2)]
    groups = [dist.new_group(ranks) for ranks in members]
    training = trial.Training(rank, mode)
    group = Exchangeable(groups[0])
    trial.hold(training, group)
    for ranks, inner in zip(members, groups, strict=True):
        if rank in ranks:
            group.inner = inner
            training.step()
        else:
            training.steps += 1
    return rank != 0 or trial.is_of_whole_batch(training, members)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_size_of_a_group_may_change_between_steps(mode):
    with Ranks(3, case_seconds=90) as ranks:
        assert ranks.run(train_while_the_group_changes, mode) == [True] * 3


def part_where_all_have_gone_both_ways(rank, world_size):
    """The program of docs/failures.md."""
    shared_layer, narrow_layer, wide_layer = (SyncBatchNorm(C) for C in (3, 3, 5))
    x = torch.rand(4, 3)
    for step in range(4):
        wide = step == 1 if step < 3 else rank == 0
        x = shared_layer(x)
        wide_layer(torch.rand(4, 5)) if wide else narrow_layer(x)


def test_ranks_that_part_where_all_have_gone_both_ways_end_as_gloo_decides():
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(part_where_all_have_gone_both_ways)
    assert "SIGABRT" in str(outcomes)


def test_detail_makes_it_an_error():
    with Ranks(2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as ranks:
        outcomes = ranks.outcomes(part_where_all_have_gone_both_ways)
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "RuntimeError" and f"[rank {rank} of 2]" in outcome.message
        assert "Detected mismatch between collectives on ranks" in outcome.message
