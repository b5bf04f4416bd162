"""The comparison of results, the tables of them in two documents, and their picture."""

import re
from dataclasses import replace

import pytest
from support.benchmarking import cells, run, step_rows
from support.paths import ROOT

from benchmarks import report
from benchmarks.cases import Case
from benchmarks.layer import OVERHEAD
from benchmarks.results import regressions, write
from benchmarks.traffic import OF_A_NET, OPERATORS, RESNET50, Copy, num_bytes
from tools.documents import replace_block

pytestmark = pytest.mark.any_torch

COLUMNS = ["float32", "float32 channels_last", "bfloat16", "bfloat16 channels_last"]
DOCUMENTS = {"README.md": report.text, "benchmarks/README.md": report.page}
EMPTY = "before\n<!-- benchmark table -->\n<!-- end of benchmark table -->\nafter\n"


def case(name, dtype="float32", layout="contiguous", shape=(2, 3, 4, 5)):
    return Case(name, shape, dtype, layout)


def sweep_rows(name, mean, low, high, **columns):
    of_case = step_rows(case(name), mean, benchmark="sweep", shape="many", **columns)
    return [replace(row, q1=low, q3=high) for row in of_case if row.variant == "torch/syncbn"]


@pytest.fixture
def rows():
    """Made-up results of a CPU. The table leaves out the speeds of 9.99."""
    return [
        *step_rows(OVERHEAD, 0.75, benchmark="overhead"),
        *step_rows(OVERHEAD, 9.99, benchmark="overhead", threads=1),
        *step_rows(case("2-D", shape=(4, 5)), 0.996, 0.125),
        *step_rows(case("memory"), 2.0, 1.07),
        *step_rows(case("memory", "bfloat16", "channels_last"), 1.5, 0.85),
        *step_rows(case("memory", "float16"), 9.99, 0.5),
        *step_rows(case("memory wide"), 9.99, 0.6),
        *step_rows(case("memory"), 9.99, 9.99, threads=1),
        *step_rows(case("memory"), 9.99, 9.99, quantity="forward"),
        *step_rows(case("memory"), 9.99, 9.99, benchmark="operators"),
        *sweep_rows("sweep", 1.5, 0.97, 3.0),
        *sweep_rows("some net", 1.5, 0.98, 2.0),
        *step_rows(case("memory"), 1.25, 9.99, allocator="default"),
        *step_rows(case("memory", "bfloat16"), 0.875, 9.99, allocator="default"),
        *step_rows(case("memory wide"), 9.99, 9.99, allocator="default"),
        *sweep_rows("sweep", 1.25, 0.9, 2.0, allocator="default"),
        *sweep_rows("some net", 1.25, 0.95, 1.5, allocator="default"),
        *step_rows(OVERHEAD, 0.65, benchmark="overhead", allocator="default"),
    ]


@pytest.fixture
def results(rows, tmp_path):
    write(tmp_path / "abacus.csv", rows)
    return tmp_path / "abacus.csv"


def changed(rows, factor, **columns):
    """Return the rows; ratios to torch are multiplied in those with such columns."""
    return [
        replace(row, median=factor * row.median)
        if row.variant == "torch/syncbn" and all(getattr(row, n) == v for n, v in columns.items())
        else row
        for row in rows
    ]


def test_compare_passes_equal_files(results):
    result = run("compare", results, results)
    assert (result.returncode, result.stdout) == (0, "nothing became slower\n"), result.stderr


def test_compare_finds_regressions_beyond_the_tolerance(rows, results, tmp_path):
    worse = tmp_path / "new.csv"
    write(worse, changed(rows, 0.8, benchmark="overhead", threads=8, allocator="tuned"))
    result = run("compare", results, worse)
    assert result.returncode == 1 and result.stderr == ""
    assert result.stdout == (
        "overhead overhead float32 contiguous 8x16x4x4 8 tuned forward+backward: "
        "0.75 -> 0.60 times torch\n"
    )
    assert run("compare", results, worse, "--tolerance", "0.25").returncode == 0
    assert run("compare", worse, results).returncode == 0  # faster is no regression


