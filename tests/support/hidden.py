"""Hides the CPU operators: SYNCBN_HIDE_OPERATORS=1 pytest ...; syncbn/ops/fallback.py computes.

Ranks of a test read the environment too.
"""

import os
import warnings

import torch

from syncbn.ops import _extension, fallback

VARIABLE = "SYNCBN_HIDE_OPERATORS"

# Tests that do not test the expressions, and the reason for each.
NOT_RUN = {
    "tests/layer/test_plain.py": "has devices of its own",
    "tests/layer/test_hidden.py": "runs these tests itself",
    "tests/ranks/test_plain_ranks.py": "has devices of its own",
    "tests/ranks/test_restart.py": "starts processes in which no operator is hidden",
    "tests/operators/test_activations.py::test_arguments_that_do_not_fit": "the layer checks",
    "tests/operators/test_batch_norm_apply.py::test_aborted_rank_is_an_error_or_nan_and_changes"
    "_nothing": "sums without a tail are not verified",
    "tests/operators/test_tail.py::test_bad_tail_is_named": "the operators check",
    "tests/operators/test_tail.py::test_sums_to_verify_must_have_a_tail": "the layer checks",
}

_libraries: list[torch.library.Library] = []


def is_asked_for() -> bool:
    """Return whether the environment asks for hidden operators."""
    return bool(os.environ.get(VARIABLE))


def hide() -> None:
    """Hide the operators in this process if the environment asks for it."""
    if not is_asked_for() or _libraries:
        return
    _extension.device_types = tuple(t for t in _extension.device_types if t != "cpu")
    library = torch.library.Library("syncbn", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for name, operator in fallback.OPERATORS.items():
            library.impl(name, fallback.for_other_devices(operator), allow_override=True)
    _libraries.append(library)  # for as long as the process
