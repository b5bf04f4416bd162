"""The README's table: the speed of training steps against torch's layer."""

import statistics
import textwrap

from benchmarks.rows import Row
from benchmarks.steps import case_name, column, is_cuda, training_steps

NO_RESULTS = "`make bench` measures the machine it runs on and writes the results here.\n"

# Rows and columns of the table, in this order; the results have more.
CASES = (
    "ResNet-50 x32",
    "ResNet-50 x256",
    "memory",
    "memory + ReLU",
    "memory + addition + ReLU",
    "memory + SiLU",
    "cache",
    "maps 7x7",
    "2-D",
    "sweep",
    "small layer",
)
COLUMNS = ("float32", "float32 channels_last", "bfloat16", "bfloat16 channels_last")

ABOVE = (
    "Speed of a training step, forward and backward, of one layer on a {processor}; 1.00 is "
    "{theirs} in the same run, 2.00 takes half its time, a blank cell was not measured."
)
# Sentences below the table.
ORIGIN = (
    "Measured on {device} {how}, on {date} at commit {commit} with torch {torch}; repeated "
    "measurements differ by up to {noise:.0%}."
)
ON_CPU = (
    "Communication is excluded: `torch.nn.SyncBatchNorm` does not train on CPUs, so there is no "
    "baseline; in one process it is the `BatchNorm` compared here. Tensors of `memory` are meant "
    "to exceed the caches, tensors of `cache` to fit the last one; the small layer has almost "
    "nothing to compute."
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
    "Measured with a warm allocator. If the system newly maps every large output, speedups drop "
    "to {low:.2f}-{high:.2f} (median {half:.2f})."
)
LINKS = (
    "[All figures](benchmarks/results/{device}.csv) and "
    "[a picture of them](benchmarks/results/{device}.png)."
)


def text(results: list[list[Row]], cases: tuple[str, ...] = CASES) -> str:
    """Return the generated block: a table for each device, or how to get one."""
    return "\n".join(_device(rows, cases) for rows in results) or NO_RESULTS


def _device(rows: list[Row], cases: tuple[str, ...]) -> str:
    steps = training_steps(rows)
    noise = max(abs(row.median - 1) for row in steps if row.variant == "syncbn again/syncbn")
    origin = {name: getattr(steps[0], name) for name in ("device", "date", "commit", "torch")}
    if is_cuda(rows):
        processor, theirs, about = "GPU", "`torch.nn.SyncBatchNorm`", ON_CUDA
        how = "in a group of one rank over NCCL"
    else:
        processor, theirs, about = "CPU", "torch's `BatchNorm`", ON_CPU
        how = f"with {steps[0].threads} threads, in one process without communication"
    below = [ORIGIN.format(how=how, noise=noise, **origin), about]
    sweeps = [row for row in steps if row.benchmark == "sweep" and row.variant == "torch/syncbn"]
    if sweeps:
        nets = ", ".join(dict.fromkeys(row.case for row in sweeps if row.case != "sweep"))
        low, high = min(row.q1 for row in sweeps), max(row.q3 for row in sweeps)
        below.append(OF_SWEEP.format(nets=nets, low=low, high=high))
    default = [row.median for row in _figures(training_steps(rows, "default"), cases)]
    if default:
        half = statistics.median(default)
        below.append(DEFAULT_ALLOCATOR.format(low=min(default), high=max(default), half=half))
    below.append(LINKS.format(**origin))
    above = ABOVE.format(processor=processor, theirs=theirs)
    lines = [*_wrapped(above), "", *_table(_figures(steps, cases), cases), ""]
    return "\n".join([*lines, *_wrapped(" ".join(below))]) + "\n"


def _wrapped(sentences: str) -> list[str]:
    return textwrap.wrap(sentences, 100, break_long_words=False, break_on_hyphens=False)


def _table(figures: list[Row], cases: tuple[str, ...]) -> list[str]:
    lines = [
        f"| case | shape | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for case in cases:
        of_case = {column(row): row for row in figures if case_name(row) == case}
        for shape in dict.fromkeys(row.shape for row in of_case.values()):
            cells = [f"{of_case[name].median:.2f}" if name in of_case else "" for name in COLUMNS]
            lines.append(f"| {case} | {shape} | {' | '.join(cells)} |")
    return lines


def _figures(steps: list[Row], cases: tuple[str, ...]) -> list[Row]:
    """Return the speeds of the table."""
    return [
        row
        for row in steps
        if row.variant == "torch/syncbn" and case_name(row) in cases and column(row) in COLUMNS
    ]
