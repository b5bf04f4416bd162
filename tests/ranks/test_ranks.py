"""The test helper itself: it must neither hide a failure nor leave a process behind."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from support.ranks import Failure, RankError, Ranks

import syncbn


def add_ranks(rank, world_size, offset):
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return total.item()


def hang_on_one(rank, world_size):
    if rank == 1:
        while True:
            time.sleep(0.1)


def warn_on_one(rank, world_size, module):
    if rank == 1:
        warnings.warn_explicit("the words of a warning", UserWarning, "file.py", 1, module=module)


def die_on_one(rank, world_size):
    if rank == 1:
        os._exit(7)
    return os.getpid()


def find_package(rank, world_size):
    return syncbn.__file__


def test_ranks_import_what_tests_import(two_ranks):
    """And not the folder of the sources if it has a build."""
    assert two_ranks.run(find_package) == [syncbn.__file__] * 2


def test_warning_of_syncbn_on_a_rank_is_an_error_unless_the_test_ignores_it(two_ranks):
    with pytest.raises(RankError, match="rank 1: Traceback(?s:.*)UserWarning: the words"):
        two_ranks.run(warn_on_one, "syncbn.modules")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert two_ranks.run(warn_on_one, "syncbn.modules") == [None, None]


def test_warning_of_torch_on_a_rank_is_no_error(two_ranks):
    assert two_ranks.run(warn_on_one, "torch.compiler") == [None, None]


def test_hang_fails_with_the_stack():
    with Ranks(2) as ranks:
        ranks.run(add_ranks, 0)
        ranks.case_seconds = 1
        with pytest.raises(RankError, match=r"(?s)rank 1: hung.*in hang_on_one"):
            ranks.run(hang_on_one)


def test_death_is_told_from_failure_and_nothing_outlives_it():
    with Ranks(2) as ranks:
        survivor, dead = ranks.outcomes(die_on_one)
    assert isinstance(dead, Failure) and dead.message == "exit code 7"
    with pytest.raises(ProcessLookupError):
        os.kill(survivor, 0)


def test_rank_that_cannot_start_is_dead():
    """What was sent to it stays unread, which resets the connection."""
    with Ranks(2, backend="none") as ranks:
        outcomes = ranks.outcomes(add_ranks, 0)
    assert [(outcome.kind, outcome.message) for outcome in outcomes] == [
        ("died", "exit code 1")
    ] * 2
