"""Writes the README's table from benchmarks/results/*.csv: ``python benchmarks/table.py``."""

import argparse
from pathlib import Path

from rows import RESULTS, Row, read

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- benchmark table -->\n"
END = "<!-- end of benchmark table -->\n"
NO_RESULTS = "`make bench` measures the machine it runs on and writes the results here.\n"

COLUMNS = {
    ("float32", "contiguous"): "float32",
    ("float32", "channels_last"): "float32 channels_last",
    ("bfloat16", "contiguous"): "bfloat16",
    ("bfloat16", "channels_last"): "bfloat16 channels_last",
}


def text(results: list[list[Row]]) -> str:
    """Return what stands between the markers: a table for each device, or how to get one."""
    return "\n".join(_device(rows) for rows in results) or NO_RESULTS


def _device(rows: list[Row]) -> str:
    threads = max(row.threads for row in rows if row.benchmark == "layer")
    shown = {
        (row.benchmark, row.case, row.shape, row.dtype, row.layout, row.variant): row
        for row in rows
        if row.quantity == "forward+backward"
        and row.threads == threads
        and row.allocator == "tuned"
        and row.kind == "measured"
    }
    cases = dict.fromkeys((row.case, row.shape) for row in shown.values() if _is_layer(row))
    first = rows[0]
    overhead = next(
        row.median for key, row in shown.items() if key[0] == "overhead" and key[-1] == "syncbn"
    )
    noise = [abs(r.median - 1) for r in shown.values() if r.variant == "syncbn again/syncbn"]
    lines = [
        f"{first.device}, {threads} threads: how many times as fast as torch's BatchNorm training",
        "is, forward and backward, and in brackets the fraction of the speed of copying the same",
        f"bytes. Two measurements of the same differ by up to {max(noise):.0%}; the host takes",
        f"{overhead:.0f} us for a step of a tiny layer. Measured on {first.date} at commit",
        f"{first.commit} with torch {first.torch}.",
        "",
        f"| case | shape | {' | '.join(COLUMNS.values())} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for case, shape in cases:
        cells = []
        for dtype, layout in COLUMNS:
            key = ("layer", case, shape, dtype, layout)
            speed, copy = (shown.get((*key, v)) for v in ("torch/syncbn", "copy/syncbn"))
            if speed is None or copy is None:
                cells.append("")
            else:
                cells.append(f"{speed.median:.2f} ({copy.median:.0%})")
        lines.append(f"| {case} | {shape} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _is_layer(row: Row) -> bool:
    return row.benchmark == "layer"


def replaced(readme: str, table: str) -> str:
    """Return the README with the table between its markers.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r}")
    return before + begin + table + end + after


def main() -> None:
    """Rewrite the README in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the CSVs")
    args = parser.parse_args()
    results = [read(path) for path in sorted(args.results.glob("*.csv"))]
    args.readme.write_text(replaced(args.readme.read_text(), text(results)))


if __name__ == "__main__":
    main()
