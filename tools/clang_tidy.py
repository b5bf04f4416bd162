"""Runs clang-tidy on the C++ files: ``python -m tools.clang_tidy``.

The file .clang-tidy selects the checks. Kernels are checked with the emulation's options, and their
adapters if CUDA's header is found.
"""

import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from torch.utils import cpp_extension

from tools import cuda

ROOT = Path(__file__).parents[1]
TORCH = [f"-isystem{path}" for path in cpp_extension.include_paths()]
PYTHON = f"-isystem{sysconfig.get_path('include')}"
# The macros of setup.py; their values do not matter here.
MACROS = [
    f'-DSYNCBN_{name}=""'
    for name in ("VERSION", "OLDEST_TORCH", "BUILT_WITH_TORCH", "CUDA_ARCHITECTURES")
]


def cuda_include() -> Path | None:
    """Return the folder of CUDA's headers."""
    header = cuda.find("include/cuda_runtime_api.h")
    return None if header is None else header.parent


def commands() -> dict[str, list[str]]:
    """Return the compiler options of each file."""
    cpu = ["-std=c++20", *TORCH, PYTHON, *MACROS]
    found = {path: cpu for path in (*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp"))}
    found[ROOT / "csrc" / "pass" / "module.cpp"] = [*cpu, "-DSYNCBN_PASS_MODULE=_"]
    emulation = ["-std=c++17", "-xc++", "-Itests/emulation", "-Itests/standin/threads", "-Icsrc"]
    emulation += ["-Wno-unknown-pragmas"]
    kernels = [*ROOT.glob("csrc/cuda/kernels/*.cu"), *ROOT.glob("tests/emulation/**/*.cpp")]
    kernels.append(ROOT / "benchmarks" / "experiment" / "operators.cpp")
    found.update({path: emulation for path in kernels})
    headers = cuda_include()
    if headers is None:
        print("no cuda_runtime_api.h was found: csrc/cuda/*.cpp are not checked")
    else:
        adapters = ["-std=c++20", *TORCH, f"-isystem{headers}", "-DUSE_CUDA"]
        found.update({path: adapters for path in ROOT.glob("csrc/cuda/*.cpp")})
    return {str(path.relative_to(ROOT)): command for path, command in found.items()}


def check(path: str, command: list[str]) -> bool:
    """Print the findings in a file; return whether there are none."""
    tidy = Path(sys.executable).with_name("clang-tidy")
    done = subprocess.run(
        [tidy, "--quiet", "--config-file=.clang-tidy", path, "--", "-Wall", "-Wextra", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout, end="")
    if done.returncode != 0 and not done.stdout:
        print(f"clang-tidy fails on {path}:\n{done.stderr}")
    return done.returncode == 0


if __name__ == "__main__":
    with ThreadPoolExecutor(cpu_count()) as pool:
        passed = list(pool.map(check, *zip(*commands().items(), strict=True)))
    sys.exit(not all(passed))
