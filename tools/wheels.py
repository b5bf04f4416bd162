"""Checks wheels for users and PyPI: ``python tools/wheels.py check dist/*.whl``.

- auditwheel: the wheel needs only system libraries of some manylinux; torch provides its own and
  NVIDIA's libraries.
- torch-abi-audit: the libraries use only torch's stable ABI. A library of csrc/pass need not: one
  minor version of torch loads it.
- check-wheel-contents: the wheel contains no misplaced files.
- twine: PyPI accepts the metadata and can render the README.
- The description has no relative links: PyPI does not host the repository's files.
- The wheel contains all files of the package.

Prints the tools' reports of problems, and exits with status 1 if there are any.

``python tools/wheels.py try`` runs tests of the installed wheel: of operators, the layer, several
ranks, torch.compile and the CUDA library. They need only the dependency group wheel-test.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRIED = (
    "operators/test_ops.py",
    "layer/test_functional.py",
    "ranks/test_multi_rank.py",
    "compile/test_compile.py",
    "cuda/test_library.py::test_kernels_use_no_local_memory_on_any_architecture",
    "cuda/test_library.py::test_every_gpu_has_code",
)
LEFT_OUT = "not whole_models"  # they need torchvision
RELATIVE = re.compile(r'(?:\]\(|^\[[^\]]+\]: |href="|src=")(?!https:)([^)"\s]+)', re.MULTILINE)


def run(tool: str, *arguments: str) -> tuple[bool, str]:
    """Run a tool of this environment; return whether it passed, and its output."""
    command = [str(Path(sys.executable).parent / tool), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode == 0, result.stdout + result.stderr


def needed_manylinux(wheel: Path) -> tuple[bool, str]:
    """Return whether some manylinux has all needed libraries, and auditwheel's output."""
    passed, printed = run("auditwheel", "show", str(wheel))
    return passed and "manylinux_" in printed, printed


def python_of(wheel: Path) -> str:
    """Return the Python version in a wheel's name, spelled as in names of libraries."""
    tag = re.fullmatch(r"syncbn-[^-]+-cp(\d+)-cp\1-(?:many)?linux_\w+\.whl", wheel.name)
    return f"cpython-{tag[1]}" if tag else "unknown"


def missing_files(wheel: Path) -> list[str]:
    """Return the package's files that the wheel lacks."""
    sources = [path for path in (ROOT / "syncbn").rglob("*.py*") if path.suffix != ".pyc"]
    expected = {path.relative_to(ROOT).as_posix() for path in sources}
    expected |= {"syncbn/py.typed", f"syncbn/_C.{python_of(wheel)}-x86_64-linux-gnu.so"}
    return sorted(expected - set(zipfile.ZipFile(wheel).namelist()))


def relative_links(metadata: str) -> list[str]:
    """Return the targets of relative links in the description, the text after the headers."""
    return RELATIVE.findall(metadata.partition("\n\n")[2])


def problems(wheel: Path) -> list[str]:
    """Return the tools' reports of problems of a wheel."""
    outcomes = [
        needed_manylinux(wheel),
        run("check-wheel-contents", str(wheel)),
        run("twine", "check", "--strict", str(wheel)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        (metadata,) = Path(folder).glob("*.dist-info/METADATA")
        relative = relative_links(metadata.read_text())
        for library in sorted(Path(folder).rglob("*.so")):
            if not library.name.startswith("_pass_torch_"):
                outcomes.append(run("torch-abi-audit", "--check", "torch", str(library)))
    found = [printed for passed, printed in outcomes if not passed]
    if relative:
        found.append(
            f"expected links with https: in the description, but got {', '.join(relative)}"
        )
    missing = missing_files(wheel)
    if missing:
        found.append(f"expected {', '.join(missing)} in {wheel.name}")
    if python_of(wheel) == "unknown":
        found.append(
            f"expected a name such as syncbn-VERSION-cp311-cp311-SYSTEM.whl, but got {wheel.name}"
        )
    return found


def check(wheels: list[Path]) -> None:
    """Check wheels; exit with the problems if there are any."""
    if not wheels:
        raise SystemExit("expected wheels to check")
    found = [problem for wheel in wheels for problem in problems(wheel)]
    if found:
        raise SystemExit("\n".join(found))
    for wheel in wheels:
        (system,) = re.findall(r'"(manylinux_\w+)"', needed_manylinux(wheel)[1])[:1]
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, for {system} and later")


def try_installed() -> int:
    """Run the tests in an empty folder, so that they import the installed syncbn."""
    tests = [str(ROOT / "tests" / test) for test in TRIED]
    command = [sys.executable, "-m", "pytest", "-k", LEFT_OUT, *tests]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", *names]:
            check([Path(name) for name in names])
        case ["try"]:
            sys.exit(try_installed())
        case arguments:
            sys.exit(f"expected check WHEELS... or try, but got {' '.join(arguments) or 'nothing'}")
