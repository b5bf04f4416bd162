"""Finds what became slower: ``python benchmarks/compare.py OLD.csv NEW.csv --tolerance 0.1``.

Compares the speed against torch's layer, measured in the same run, and not times: those of two
runs differ by what else the machine does. Exits with 1 if something became slower.
"""

import argparse
import sys
from pathlib import Path

from rows import Row, read, where

RATIO = "torch/syncbn"


def regressions(old: list[Row], new: list[Row], tolerance: float) -> list[str]:
    """Return a line for each ratio that fell by more than ``tolerance``, a fraction of the old.

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
        if not now.median >= then.median * (1 - tolerance)  # so that NaN is caught
    ]


def main() -> None:
    """Compare two files and print what became slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.1, help="as a fraction")
    args = parser.parse_args()
    found = regressions(read(args.old), read(args.new), args.tolerance)
    print("\n".join(found) or "nothing became slower")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
