"""Runs setup.py in processes that have imported torch: that import takes most of its time."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.paths import ROOT


def run(*arguments: str, prepare: str = "", **environment: str) -> Any:
    """Return the exit status and the output of setup.py; ``prepare`` is code to run before it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "setuptools"])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(arguments, prepare, environment, outputs))
        process.start()
        process.join()
        texts = [Path(path).read_text() for path in outputs]
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def _run(
    arguments: tuple[str, ...], prepare: str, environment: dict[str, str], outputs: list[str]
) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    os.chdir(ROOT)
    exec(prepare, {})
    sys.argv = ["setup.py", *arguments]
    runpy.run_path("setup.py", run_name="__main__")
