"""Detection of tracers and of recomputation."""

from syncbn import _torch_private

__all__ = ["forward_direction", "is_recomputation", "is_recorded"]


def is_recorded() -> bool:
    """Whether a tracer records this call; not to be asked where torch.compile traces.

    That is torch.export, make_fx or AOTAutograd by itself, or a tool that is built on them, such as
    pipelines and quantization-aware training. The user of the graph may differentiate it.
    """
    return (
        _torch_private.is_exporting()
        or _torch_private.is_dispatch_key_included(_torch_private.PRE_DISPATCH)
        or (_torch_private.num_dispatch_modes() > 0 and _torch_private.is_mode_recording())
    )


def is_recomputation() -> bool:
    """Whether this forward pass runs inside a backward pass: activation checkpointing's second run.

    The first run has updated the running statistics.
    """
    return _torch_private.graph_task_id() != -1


def forward_direction() -> str:
    """Return what this forward pass is called between ranks."""
    return "recomputation" if is_recomputation() else "forward"