def test_compare_counts_nan_as_slower(rows):
    (line,) = regressions(rows, changed(rows, float("nan"), case="2-D"), 0.1)
    assert line.endswith("1.00 -> nan times torch")


def test_compare_refuses_incomparable_results(rows):
    other = [replace(row, device="slide rule") for row in rows]
    with pytest.raises(ValueError, match="expected results of one device, but got .*abacus"):
        regressions(rows, other, 0.1)
    times = [row for row in rows if row.unit == "us"]
    with pytest.raises(ValueError, match="expected results that measured the same"):
        regressions(rows, times, 0.1)


def test_table_of_the_readme_shows_only_the_named_cases(rows):
    above, device, lines, below = report.text([rows]).split("\n\n")
    assert above.replace("\n", " ") == report.ABOVE_ALL
    assert device.replace("\n", " ") == (
        "Relative to torch's `BatchNorm`, on abacus with 8 threads, in one process, 2026-01-02, in "
        "brackets with [an allocator that keeps freed memory](docs/cost.md#memory):"
    )
    assert cells(lines) == [
        ["input", "shape", *COLUMNS],
        ["larger than the caches", "2x3x4x5", "1.25x (2.00x)", "", "0.88x", "(1.50x)"],
        ["geometric mean over nets", "many", "1.25x (1.50x)", "", "", ""],
        ["tiny", "8x16x4x4", "0.65x (0.75x)", "", "", ""],
    ]
    assert below == "[All figures and conditions](benchmarks/README.md).\n"


def steps(mode, variant, **quantities):
    """Return rows of whole steps."""
    (row, *_) = step_rows(case("ResNet-18", shape=(16, 3, 112, 112)), 1.0)
    row = replace(row, benchmark=f"steps, {mode}", variant=variant, allocator="default")
    return [replace(row, quantity=n.replace("_", " "), median=v) for n, v in quantities.items()]


def test_whole_steps_come_first(rows):
    of_cpu = [
        *steps("eager", "BatchNorm2d", step=106.4, collectives=0),
        *steps("compiled", "BatchNorm2d", step=99.96, collectives=0),
        *steps("eager", "syncbn, group", step=7.04, collectives=40),
    ]
    heading, lines, above, *_ = report.text([rows, of_cpu]).split("\n\n")
    assert heading.replace("\n", " ") == (
        "A training step of ResNet-18, 16 images of 112x112 pixels, float32, on abacus with one "
        "thread for each of two ranks, 2026-01-02:"
    )
    assert cells(lines) == [
        ["", "eager", "compiled"],
        ["BatchNorm2d", "106 ms", "100 ms"],
        ["syncbn, group", "7.0 ms", ""],
    ]
    assert above.replace("\n", " ") == report.ABOVE_ALL


def test_whole_steps_on_a_gpu_show_their_memory():
    of_gpu = steps("eager", "BatchNorm2d", step=21.14, **{"peak of memory": 4100.4})
    assert "| BatchNorm2d | 21.1 ms, 4100 MiB |" in report.text([of_gpu])


SHORT_NAMES = ("stats", "apply", "backward_reduce", "backward_apply")
# A copy takes 3 us and a microsecond for each KB. Each kernel is half as fast.
FIXED, PER_BYTE = 3.0, 1e-3


def kernel_rows(dtype="float32"):
    """Made-up results of the kernels of ResNet-50's layers, for one image."""
    (row, *_) = step_rows(case("ResNet-50 x256", dtype), 1.0)
    made_up = []
    for _, channels, size in RESNET50:
        of_shape = replace(row, benchmark=OF_A_NET, shape=f"1x{channels}x{size}x{size}")
        for operator, passes in zip(OPERATORS, (1, 2, 2, 3), strict=True):
            of_operator = replace(of_shape, quantity=operator)
            copy = PER_BYTE * num_bytes(of_shape) * passes / 2
            # As measured: a copy's time in proportion to the passes.
            times = {"copy": passes / 2 * FIXED + copy, "syncbn": 2 * (FIXED + copy)}
            made_up += [replace(of_operator, variant=v, median=us) for v, us in times.items()]
    return made_up


