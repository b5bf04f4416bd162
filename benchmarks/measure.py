"""Measures calls: time by the clocks of host and GPU, launches and waits by torch's profiler."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # returns seconds per call of that many calls in a row
Samples = dict[str, list[float]]  # seconds by variant and round

SLEEP_CYCLES_PER_SECOND = 2e9  # at least; slower GPUs sleep longer
LAUNCHES_AHEAD = 400  # a stream queues about a thousand before the host must wait

_RANGE = "the call whose launches are counted"


def host_clock(call: Call, calls: int) -> float:
    """Return the host's seconds per call of ``calls`` calls in a row."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def eager_clock(call: Call, calls: int) -> float:
    """Return the seconds per call on the GPU, from the first call's start to the last one's end."""
    torch.cuda.synchronize()
    return elapsed(call, calls)


def gpu_clock(call: Call, calls: int) -> float:
    """Like eager_clock, without host time: the GPU sleeps until all calls are launched."""
    calls = min(calls, LAUNCHES_AHEAD)
    torch.cuda.synchronize()
    seconds = host_clock(call, calls)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.5 * seconds * calls * SLEEP_CYCLES_PER_SECOND))
    return elapsed(call, calls)


def launch_clock(call: Call, calls: int) -> float:
    """Return the host's seconds per call, while the GPU is idle."""
    torch.cuda.synchronize()
    return host_clock(call, min(calls, LAUNCHES_AHEAD // 8))


def elapsed(call: Call, calls: int) -> float:
    """Return the seconds per call between two events, before and after the calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def interleave(
    variants: Mapping[str, Call],
    clocks: Mapping[str, Clock],
    repeats: int,
    sample_seconds: float,
) -> Samples:
    """Time all variants in turn, for ``repeats`` rounds, so that drift affects all alike.

    Returns:
        Seconds per call by variant and round, measured by its clock. Samples of one round are
        adjacent in time: their ratio is steadier than their values.
    """
    calls = {}
    for name, call in variants.items():
        call()  # the first call allocates, and starts threads
        calls[name] = max(1, math.ceil(sample_seconds / max(clocks[name](call, 1), 1e-7)))
    samples: Samples = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            if calls[name] > 1:
                call()  # refills the caches; long calls do not need it
            samples[name].append(clocks[name](call, calls[name]))
    return samples


class Launches(NamedTuple):
    """Names, in the order of the trace."""

    kernels: list[str]
    copies: list[str]  # memory copies and memsets
    waits: list[str]  # CUDA runtime or driver calls that wait for the GPU


def record_launches(call: Call) -> Launches:
    """Return the launches of ``call()``; run it once before, so that setup is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        # Without acc_events the profiler warns about a second cycle, which does not exist.
        with profile(activities=activities, acc_events=True) as profiler:
            with record_function(_RANGE):
                call()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return read_launches(json.loads(path.read_text())["traceEvents"])


def read_launches(events: Iterable[Mapping[str, Any]]) -> Launches:
    """Return the launches in the events of a trace.

    Raises:
        ValueError: The trace does not show the call.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [
        event
        for event in complete
        if event.get("cat") == "user_annotation" and event["name"] == _RANGE
    ]
    if len(ranges) != 1:
        raise ValueError(f"expected one range {_RANGE!r} in the trace, but got {len(ranges)}")
    begin = ranges[0]["ts"]
    end = begin + ranges[0]["dur"]

    def names(*categories: str) -> list[str]:
        return [event["name"] for event in complete if event.get("cat") in categories]

    waits = [
        event["name"]
        for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and begin <= event["ts"] <= end
        and "Synchronize" in event["name"]
    ]
    return Launches(names("kernel"), names("gpu_memcpy", "gpu_memset"), waits)
