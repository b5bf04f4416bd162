"""Files of CUDA: from the toolkit, or from installed packages."""

import sys
from glob import glob
from pathlib import Path

from torch.utils import cpp_extension


def find(name: str) -> Path | None:
    """Return a file such as ``bin/nvcc`` from the first CUDA that has it.

    The order is the same as in setup.py, which cannot import this: the toolkit, the newest package.
    """
    homes = [cpp_extension.CUDA_HOME] if cpp_extension.CUDA_HOME else []
    homes += [
        home for path in sys.path for home in sorted(glob(f"{path}/nvidia/cu*"), reverse=True)
    ]
    return next((file for home in homes if (file := Path(home) / name).exists()), None)
