"""Hides the CPU operators: SYNCBN_HIDE_OPERATORS=KIND pytest ...; syncbn/ops/fallback.py computes.

KIND is "float64": CPU tensors go to the expressions as they are; or "float32": they go to a
stand-in device that has no float64 (standin.py), and the results come back. A float64 tensor, which
such a device cannot have, stays. Ranks of a test are told by the environment.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import standin
import torch
from torch import Tensor

from syncbn.ops import _extension, fallback

VARIABLE = "SYNCBN_HIDE_OPERATORS"
KINDS = ("float64", "float32")
# Tensors of batches and of a layer. The others of an operator are statistics.
_OF_DEVICE = ("grad_output", "input", "weight", "bias", "running_mean", "running_var")
_OF_DEVICE += ("num_batches_tracked", "residual", "output")

# Tests that are not of what the expressions compute, and the reason for each.
NOT_RUN = {
    "tests/layer/test_plain.py": "has devices of its own",
    "tests/layer/test_hidden.py": "runs what runs here",
    "tests/ranks/test_plain_ranks.py": "has devices of its own",
    "tests/operators/test_activations.py::test_arguments_that_do_not_fit": "the layer checks",
    "tests/operators/test_tail.py::test_sums_to_verify_must_have_a_tail": "the layer checks",
}

_libraries: list[torch.library.Library] = []


def kind() -> str | None:
    """Return how the operators are hidden; None if they are not."""
    found = os.environ.get(VARIABLE) or None
    if found not in (None, *KINDS):
        raise ValueError(f"expected {VARIABLE} to be one of {KINDS}, but got {found!r}")
    return found


def hide() -> None:
    """Hide the operators in this process if the environment asks for it."""
    how = kind()
    if how is None or _libraries:
        return
    if how == "float32":
        standin.install()
        standin.set_float64(False)
    _extension.device_types = tuple(t for t in _extension.device_types if t != "cpu")
    library = torch.library.Library("syncbn", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for operator in fallback.OPERATORS:
            function = _through_device(operator) if how == "float32" else operator
            library.impl(operator.__name__, function, allow_override=True)
    _libraries.append(library)  # for as long as the process


def sum_errors(x: Tensor) -> dict[str, Tensor] | None:
    """Return bounds of errors in sums over a batch that are of float32; None for those of float64.

    The sums are of float32 where float64 is hidden, while torch's own on the CPU are of float64;
    and within a thread and a block on CUDA, where torch's may be exact by chance. The sum of n
    terms of random signs is about the root of n: 16 roundings of that, in a cascade of partial
    sums.
    """
    if x.dtype == torch.float64 or not (x.is_cuda or kind() == "float32"):
        return None
    values = torch.tensor(x.numel() / x.size(1))
    error = 8 * torch.finfo(torch.float32).eps * values.sqrt()
    return {"grad_weight": error, "grad_bias": error}


def _through_device(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator on the stand-in device, as an operator of CPU tensors."""
    schema = getattr(torch.ops.syncbn, operator.__name__).default._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    on_device = [a.name in _OF_DEVICE for a in schema.arguments]

    @functools.wraps(operator)
    def call(*arguments: Any) -> Any:
        tensors = [a for a, on in zip(arguments, on_device, strict=False) if on]
        if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in tensors):
            return operator(*arguments)
        moved = [
            argument.to("standin") if on and isinstance(argument, Tensor) else argument
            for argument, on in zip(arguments, on_device, strict=False)
        ]
        results = getattr(torch.ops.syncbn, operator.__name__).default(*moved)
        for argument, there, is_written in zip(arguments, moved, written, strict=False):
            if is_written and there is not argument:
                argument.data.copy_(there)  # as the operators leave the version
        if isinstance(results, Tensor):
            return results.cpu()
        return tuple(result.cpu() for result in results)

    return call
