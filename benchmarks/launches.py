"""Counts a call's GPU launches and host waits by torch's profiler."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "the call whose launches are counted"


class Launches(NamedTuple):
    """Names, in the order of the trace."""

    kernels: list[str]
    copies: list[str]  # memory copies and memsets
    waits: list[str]  # CUDA runtime or driver calls that wait for the GPU


def record_launches(call: Any) -> Launches:
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
