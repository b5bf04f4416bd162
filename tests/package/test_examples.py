import ast
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(folder, *arguments):
    """Run a program in two ranks."""
    result = subprocess.run(
        [sys.executable, *TWO_RANKS, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as torchrun sets it, but without its warning
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_digits_trains_three_ways_and_compares_them(tmp_path):
    result = run(tmp_path, EXAMPLES / "digits.py")
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    accuracy = {
        name: float(value)
        for name, value in re.findall(r"^(\(.\)).*?([\d.]+)%", result.stdout, re.MULTILINE)
    }
    assert accuracy.keys() == {"(a)", "(b)", "(c)"}
    assert accuracy["(b)"] > accuracy["(a)"]


@pytest.fixture
def stopped(tmp_path, monkeypatch, capsys):
    """A function that runs an example in this process until it exits, and returns its output."""

    def run_until_it_stops(name, *arguments, rank=None):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return "".join(capsys.readouterr())

    return run_until_it_stops


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("name", "missing"),
    [("digits.py", "--output=missing/a.png"), ("resnet18.py", "--checkpoint=missing/a.pt")],
)
def test_bad_arguments_are_reported_before_any_training(stopped, name, missing):
    assert "start it by torchrun" in stopped(name)
    assert "there is no folder missing" in stopped(name, missing, rank="0")


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("resnet18.py --images=15 --batch-size=16", "expected a batch of 16 images for each of 1"),
        ("resnet18.py --checkpoint=junk", "junk is no checkpoint of this training"),
    ],
)
def test_bad_start_is_reported_in_one_line(tmp_path, command, words):
    (tmp_path / "junk").write_bytes(b"junk")
    name, *arguments = command.split()
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=tmp_path,
        env={**os.environ, **one_rank},
        capture_output=True,
        text=True,
        timeout=120,  # less than a training
    )
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert words in result.stderr.splitlines()[-1]


@pytest.mark.any_torch
@pytest.mark.parametrize("name", ["digits.py", "resnet18.py"])
def test_help_shows_defaults(stopped, name):
    options = re.findall(
        r"^  (--\w.*?)(?=^  -|\Z)", stopped(name, "--help"), re.MULTILINE | re.DOTALL
    )
    assert options and all("(default:" in option for option in options)


def lines(text):
    return [line for line in text.splitlines() if line]


@pytest.mark.any_torch
def test_code_of_the_tutorial_is_all_of_the_example():
    code = (EXAMPLES / "digits.py").read_text()
    documentation = ast.parse(code).body[0].end_lineno
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    shown = "".join(re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL))
    assert lines(shown) == lines("\n".join(code.splitlines()[documentation:]))


def test_notebook_prints_tables_like_the_stored_ones(tmp_path, monkeypatch, capfd):
    """After one step, so that the accuracies differ."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the notebook sets it without resetting it
    cells = json.loads((EXAMPLES / "small_batches.ipynb").read_text())["cells"]
    program, launch = [cell for cell in cells if cell["cell_type"] == "code"]
    magic, *lines = program["source"]
    assert magic == "%%writefile train.py\n" and "STEPS = 400\n" in lines
    (tmp_path / "train.py").write_text("".join(lines).replace("STEPS = 400", "STEPS = 1"))
    exec("".join(launch["source"]), {})
    (output,) = launch["outputs"]
    printed, stored = (
        re.sub(r" *[\d.]+%", " %", text)
        for text in (capfd.readouterr().out, "".join(output["text"]))
    )
    assert printed == stored and stored.count("%") == 24


# Keeps each checkpoint in its own file: an interruption leaves the one of epoch 1.
LAUNCHER = """
import os, runpy, shutil, sys
replace, written = os.replace, []

def keep(source, target):
    written.append(source)
    shutil.copy(source, f"{target}.{len(written)}")
    replace(source, target)

os.replace = keep
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_resumed_resnet18_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    # tests/compile compiles a smaller net; Inductor takes minutes for this one.
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    small = ["--images=32", "--image-size=32", "--batch-size=8", "--workers=0", "--epochs=2"]
    command = ["launcher.py", EXAMPLES / "resnet18.py", *small]

    printed = run(tmp_path, *command, "--checkpoint=whole").stdout
    assert re.findall(r"^epoch (\d): [\d.]+% of the test images", printed, re.MULTILINE) == [
        "1",
        "2",
    ]
    (tmp_path / "whole.1").rename(tmp_path / "interrupted")
    printed = run(tmp_path, *command, "--checkpoint=interrupted").stdout
    assert "resuming from interrupted, after epoch 1" in printed and "epoch 1:" not in printed

    resumed = torch.load(tmp_path / "interrupted", weights_only=True)
    whole = torch.load(tmp_path / "whole", weights_only=True)
    assert resumed["epochs"] == whole["epochs"] == 2
    assert resumed["net"].keys() == whole["net"].keys()
    for name, value in whole["net"].items():
        assert torch.equal(resumed["net"][name], value), name
