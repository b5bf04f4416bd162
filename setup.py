"""Builds syncbn._C, and syncbn._cuda if there is CUDA. Other settings are in pyproject.toml.

Also builds syncbn._pass_torch_X_Y, the training pass in C++, for the minor version of torch that it
finds. Without it Python makes the passes.

SYNCBN_CUDA           auto (the default): CUDA operators if torch has CUDA and nvcc is of its major
                      version; 1: an error if they cannot be built; 0: none.
CXX                   the C++ compiler; by default torch compiles with c++, and setuptools links
                      with the one that Python was built with.
TORCH_CUDA_ARCH_LIST  the GPUs to build for, in torch's format; by default this machine's GPUs, or
                      all supported ones if there is none.
CUDA_HOME             the CUDA toolkit; by default nvcc is searched for on PATH, in /usr/local/cuda
                      and among the installed packages (nvidia-cuda-nvcc).
"""

import os
import re
import shutil
import subprocess
import sys
import warnings
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

# pip shows a build's warnings. Torch emits this one if NumPy is not installed.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

VERSION = "0.1.0"
OLDEST_TORCH = "2.11"  # TORCH_TARGET_VERSION in csrc/common/stable.h
# 8.6 to 8.9 run the code of 8.0: theirs would differ only in scheduling.
GPU_ARCHITECTURES = (75, 80, 90, 100, 120)
# Code for later GPUs is compiled from this PTX; unlisted GPUs run the PTX. The kernels need
# nothing newer: with its own PTX, 90 gets the same code, 100 and 120 get code with a tenth more
# registers, and a build takes twice as long.
GPU_PTX = 80

# No -std: torch adds the one its headers need. No -ffast-math: the two -fno- flags let loops with
# comparisons be vectorized and change no result. -g0: debug information is 20 times the code.
COMPILE_FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
# Warnings of our own code only: torch's headers are included as system headers.
COMPILE_FLAGS += ["-Wall", "-Wextra"]
COMPILE_FLAGS += [f"-isystem{path}" for path in cpp_extension.include_paths()]
# Torch's macros put file paths into errors: remove this machine's folders from them.
COMPILE_FLAGS += [f"-ffile-prefix-map={Path.cwd()}/="]
COMPILE_FLAGS += [f"-ffile-prefix-map={path}/=" for path in cpp_extension.include_paths()]
NVCC_FLAGS = ["-O3", "-Xcompiler=-fvisibility=hidden,-Wall,-Wextra", "-Xfatbin=-compress-all"]
NVCC_FLAGS += ["--threads=4"]  # architectures in parallel: one file takes most of a build


def find_nvcc() -> Path | None:
    """Sets CUDA_HOME if nvcc is only among the installed packages."""
    homes = [cpp_extension.CUDA_HOME] if cpp_extension.CUDA_HOME else []
    homes += [p for d in sys.path for p in sorted(glob(f"{d}/nvidia/cu*"), reverse=True)]
    for home in homes:
        nvcc = Path(home) / "bin" / "nvcc"
        if nvcc.exists():
            cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(home)
            return nvcc
    return None


def run_nvcc(nvcc: Path, option: str) -> str:
    return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout


def why_no_cuda(nvcc: Path | None) -> str | None:
    """The reason why CUDA operators cannot be built; empty if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    needed = torch.version.cuda.split(".")[0]
    if nvcc is None:
        return (
            f"no nvcc was found; install the CUDA toolkit {needed}, or set CUDA_HOME to where it is"
        )
    try:
        found = re.search(r"release (\d+)", run_nvcc(nvcc, "--version"))
        run_nvcc(nvcc, "--list-gpu-arch")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{nvcc} does not run: {error}"
    if found is None or found[1] != needed:
        version = found[1] if found else "unknown"
        return f"{nvcc} is of CUDA {version}, but torch {torch.__version__} has CUDA {needed}"
    return None


def choose_architectures(nvcc: Path) -> tuple[str, list[str], str]:
    """The GPUs to build for, in torch's format, nvcc's options for them, and a note for the log."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if chosen:
        return chosen.replace(";", " "), [], ""  # torch adds the options
    known = {int(n) for n in re.findall(r"compute_(\d+)\n", run_nvcc(nvcc, "--list-gpu-arch"))}
    capabilities, about = [], ""
    try:  # NVML also counts GPUs on which CUDA does not start, such as under an old driver
        capabilities = [*map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))]
    except (AssertionError, RuntimeError) as error:
        about = f", because CUDA does not start: {str(error).splitlines()[0]}"
    here = {10 * major + minor for major, minor in capabilities}
    if here and here <= known:
        architectures = sorted(here)
        about = ", for the GPUs of this machine (TORCH_CUDA_ARCH_LIST names others)"
    else:
        architectures = [a for a in GPU_ARCHITECTURES if a in known]
    ptx = min(GPU_PTX, architectures[-1])
    options = [f"-gencode=arch=compute_{min(a, GPU_PTX)},code=sm_{a}" for a in architectures]
    # For the GPUs of other nodes that load this library.
    options.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    names = [f"{a // 10}.{a % 10}" for a in architectures]
    names[architectures.index(ptx) if ptx in architectures else 0] += "+PTX"
    return " ".join(names), options, about


