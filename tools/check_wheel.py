"""Checks wheels as their users and PyPI will: ``python -m tools.check_wheel dist/*.whl``.

- auditwheel: from the system they need only what some manylinux names; torch's and NVIDIA's
  libraries come with torch.
- torch-abi-audit: of torch the libraries need the stable ABI alone.
- check-wheel-contents: nothing lies where it does not belong.
- twine: PyPI takes the metadata, and can show the README.
- All files of the package are in it.

Prints what the tools say of what is wrong, and ends with status 1 where anything is.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(tool: str, *arguments: str) -> tuple[bool, str]:
    """Run a tool of this environment; return whether it passed, and what it printed."""
    command = [str(Path(sys.executable).parent / tool), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode == 0, result.stdout + result.stderr


def needed_manylinux(wheel: Path) -> tuple[bool, str]:
    """Return whether some manylinux has all that the wheel needs, and what auditwheel says."""
    passed, printed = run("auditwheel", "show", str(wheel))
    return passed and "manylinux_" in printed, printed


def python_of(wheel: Path) -> str:
    """Return the Python that a wheel's name says it is for, as names of libraries have it."""
    tag = re.fullmatch(r"syncbn-[^-]+-cp(\d+)-cp\1-(?:many)?linux_\w+\.whl", wheel.name)
    return f"cpython-{tag[1]}" if tag else "unknown"


def missing_files(wheel: Path) -> list[str]:
    """Return the files of the package that are not in the wheel."""
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "syncbn").rglob("*.py*")}
    expected |= {"syncbn/py.typed", f"syncbn/_C.{python_of(wheel)}-x86_64-linux-gnu.so"}
    return sorted(expected - set(zipfile.ZipFile(wheel).namelist()))


def problems(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel, in the words of the tools that say so."""
    outcomes = [
        needed_manylinux(wheel),
        run("check-wheel-contents", str(wheel)),
        run("twine", "check", "--strict", str(wheel)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for library in sorted(Path(folder).rglob("*.so")):
            outcomes.append(run("torch-abi-audit", "--check", "torch", str(library)))
    found = [printed for passed, printed in outcomes if not passed]
    missing = missing_files(wheel)
    if missing:
        found.append(f"expected {', '.join(missing)} in {wheel.name}")
    if python_of(wheel) == "unknown":
        found.append(
            f"expected a name such as syncbn-VERSION-cp311-cp311-SYSTEM.whl, but got {wheel.name}"
        )
    return found


def main() -> None:
    """Check the wheels that are named."""
    wheels = [Path(argument) for argument in sys.argv[1:]]
    if not wheels:
        raise SystemExit("expected wheels to check")
    found = [problem for wheel in wheels for problem in problems(wheel)]
    if found:
        raise SystemExit("\n".join(found))
    for wheel in wheels:
        (system,) = re.findall(r'"(manylinux_\w+)"', needed_manylinux(wheel)[1])[:1]
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, for {system} and later")


if __name__ == "__main__":
    main()
