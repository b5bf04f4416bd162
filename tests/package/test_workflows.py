"""Files that GitHub reads: workflows, forms of issues, dependabot's settings, the citation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.any_torch

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMAS = {
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    ".github/ISSUE_TEMPLATE/installation.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/performance.yml": "github-issue-forms",
    ".github/dependabot.yml": "dependabot",
    "CITATION.cff": "citation-file-format",
}


def run(tool, *arguments):
    """Run a tool of the environment that runs the tests."""
    command = [Path(sys.executable).parent / tool, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def lint(folder):
    """Run the fork of actionlint that PyPI has as a wheel, with shellcheck for the commands."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    workflows = (folder / ".github/workflows").iterdir()
    return run("jactionlint", "--strict-exit", f"--shellcheck={shellcheck}", *workflows)


def test_workflows_are_valid():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_actions_are_named_by_commit():
    """A tag can be moved to other code; a comment names the commit's version."""
    for workflow in WORKFLOWS:
        for line in re.findall(r"uses: (.*)", workflow.read_text()):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), (
                f"{workflow}: {line}"
            )


def test_workflows_call_programs_of_the_project():
    """They hold no commands of their own, which nobody could run elsewhere."""
    commands = [c for w in WORKFLOWS for c in re.findall(r"run: (.*)", w.read_text())]
    assert ".ci/run" in commands
    for command in commands:
        program, *arguments = command.split()
        if program == "make":
            made = run_make(*arguments)
            assert made.returncode == 0, made.stderr
        elif program in ("python", "python3"):
            assert arguments[0] == "-m" and (ROOT / f"{arguments[1].replace('.', '/')}.py").exists()
        else:
            assert (ROOT / program).stat().st_mode & 0o100, f"expected a program, but got {program}"


def run_make(*arguments):
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_every_form_is_checked():
    forms = (ROOT / ".github/ISSUE_TEMPLATE").iterdir()
    assert {str(form.relative_to(ROOT)) for form in forms} <= SCHEMAS.keys()


@pytest.mark.parametrize(("path", "schema"), SCHEMAS.items())
def test_forms_and_settings_are_valid(path, schema):
    result = run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ("bug", "python -m syncbn info"),
        ("performance", "python -m benchmarks run --output FOLDER"),
        ("performance", "python -m benchmarks compare OLD.csv NEW.csv"),
    ],
)
def test_forms_ask_for_commands_of_the_project(form, asked):
    assert asked in (ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text()
