"""The benchmarks run and say what they promise. Their figures are not judged here."""

import itertools
import math
import re
import sys
import time
from statistics import geometric_mean

import pytest
import torch
from support.benchmarking import execute, found, read, run, select

import syncbn
from benchmarks import timer
from benchmarks.cases import RESNET50, SUITES, Case
from benchmarks.layer import Setting, make_layers, timed_rows
from benchmarks.nets import shapes_of_nets
from benchmarks.timings import ALLOCATORS

pytestmark = pytest.mark.any_torch


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder with what a run of the tiny suite leaves."""
    folder = tmp_path_factory.mktemp("benchmarks")
    result = run("run", "--tiny", "--output", folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def results(output):
    (path,) = output.glob("*.csv*")
    assert path.suffix == ".csv", "the run is not finished"
    return path


@pytest.fixture(scope="module")
def rows(results):
    return read(results)


def test_rows_of_every_kind(rows):
    variants = {}
    for benchmark, quantity, variant in found(rows, "benchmark", "quantity", "variant"):
        variants.setdefault((benchmark, quantity), set()).add(variant)
    times = {"syncbn", "torch", "syncbn again"}
    ratios = {"torch/syncbn", "syncbn again/syncbn"}
    copies = {"copy", "copy/syncbn"}
    layer = times | ratios | copies | {"copy/torch"}
    operators = ("stats", "apply", "backward_reduce", "backward_apply")
    counted = ("collectives", "bytes_sent", "bytes_received", "forward collective")
    errors = ("output", "grad_input", "grad_weight", "running_var")
    assert variants == {
        ("layer", "forward"): layer,
        ("layer", "forward+backward"): layer,
        ("fused", "forward+backward"): layer | {"separate", "separate/syncbn"},
        ("overhead", "forward+backward"): times | ratios,
        ("shape of a net", "forward+backward"): {"syncbn", "torch", "torch/syncbn"},
        ("sweep", "forward+backward"): {"torch/syncbn"},
        **{("operators", f"batch_norm_{name}"): copies | {"syncbn"} for name in operators},
        **{("scaling", quantity): {"syncbn", "all-gather"} for quantity in counted},
        **{("accuracy", quantity): {"syncbn", "torch"} for quantity in errors},
    }


def test_layer_is_timed_with_both_allocators_and_by_one_thread_and_all(rows):
    every = str(torch.get_num_threads())
    expected = {("tuned", "1"), ("tuned", every), ("default", every)}
    assert found(select(rows, benchmark="layer"), "allocator", "threads") == expected
    assert found(select(rows, benchmark="overhead"), "allocator", "threads") == expected


def test_units_are_sane(rows):
    # From the resolution of the clock to what even a busy machine takes for these shapes.
    limits = {
        "us": (0.05, 1e7),
        "ratio": (1e-5, 1e5),
        "bytes": (0, 1e5),
        "calls": (0, 2),
        "relative error": (0, 0.1),
    }
    assert {row["unit"] for row in rows} == limits.keys()
    for row in rows:
        low, high = limits[row["unit"]]
        q1, median, q3 = (float(row[name]) for name in ("q1", "median", "q3"))
        assert low <= q1 <= median <= q3 <= high, row


def test_times_are_microseconds_and_ratios_are_a_to_b_round_by_round():
    samples = {
        "syncbn": [1.0, 2.0, 4.0],
        "torch": [2.0, 6.0, 16.0],
        "syncbn again": [1.0, 2.0, 4.0],
    }
    setting = Setting(SUITES["tiny"], torch.device("cpu"), 1, "tuned")
    rows = timed_rows("layer", SUITES["tiny"].cases[0], "forward", samples, setting, [])
    assert [(row.variant, row.unit, row.q1, row.median, row.q3) for row in rows] == [
        ("syncbn", "us", 1500000, 2000000, 3000000),
        ("torch", "us", 4000000, 6000000, 11000000),
        ("syncbn again", "us", 1500000, 2000000, 3000000),
        ("torch/syncbn", "ratio", 2.5, 3, 3.5),
        ("syncbn again/syncbn", "ratio", 1, 1, 1),
    ]


def test_only_projections_are_called_so(rows):
    assert found(rows, "benchmark", "kind") == {
        ("layer", "measured"),
        ("fused", "measured"),
        ("operators", "measured"),
        ("overhead", "measured"),
        ("shape of a net", "measured"),
        ("sweep", "geometric mean"),
        ("accuracy", "measured"),
        ("scaling", "counted"),
        ("scaling", "projection"),
    }
    projections = select(rows, kind="projection")
    assert found(projections, "case", "variant") >= {("world 4096", "syncbn")}
    assert found(projections, "quantity", "unit") == {("forward collective", "us")}


def test_sweeps_are_the_means_of_their_shapes(rows):
    parts = select(rows, benchmark="shape of a net", variant="torch/syncbn")
    means = select(rows, benchmark="sweep")
    nets = {row["case"] for row in parts}
    assert {row["case"] for row in means} == nets | {"sweep"} and len(nets) == 7
    for mean in means:
        kind = {name: mean[name] for name in ("dtype", "layout", "threads")}
        net = {} if mean["case"] == "sweep" else {"case": mean["case"]}
        speeds = [float(row["median"]) for row in select(parts, **kind, **net)]
        # Rows keep five digits.
        assert float(mean["median"]) == pytest.approx(geometric_mean(speeds), rel=1e-4)
        assert (float(mean["q1"]), float(mean["q3"])) == (min(speeds), max(speeds))
        assert int(mean["repeats"]) == len(speeds)


def test_shapes_are_those_that_nets_have():
    nets = shapes_of_nets(7)
    assert sum(map(len, nets.values())) == 40
    own = {(images, c, size, size) for _, c, size in RESNET50 for images in (8, 32)}
    assert set(nets["resnet50"]) < own
    smallest, largest = nets["resnet50"][0], nets["resnet50"][-1]
    assert smallest == min(own, key=math.prod) and math.prod(largest) == max(map(math.prod, own))


def test_layers_take_every_shape_that_nets_have():
    dims = {len(shape) for shapes in shapes_of_nets(7).values() for shape in shapes}
    assert dims == {2, 3, 4}
    for number in dims:
        case = Case("net", (4, 3, 2, 5)[:number], "float32", "contiguous")
        for layer in make_layers(case, torch.device("cpu")).values():
            assert layer(torch.rand(case.shape)).shape == case.shape


def test_rows_say_where_they_are_from(rows, results):
    ((torch_version, version, commit, device, date),) = found(
        rows, "torch", "syncbn", "commit", "device", "date"
    )
    assert (torch_version, version, device) == (torch.__version__, syncbn.__version__, results.stem)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", device)
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_counted_bytes(rows):
    """By the sizes of the messages: ours are of one size, the all-gather's grow with the world."""
    channels = 64
    forward, backward = 2 * channels + 1, 2 * channels
    scaling = select(rows, benchmark="scaling", kind="counted")
    counts = {
        (int(row["case"].removeprefix("world ")), row["variant"], row["quantity"]): int(
            row["median"]
        )
        for row in scaling
    }
    worlds = {world for world, _, _ in counts}
    assert worlds == {1, 2, 3}
    for world in worlds:
        got = {
            variant: [
                counts[world, variant, quantity]
                for quantity in ("collectives", "bytes_sent", "bytes_received")
            ]
            for variant in ("syncbn", "all-gather")
        }
        if world == 1:
            assert got == {"syncbn": [0, 0, 0], "all-gather": [0, 0, 0]}
        else:
            ours, theirs = 2 * 8 * (2 * channels + 4), 4 * (forward + backward)
            assert got["syncbn"] == [2, ours, ours]
            assert got["all-gather"] == [2, theirs, 4 * (world * forward + backward)]


