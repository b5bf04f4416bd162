"""The benchmarks run and give the promised rows. Their figures are not judged here."""

import csv
import math
import os
import re
import sys
from statistics import geometric_mean

import pytest
import torch
from support.benchmarking import (
    COPIES,
    OPERATORS,
    VARIANTS,
    execute,
    found,
    run,
    select,
    step_rows,
    variants,
)
from support.paths import ROOT

import syncbn
from benchmarks import measure
from benchmarks.cases import SUITES, Case, shapes_of_nets
from benchmarks.cpu import ALLOCATORS
from benchmarks.layer import Setting, make_layers, timed_rows
from benchmarks.results import read, write
from benchmarks.traffic import RESNET50

pytestmark = pytest.mark.any_torch

SETTING = Setting(SUITES["tiny"], torch.device("cpu"), 1, "tuned")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of a run of the tiny suite."""
    folder = tmp_path_factory.mktemp("benchmarks")
    result = run("run", "--tiny", "--output", folder)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.csv*")
    assert path.suffix == ".csv", "the run is not finished"
    return path


@pytest.fixture(scope="module")
def rows(results):
    return read(results)


def test_rows_of_every_kind(rows):
    layer = VARIANTS | COPIES | {"copy/torch"}
    counted = ("collectives", "bytes_sent", "bytes_received", "forward collective")
    errors = ("output", "grad_input", "grad_weight", "running_var")
    assert variants(rows) == {
        ("layer", "forward"): layer,
        ("layer", "forward+backward"): layer,
        ("fused", "forward+backward"): layer | {"separate", "separate/syncbn"},
        ("overhead", "forward+backward"): VARIANTS,
        ("shape of a net", "forward+backward"): {"syncbn", "torch", "torch/syncbn"},
        ("sweep", "forward+backward"): {"torch/syncbn"},
        **{("operators", name): COPIES | {"syncbn"} for name in OPERATORS},
        **{("scaling", quantity): {"syncbn", "all-gather"} for quantity in counted},
        **{("accuracy", quantity): {"syncbn", "torch"} for quantity in errors},
    }


def test_layer_is_timed_with_both_allocators_and_by_one_thread_and_all(rows):
    every = torch.get_num_threads()
    expected = {("tuned", 1), ("tuned", every), ("default", every)}
    assert found(select(rows, benchmark="layer"), "allocator", "threads") == expected
    assert found(select(rows, benchmark="overhead"), "allocator", "threads") == expected


def test_units_are_sane(rows):
    assert found(rows, "unit") == {("us",), ("ratio",), ("bytes",), ("calls",), ("relative error",)}
    for row in rows:
        assert 0 <= row.q1 <= row.median <= row.q3 < math.inf, row
        assert row.median > 0 or row.unit in ("bytes", "calls", "relative error"), row


def test_times_are_microseconds_and_ratios_are_a_to_b_round_by_round():
    samples = {"syncbn": [1.0, 2.0, 4.0], "torch": [2.0, 6.0, 16.0], "copy": [1.0, 1.0, 1.0]}
    rows = timed_rows("layer", SUITES["tiny"].cases[0], "forward", samples, SETTING, passes=4)
    assert [(row.variant, row.unit, row.q1, row.median, row.q3) for row in rows] == [
        ("syncbn", "us", 1500000, 2000000, 3000000),
        ("torch", "us", 4000000, 6000000, 11000000),
        ("copy", "us", 2000000, 2000000, 2000000),  # of two tensors, in four passes
        ("torch/syncbn", "ratio", 2.5, 3, 3.5),
        ("copy/syncbn", "ratio", 0.75, 1, 1.5),
        ("copy/torch", "ratio", pytest.approx((1 / 8 + 1 / 3) / 2), pytest.approx(1 / 3), 2 / 3),
    ]


def test_only_projections_are_labelled_as_such(rows):
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
    nets = {row.case for row in parts}
    assert {row.case for row in means} == nets | {"sweep"} and len(nets) == 7
    for mean in means:
        names = ("dtype", "layout", "threads", "allocator")
        kind = {name: getattr(mean, name) for name in names}
        net = {} if mean.case == "sweep" else {"case": mean.case}
        speeds = [row.median for row in select(parts, **kind, **net)]
        # Rows keep five digits.
        assert mean.median == pytest.approx(geometric_mean(speeds), rel=1e-4)
        assert (mean.q1, mean.q3, mean.repeats) == (min(speeds), max(speeds), len(speeds))


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
        for layer in make_layers(case, SETTING).values():
            assert layer(torch.rand(case.shape)).shape == case.shape


def test_rows_name_their_origin(rows, results):
    ((torch_version, version, commit, device, date),) = found(
        rows, "torch", "syncbn", "commit", "device", "date"
    )
    assert (torch_version, version, device) == (torch.__version__, syncbn.__version__, results.stem)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", device)
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_counted_bytes(rows):
    """Message sizes: ours is constant, the all-gather's grows with the world."""
    channels = 64
    forward, backward = 2 * channels + 1, 2 * channels
    ours, theirs = 2 * 8 * (2 * channels + 4), 4 * (forward + backward)
    counts = {}
    for row in select(rows, benchmark="scaling", kind="counted"):
        counts.setdefault((row.case, row.variant), []).append(row.median)
    assert counts == {
        ("world 1", "syncbn"): [0, 0, 0],
        ("world 1", "all-gather"): [0, 0, 0],
        ("world 2", "syncbn"): [2, ours, ours],
        ("world 2", "all-gather"): [2, theirs, 4 * (2 * forward + backward)],
        ("world 3", "syncbn"): [2, ours, ours],
        ("world 3", "all-gather"): [2, theirs, 4 * (3 * forward + backward)],
    }


