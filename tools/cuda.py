"""CUDA's files: of the toolkit, or of the packages that torch or a user has installed."""

import sys
from glob import glob
from pathlib import Path

from torch.utils import cpp_extension


def find(name: str) -> Path | None:
    """Return a file such as ``bin/nvcc`` of the first CUDA that has it.

    In the order of setup.py, which cannot import this: the toolkit, then the newest package.
    """
    homes = [cpp_extension.CUDA_HOME] if cpp_extension.CUDA_HOME else []
    homes += [
        home for path in sys.path for home in sorted(glob(f"{path}/nvidia/cu*"), reverse=True)
    ]
    return next((file for home in homes if (file := Path(home) / name).exists()), None)
