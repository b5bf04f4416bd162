"""Tables of the speed of training steps against torch's layer, for the README and for a page."""

import statistics
import textwrap

from benchmarks.rows import Row
from benchmarks.steps import case_name, column, is_cuda, training_steps

NO_RESULTS = "`make bench` measures the machine it runs on and writes the results here.\n"

# Lines of the README's table, in this order; the page has all.
CASES = {
    "ResNet-50 x32": "layers of ResNet-50, 32 images",
    "ResNet-50 x256": "layers of ResNet-50, 256 images",
    "memory": "larger than the caches",
    "cache": "fits the last cache",
    "2-D": "2-D",
    "sweep": "geometric mean over nets",
    "small layer": "tiny",
}
COLUMNS = ("float32", "float32 channels_last", "bfloat16", "bfloat16 channels_last")

ABOVE = (
    "Speed of a training step, forward and backward, of one layer on a {processor}, relative to "
    "{theirs}: 2.00x takes half the time."
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
    "{high:.2f}."
)
ON_CUDA = (
    "ResNet-50 is the sum of its 53 batch norm layers for 32 or 256 images; the small layer has "
    "almost nothing to compute: its time is host time."
)
DEFAULT_ALLOCATOR = (
    "If the system newly maps every large output, which a warm allocator avoids, speeds are "
    "{low:.2f}x to {high:.2f}x (median {half:.2f}x)."
)
ALL = "[All figures and conditions](benchmarks/README.md)."
LINKS = "[The figures](results/{device}.csv) also have operators and accuracy."
PICTURE = "![The table above as a picture, and how fast copying is.](results/{device}.png)"


def text(results: list[list[Row]]) -> str:
    """Return the README's block: a table for each device, or how to get one."""
    return "\n".join(map(_summary, results)) or NO_RESULTS


def page(results: list[list[Row]]) -> str:
    """Return the page's block: all figures of each device, and their conditions."""
    return "\n".join(map(_section, results)) or NO_RESULTS


def _summary(rows: list[Row]) -> str:
    sentences = " ".join([ABOVE, ORIGIN, *_default_allocator(rows, tuple(CASES)), ALL])
    caption = _wrapped(sentences.format(**_setting(rows)))
    return "\n".join([*_table("input", rows, CASES), "", *caption]) + "\n"


def _section(rows: list[Row]) -> str:
    steps, setting = training_steps(rows), _setting(rows)
    cases = {name: name for name in map(case_name, steps)}
    below = [ORIGIN, ON_CUDA if is_cuda(rows) else ON_CPU]
    sweeps = [row for row in steps if row.benchmark == "sweep" and row.variant == "torch/syncbn"]
    if sweeps:
        nets = ", ".join(dict.fromkeys(row.case for row in sweeps if row.case != "sweep"))
        low, high = min(row.q1 for row in sweeps), max(row.q3 for row in sweeps)
        below.append(OF_SWEEP.format(nets=nets, low=low, high=high))
    below += [*_default_allocator(rows, tuple(cases)), LINKS]
    lines = [f"## {setting['device']}", "", *_wrapped(ABOVE.format(**setting)), ""]
    lines += [*_table("case", rows, cases), "", *_wrapped(" ".join(below).format(**setting)), ""]
    return "\n".join([*lines, PICTURE.format(**setting)]) + "\n"


def _setting(rows: list[Row]) -> dict[str, str | float]:
    """Return the fields of the sentences."""
    steps = training_steps(rows)
    noise = max(abs(row.median - 1) for row in steps if row.variant == "syncbn again/syncbn")
    setting = {name: getattr(steps[0], name) for name in ("device", "date", "commit", "torch")}
    if is_cuda(rows):
        processor, theirs = "GPU", "`torch.nn.SyncBatchNorm`"
        how = "in a group of one rank over NCCL"
    else:
        processor, theirs = "CPU", "torch's `BatchNorm`"
        how = f"with {steps[0].threads} threads, in one process without communication"
    return setting | {"noise": noise, "processor": processor, "theirs": theirs, "how": how}


def _default_allocator(rows: list[Row], cases: tuple[str, ...]) -> list[str]:
    """Return the sentence about newly mapped outputs, if they were measured."""
    figures = _figures(training_steps(rows, "default"), cases)
    if not figures:
        return []
    speeds = [row.median for row in figures]
    half = statistics.median(speeds)
    return [DEFAULT_ALLOCATOR.format(low=min(speeds), high=max(speeds), half=half)]


def _wrapped(sentences: str) -> list[str]:
    return textwrap.wrap(sentences, 100, break_long_words=False, break_on_hyphens=False)


def _table(first: str, rows: list[Row], cases: dict[str, str]) -> list[str]:
    """Return the lines of a table; ``cases`` maps names to displayed ones."""
    figures = _figures(training_steps(rows), tuple(cases))
    lines = [
        f"| {first} | shape | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for case, displayed in cases.items():
        of_case = {column(row): row for row in figures if case_name(row) == case}
        for shape in dict.fromkeys(row.shape for row in of_case.values()):
            cells = [f"{of_case[name].median:.2f}x" if name in of_case else "" for name in COLUMNS]
            lines.append(f"| {displayed} | {shape} | {' | '.join(cells)} |")
    return lines


def _figures(steps: list[Row], cases: tuple[str, ...]) -> list[Row]:
    """Return the speeds of a table."""
    return [
        row
        for row in steps
        if row.variant == "torch/syncbn" and case_name(row) in cases and column(row) in COLUMNS
    ]
