"""Timing of calls: the host clock, and interleaved variants in one process."""

import math
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # returns seconds per call of that many calls in a row


def host_clock(call: Call, calls: int) -> float:
    """Return the host's seconds per call of ``calls`` calls in a row."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def interleave(
    variants: Mapping[str, Call],
    clocks: Mapping[str, Clock],
    repeats: int,
    sample_seconds: float,
) -> dict[str, list[float]]:
    """Time all variants in turn, for ``repeats`` rounds, so that drift affects all alike.

    Returns:
        Seconds per call by variant and round, measured by its clock. Samples of one round are
        adjacent in time: their ratio is steadier than their values.
    """
    calls = {}
    for name, call in variants.items():
        call()  # the first call allocates, and starts threads
        calls[name] = max(1, math.ceil(sample_seconds / max(clocks[name](call, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            if calls[name] > 1:
                call()  # refills the caches; long calls do not need it
            samples[name].append(clocks[name](call, calls[name]))
    return samples