def test_errors_of_a_right_layer_are_rounding(rows):
    """In float32 and at a mean of one standard deviation, errors are only rounding."""
    near = select(rows, benchmark="accuracy", case="mean/std 1e+00", dtype="float32")
    assert len(near) == 8
    assert all(0 < row.median < 1e-6 for row in near)


def test_variants_take_turns():
    order = []
    variants = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = measure.interleave(variants, dict.fromkeys("ab", measure.host_clock), 3, 0.0)
    # A first call and one to see how long it takes, of each; then in turn.
    assert "".join(order) == "aabb" + "ab" * 3
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


@pytest.mark.skipif(sys.platform != "linux", reason="the variables are those of glibc")
def test_tuned_allocator_keeps_its_pages():
    code = """
import resource, torch
from benchmarks.cpu import touch_memory
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x = torch.ones(10 << 20)  # above glibc's largest threshold
touch_memory(x.nbytes)
before = faults()
for _ in range(5):
    x + 1
print(faults() - before)
"""
    huge_pages = 5 * 4 * (10 << 20) // (2 << 20)  # small ones: 512 times as many
    assert int(execute("-c", code, **ALLOCATORS["tuned"]).stdout) < huge_pages / 2
    assert int(execute("-c", code).stdout) >= huge_pages  # else there would be nothing to tune


def test_each_way_of_masks_has_its_ratio():
    result = run("masks", "--tiny")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        ratios = dict(re.findall(r"(\w+(?:, filled)?) (\d+\.\d\d) \[", line))
        assert [*ratios] == ["padding", "padding, filled", "any", "any, filled"]
        # Filling runs tens of operators more, which take the time of tensors of 24 values.
        assert float(ratios["padding, filled"]) > float(ratios["padding"])


def test_whole_steps_count_their_collectives(tmp_path):
    result = run("steps", "--tiny", "--rounds", "1", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("steps-*.csv")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "collectives"]
    counted = {row["variant"]: int(row["median"]) for row in rows}
    # ResNet-18 has 20 layers.
    assert counted == {"BatchNorm2d": 0, "syncbn, one process": 0, "syncbn, group": 40}


def test_whole_steps_without_their_collectives_are_an_error():
    code = """
import torch, torch.distributed as dist
from benchmarks.steps import TINY, measure
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
measure(TINY, ["eager"], torch.device("cpu"), 1)
"""
    result = execute("-c", code, GLOO_SOCKET_IFNAME="lo")
    assert "expected 40 collectives in a step, but counted 0" in result.stderr


def test_host_time_is_printed_with_its_ratio():
    result = execute("-m", "benchmarks.host", "one", "--rounds", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("syncbn, residual and ReLU") == 2  # of minima and medians
    assert re.search(r"median BatchNorm2d +forward +\d+\.\d \(1\.00\)", result.stdout)


@pytest.fixture
def installed(tmp_path):
    """A folder that precedes the project's, like site-packages; its syncbn exits with a message."""
    (tmp_path / "syncbn").mkdir()
    (tmp_path / "syncbn/__init__.py").write_text("raise SystemExit('the installed one')")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "benchmarks", "run", "--tiny"),
        ("-m", "benchmarks.cpu"),
        ("-m", "benchmarks.cuda"),
        ("-c", "import benchmarks, syncbn"),
    ],
)
def test_installed_package_is_measured_instead_of_the_sources(installed, command):
    assert execute(*command, PYTHONPATH=str(installed)).stderr == "the installed one\n"


FIND = """
import benchmarks, sys
from importlib.util import find_spec
print(find_spec("syncbn").origin, sys.path[-1])
"""


def test_sources_are_measured_if_the_path_names_them(installed):
    """tools.gpu_check does so, because it builds in place."""
    result = execute("-c", FIND, PYTHONPATH=f"{ROOT}{os.pathsep}{installed}")
    assert result.stdout.split()[0] == str(ROOT / "syncbn/__init__.py"), result.stderr


def test_sources_are_found_if_nothing_is_installed():
    # Without site-packages, where torch lies, too.
    result = execute("-S", "-c", FIND, PYTHONPATH="")
    assert result.stdout.split() == [str(ROOT / "syncbn/__init__.py"), str(ROOT)], result.stderr


def without(*modules):
    """Return a program that cannot import these."""
    return f"""
import benchmarks, sys
sys.modules.update(dict.fromkeys({modules}))
"""


@pytest.mark.parametrize("command", ["table", "compare"])
def test_results_are_read_with_nothing_but_python(tmp_path, command):
    results = tmp_path / "abacus.csv"
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).write_text("<!-- benchmark table -->\n<!-- end of benchmark table -->\n")
    write(results, step_rows(SUITES["tiny"].cases[0], 1.0))
    args = {"table": ("--root", tmp_path, "--results", tmp_path), "compare": (results, results)}
    code = without("torch", "syncbn", "numpy", "matplotlib")
    code += "from benchmarks.__main__ import main; main()"
    result = execute("-c", code, command, *args[command])
    assert result.returncode == 0, result.stderr


def test_gpus_are_timed_without_numpy_and_matplotlib():
    """A machine with a GPU may have no more than torch."""
    code = "import benchmarks, syncbn" + without("numpy", "matplotlib", "torchvision")
    result = execute("-c", code + "import benchmarks.cuda")
    assert result.returncode == 0, result.stderr
