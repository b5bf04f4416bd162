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
    "SECURITY.md",
    "docs/api.md",
    "docs/architecture.md",
    "docs/choosing.md",
    "docs/devices.md",
    "docs/failures.md",
    "docs/fusion.md",
    "docs/integrations.md",
    "docs/masks.md",
    "docs/numerics.md",
    "docs/pytorch2.md",
    "docs/standin.md",
    "docs/statistics.md",
    "docs/support.md",
    "docs/tutorial.md",
]


def blocks(language, document=README):
    return re.findall(rf"```{language}\n(.*?)```", document, re.DOTALL)


def in_a_group(code):
    """Return the code in a group. Without its end, gloo's threads can crash an exiting process."""
    begin = "import torch\ntorch.distributed.init_process_group('gloo')\n"
    return f"{begin}{code}\ntorch.distributed.destroy_process_group()\n"


TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("launch", [[], TWO_PROCESSES])
def test_python_code_runs_in_one_process_and_in_two(tmp_path, launch):
    (code,) = blocks("python")
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, *launch, "train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    printed = re.findall(r"tensor\([^)]*\)", result.stdout)
    assert len(printed) == (2 if launch else 1) and len(set(printed)) == 1


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("choosing", TWO_PROCESSES),  # begins and ends the group itself
        ("fusion", []),
        ("masks", []),
        ("masks", TWO_PROCESSES),
        ("statistics", []),
        ("statistics", TWO_PROCESSES),
    ],
)
def test_code_of_a_document_runs_as_printed(tmp_path, name, launch):
    (code,) = blocks("python", (ROOT / f"docs/{name}.md").read_text())
    if launch and "init_process_group" not in code:
        code = in_a_group(code)
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, *launch, "train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def commands():
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def test_commands_are_the_ones_that_are_tested():
    """.ci/run installs, test_examples runs the demo, `make test` is what runs this."""
    assert commands() == ["pip install .", "make demo", "make test"]


@pytest.mark.parametrize("target", ["demo", "test", "bench", "works", "wheels"])
def test_make_knows_the_target(target):
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("python", "installs"), [(sys.executable, False), ("false", True)])
def test_demo_installs_syncbn_only_where_python_lacks_it(tmp_path, python, installs):
    command = ["make", "-n", "demo", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (f"{tmp_path}/venv/bin/pip install" in printed) == installs


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
