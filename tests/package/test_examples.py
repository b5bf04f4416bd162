import ast
import os
import re
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


def lines(text):
    return [line for line in text.splitlines() if line]


@pytest.mark.any_torch
def test_code_of_the_tutorial_is_all_of_the_example():
    code = (EXAMPLES / "digits.py").read_text()
    documentation = ast.parse(code).body[0].end_lineno
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    shown = "".join(re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL))
    assert lines(shown) == lines("\n".join(code.splitlines()[documentation:]))


# Inductor takes minutes for this net, and its code for our layers is tested in tests/compile: all
# but that, Dynamo and the graphs of AOTAutograd, is the same with this backend.
#
# Each checkpoint is kept in a file of its own: that of epoch 1 is what an interruption leaves.
LAUNCHER = """
import functools, os, runpy, shutil, sys, torch
replace, written = os.replace, []

def keep(source, target):
    written.append(source)
    shutil.copy(source, f"{target}.{len(written)}")
    replace(source, target)

os.replace = keep
torch.compile = functools.partial(torch.compile, backend="aot_eager")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_resnet18_that_goes_on_is_the_one_that_was_not_interrupted(tmp_path):
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
    assert "resumes after epoch 1 of interrupted" in printed and "epoch 1:" not in printed

    resumed = torch.load(tmp_path / "interrupted", weights_only=True)
    whole = torch.load(tmp_path / "whole", weights_only=True)
    assert resumed["epochs"] == whole["epochs"] == 2
    assert resumed["net"].keys() == whole["net"].keys()
    for name, value in whole["net"].items():
        assert torch.equal(resumed["net"][name], value), name
