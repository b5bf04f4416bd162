"""Timing of calls: the host's clock, and the interleaving of variants in one process."""

import math
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # the seconds that one of so many calls in a row takes


def host_clock(call: Call, calls: int) -> float:
    """Return the seconds that one of ``calls`` calls in a row takes the host."""
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
    """Time all variants in turn, ``repeats`` times over, so that drift meets them alike.

    Returns:
        For each variant the seconds per call of each round, by its clock. Samples of one round lie
        side by side in time: their ratio is steadier than their values.
    """
    calls = {}
    for name, call in variants.items():
        call()  # the first one allocates, and starts threads
        calls[name] = max(1, math.ceil(sample_seconds / max(clocks[name](call, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            if calls[name] > 1:
                call()  # fills the caches anew; long calls do not profit from them
            samples[name].append(clocks[name](call, calls[name]))
    return samples
