"""Chooses among variants: ``python -m benchmarks.experiment choose FILE.csv``. Needs only Python.

A sum is one operator's time, or a pair's, in the layers of ResNet-50 for one kind of input. A
variant is faster than the present kernels in a sum if its gain exceeds three times the larger
spread of the two, (q3 - q1) / median, and the difference between two timings of the present
kernels. For the reductions, the element-wise kernels and the pairs, the chosen
variant is faster in one of their sums over the whole net at least, and slower in no sum, also not
from the L2 cache or beside busy multiprocessors; of several the one with the smallest mean time.
Otherwise the present kernels stay. A variant that had wrong values is left out.
"""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.experiment.build import PRESENT
from benchmarks.experiment.patterns import PRESENT as PRESENT_PATTERNS
from benchmarks.results import Row
from benchmarks.traffic import Copy, kernels_of, num_bytes

# The benchmarks of sums; the first is over the whole net. The rows of a layer have the suffix.
COLD = "operators"
WARM = "operators in the L2 cache"
BUSY = "operators beside busy multiprocessors"
SUMS = (COLD, WARM, BUSY)
OF_A_NET = " of a net"
MEMORY = "memory"

COPY = "copy"
AGAIN = "present again"  # the present kernels a second time: differences by chance
WRONG = "wrong"  # the kind of a row of a variant with wrong values; the median is its error

SPREADS = 3
FASTEST_PATTERNS = 5  # are printed


class Key(NamedTuple):
    """The key of a measurement, which all variants share."""

    benchmark: str
    quantity: str
    case: str
    dtype: str
    layout: str

    @classmethod
    def of(cls, row: Row) -> "Key":
        """Return the key of a row."""
        return cls(*(getattr(row, name) for name in cls._fields))

    @property
    def kind(self) -> str:
        """The kind of kernels."""
        if "+" in self.quantity:
            return "pairs"
        return "element-wise kernels" if self.quantity.endswith("apply") else "reductions"

    def __str__(self) -> str:
        return f"{self.quantity}, {self.case} {self.dtype} {self.layout}, {self.benchmark}"


class Sum(NamedTuple):
    """One sum, by variant."""

    key: Key
    rows: dict[str, Row]

    def ratio(self, variant: str) -> float:
        """Return a variant's share of the present kernels' time."""
        return self.rows[variant].median / self.rows[PRESENT].median

    def verdict(self, variant: str) -> str:
        """Return faster, slower or same."""
        noise = SPREADS * max(_spread(self.rows[variant]), _spread(self.rows[PRESENT]))
        if variant != AGAIN and AGAIN in self.rows:
            noise = max(noise, abs(1 - self.ratio(AGAIN)))
        gain = 1 - self.ratio(variant)
        return "faster" if gain > noise else "slower" if gain < -noise else "same"


def _spread(row: Row) -> float:
    return (row.q3 - row.q1) / row.median


def wrong_row(
    benchmark: str,
    columns: tuple[str, str, str, str],
    quantity: str,
    variant: str,
    error: float = math.nan,
) -> Row:
    """Return the row of a variant with wrong values; ``columns`` are a case's."""
    key = (benchmark, *columns, 1, "tuned", quantity, variant, WRONG)
    return Row(*key, error, error, error, "relative error", 1)


def find_sums(rows: Iterable[Row]) -> list[Sum]:
    """Return the sums in which the present kernels were measured."""
    by_key: dict[Key, dict[str, Row]] = {}
    for row in rows:
        if row.benchmark in SUMS and row.variant != COPY and row.kind != WRONG:
            by_key.setdefault(Key.of(row), {})[row.variant] = row
    return [Sum(key, by_variant) for key, by_variant in by_key.items() if PRESENT in by_variant]


def mean_ratio(sums: Iterable[Sum], variant: str) -> float:
    """Return the geometric mean of a variant's shares of the present kernels' time."""
    return statistics.geometric_mean(of_all.ratio(variant) for of_all in sums)


def choose(sums: list[Sum], wrong: Iterable[str]) -> dict[str, str]:
    """Return the chosen variant for each kind of kernels."""
    everywhere = set.intersection(*(set(of_all.rows) for of_all in sums)) if sums else set()
    candidates = [
        variant
        for variant in sorted(everywhere - {PRESENT, AGAIN, *wrong})
        if all(of_all.verdict(variant) != "slower" for of_all in sums)
    ]
    chosen = {}
    whole = [of_all for of_all in sums if of_all.key.benchmark == COLD]
    for kind in dict.fromkeys(of_all.key.kind for of_all in whole):
        of_kind = [of_all for of_all in whole if of_all.key.kind == kind]
        faster = {
            variant: mean_ratio(of_kind, variant)
            for variant in candidates
            if any(of_all.verdict(variant) == "faster" for of_all in of_kind)
        }
        chosen[kind] = min(faster, key=lambda variant: faster[variant], default=PRESENT)
    return chosen


