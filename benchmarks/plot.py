"""Picture of a file of results: two tables, cells colored by speed."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.rows import Row, read
from benchmarks.steps import case_name, column, is_cuda, training_steps

# At a width of 800 pixels, an inch has 100 pixels and a point 1.4; the file has twice as many.
WIDTH, LINE, AROUND_LINES = 8.0, 0.23, 2.0  # inches
DPI = 200
TEXT, TITLE = 7.5, 9  # points

Cells = dict[str, dict[str, float]]  # by names of line and column


def draw(path: Path) -> Path:
    """Draw a file of results into the same folder; return the picture's path."""
    drawn = path.with_suffix(".png")
    picture(read(path)).savefig(drawn)
    return drawn


def picture(rows: list[Row]) -> Figure:
    """Return the speed relative to torch and, below, to copying (for nets also by operator)."""
    steps = training_steps(rows)
    nets = {row.case for row in rows if row.benchmark == "operators of a net"}
    operators = [row for row in rows if row.benchmark == "operators" and row.case in nets]
    speed = _cells(steps, "torch/syncbn")
    copying = _cells([*steps, *operators], "copy/syncbn")
    lines = [len(speed), len(copying)]
    size = (WIDTH, AROUND_LINES + LINE * sum(lines))
    layout = ConstrainedLayoutEngine(hspace=0.05)  # between the tables
    figure = Figure(size, dpi=DPI, layout=layout)
    above, below = figure.subplots(2, 1, height_ratios=lines)

    first = steps[0]
    where, theirs = f"{first.device} with {first.threads} threads", "BatchNorm"
    share = "share of the speed of copying as many bytes"
    if is_cuda(rows):
        where, theirs = first.device, "SyncBatchNorm"
    else:
        share += ";\na copy also reads what it overwrites"
    figure.suptitle(
        f"syncbn: speed of a training step, forward and backward, on {where}\n"
        f"medians of {first.date}, commit {first.commit}, torch {first.torch}",
        fontsize=TITLE,
    )
    found = [value for by_column in speed.values() for value in by_column.values()]
    # Symmetric around 1, so that 1 is white, the middle of the colors.
    limit = max(2, *found, *(1 / value for value in found))
    title = f"times torch's {theirs}: 1.00 is equal, blue is faster, red is slower"
    _panel(above, speed, title, "RdBu", LogNorm(1 / limit, limit), "{:.2f}")
    _panel(below, copying, share, "Greens", Normalize(0, 1.2), "{:.0%}")
    return figure


def _cells(rows: list[Row], variant: str) -> Cells:
    cells: Cells = {}
    for row in rows:
        line = f"{case_name(row)}  {row.shape}"
        if row.benchmark == "operators":
            line = f"{row.case}  {row.quantity.removeprefix('batch_norm_')}"
        if row.variant == variant:
            cells.setdefault(line, {})[column(row)] = row.median
    return cells


def _panel(axes: Axes, cells: Cells, title: str, colors: str, scale: Normalize, form: str) -> None:
    """Draw a table; unmeasured cells stay empty."""
    columns = list(dict.fromkeys(name for by_column in cells.values() for name in by_column))
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(cells), 0)
    axes.set_xticks([n + 0.5 for n in range(len(columns))], [c.replace(" ", "\n") for c in columns])
    axes.set_yticks([n + 0.5 for n in range(len(cells))], list(cells))
    axes.tick_params(length=0, labelsize=TEXT, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=TITLE, fontweight="bold", loc="left")
    for line, by_column in enumerate(cells.values()):
        for name, value in by_column.items():
            x = columns.index(name)
            color = colormaps[colors](scale(value))
            axes.fill([x, x + 1, x + 1, x], [line, line, line + 1, line + 1], fc=color, ec="white")
            # Black text on light cells, by perceived lightness.
            light = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2] > 0.5
            ink = "black" if light else "white"
            where = (x + 0.5, line + 0.5)
            axes.annotate(form.format(value), where, ha="center", va="center", size=TEXT, color=ink)
