"""The model of the CUDA kernels' times: the plans that it reads, and its sums."""

import pytest
from support.benchmarking import execute

from benchmarks import cuda_plans
from benchmarks.cases import Case
from benchmarks.cuda_plans import KERNELS, L2, LAUNCH, MEMORY, SIGNAL, STEP, Plan

pytestmark = pytest.mark.any_torch


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_plans.build(tmp_path_factory.mktemp("plans"))


def test_plan_is_that_of_the_kernels(library):
    case = Case("", (32, 64, 56, 56), "bfloat16", "contiguous")
    plan = cuda_plans.find_plan(library, case, multiprocessors=132)
    # A channel has 32 planes of 392 vectors, in four segments; 256 threads load 12.25 each.
    assert plan == Plan(0, 8, 1, 256, 1, 1, 64, 4, 13, 256, 1, 8, 8, 2)
    assert plan.blocks == 256 and plan.partial_bytes == 4 * 16 and plan.last_steps == 1

    case = Case("", (32, 64, 56, 56), "float32", "channels_last")
    plan = cuda_plans.find_plan(library, case, multiprocessors=132)
    assert (plan.matrix, plan.vector, plan.channels * plan.tiles) == (1, 4, 64)
    assert plan.tiles * plan.splits == 264 and plan.loads * plan.block_y * plan.splits >= 100_352


DECISIONS = {
    "several channels in a block": (
        Case("", (64, 1024, 14, 14), "float32", "contiguous"),
        {"block_x": 64, "block_y": 4, "tiles": 256, "splits": 1},
    ),
    "tiny planes are columns": (Case("", (256, 64, 2, 2), "float32", "contiguous"), {"matrix": 1}),
    "small planes of whole vectors are not": (
        Case("", (256, 64, 4, 4), "float32", "contiguous"),
        {"matrix": 0, "aligned": 1},
    ),
    "wide tiles where rows are few": (
        Case("", (1, 16384, 3, 3), "float32", "contiguous"),
        {"matrix": 1, "block_x": 72, "tiles": 512},
    ),
    "more narrow vectors in flight": (
        Case("", (32, 17, 112, 112), "bfloat16", "channels_last"),
        {"vector": 1, "in_flight": 16},
    ),
}


@pytest.mark.parametrize(("case", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_decisions_of_the_plan(library, case, expected):
    plan = cuda_plans.find_plan(library, case, multiprocessors=132)._asdict()
    assert {name: plan[name] for name in expected} == expected


def test_times_are_the_sums_of_what_is_assumed():
    stats, apply = KERNELS[:2]
    case = Case("", (1000, 100, 10, 10), "float32", "contiguous")
    copy = case.num_bytes / (2 * cuda_plans.COPY_RATE)

    def seconds(kernel, **fields):
        plan = Plan(0, 4, 1, 256, 1, 1, 4, 1, 8, 256, 1, 8, 8, 2)._replace(**fields)
        return cuda_plans.kernel_seconds(kernel, plan, case, multiprocessors=2)

    assert cuda_plans.copy_seconds(stats, case, 2) == pytest.approx(LAUNCH + MEMORY + copy)
    # Four blocks are one wave; 256 members merge in eight steps.
    one_wave = LAUNCH + MEMORY + 8 * STEP + copy
    assert seconds(stats) == pytest.approx(one_wave)
    assert seconds(stats, tiles=8) == pytest.approx(one_wave + (MEMORY + 8 * STEP) / 2)
    # Sixteen partial sums of a channel and one reader: two turns, no step.
    assert seconds(stats, tiles=1, splits=16) == pytest.approx(
        one_wave + 3 * (MEMORY + 8 * STEP) / 2 + SIGNAL + 2 * L2
    )
    # One block on one of two multiprocessors draws twice its share, which is that of both.
    assert seconds(stats, tiles=1) == pytest.approx(one_wave)
    assert seconds(apply) == pytest.approx(LAUNCH + MEMORY + apply.chain * L2 + 2 * copy)


def test_tables_are_printed():
    arguments = ("--images", "32", "--multiprocessors", "132", "--dtypes", "bfloat16")
    result = execute("-m", "benchmarks.cuda_plans", *arguments)
    assert result.stdout.startswith("A model, not a measurement."), result.stderr
    tables = result.stdout.split("\n## ")[1:]
    assert [title.split(", ")[2:4] for title in tables] == [
        ["bfloat16", "contiguous"],
        ["bfloat16", "channels_last"],
    ]
    for table in tables:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len(lines) == 2 + 12 + 1 and lines[-1].startswith("| all layers |")
        assert len({line.count("|") for line in lines}) == 1
    assert "| 6 x 64x56x56 | planar 8 | 256x1 | 64x4 | 0.97 | 49 | 13 | 0 | 1 |" in tables[0]
