"""Functions that run benchmarks as users do, make up results and read results."""

import os
import subprocess
import sys
from dataclasses import replace

import torch

from benchmarks.cases import SUITES
from benchmarks.layer import Setting, timed_rows
from benchmarks.results import STEP
from support.paths import ROOT

ORIGIN = {"device": "abacus", "date": "2026-01-02", "commit": "abcdef0", "torch": "2.11.0"}


def execute(*command, **variables):
    """Run Python in the project's folder, as users do, who do not set PYTHONSAFEPATH."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(*args, **variables):
    return execute("-m", "benchmarks", *args, **variables)


def found(rows, *columns):
    return {tuple(getattr(row, column) for column in columns) for row in rows}


def select(rows, **values):
    return [row for row in rows if all(getattr(row, n) == value for n, value in values.items())]


def variants(rows):
    """Return the variants of each benchmark and quantity."""
    by_quantity = {}
    for benchmark, quantity, variant in found(rows, "benchmark", "quantity", "variant"):
        by_quantity.setdefault((benchmark, quantity), set()).add(variant)
    return by_quantity


# Of times.
VARIANTS = {"syncbn", "torch", "syncbn again", "torch/syncbn", "syncbn again/syncbn"}
COPIES = {"copy", "copy/syncbn"}
OPERATORS = [
    f"batch_norm_{name}" for name in ("stats", "apply", "backward_reduce", "backward_apply")
]


def step_rows(case, speed, share=None, benchmark="layer", **changes):
    """Return rows of training steps that are ``speed`` times as fast as torch's.

    ``share`` is the speed as a share of copying's, ``changes`` are columns.
    """
    samples = {"syncbn": [1.0], "torch": [speed], "syncbn again": [1.04]}
    if share is not None:
        samples["copy"] = [share]
    setting = Setting(SUITES["tiny"], torch.device("cpu"), threads=8, allocator="tuned")
    rows = timed_rows(benchmark, case, STEP, samples, setting, passes=2)
    return [replace(row, **{**ORIGIN, **changes}) for row in rows]


def cells(text):
    """Return the cells of a document's tables, line by line, without separator lines."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
