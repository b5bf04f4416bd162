"""Compares two runs by their speed relative to torch's layer, measured in the same run.

Absolute times of two runs differ by the load of the machine.
"""

from benchmarks.rows import Row, where

RATIO = "torch/syncbn"


def regressions(old: list[Row], new: list[Row], tolerance: float) -> list[str]:
    """Return a line for each ratio that fell by more than the fraction ``tolerance``.

    Raises:
        ValueError: The results are of different devices, or have no ratio in common.
    """
    devices = {row.device for row in old + new}
    if len(devices) != 1:
        raise ValueError(f"expected results of one device, but got {sorted(devices)}")
    before = {where(row): row for row in old if row.variant == RATIO}
    pairs = [
        (before[where(row)], row) for row in new if row.variant == RATIO and where(row) in before
    ]
    if not pairs:
        raise ValueError("expected results that measured the same, but got none")
    return [
        f"{' '.join(map(str, where(now)))}: {then.median:.2f} -> {now.median:.2f} times torch"
        for then, now in pairs
        if not now.median >= then.median * (1 - tolerance)  # also for NaN
    ]
