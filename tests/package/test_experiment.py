"""The experiment with the CUDA kernels, without a GPU."""

import subprocess
from argparse import Namespace
from dataclasses import replace

import pytest
from support.benchmarking import execute, found, select
from support.paths import ROOT

from benchmarks.cases import Case
from benchmarks.experiment import __main__ as command_line
from benchmarks.experiment import build, memory, operators, patterns
from benchmarks.experiment.choose import AGAIN, BUSY, COLD, COPY, OF_A_NET, WARM, WRONG, report
from benchmarks.experiment.setting import Setting
from benchmarks.results import Row, read
from benchmarks.traffic import OPERATORS, RESNET50
from tools.gpu_check import Outcome

pytestmark = pytest.mark.any_torch

OTHER = "evict_first_stores"
PAIRS = {"+".join(OPERATORS[:2]), "+".join(OPERATORS[2:])}


def has_commit(commit):
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}:csrc"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", build.VARIANTS)
def test_diffs_of_each_variant_apply(name, tmp_path):
    commit = build.VARIANTS[name].commit
    if commit and not has_commit(commit):
        pytest.skip(f"the history of this clone does not reach {commit}")
    build.make_sources(tmp_path, build.VARIANTS[name])
    kernel = tmp_path / "csrc/cuda/kernels/batch_norm_apply.cu"
    assert "WithNormalize<true>{" not in kernel.read_text()  # measured_only.diff is applied


def test_each_diff_is_of_a_variant():
    diffs = {diff for variant in build.VARIANTS.values() for diff in variant.diffs}
    used = {build.MEASURED_ONLY, *diffs}
    assert used == {path.name for path in build.DIFFS.glob("*.diff")}


def test_diff_that_does_not_apply_is_named(tmp_path, monkeypatch):
    diff = (build.DIFFS / "load_policy.diff").read_text()
    (tmp_path / "old.diff").write_text(diff.replace("__ldcs", "__ldcg"))
    monkeypatch.setattr(build, "DIFFS", tmp_path)
    monkeypatch.setattr(build, "MEASURED_ONLY", "old.diff")
    with pytest.raises(ValueError, match="variants/old.diff does not apply to csrc/"):
        build.make_sources(tmp_path, build.Variant())


def test_unknown_commit_is_named(tmp_path):
    with pytest.raises(ValueError, match="archive 0123456 csrc"):
        build.make_sources(tmp_path, build.Variant(commit="0123456"))


def test_each_pattern_is_compiled_once():
    lines = patterns.instances().splitlines()
    assert len(lines) == len(set(patterns.PATTERNS)) > 100
    assert lines[0] == (
        "INSTANCE(0, 1, true, 4, 3, Order::kFlat, Loads::kEvictFirst, Stores::kPlain)"
    )
    assert set(patterns.PRESENT) <= set(patterns.PATTERNS)


@pytest.mark.parametrize(
    ("order", "channels", "blocks"),
    [
        ("flat", 256, 396),
        ("planes up", 256, 3),
        ("dealt planes down", 64, 6),
        ("planes up", 512, 3),
    ],
)
def test_blocks_of_a_channel_are_those_of_the_plan(order, channels, blocks):
    # 768 of 792 blocks are in two waves of 396, 384 of 396 in one, 1536 of 1584 in four.
    pattern = patterns.Pattern(1, 1, order, vectors=4, blocks=3)
    assert memory.num_blocks(pattern, channels, multiprocessors=132) == blocks


def made_up(variant, time, spread=0.01, benchmark=COLD, quantity=OPERATORS[1], kind="measured"):
    """Return the row of a sum."""
    case = ("ResNet-50 x32", "float32", "contiguous", "32x3x224x224", 1, "tuned")
    quartiles = (time * (1 - spread / 2), time * (1 + spread / 2))
    return Row(benchmark, *case, quantity, variant, kind, time, *quartiles, "us", 11)


