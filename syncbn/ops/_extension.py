"""Loads the compiled operators, or raises ImportError with the reason and advice."""

import re
from pathlib import Path
from typing import Any

import torch

_OLDEST_TORCH = (2, 11)


_version = re.match(r"(\d+)\.(\d+)", torch.__version__)
if _version is None:
    raise ImportError(f"syncbn cannot read torch's version {torch.__version__!r}")
if (int(_version[1]), int(_version[2])) < _OLDEST_TORCH:
    raise ImportError(
        f"syncbn needs torch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or later, but found torch "
        f"{torch.__version__}. Upgrade it: pip install --upgrade torch"
    )

try:
    from syncbn import _compat as _compat
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"this version of syncbn does not know torch {torch.__version__}: {error}. Upgrade syncbn, "
        "or install an earlier torch"
    ) from error

try:
    from syncbn import _C
except ImportError as error:
    raise ImportError(
        f"syncbn's compiled operators cannot be loaded: {error}\n"
        f"  Python looked in {Path(__file__).parents[1]}, with torch "
        f"{torch.__version__}.\n"
        "  In a source checkout, install it first: pip install --no-build-isolation .\n"
        "  Elsewhere, build it again from its sources: "
        "pip install --force-reinstall --no-deps --no-cache-dir PATH_TO_SOURCES"
    ) from error

build_info: dict[str, Any] = _C.build_info()


def _load_cuda() -> str:
    """Load the CUDA operators; return why there are none, or nothing."""
    if not build_info["cuda_architectures"]:
        return (
            "it was built without them; rebuild it where nvcc is, with SYNCBN_CUDA=1 in the "
            "environment to see what is missing"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        operators = Path(_C.__file__)
        # Built for the same Python, of which a source checkout may hold more than one's.
        torch.ops.load_library(operators.with_name(operators.name.replace("_C", "_cuda", 1)))
    except OSError as error:
        return f"its library of CUDA operators cannot be loaded: {error}"
    return ""


# The reason for no CUDA operators; empty if there are some.
cuda_missing: str = _load_cuda()

# Devices that the operators run on; "meta" computes shapes only.
device_types: tuple[str, ...] = ("cpu", "meta") if cuda_missing else ("cpu", "cuda", "meta")
