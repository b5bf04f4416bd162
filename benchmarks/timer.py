"""Times calls: the clock, and the interleaving of variants in one process."""

import math
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]

CPU = torch.device("cpu")


def timer(call: Call, calls: int, device: torch.device) -> float:
    """Return the seconds that one of ``calls`` calls in a row takes.

    On CUDA, untested on a GPU: between two events on the current stream, which is the device's
    time, or the host's where that is the longer one. With the CPU as ``device``, calls that work
    on CUDA are timed as the host sees them: what it takes to launch.
    """
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def interleave(
    variants: Mapping[str, Call], device: torch.device, repeats: int, sample_seconds: float
) -> dict[str, list[float]]:
    """Time all variants in turn, ``repeats`` times over, so that drift meets them alike.

    Returns:
        For each variant the seconds per call of each round. Samples of one round lie side by side
        in time: their ratio is steadier than their values.
    """
    calls = {}
    for name, call in variants.items():
        call()  # the first one allocates, and starts threads
        calls[name] = max(1, math.ceil(sample_seconds / max(timer(call, 1, device), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            if calls[name] > 1:
                call()  # fills the caches anew; long calls do not profit from them
            samples[name].append(timer(call, calls[name], device))
    return samples
