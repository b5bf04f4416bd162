"""Tables of results, for the README and for a page, and a picture.

They show training steps of layers with all threads. Tables need only Python.
"""

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import RATIO, STEP, Row, read
from benchmarks.traffic import OF_A_NET, OPERATORS, Copy, Kernels, kernels_of

NO_RESULTS = "`make bench` measures the machine it runs on and writes the results here.\n"

# Rows of the README's tables, in this order; the page has all rows.
CASES = {
    "ResNet-50 x32": "layers of ResNet-50, 32 images: time of the host",
    "ResNet-50 x256": "layers of ResNet-50, 256 images: mostly time of the host",
    "memory": "larger than the caches",
    "sweep": "geometric mean over nets",
    "small layer": "tiny",
}
LARGEST_NET = "ResNet-50 x256"
COLUMNS = ("float32", "float32 channels_last", "bfloat16", "bfloat16 channels_last")

ABOVE_ALL = (
    "Below is the speed of one layer's forward and backward pass, without other ranks: 2.00x takes "
    "half the time. Blank cells were not measured."
)
OF_DEVICE = "Relative to {theirs}, on {device} {how}, {date}{brackets}:"
OF_ALLOCATOR = (
    ", in brackets with [an allocator that keeps freed memory]({root}docs/cost.md#memory)"
)
OF_STEP = (
    "A training step of {net}, {images} images of {pixels} pixels, {dtype}, on {device} {how}, "
    "{date}:"
)
ABOVE = (
    "Speed of one layer's forward and backward pass on a {processor}, relative to "
    "{theirs}{brackets}: 2.00x takes half the time."
)
# Sentences below the tables.
ORIGIN = (
    "Measured on {device} {how}, on {date} at commit {commit} with torch {torch}; repeated "
    "measurements differ by up to {noise:.0%}."
)
ON_CPU = (
    "Communication is excluded: `torch.nn.SyncBatchNorm` does not train on CPUs, so there is no "
    "baseline; in one process it is the `BatchNorm` compared here. Tensors of `memory` are meant "
    "to exceed the caches, tensors of `cache` to fit the last one; the small layer has almost "
    "nothing to compute. A blank cell was not measured."
)
OF_SWEEP = (
    "`sweep` is the geometric mean over shapes of {nets}; single shapes range from {low:.2f} to "
    "{high:.2f} with the system's allocator."
)
ON_CUDA = (
    "ResNet-50 is the sum of its 53 batch norm layers for 32 or 256 images, `memory` are tensors "
    "larger than the caches. Each layer is called by itself, so the host bounds the time of small "
    "ones: of ResNet-50 x32, maps 7x7, 2-D, 17 channels and the small layer, and of a part of "
    "ResNet-50 x256. A blank cell was not measured."
)
OF_THEIR_KERNELS = "their kernels alone, relative to copies of as many bytes"
OF_KERNELS = (
    "Kernels of ResNet-50's 53 layers: milliseconds, in brackets the share of a copy's speed. A "
    "copy takes {fixed:.1f} us and the time of its bytes at {bandwidth:.2f} TB/s, and so would an "
    "operator at its speed; `fixed` is the first part for all layers, in milliseconds. Kernels "
    "that only read can be a tenth faster than a copy."
)
ALL = "[All figures and conditions](benchmarks/README.md)."
LINKS = "[The figures](results/{device}.csv) also have operators."
PICTURE = "![The table above as a picture, and how fast copying is.](results/{device}.png)"

# At a width of 800 pixels, an inch has 100 pixels and a point 1.4; the file has twice as many.
WIDTH, LINE, AROUND_LINES = 8.0, 0.23, 2.0  # inches
DPI = 200
TEXT, TITLE = 7.5, 9  # points

Cells = dict[str, dict[str, float]]  # by names of line and column


def training_steps(rows: list[Row], allocator: str = "tuned") -> list[Row]:
    """Return the rows of layers, fused layers, sweeps and the small layer, with an allocator.

    A GPU has one: torch's own, which keeps freed memory.
    """
    names = ("layer", "fused", "sweep", "overhead")
    layers = [row for name in names for row in rows if row.benchmark == name]
    threads = max(row.threads for row in layers)
    how = (STEP, threads, allocator)
    return [row for row in layers if (row.quantity, row.threads, row.allocator) == how]


def case_name(row: Row) -> str:
    """Return the displayed name of a case."""
    return "small layer" if row.benchmark == "overhead" else row.case


def column(row: Row) -> str:
    """Return the dtype, with the layout unless it is contiguous."""
    return row.dtype if row.layout == "contiguous" else f"{row.dtype} {row.layout}"


def is_cuda(rows: list[Row]) -> bool:
    """Whether results are of a GPU: only these count launches."""
    return any(row.benchmark == "launches" for row in rows)


