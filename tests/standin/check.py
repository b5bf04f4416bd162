"""Runs the stand-in's own tests, if its files have changed since the tests passed.

``python tests/standin/check.py``. ``tested.txt`` holds torch's version and a digest of the files
that last passed; a pass writes it, for the next commit. With arguments, for pytest, the tests run
in any case.
"""

import hashlib
import subprocess
import sys

import build_standin as build
import torch

DIGEST = build.STANDIN / "tested.txt"
SUFFIXES = {".py", ".h", ".cpp"}


def digest() -> str:
    """Return the version of torch and a digest of the stand-in's sources."""
    found = hashlib.sha256()
    for path in sorted(build.STANDIN.rglob("*")):
        if path.suffix in SUFFIXES:
            found.update(f"{path.relative_to(build.STANDIN)}\n".encode() + path.read_bytes())
    return f"torch {torch.__version__.partition('+')[0]} {found.hexdigest()}\n"


def main() -> int:
    """Run the tests if they are needed; return pytest's exit status."""
    current = digest()
    if len(sys.argv) == 1 and DIGEST.exists() and DIGEST.read_text() == current:
        print("The stand-in is the one that has passed its own tests (tests/standin/tested.txt)")
        return 0
    run = [sys.executable, str(build.STANDIN / "run.py")]
    tests = [sys.executable, "-m", "pytest", *sys.argv[1:], str(build.STANDIN / "tests")]
    status = subprocess.run([*run, *tests]).returncode
    if status == 0 and len(sys.argv) == 1 and not build.why_not():
        DIGEST.write_text(current)
    return status


if __name__ == "__main__":
    sys.exit(main())