def cuda_extension(nvcc: Path, gpu_options: list[str]) -> Extension:
    home = nvcc.parent.parent
    extension = CUDAExtension(
        "syncbn._cuda",
        sources=sorted(glob("csrc/cuda/*.c*") + glob("csrc/cuda/kernels/*.cu")),
        depends=sorted(glob("csrc/c*/*.h") + glob("csrc/cuda/kernels/*.h")),
        extra_compile_args={"cxx": COMPILE_FLAGS, "nvcc": NVCC_FLAGS + gpu_options},
        define_macros=[("USE_CUDA", None)],  # declares torch's stream functions
        library_dirs=[str(home / "lib64"), str(home / "lib")],
    )
    # The CUDA runtime is linked statically, so that no library of one CUDA version has to be
    # found. Of torch's libraries only the stable ABI is used.
    extension.libraries = ["torch", "torch_cpu", "torch_cuda", "cudart_static", "rt", "dl"]
    return extension


def wanted_cuda(nvcc: Path | None) -> tuple[bool, str]:
    """Whether to build the CUDA operators, and a note for the log."""
    setting = os.environ.get("SYNCBN_CUDA") or "auto"
    if setting not in ("auto", "0", "1"):
        raise SystemExit(f"expected SYNCBN_CUDA to be auto, 0 or 1, but got {setting!r}")
    if setting == "0":
        return False, "no CUDA operators, as SYNCBN_CUDA=0 asks"
    missing = why_no_cuda(nvcc)
    if missing is None:
        return True, "CUDA operators"
    if setting == "1":
        raise SystemExit(f"SYNCBN_CUDA=1, but the CUDA operators cannot be built: {missing}")
    return False, f"no CUDA operators: {missing}"


nvcc = find_nvcc()
with_cuda, about_cuda = wanted_cuda(nvcc)
extensions = []
architectures = ""
if with_cuda:
    architectures, gpu_options, about_gpus = choose_architectures(nvcc)
    about_cuda += f" for {architectures}{about_gpus}"
    extensions.append(cuda_extension(nvcc, gpu_options))


def check_compiler(commands: list[str]):
    """Torch would only warn, and the build's error would not say what to do."""
    # A command may consist of several words, such as ccache g++.
    missing = [c for c in dict.fromkeys(commands) if not shutil.which(c.partition(" ")[0])]
    if not missing:
        return
    problem = f"PATH has no {' and no '.join(missing)}"
    if "CXX" in os.environ:
        problem = f"CXX={os.environ['CXX']} names no program"
    raise SystemExit(
        f"syncbn needs a C++ compiler, but {problem}. Install one, such as by apt install g++, or "
        "set CXX to the one you have"
    )


def check_standard_library(library: Path):
    """With libstdc++ linked statically, the first error would end the process."""
    if b"libstdc++.so" in library.read_bytes():  # it is linked dynamically
        return
    library.unlink()
    raise SystemExit(
        "syncbn needs the C++ library of torch, libstdc++.so, but the compiler has linked one into "
        "syncbn: errors would end the process. Set CXX to a compiler that does not, such as "
        "CXX=/usr/bin/g++"
    )


class CheckedBuild(BuildExtension):
    """Raises an error for a compiler that is missing or that makes unusable libraries."""

    def build_extensions(self):
        commands = [self.compiler.compiler_cxx[0]]
        if self.use_ninja:
            commands.append(cpp_extension.get_cxx_compiler())
        check_compiler(commands)
        super().build_extensions()

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:
            if not ext.optional:
                raise
            print(f"syncbn: Python makes the training passes: {ext.name}: {error}", file=sys.stderr)
            return
        check_standard_library(Path(self.get_ext_fullpath(ext.name)))


BUILT_WITH_TORCH = ("SYNCBN_BUILT_WITH_TORCH", f'"{torch.__version__}"')
extensions.insert(
    0,
    CppExtension(
        "syncbn._C",
        sources=["csrc/module.cpp", "csrc/ops.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        depends=sorted(glob("csrc/c*/*.h")),
        define_macros=[
            ("SYNCBN_VERSION", f'"{VERSION}"'),
            ("SYNCBN_OLDEST_TORCH", f'"{OLDEST_TORCH}"'),
            BUILT_WITH_TORCH,
            ("SYNCBN_CUDA_ARCHITECTURES", f'"{architectures}"'),
        ],
        extra_compile_args=COMPILE_FLAGS,
    ),
)

PASS_MODULE = "_pass_torch_" + "_".join(torch.__version__.split(".")[:2])
extensions.append(
    CppExtension(
        f"syncbn.{PASS_MODULE}",
        sources=["csrc/pass/module.cpp"],
        depends=sorted(glob("csrc/pass/*")),
        define_macros=[("SYNCBN_PASS_MODULE", PASS_MODULE), BUILT_WITH_TORCH],
        extra_compile_args=COMPILE_FLAGS,
        optional=True,
    )
)

print(
    f"syncbn {VERSION}: CPU operators and {about_cuda}; built with torch {torch.__version__} for "
    f"torch {OLDEST_TORCH} and later",
    file=sys.stderr,
)


def pypi_description() -> str:
    """The README; its relative links, dead on PyPI, point to this version's tag."""
    pyproject = Path("pyproject.toml").read_text()  # Python 3.10 has no TOML parser
    (repository,) = re.findall(r'^Repository = "(.+)"$', pyproject, re.MULTILINE)

    def absolute(link):
        kind = "raw" if link[1].endswith(".png") else "blob"
        return f"]({repository}/{kind}/v{VERSION}/{link[1]})"

    readme = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https:)([^)\s]+)\)", absolute, readme)


setup(
    version=VERSION,
    ext_modules=extensions,
    long_description=pypi_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": CheckedBuild},
)
