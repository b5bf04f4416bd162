"""Writes the README's table from benchmarks/results/*.csv: ``python benchmarks/table.py``."""

import argparse
import statistics
import textwrap
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


OPERATORS = (
    "batch_norm_stats",
    "batch_norm_apply",
    "batch_norm_backward_reduce",
    "batch_norm_backward_apply",
)

_ON_CPU = (
    "one process without communication on {device} with {threads} threads: speedup over torch's "
    "BatchNorm"
)
_ON_CUDA = (
    "a group of one rank over NCCL on {device}: speedup over torch's SyncBatchNorm (ResNet-50: all "
    "53 of its batch norm layers for so many images)"
)


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
    overhead = {key[-1]: row.median for key, row in shown.items() if key[0] == "overhead"}
    noise = [abs(r.median - 1) for r in shown.values() if r.variant == "syncbn again/syncbn"]
    on_cuda = any(row.benchmark == "launches" for row in rows)
    subject = (_ON_CUDA if on_cuda else _ON_CPU).format(device=first.device, threads=threads)
    sentences = [
        f"One training step, forward and backward, of one layer in {subject}, and in brackets the "
        "speed relative to copying the same bytes.",
        f"Repeated measurements differ by up to {max(noise):.0%}.",
        f"A step of a tiny layer takes {overhead['syncbn']:.0f} us, with torch's layer "
        f"{overhead['torch']:.0f} us.",
        f"Measured on {first.date} at commit {first.commit} with torch {first.torch}.",
    ]
    if not on_cuda:
        sentences.append(
            "Tensors of `memory` are meant to fit no cache, those of `cache` the last one."
        )
    sentences += _default_allocator(rows)
    results = f"benchmarks/results/{first.device}"
    sentences.append(
        f"[All figures]({results}.csv), and two pictures: [against torch]({results}-torch.png), "
        f"[against copying]({results}-copy.png)."
    )
    lines = [
        *textwrap.wrap(" ".join(sentences), 100, break_long_words=False, break_on_hyphens=False),
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
    if on_cuda:
        lines += ["", *_operators_of_nets(rows)]
    return "\n".join(lines) + "\n"


def _default_allocator(rows: list[Row]) -> list[str]:
    """Return a sentence on what the table leaves out: the C library's own ways with memory."""
    speed = [
        row.median
        for row in rows
        if _is_layer(row)
        and row.allocator == "default"
        and (row.dtype, row.layout) in COLUMNS
        and (row.quantity, row.variant) == ("forward+backward", "torch/syncbn")
    ]
    if not speed:
        return []
    return [
        "Memory was reused, as in a long training; where the system provides each large output "
        f"anew, the speedups are {min(speed):.2f} to {max(speed):.2f}, half of them below "
        f"{statistics.median(speed):.2f}."
    ]


def _operators_of_nets(rows: list[Row]) -> list[str]:
    """Return the table of the operators' speed over all layers of a net."""
    nets = dict.fromkeys(row.case for row in rows if row.benchmark == "operators of a net")
    speed = {
        (row.case, row.quantity, row.dtype, row.layout): f"{row.median:.0%}"
        for row in rows
        if row.benchmark == "operators" and row.variant == "copy/syncbn"
    }
    lines = [
        "Each operator's share of the speed of copying as many bytes as it moves:",
        "",
        f"| layers of | operator | {' | '.join(COLUMNS.values())} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for net in nets:
        for operator in OPERATORS:
            cells = [speed.get((net, operator, *kind), "") for kind in COLUMNS]
            lines.append(f"| {net} | {operator} | {' | '.join(cells)} |")
    return lines


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
