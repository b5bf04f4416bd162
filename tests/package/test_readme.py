"""The README's code runs, its commands exist, and its links resolve."""

import os
import re
import subprocess
import sys

import pytest
from support.paths import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENTS = [path for folder in (".", "benchmarks", "docs") for path in ROOT.glob(f"{folder}/*.md")]


def blocks(language, document=README):
    return re.findall(rf"```{language}\n(.*?)```", document, re.DOTALL)


# A thread of gloo that needs the GIL crashes a process that exits: one in thirty that leave a group
# alive, as DistributedDataParallel does in torch too. Here no program leaves one.
RUN = """
import gc
import runpy

runpy.run_path("train.py", run_name="__main__")
gc.collect()
"""


def run(folder, code, launch):
    """Run a program in one process or by torchrun; return its output."""
    (folder / "train.py").write_text(code)
    (folder / "run.py").write_text(RUN)
    command = [sys.executable, *launch, "run.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def in_a_group(code):
    begin = "import torch\ntorch.distributed.init_process_group('gloo')\n"
    return f"{begin}{code}\ntorch.distributed.destroy_process_group()\n"


def running_means(output):
    """Return the printed running means by rank and layer."""
    lines = re.findall(r"rank (\d), (\w+): tensor\(\[(.*?), (.*?)\]\)", output)
    return {(int(rank), layer): (float(a), float(b)) for rank, layer, a, b in lines}


TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("launch", [[], TWO_PROCESSES])
def test_python_code_runs_in_one_process_and_in_two(tmp_path, launch):
    (code,) = blocks("python")
    printed = running_means(run(tmp_path, code, launch))
    if launch:
        (shown,) = blocks("text")
        assert printed == pytest.approx(running_means(shown), abs=1e-4)  # the last shown digit
        assert printed[0, "SyncBatchNorm2d"] == printed[1, "SyncBatchNorm2d"]
    else:
        assert printed.keys() == {(0, "BatchNorm2d"), (0, "SyncBatchNorm2d")}
        assert len(set(printed.values())) == 1


@pytest.mark.parametrize(
    ("name", "number", "launch"),
    [
        ("cost", 0, TWO_PROCESSES),
        ("fusion", 0, []),
        ("fusion", 1, []),
        ("fusion", 1, TWO_PROCESSES),
        ("statistics", 0, TWO_PROCESSES),  # begins and ends the group itself
        ("statistics", 1, []),
        ("statistics", 1, TWO_PROCESSES),
    ],
)
def test_code_of_a_document_runs_as_printed(tmp_path, name, number, launch):
    code = blocks("python", (ROOT / f"docs/{name}.md").read_text())[number]
    if launch and "init_process_group" not in code:
        code = in_a_group(code)
    run(tmp_path, code, launch)


def commands(document):
    lines = "".join(blocks("bash", document)).splitlines()
    return list(filter(None, (line.split("#")[0].strip() for line in lines)))


INSTALL = [
    "python3 -m venv .venv && . .venv/bin/activate",
    'pip install torch numpy ninja "setuptools>=77.0.3,<82"',
    "pip install --no-build-isolation .",
]


def test_commands_are_the_ones_that_are_tested():
    """.ci/run installs as the Makefile does and runs all tests, test_examples runs the demo."""
    assert commands(README) == [*INSTALL, "make demo", "make test", "make test-all"]
    makefile = (ROOT / "Makefile").read_text()
    needed = INSTALL[1].removeprefix("pip install torch numpy ")
    assert f"torch$(if $(TORCH),==$(TORCH)) {needed}" in makefile
    assert f"'pip install torch {needed}'" in (ROOT / "tools/backend/syncbn_backend.py").read_text()


def test_install_page_has_the_same_commands():
    """test_main runs the last command but one."""
    page = commands((ROOT / "docs/install.md").read_text())
    assert page == [*INSTALL, "python -m syncbn info", "pip uninstall syncbn"]


@pytest.mark.parametrize("target", ["demo", "test", "bench", "-f tools/maintain.mk wheels"])
def test_make_knows_the_target(target):
    result = subprocess.run(
        ["make", "-n", *target.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("python", "installs"), [(sys.executable, False), ("false", True)])
def test_demo_installs_syncbn_only_if_python_lacks_it(tmp_path, python, installs):
    command = ["make", "-n", "demo", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
    env = {**os.environ, "PYTHONSAFEPATH": ""}  # as users call it
    printed = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert (f"{tmp_path}/venv/bin/pip install" in printed) == installs


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document):
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_path_named_in_contributing_exists():
    document = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"(?:csrc|syncbn|tests|tools)/[\w/.<>]*", document)
    assert len(named) > 20
    for path in named:
        pattern = path.rstrip("/.").replace("<name>", "*")
        assert list(ROOT.glob(pattern)) or list(ROOT.glob(f"{pattern}.py")), path
