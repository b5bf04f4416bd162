"""Builds syncbn._C. What needs no code stands in pyproject.toml."""

import sys
from glob import glob

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

VERSION = "0.1.0"
OLDEST_TORCH = "2.11"  # TORCH_TARGET_VERSION in csrc/common/stable.h

# No -std: torch adds the one its headers need. No -ffast-math: the two -fno- flags let loops with
# comparisons be vectorised and change no result. -g0: debug information is 20 times the code.
COMPILE_FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]


class BuildHereToo(BuildExtension):
    """Also leaves the binary in the source tree, which hides the installed package from Python
    wherever the checkout is the current directory."""

    def run(self):
        super().run()
        if not self.inplace:
            self.copy_extensions_to_source()


extension = CppExtension(
    "syncbn._C",
    sources=["csrc/module.cpp", "csrc/ops.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
    depends=sorted(glob("csrc/*/*.h")),
    define_macros=[
        ("SYNCBN_VERSION", f'"{VERSION}"'),
        ("SYNCBN_OLDEST_TORCH", f'"{OLDEST_TORCH}"'),
        ("SYNCBN_BUILT_WITH_TORCH", f'"{torch.__version__}"'),
        ("SYNCBN_BUILT_WITH_CUDA", "false"),
    ],
    extra_compile_args=COMPILE_FLAGS,
)

print(
    f"syncbn {VERSION}: CPU operators, built with torch {torch.__version__} "
    f"for torch {OLDEST_TORCH} and later; no CUDA operators in this version",
    file=sys.stderr,
)

setup(
    version=VERSION,
    license="BSD-3-Clause",  # in here, because setuptools 77 changed its form in pyproject.toml
    ext_modules=[extension],
    cmdclass={"build_ext": BuildHereToo},
)