def test_errors_of_a_wrong_layer_would_show(rows):
    """In float32 and at a mean of one standard deviation there is rounding, and no more."""
    near = select(rows, benchmark="accuracy", case="mean/std 1e+00", dtype="float32")
    assert len(near) == 8
    assert all(0 < float(row["median"]) < 1e-6 for row in near)


def test_clock_tells_seconds_per_call(monkeypatch):
    now = itertools.count(3)  # the calls are all that takes time
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert timer.host_clock(lambda: next(now), 5) == (5 + 1) / 5


def test_variants_take_turns():
    order = []
    variants = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = timer.interleave(variants, dict.fromkeys("ab", timer.host_clock), 3, 0.0)
    # A first call and one to see how long it takes, of each; then in turn.
    assert "".join(order) == "aabb" + "ab" * 3
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


@pytest.mark.skipif(sys.platform != "linux", reason="the variables are those of glibc")
def test_tuned_allocator_keeps_its_pages():
    code = """
import resource, torch
from benchmarks.timings import touch_memory
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x = torch.ones(10 << 20)  # above glibc's largest threshold
touch_memory(x.nbytes)
before = faults()
for _ in range(5):
    x + 1
print(faults() - before)
"""
    huge_pages = 5 * 4 * (10 << 20) // (2 << 20)  # of small ones it would be 512 times as many
    assert int(execute("-c", code, **ALLOCATORS["tuned"]).stdout) < huge_pages / 2
    assert int(execute("-c", code).stdout) >= huge_pages  # or there would be nothing to tune


def test_run_is_drawn(results):
    drawn = results.with_suffix(".png")
    assert sorted(results.parent.iterdir()) == [results, drawn]
    assert drawn.stat().st_size > 10_000