def test_kernels_are_compared_with_a_copy_of_as_many_bytes(rows):
    net = case("ResNet-50 x256", shape=(1, 3, 224, 224))
    on_gpu = [*rows, *step_rows(net, 1.75), *kernel_rows(), *kernel_rows("bfloat16")]
    assert Copy.fitted(on_gpu) == pytest.approx((FIXED, PER_BYTE))
    of_readme = cells(report.text([on_gpu]))
    (place,) = [i for i, line in enumerate(of_readme) if "256 images" in line[0]]
    assert of_readme[place][1:] == ["1x3x224x224", "(1.75x)", "", "", ""]
    assert of_readme[place + 1][1:] == ["", "0.50x", "", "0.50x", ""]
    *_, words, table, _ = report.page([on_gpu]).split("\n\n")
    assert "A copy takes 3.0 us and the time of its bytes at 0.00 TB/s" in " ".join(words.split())
    assert cells(table)[0] == ["net", "operator", "fixed", *COLUMNS]
    # 4 * 53 launches of 3 us, and in float32 (1 + 2 + 2 + 3) / 2 us a KB of 44.5 MB; twice that.
    assert cells(table)[-1] == [
        "ResNet-50 x256",
        "all",
        "0.64",
        "356.92 (0.50)",
        "",
        "179.10 (0.50)",
        "",
    ]
    assert [line[1] for line in cells(table)[1:]] == [*SHORT_NAMES, "all"]


def test_page_shows_all_cases(rows):
    heading, above, lines, below, picture = report.page([rows]).split("\n\n")
    assert heading == "## abacus" and above.startswith("Speed of one layer's")
    assert cells(lines) == [
        ["case", "shape", *COLUMNS],
        ["2-D", "4x5", "(1.00x)", "", "", ""],
        ["memory", "2x3x4x5", "1.25x (2.00x)", "", "0.88x", "(1.50x)"],
        ["memory wide", "2x3x4x5", "9.99x (9.99x)", "", "", ""],
        ["sweep", "many", "1.25x (1.50x)", "", "", ""],
        ["some net", "many", "1.25x (1.50x)", "", "", ""],
        ["small layer", "8x16x4x4", "0.65x (0.75x)", "", "", ""],
    ]
    words = " ".join(below.split())
    assert (
        "Measured on abacus with 8 threads, in one process, on 2026-01-02 at commit abcdef0 with "
        "torch 2.11.0; repeated measurements differ by up to 4%."
    ) in words
    assert "shapes of some net; single shapes range from 0.90 to 2.00 with" in words
    assert "(results/abacus.csv)" in words and "(results/abacus.png)" in picture


@pytest.fixture
def root(tmp_path):
    """A folder with both documents, their tables empty."""
    (tmp_path / "benchmarks").mkdir()
    for name in DOCUMENTS:
        (tmp_path / name).write_text(EMPTY)
    return tmp_path


def test_tables_are_put_between_their_markers(rows, results, root):
    result = run("table", "--root", root, "--results", root)
    assert result.returncode == 0, result.stderr
    for name, block in DOCUMENTS.items():
        assert (root / name).read_text() == replace_block(EMPTY, "benchmark table", block([rows]))


def test_tables_are_of_each_device(rows, results, root):
    write(root / "slide-rule.csv", [replace(row, device="slide-rule") for row in rows])
    assert run("table", "--root", root, "--results", root).returncode == 0
    for name in DOCUMENTS:
        measured = re.findall(r"\bon (\S+) with \d+ threads", (root / name).read_text())
        assert measured == ["abacus", "slide-rule"]


@pytest.mark.parametrize("block", DOCUMENTS.values())
def test_without_results_the_table_gives_advice(block):
    assert "make bench" in block([])


def test_tables_of_the_documents_are_the_generated_ones(root):
    for name in DOCUMENTS:
        (root / name).write_text((ROOT / name).read_text())
    result = run("table", "--root", root)
    assert result.returncode == 0, result.stderr
    for name in DOCUMENTS:
        assert (root / name).read_text() == (ROOT / name).read_text()
