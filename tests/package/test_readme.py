"""The README is a promise: its code runs, its commands exist, its links lead somewhere."""

import re
import subprocess
import sys

import pytest
from paths import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/integrations.md",
    "docs/pytorch2.md",
]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_code_runs_on_two_ranks(tmp_path):
    (code,) = blocks("python")
    (tmp_path / "readme.py").write_text(code + "\ndist.destroy_process_group()\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, "readme.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def commands():
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def test_commands_are_the_ones_that_are_tested():
    """`make test` is what runs this, test_examples runs the demo, .ci/run installs both ways."""
    assert commands() == [
        "pip install .",
        "pip install --no-build-isolation .",
        "make demo",
        "make test",
    ]


@pytest.mark.parametrize("target", ["demo", "test", "bench", "works"])
def test_make_knows_the_target(target):
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    document = ROOT / name
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_path_named_in_contributing_exists():
    document = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"(?:csrc|syncbn|tests|tools)/[\w/.<>]*", document)
    assert len(named) > 20
    for path in named:
        pattern = path.rstrip("/.").replace("<name>", "*")
        assert list(ROOT.glob(pattern)) or list(ROOT.glob(f"{pattern}.py")), path