def text(results: list[list[Row]]) -> str:
    """Return the README's block: whole steps, tables of all CPUs and the last GPU, or advice."""
    if not results:
        return NO_RESULTS
    whole = [rows for rows in results if is_of_steps(rows)]
    layers = [rows for rows in results if not is_of_steps(rows)]
    of_gpus = [rows for rows in layers if is_cuda(rows)]
    of_gpus.sort(key=lambda rows: (rows[0].date, rows[0].device))
    shown = [rows for rows in layers if not is_cuda(rows)] + of_gpus[-1:]
    tables = [line for rows in whole for line in _steps(rows)]
    tables += [*_wrapped(ABOVE_ALL), ""] if shown else []
    tables += [line for rows in shown for line in _summary(rows)]
    return "\n".join([*tables, ALL]) + "\n"


def page(results: list[list[Row]]) -> str:
    """Return the page's block: all figures of layers on each device, and their conditions."""
    return "\n".join(_section(rows) for rows in results if not is_of_steps(rows)) or NO_RESULTS


def is_of_steps(rows: list[Row]) -> bool:
    """Whether results are of whole training steps."""
    return rows[0].benchmark.startswith("steps")


def _steps(rows: list[Row]) -> list[str]:
    """Return a table of the last case: milliseconds by variant and mode, on a GPU also memory."""
    case = [row for row in rows if row.shape == rows[-1].shape and row.case == rows[-1].case]
    last, modes = case[-1], list(dict.fromkeys(row.benchmark for row in case))
    cells = {(row.variant, row.benchmark, row.quantity): row for row in case}
    on_gpu = ("BatchNorm2d", modes[0], "peak of memory") in cells
    how = "in a group of one rank over NCCL" if on_gpu else "with one thread for each of two ranks"
    images, _, pixels, _ = last.shape.split("x")
    heading = OF_STEP.format(
        net=last.case,
        images=images,
        pixels=f"{pixels}x{pixels}",
        dtype=last.dtype,
        device=last.device,
        how=how,
        date=last.date,
    )
    lines = [*_wrapped(heading), ""]
    lines += [f"| | {' | '.join(mode.removeprefix('steps, ') for mode in modes)} |"]
    lines += ["|---|" + "---|" * len(modes)]
    for variant in dict.fromkeys(row.variant for row in case):
        texts = []
        for mode in modes:
            step = cells.get((variant, mode, "step"))
            text = "" if step is None else f"{step.median:.{0 if step.median >= 99.5 else 1}f} ms"
            if step is not None and on_gpu:
                text += f", {cells[variant, mode, 'peak of memory'].median:.0f} MiB"
            texts.append(text)
        lines.append(f"| {variant} | {' | '.join(texts)} |")
    return [*lines, ""]


def _summary(rows: list[Row]) -> list[str]:
    setting, table = _setting(rows, root=""), _table("input", rows, CASES)
    of_net = _kernels_by_column(rows, LARGEST_NET, OPERATORS)
    shares = [f"{of_net[name].share:.2f}x" if name in of_net else "" for name in COLUMNS]
    for place, line in enumerate(table):
        if of_net and line.startswith(f"| {CASES[LARGEST_NET]} |"):
            table.insert(place + 1, f"| {OF_THEIR_KERNELS} | | {' | '.join(shares)} |")
            break
    return [*_wrapped(OF_DEVICE.format(**setting)), "", *table, ""]


def _kernels_by_column(rows: list[Row], net: str, operators: tuple[str, ...]) -> dict[str, Kernels]:
    """Return the kernels of a net on a GPU, by dtype and layout."""
    by_column: dict[str, list[Row]] = {}
    for row in rows:
        kind = (row.benchmark, row.case, row.variant)
        if kind == (OF_A_NET, net, "syncbn") and row.quantity in operators:
            by_column.setdefault(column(row), []).append(row)
    if not by_column:
        return {}
    copy = Copy.fitted(rows)
    return {name: kernels_of(of_column, copy) for name, of_column in by_column.items()}


def _nets(rows: list[Row]) -> list[str]:
    """Return the names of the nets whose kernels were measured."""
    names = dict.fromkeys(row.case for row in rows if row.benchmark == OF_A_NET)
    return [name for name in names if name in CASES]


def _kernels(rows: list[Row]) -> list[str]:
    """Return the table of kernels of a GPU's page."""
    nets = _nets(rows)
    if not nets:
        return []
    copy = Copy.fitted(rows)
    words = OF_KERNELS.format(fixed=copy.fixed, bandwidth=2e-6 / copy.per_byte)
    lines = [*_wrapped(words), "", f"| net | operator | fixed | {' | '.join(COLUMNS)} |"]
    lines.append("|---|---|---|" + "---|" * len(COLUMNS))
    for net in nets:
        for name in (*OPERATORS, "all"):
            of = _kernels_by_column(rows, net, OPERATORS if name == "all" else (name,))
            cells = [f"{next(iter(of.values())).fixed / 1e3:.2f}"]
            for column_name in COLUMNS:
                kernels = of.get(column_name)
                text = f"{kernels.measured / 1e3:.2f} ({kernels.share:.2f})" if kernels else ""
                cells.append(text)
            operator = name.removeprefix("batch_norm_")
            lines.append(f"| {net} | {operator} | {' | '.join(cells)} |")
    return [*lines, ""]


