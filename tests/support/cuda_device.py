"""The CUDA device that tests run on: a GPU, or the stand-in of tests/standin."""

import ctypes

IS_STANDIN = hasattr(ctypes.CDLL(None), "standin_take_log")

# On the stand-in Triton's kernels do nothing: there a graph runs as AOTAutograd makes it.
COMPILER = "aot_eager" if IS_STANDIN else "inductor"


def fail_launch(number: int, *, ends_device: bool = False) -> None:
    """Have a kernel launch of this process on the stand-in fail: the next one is number 1.

    With ``ends_device`` its device fails as well, for the rest of the process.
    """
    ctypes.CDLL(None).standin_fail_launch(number, ends_device)