def choice(*rows):
    """Return the choice for the element-wise kernels."""
    (line,) = (line for line in report(list(rows)) if line.endswith("(element-wise kernels)"))
    return line.removesuffix(" (element-wise kernels)")


PRESENT = made_up("present", 100)


def test_gain_of_more_than_three_spreads_is_chosen():
    assert choice(PRESENT, made_up("quick", 96.9)) == "CHOOSE: quick"
    assert choice(PRESENT, made_up("quick", 97.1)) == "KEEP: present"


def test_larger_spread_counts():
    assert choice(PRESENT, made_up("quick", 96.9, spread=0.02)) == "KEEP: present"
    assert choice(made_up("present", 100, spread=0.02), made_up("quick", 96.9)) == "KEEP: present"


def test_fastest_variant_is_chosen():
    variants = (made_up("quick", 90), made_up("quicker", 80), made_up("slow", 120))
    assert choice(PRESENT, *variants) == "CHOOSE: quicker"


def test_variant_with_wrong_values_is_not_chosen():
    wrong = made_up("quicker", 1e-2, benchmark=COLD + OF_A_NET, kind=WRONG)
    rows = (PRESENT, made_up("quick", 90), made_up("quicker", 80), wrong)
    assert choice(*rows) == "CHOOSE: quick"
    lines = list(report(list(rows)))
    assert any(line.startswith("WRONG: quicker: batch_norm_apply 32x3x224x224") for line in lines)


@pytest.mark.parametrize("benchmark", [COLD, WARM, BUSY])
def test_variant_that_is_slower_elsewhere_is_not_chosen(benchmark):
    elsewhere = {"benchmark": benchmark, "quantity": OPERATORS[3]}
    rows = (PRESENT, made_up("quick", 90), made_up("present", 100, **elsewhere))
    assert choice(*rows, made_up("quick", 102, **elsewhere)) == "CHOOSE: quick"
    assert choice(*rows, made_up("quick", 104, **elsewhere)) == "KEEP: present"


@pytest.mark.parametrize("benchmark", [WARM, BUSY])
def test_gain_over_a_part_of_the_net_is_no_reason(benchmark):
    part = (made_up("present", 100, benchmark=benchmark), made_up("quick", 50, benchmark=benchmark))
    assert choice(PRESENT, made_up("quick", 100), *part) == "KEEP: present"


def test_gain_exceeds_what_the_present_kernels_differ_from_themselves():
    assert choice(PRESENT, made_up(AGAIN, 94), made_up("quick", 95)) == "KEEP: present"
    assert choice(PRESENT, made_up(AGAIN, 106), made_up("quick", 95)) == "KEEP: present"
    assert choice(PRESENT, made_up(AGAIN, 96), made_up("quick", 95)) == "CHOOSE: quick"


def test_net_that_was_not_finished_is_named():
    layer = made_up("present", 1, benchmark=COLD + OF_A_NET)
    lines = list(report([layer]))
    assert "UNFINISHED: batch_norm_apply, ResNet-50 x32 float32 contiguous, operators" in lines
    assert lines[-1] == "KEEP: present: no sum was measured"


def test_share_of_a_copy_counts_its_fixed_time_once_for_each_layer():
    # A copy takes 2 us and 1 us for each million bytes of the tensor.
    rows = []
    for _, channels, size in RESNET50:
        megabytes = 32 * channels * size**2 * 4e-6
        shape = f"32x{channels}x{size}x{size}"
        for variant, time in ((COPY, 2 + megabytes), ("present", 2 * (2 + megabytes))):
            row = made_up(variant, time, benchmark=COLD + OF_A_NET)
            rows.append(replace(row, shape=shape))
    lines = list(report([*rows, PRESENT]))
    assert lines[0] == "a copy takes 2.00 us and moves 2.00 TB/s"
    assert lines[2].endswith("present, 0.50 of a copy's speed")


