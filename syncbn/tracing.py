"""Who runs the layer: a program, a tracer that records it, or a recomputation."""

import torch

__all__ = ["is_recomputation", "is_recorded"]

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_RECORDING_MODES = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


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
    if torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH):
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _RECORDING_MODES)


def is_recomputation() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing's second run.

    Its statistics have been counted by the first.
    """
    return torch._C._current_graph_task_id() != -1
