"""Clocks for GPUs: GPU time, time of an eager layer, and host time of the launches."""

import torch

from benchmarks.timer import Call, host_clock

SLEEP_CYCLES_PER_SECOND = 2e9  # at least; slower GPUs sleep longer
LAUNCHES_AHEAD = 400  # a stream queues about a thousand before the host must wait


def eager_clock(call: Call, calls: int) -> float:
    """Return the seconds per call on the GPU, from the first call's begin to the last one's end."""
    torch.cuda.synchronize()
    return _elapsed(call, calls)


def gpu_clock(call: Call, calls: int) -> float:
    """Return the same without host time: the GPU sleeps until all calls are launched."""
    calls = min(calls, LAUNCHES_AHEAD)
    torch.cuda.synchronize()
    seconds = host_clock(call, calls)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.5 * seconds * calls * SLEEP_CYCLES_PER_SECOND))
    return _elapsed(call, calls)


def launch_clock(call: Call, calls: int) -> float:
    """Return the host's seconds per call, while the GPU is idle."""
    torch.cuda.synchronize()
    return host_clock(call, min(calls, LAUNCHES_AHEAD // 8))


def _elapsed(call: Call, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
