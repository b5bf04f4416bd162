"""All of ``python -m tools.gpu_check``, without the build and the limits of time."""

import csv
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import packages_distributions

import pytest
import tomllib
from packaging.requirements import Requirement
from support.cuda_device import IS_STANDIN
from support.paths import ROOT

from tools import gpu_check

pytestmark = [
    pytest.mark.any_torch,  # tests of operators and benchmarks run with both
    pytest.mark.cuda,
    pytest.mark.skipif(not IS_STANDIN, reason="on a GPU this is tools.gpu_check itself"),
]

# Without the profiler, and without buffers that exceed a GPU's cache.
BENCHMARK = """
import sys
import standin_plugin
standin_plugin.count_by_log()
from benchmarks import cuda
cuda.num_buffers = lambda case: 2
cuda.main(*sys.argv[1:])
"""


# A sitecustomize.py that hides the packages that gpu-check does not require.
HIDING = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {names} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def modules_to_hide():
    """The modules of packages that tests need and gpu-check does not."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = {Requirement(line).name for name in ("docs", "test") for line in groups[name]}
    wanted -= {"numpy", "pytest"}
    modules = packages_distributions()
    return {module for module, owners in modules.items() if wanted.intersection(owners)}


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    monkeypatch.setenv("STANDIN_STREAMS", "inline")
    monkeypatch.setenv("STANDIN_DEVICES", "1")


@pytest.fixture
def small_stages(tmp_path, monkeypatch):
    """Small shapes for a CPU; the tests are only collected, and `make standin` runs them."""
    stages = gpu_check.stages

    def small(output):
        _, (environment,), tests, (benchmark,) = stages(output)
        *shell, script = environment.command
        script = script.replace("cuda_host", "cuda_host --layers 2 --rounds 1")
        environment = replace(environment, command=[*shell, script])
        _, _, path, _ = benchmark.command[1:]
        command = [sys.executable, "-c", BENCHMARK, path, "tiny"]
        tests = [replace(part, command=[*part.command, "--collect-only"]) for part in tests]
        parts = [[environment], tests, [replace(benchmark, command=command)]]
        return [[replace(part, seconds=3600) for part in stage] for stage in parts]

    monkeypatch.setattr(gpu_check, "stages", small)
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(names=modules_to_hide()))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho a GPU\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_gpu_check(small_stages, tmp_path, monkeypatch, capsys):
    output = tmp_path / "output"
    monkeypatch.setattr(sys, "argv", ["gpu_check", str(output)])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert not end.value.code, capsys.readouterr().out
    with (output / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    counted = [row for row in rows if row["benchmark"] == "launches"]
    assert counted and {row["benchmark"] for row in rows} > {"layer", "kernels", "overhead"}
    of_operators = {row["variant"] for row in rows if row["benchmark"] == "operators"}
    assert of_operators > {"syncbn", "torch", "copy"}
    waits = [
        r["median"] for r in counted if (r["variant"], r["quantity"][-5:]) == ("syncbn", "waits")
    ]
    assert waits and set(waits) == {"0"}
    assert "CUDA operators" in (output / "environment.log").read_text()
    collected = sum(num_collected((output / f"{name}.log").read_text()) for name in gpu_check.TESTS)
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--collect-only", ROOT / "tests"]
    everything = subprocess.run(command, capture_output=True, text=True)
    assert everything.returncode == 0 and collected == num_collected(everything.stdout)


def num_collected(output):
    """The number of tests that pytest has collected."""
    return int(re.findall(r"(\d+)(?:/\d+)? tests collected", output)[-1])


def test_program_for_compute_sanitizer():
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "sanitizer" / "sanitize_operators.py"],
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) > 1000
