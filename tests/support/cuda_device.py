"""The CUDA device that tests run on: a GPU, or the stand-in of tests/standin."""

import ctypes

IS_STANDIN = hasattr(ctypes.CDLL(None), "standin_take_log")

# On the stand-in Triton's kernels do nothing: there a graph runs as AOTAutograd makes it.
COMPILER = "aot_eager" if IS_STANDIN else "inductor"
