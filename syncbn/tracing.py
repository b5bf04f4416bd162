"""Who runs the layer: a program, a tracer that records it, or a recomputation."""

import torch
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch

__all__ = ["is_recomputation", "is_recorded"]


def is_recorded() -> bool:
    """Whether a graph is recorded that may be differentiated, or anything, by whoever gets it.

    So do torch.export, make_fx and AOTAutograd by itself, and what is built on them, such as
    pipelines and quantization-aware training; not torch.compile.
    """
    # is_exporting() is true on 2.11 wherever torch.compile traces.
    if torch.compiler._is_exporting_flag:
        return True
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_dispatch_mode(_TorchDispatchModeKey.FUNCTIONAL) is not None
        or _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY) is not None
    )


def is_recomputation() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing's second run.

    Its statistics have been counted by the first.
    """
    return torch._C._current_graph_task_id() != -1
