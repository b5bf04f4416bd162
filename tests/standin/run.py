"""Runs a command on the stand-in for CUDA: ``python tests/standin/run.py COMMAND...``.

Builds the stand-in first if it is not up to date. If it cannot be built, prints the reason and
exits with status 0: CUDA is then not tested, as on any machine without a GPU.

README.md lists the environment variables.
"""

import os
import sys
import time
from pathlib import Path

import build_standin as build
import project


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a process that runs on the stand-in."""
    paths = [folder / "packages", project.PLUGIN_FOLDER, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(str(folder / name) for name in build.PRELOADED),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PYTHONSAFEPATH": "1",  # the current folder may hold a package for GPUs
        "PYTEST_PLUGINS": project.PLUGIN,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


if __name__ == "__main__":
    if reason := build.why_not():
        print(f"The CUDA tests are skipped: the stand-in cannot be built: {reason}")
        sys.exit()
    start = time.monotonic()
    print(f"Building the stand-in for torch {build.torch.__version__}", flush=True)
    folder = build.build()
    print(f"Built in {time.monotonic() - start:.0f} s: {folder}", flush=True)
    os.execvpe(sys.argv[1], sys.argv[1:], environment(folder))
