"""Runners of a layer other than a program: tracers that record it, and recomputations."""

import torch

from syncbn import _torch_private

__all__ = ["is_recomputation", "is_recorded"]


def is_recorded() -> bool:
    """Whether a graph is recorded that may be differentiated, or anything, by whoever gets it.

    So do torch.export, make_fx and AOTAutograd by itself, and what is built on them, such as
    pipelines and quantization-aware training; not torch.compile.
    """
    if torch.compiler.is_compiling():
        return _torch_private.is_exporting()
    if _torch_private.is_dispatch_key_included(_torch_private.PRE_DISPATCH):
        return True
    return _torch_private.num_dispatch_modes() > 0 and _torch_private.is_mode_recording()


def is_recomputation() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing's second run.

    Its statistics have been counted by the first.
    """
    return _torch_private.graph_task_id() != -1