def _section(rows: list[Row]) -> str:
    steps, setting = training_steps(rows), _setting(rows, root="../")
    cases = {name: name for name in map(case_name, steps)}
    below = [ORIGIN, ON_CUDA if is_cuda(rows) else ON_CPU]
    default = training_steps(rows, "default")
    sweeps = [row for row in default if row.benchmark == "sweep" and row.variant == RATIO]
    if sweeps:
        nets = ", ".join(dict.fromkeys(row.case for row in sweeps if row.case != "sweep"))
        low, high = min(row.q1 for row in sweeps), max(row.q3 for row in sweeps)
        below.append(OF_SWEEP.format(nets=nets, low=low, high=high))
    below.append(LINKS)
    lines = [f"## {setting['device']}", "", *_wrapped(ABOVE.format(**setting)), ""]
    lines += [*_table("case", rows, cases), "", *_wrapped(" ".join(below).format(**setting)), ""]
    lines += _kernels(rows)
    return "\n".join([*lines, PICTURE.format(**setting)]) + "\n"


def _setting(rows: list[Row], root: str) -> dict[str, str | float]:
    """Return the fields of the sentences; ``root`` is the path to the repository's folder."""
    steps = training_steps(rows)
    noise = max(abs(row.median - 1) for row in steps if row.variant == "syncbn again/syncbn")
    setting = {name: getattr(steps[0], name) for name in ("device", "date", "commit", "torch")}
    brackets = ""
    if is_cuda(rows):
        processor, theirs = "GPU", "`torch.nn.SyncBatchNorm`"
        how = "with one rank over NCCL, both forced to synchronize"
    else:
        brackets = OF_ALLOCATOR.format(root=root)
        processor, theirs = "CPU", "torch's `BatchNorm`"
        how = f"with {steps[0].threads} threads, in one process"
    fields = {"noise": noise, "processor": processor, "theirs": theirs, "how": how}
    return setting | fields | {"brackets": brackets}


def _wrapped(sentences: str) -> list[str]:
    return textwrap.wrap(sentences, 100, break_long_words=False, break_on_hyphens=False)


def _table(first: str, rows: list[Row], cases: dict[str, str]) -> list[str]:
    """Return the lines of a table; ``cases`` maps names to displayed ones."""
    tuned = _figures(training_steps(rows), tuple(cases))
    default = _figures(training_steps(rows, "default"), tuple(cases))
    speeds = {(case_name(row), row.shape, column(row)): row.median for row in default}
    lines = [
        f"| {first} | shape | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for case, displayed in cases.items():
        of_case = {column(row): row for row in tuned if case_name(row) == case}
        for shape in dict.fromkeys(row.shape for row in of_case.values()):
            cells = []
            for name in COLUMNS:
                key = (case, shape, name)
                cell = f"{speeds[key]:.2f}x" if key in speeds else ""
                if name in of_case:
                    speed = f"{of_case[name].median:.2f}x"
                    cell = f"{cell} ({speed})".lstrip() if default else speed
                cells.append(cell)
            lines.append(f"| {displayed} | {shape} | {' | '.join(cells)} |")
    return lines


def _figures(steps: list[Row], cases: tuple[str, ...]) -> list[Row]:
    """Return the speeds of a table."""
    return [
        row
        for row in steps
        if row.variant == RATIO and case_name(row) in cases and column(row) in COLUMNS
    ]


def draw(path: Path) -> Path:
    """Draw a file of results into the same folder; return the picture's path.

    The picture has the speed relative to torch and, below, to copying, for nets also by operator.
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = read(path)
    steps = training_steps(rows)
    nets = _nets(rows)
    speed, copying = _cells(steps, RATIO), _cells(steps, "copy/syncbn")
    for net, operator in itertools.product(nets, OPERATORS):
        of = _kernels_by_column(rows, net, (operator,))
        copying[f"{net}  {operator.removeprefix('batch_norm_')}"] = {
            n: k.share for n, k in of.items()
        }
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
    scale = LogNorm(1 / limit, limit)
    _panel(above, speed, title, lambda value: colormaps["RdBu"](scale(value)), "{:.2f}")
    greens = Normalize(0, 1.2)
    _panel(below, copying, share, lambda value: colormaps["Greens"](greens(value)), "{:.0%}")
    drawn = path.with_suffix(".png")
    figure.savefig(drawn)
    return drawn


def _cells(rows: list[Row], variant: str) -> Cells:
    cells: Cells = {}
    for row in rows:
        line = f"{case_name(row)}  {row.shape}"
        if row.variant == variant:
            cells.setdefault(line, {})[column(row)] = row.median
    return cells


def _panel(
    axes: Any, cells: Cells, title: str, find_color: Callable[[float], Any], form: str
) -> None:
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
            color = find_color(value)
            axes.fill([x, x + 1, x + 1, x], [line, line, line + 1, line + 1], fc=color, ec="white")
            # Black text on light cells, by perceived lightness.
            light = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2] > 0.5
            ink = "black" if light else "white"
            where = (x + 0.5, line + 0.5)
            axes.annotate(form.format(value), where, ha="center", va="center", size=TEXT, color=ink)