def report(rows: list[Row]) -> Iterator[str]:
    """Yield the lines: patterns, sums, wrong and unfinished ones, and at the end the choice."""
    yield from _pattern_lines(rows)
    sums = find_sums(rows)
    layers = [row for row in rows if row.benchmark == COLD + OF_A_NET and row.kind != WRONG]
    sizes = {num_bytes(row) for row in layers if row.variant == COPY}
    copy = Copy.fitted(rows) if len(sizes) > 1 else None
    if copy is not None:
        speed = 2e-6 / copy.per_byte
        yield f"a copy takes {copy.fixed:.2f} us and moves {speed:.2f} TB/s"
    for of_all in sums:
        yield from _sum_lines(of_all, layers, copy)
    found = {of_all.key for of_all in sums}
    for key in dict.fromkeys(Key.of(row) for row in rows if row.kind != WRONG):
        whole = key._replace(benchmark=key.benchmark.removesuffix(OF_A_NET))
        if whole.benchmark in SUMS and whole not in found:
            yield f"UNFINISHED: {whole}"
    wrong = [row for row in rows if row.kind == WRONG]
    for row in wrong:
        where = " ".join((row.quantity, row.shape, row.dtype, row.layout)).strip()
        yield f"WRONG: {row.variant}: {where}, error {row.median:.2g}"
    yield from _choice_lines(sums, {row.variant for row in wrong})


def _pattern_lines(rows: list[Row]) -> Iterator[str]:
    names = {pattern.name for pattern in PRESENT_PATTERNS}
    by_key: dict[Key, list[Row]] = {}
    for row in rows:
        if row.benchmark == MEMORY and row.kind != WRONG:
            by_key.setdefault(Key.of(row), []).append(row)
    for key, of_key in by_key.items():
        yield str(key)
        ordered = sorted(of_key, key=lambda row: row.median)
        for place, row in enumerate(ordered):
            is_compared = row.variant in names or row.variant.startswith("torch")
            if place < FASTEST_PATTERNS or is_compared:
                yield f"    {row.median:9.2f} us  {row.variant}"


def _sum_lines(of_all: Sum, layers: list[Row], copy: Copy | None) -> Iterator[str]:
    yield str(of_all.key)
    for variant, row in sorted(of_all.rows.items(), key=lambda item: item[1].median):
        line = f"    {row.median / 1e3:9.3f} ms  {of_all.ratio(variant):.3f}"
        line += f"  spread {100 * _spread(row):4.1f} %  {of_all.verdict(variant):6}  {variant}"
        if copy is not None and of_all.key.benchmark == COLD:
            key = of_all.key._replace(benchmark=COLD + OF_A_NET)
            own = [row for row in layers if row.variant == variant and Key.of(row) == key]
            line += f", {_share(own, copy):.2f} of a copy's speed"
        yield line


def _share(rows: list[Row], copy: Copy) -> float:
    """Return the share of a copy's speed; each operator of a pair would be a copy of its own."""
    operators = [
        kernels_of((replace(row, quantity=operator) for row in rows), copy)
        for operator in rows[0].quantity.split("+")
    ]
    return math.fsum(kernels.at_copy_speed for kernels in operators) / operators[0].measured


def _choice_lines(sums: list[Sum], wrong: set[str]) -> Iterator[str]:
    if not sums:
        yield f"KEEP: {PRESENT}: no sum was measured"
    chosen = choose(sums, wrong)
    for variant in dict.fromkeys(variant for of_all in sums for variant in of_all.rows):
        own = [of_all for of_all in sums if variant in of_all.rows]
        verdicts = [of_all.verdict(variant) for of_all in own]
        line = f"{variant}: {mean_ratio(own, variant):.3f} of the present time, faster in "
        line += f"{verdicts.count('faster')} and slower in {verdicts.count('slower')} "
        line += f"of {len(own)} sums"
        kinds = [kind for kind, name in chosen.items() if name == variant]
        if variant in wrong:
            line += ", wrong values"
        elif kinds:
            line += f", chosen for {' and '.join(kinds)}"
        yield line
    for kind, variant in chosen.items():
        yield f"{'KEEP' if variant == PRESENT else 'CHOOSE'}: {variant} ({kind})"
