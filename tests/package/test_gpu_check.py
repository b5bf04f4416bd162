"""The parts of ``python -m tools.gpu_check`` that run without a GPU."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.paths import ROOT

from benchmarks.cases import CUDA_SUITES
from tools import gpu_check
from tools.gpu_check import Part

pytestmark = pytest.mark.any_torch

# As the program "pytest": the current folder's syncbn does not hide the installed one.
LAST = "import sys; sys.path.append(sys.path.pop(0)); import pytest; sys.exit(pytest.main())"
PYTEST = [sys.executable, "-c", LAST]


def part(name, code, seconds=30):
    return Part(name, [sys.executable, "-c", code], seconds, {"GREETING": "hello"})


def test_without_a_gpu_it_exits_with_a_message(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": ""},  # as users call it
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert re.search(r"^gpu-check needs a CUDA device, but .* finds none: \w+", result.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "outcome"), [("-ra", "skipped"), ("--require-cuda", "error")])
def test_cuda_tests_give_the_reason_why_they_cannot_run(option, outcome):
    command = [*PYTEST, "tests/cuda/test_graphs.py", "-q", option]
    result = subprocess.run(
        [*command, "-k", "empty_batch"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert f"1 {outcome}" in result.stdout and "no CUDA device is here" in result.stdout
    assert result.returncode == (outcome == "error")


def test_limits_leave_a_minute_of_ten_and_files_are_few():
    stages = gpu_check.stages(Path("out"))
    assert sum(max(part.seconds for part in parts) for parts in stages) <= 540
    logs = [part.name for parts in stages for part in parts]
    assert len(logs) == len(set(logs)) <= 8 - len(("benchmark.csv", "summary.txt"))


def test_program_of_the_benchmark_exists():
    (benchmark,) = gpu_check.stages(Path("out"))[-1]
    (_, option, module, path, suite) = benchmark.command
    assert (option, path) == ("-m", "out/benchmark.csv") and suite in CUDA_SUITES
    assert find_spec(module) is not None


def test_parts_run_at_once_and_their_results_are_reported(tmp_path):
    wait = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.1)"
    mark = tmp_path / "mark"
    outcomes = gpu_check.run_at_once(
        [
            part("waits", wait.format(str(mark)) + "\nprint('seen')"),
            part("marks", f"open({str(mark)!r}, 'w'); import os; print(os.environ['GREETING'])"),
            part("fails", "import sys; print('a word'); sys.exit(3)"),
        ],
        tmp_path,
    )
    assert [outcome.result for outcome in outcomes] == ["passed", "passed", "failed, exit status 3"]
    assert [str(outcome).split()[-1] for outcome in outcomes] == ["seen", "hello", "word"]


def test_part_at_its_limit_is_stopped_with_its_child_processes(tmp_path):
    pid = tmp_path / "pid"
    hang = Part("hangs", ["sh", "-c", f"sleep 300 & echo $! > {pid}; wait"], 10, {})
    (outcome,) = gpu_check.run_at_once([hang], tmp_path)
    assert outcome.result == "stopped at 10 s" and not outcome.passed
    state = Path(f"/proc/{pid.read_text().strip()}/stat")

    def is_gone() -> bool:
        # Or a zombie that its new parent has not collected yet.
        return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    while not is_gone():  # it takes a moment to end
        time.sleep(0.1)


def test_failing_part_stops_no_other_and_the_end_of_its_log_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "find_device", lambda: ("9.0", "A GPU"))
    stages = [[part("one", "print('first'); 1 / 0")], [part("two", "print('42 passed')")]]
    monkeypatch.setattr(gpu_check, "stages", lambda output: stages)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path)])
    (tmp_path / "benchmark.csv").write_text("of an earlier run")
    with pytest.raises(SystemExit) as exit:
        gpu_check.main()
    assert exit.value.code == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert re.search(r"(?m)^one +failed, exit status 1 .*ZeroDivisionError", summary)
    assert re.search(r"(?m)^two +passed .* 42 passed$", summary)
    printed = capsys.readouterr().out
    assert "first\n" in printed and printed.endswith(f"\n{summary}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.log", "summary.txt", "two.log"]
