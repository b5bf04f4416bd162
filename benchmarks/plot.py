"""Draws a file of results: ``python benchmarks/plot.py FILE.csv`` puts the PNGs beside it."""

import argparse
from pathlib import Path

from matplotlib.figure import Figure
from rows import Row, read

SUBTITLE = "bars: medians, whiskers: quartiles"


def _label(row: Row) -> str:
    layout = " channels_last" if row.layout == "channels_last" else ""
    return f"{row.case} {row.dtype}{layout}"


def _bars(rows: list[Row], series: dict[str, list[Row]], title: str, mark: str) -> Figure:
    """Draw a group of bars for each input, with a line where the ratio is 1."""
    labels = list(dict.fromkeys(map(_label, rows)))
    figure = Figure(figsize=(9, 2 + 0.2 * len(labels) * len(series)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [labels.index(_label(row)) + (number + 0.5) * height - 0.4 for row in values]
        medians = [row.median for row in values]
        whiskers = [
            [row.median - row.q1 for row in values],
            [row.q3 - row.median for row in values],
        ]
        axes.barh(places, medians, height, xerr=whiskers, label=name, error_kw={"lw": 0.8})
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.set_xlabel(mark)
    first = rows[0]
    origin = f"{first.device}, {first.date}, commit {first.commit}"
    axes.set_title(f"{title}\n{origin}\n{SUBTITLE}", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw(path: Path) -> list[Path]:
    """Draw both figures: the speed against torch, and as a fraction of copying."""
    results = [row for row in read(path) if row.allocator == "tuned"]
    theirs = "BatchNorm"
    if any(row.benchmark == "launches" for row in results):  # on CUDA
        theirs = "SyncBatchNorm"
    # Of a net all layers together.
    rows = [row for row in results if row.benchmark in ("layer", "operators")]
    against_torch = [r for r in rows if r.benchmark == "layer" and r.variant == "torch/syncbn"]
    threads = sorted({row.threads for row in against_torch})
    ratio = {
        f"{quantity}, threads: {number}": [
            row for row in against_torch if (row.quantity, row.threads) == (quantity, number)
        ]
        for quantity in ("forward", "forward+backward")
        for number in threads
    }
    against_copy = [r for r in rows if r.variant == "copy/syncbn" and r.threads == threads[-1]]
    quantities = dict.fromkeys(row.quantity for row in against_copy)
    copy = {name: [row for row in against_copy if row.quantity == name] for name in quantities}

    drawn = []
    for name, figure in (
        ("torch", _bars(against_torch, ratio, "Speed of syncbn", f"times torch's {theirs}")),
        ("copy", _bars(against_copy, copy, "Speed of syncbn", "fraction of copying's speed")),
    ):
        drawn.append(path.with_name(f"{path.stem}-{name}.png"))
        figure.savefig(drawn[-1], dpi=120)
    return drawn


def main() -> None:
    """Draw the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    for path in draw(parser.parse_args().results):
        print(path)


if __name__ == "__main__":
    main()
