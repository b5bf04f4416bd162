"""Clocks of a GPU: seconds of its own, of a layer as it trains, and of the host that launches."""

import torch

from benchmarks.timer import Call, host_clock

SLEEP_CYCLES_PER_SECOND = 2e9  # at least: of slower GPUs the sleep takes longer
LAUNCHES_AHEAD = 400  # a stream takes about a thousand before the host has to wait


def eager_clock(call: Call, calls: int) -> float:
    """Return the seconds between the first call's begin and the last one's end on the GPU."""
    torch.cuda.synchronize()
    return _elapsed(call, calls)


def gpu_clock(call: Call, calls: int) -> float:
    """Return the same without the host's: the GPU sleeps until all calls are launched."""
    calls = min(calls, LAUNCHES_AHEAD)
    torch.cuda.synchronize()
    seconds = host_clock(call, calls)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.5 * seconds * calls * SLEEP_CYCLES_PER_SECOND))
    return _elapsed(call, calls)


def launch_clock(call: Call, calls: int) -> float:
    """Return the seconds that the host takes, with nothing for the GPU to be late with."""
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
