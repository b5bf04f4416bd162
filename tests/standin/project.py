"""The package whose kernels run on the stand-in; no other file of this folder knows it.

To use this folder for another package, rewrite this file.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tools import cuda  # noqa: E402

BUILD = ROOT / "build"  # for the folders of builds
PACKAGE = "syncbn"  # as it is installed
OPERATORS = "_cuda"  # the package's library of CUDA operators, which the build replaces
ADAPTERS = ROOT / "csrc" / "cuda"  # .cpp files of that library
KERNELS = [*sorted((ADAPTERS / "kernels").glob("*.cu")), ADAPTERS / "counters.cu"]
DEFINES = ["-DUSE_CUDA"]

NVCC = cuda.find("bin/nvcc")

# For programs on the stand-in, whose current folder is not on the path: other packages to import,
# and a plugin of pytest with its folder.
PACKAGES = [ROOT / "benchmarks"]
PLUGIN = "standin_plugin"
PLUGIN_FOLDER = ROOT / "tests" / "support"
