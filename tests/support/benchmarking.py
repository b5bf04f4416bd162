"""Runs benchmarks and looks into their results."""

import os
import subprocess
import sys

from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def execute(*command, **variables):
    """Run Python where the benchmarks can be imported."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=BENCHMARKS,  # the checkout's root would hide the installed syncbn
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(script, *args):
    return execute(BENCHMARKS / script, *args)


def found(rows, *columns):
    return {tuple(row[column] for column in columns) for row in rows}


def select(rows, **values):
    return [row for row in rows if all(row[name] == value for name, value in values.items())]
