"""For pytest on the stand-in: benchmarks count launches and waits by its log, not by a profiler."""

import ctypes
from typing import Any

import pytest


def take_log() -> list[tuple[str, str]]:
    """Return the events since the last call: a kind and a name."""
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.standin_take_log.restype = ctypes.c_char_p
    lines = runtime.standin_take_log().decode().splitlines()
    return [(kind, name) for kind, _, name in (line.partition(" ") for line in lines)]


def record_launches(call: Any) -> Any:
    """Do as :func:`benchmarks.measure.record_launches`."""
    import torch

    from benchmarks.measure import Launches

    take_log()
    call()
    log = take_log()
    torch.cuda.synchronize()
    # A collective is a kernel of NCCL's, as in a profile.
    log = [("kernel", f"nccl {n}") if kind == "collective" else (kind, n) for kind, n in log]
    kinds = ("kernel", "copy", "wait")
    return Launches(*([name for kind, name in log if kind == each] for each in kinds))


def count_by_log() -> None:
    """Have benchmarks count launches by the log."""
    from benchmarks import measure

    measure.record_launches = record_launches


def pytest_configure(config: pytest.Config) -> None:
    count_by_log()
