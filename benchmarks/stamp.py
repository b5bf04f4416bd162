"""Origin of results: versions, commit, device, date."""

import contextlib
import datetime
import functools
import os
import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

import syncbn
from benchmarks.rows import Row


def stamp(row: Row, device: torch.device) -> Row:
    """Return the row with its origin filled in."""
    return replace(
        row,
        torch=torch.__version__,
        syncbn=syncbn.__version__,
        commit=_commit(),
        device=device_slug(device),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def device_slug(device: torch.device) -> str:
    """Return the model of the CPU or GPU, spelled for a file name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match is not None:
            return match[1]
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str:
    """Return the commit of this checkout, marked if files differ from it.

    For a copy without git, the environment variable SYNCBN_COMMIT names the commit.
    """
    described = ""
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        result = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        described = result.stdout.strip()
    return described or os.environ.get("SYNCBN_COMMIT") or "unknown"