def test_variant_that_fails_its_check_is_not_timed(tmp_path, monkeypatch):
    parts = {}

    def run_at_once(at_once, folder):
        outcomes = []
        for part in at_once:
            parts[part.name] = part
            log = folder / f"{part.name}.log"
            log.touch()
            result = "stopped at 50 s" if part.name == f"check-{OTHER}" else "passed"
            outcomes.append(Outcome(part.name, result, 1.0, log))
        return outcomes

    monkeypatch.setattr(command_line, "run_at_once", run_at_once)
    monkeypatch.setattr(build.Library, "built", lambda self: None)
    variants = [OTHER, "plain_loads"]
    with pytest.raises(SystemExit) as exit:
        command_line.run(Namespace(folder=tmp_path, variants=variants, dry=False))
    assert exit.value.code == 1
    assert f"WRONG: {OTHER}: check" in (tmp_path / "chosen.txt").read_text()
    one_after_another = ("check-present", "memory", "operators-256", "operators-32")
    assert parts.keys() == {*one_after_another, *(f"check-{name}" for name in variants)}
    for name in ("operators-256", "operators-32"):
        assert parts[name].command[-2:] == ["present", "plain_loads"]
    assert sum(parts[name].seconds for name in one_after_another) < 9 * 60


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    # As on a machine without syncbn.
    (folder / "syncbn.py").write_text("raise ImportError")
    command = ("-m", "benchmarks.experiment", "run", folder, "--dry", "--variants")
    result = execute(*command, f"present,{OTHER}", PYTHONPATH=str(folder))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "memory patterns are skipped: they need a GPU" in result.stdout
    return folder


def test_dry_run_measures_everything_and_finds_no_wrong_value(dry):
    rows = read(dry / "experiment.csv")
    assert found(rows, "kind", "unit") == {("measured", "us")}
    variants = {"present", AGAIN, OTHER}
    for benchmark in (COLD, WARM):
        expected = {(quantity, variant) for quantity in OPERATORS for variant in variants}
        if benchmark == COLD:
            expected |= {(quantity, variant) for quantity in PAIRS for variant in variants}
            expected.add((OPERATORS[1], COPY))
        for part in (benchmark, benchmark + OF_A_NET):
            assert found(select(rows, benchmark=part), "quantity", "variant") == expected, part
    kinds = {(dtype, layout) for dtype, layout in operators.KINDS}
    assert found(select(rows, benchmark=COLD), "dtype", "layout") == kinds


def test_dry_run_writes_the_choice(dry):
    lines = (dry / "chosen.txt").read_text().splitlines()
    assert [line.split(": ")[0] in ("CHOOSE", "KEEP") for line in lines[-3:]] == [True] * 3
    assert any(line.startswith(f"{OTHER}: ") for line in lines)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_values_are_found(dry, dtype):
    layer = operators.Layer(Case("layer", (2, 16, 7, 7), dtype, "contiguous"), Setting.dry())
    right = operators.load("present", is_dry=True)

    def inexact(pointer):
        error = right(pointer)
        layer.sets[0].out.mul_(1 + 2**-6)
        layer.state["sums"].mul_(1 + 2**-10)
        layer.state["message"].mul_(1 + 2**-10)
        return error

    def idle(pointer):
        return None

    runs = {"present": right, "inexact": inexact, "idle": idle}
    wrong = list(operators.check(layer, runs))
    assert found(wrong, "kind") == {(WRONG,)}
    assert found(wrong, "variant", "quantity") == {
        (variant, operator) for variant in ("inexact", "idle") for operator in OPERATORS
    }


def test_library_of_other_sources_is_refused(dry, monkeypatch):
    library = build.Library("present", emulated=True)
    assert library.built().exists()
    monkeypatch.setitem(build.VARIANTS, "present", build.Variant(("load_policy.diff",)))
    with pytest.raises(FileNotFoundError, match="expected a library of the present sources"):
        library.built()
