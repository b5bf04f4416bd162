"""Training steps of layers over shapes of nets, as geometric means by net and of all.

Shapes chosen by hand may be shapes that the code is tuned for.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cases import LAYOUTS, Case
from benchmarks.layer import (
    Setting,
    make_buffers,
    make_layers,
    step_call,
    time_variants,
    timed_rows,
)
from benchmarks.nets import shapes_of_nets
from benchmarks.rows import Row
from benchmarks.steps import QUANTITY

DTYPES = ("float32", "bfloat16")


def sweep_rows(setting: Setting) -> Iterator[Row]:
    """Time each shape in each dtype and layout; yield the means last."""
    # Many cases compensate for few samples.
    suite = replace(
        setting.suite,
        repeats=min(setting.suite.repeats, 9),
        sample_seconds=setting.suite.sample_seconds / 4,
    )
    setting = setting._replace(suite=suite)
    ratios: dict[tuple[str, str], list[Row]] = {}
    for net, shapes in shapes_of_nets(suite.shapes_per_net).items():
        for case in _cases(net, shapes):
            rows = list(_case_rows(case, setting))
            yield from rows
            ratios.setdefault((case.dtype, case.layout), []).append(rows[-1])
    for of_kind in ratios.values():
        for net in dict.fromkeys(row.case for row in of_kind):
            yield _mean(net, [row for row in of_kind if row.case == net])
        yield _mean("sweep", of_kind)


def _cases(net: str, shapes: tuple[tuple[int, ...], ...]) -> Iterator[Case]:
    for shape in shapes:
        for dtype in DTYPES:
            for layout in LAYOUTS if len(shape) == 4 else LAYOUTS[:1]:
                yield Case(net, shape, dtype, layout)


def _case_rows(case: Case, setting: Setting) -> Iterator[Row]:
    turns = make_buffers(case, setting.device)
    layers = make_layers(case, setting.device)
    calls = {name: step_call(layers[name], turns, True) for name in ("syncbn", "torch")}
    return timed_rows("shape of a net", case, QUANTITY, time_variants(calls, setting), setting, [])


def _mean(name: str, rows: list[Row]) -> Row:
    speeds = [row.median for row in rows]
    return replace(
        rows[0],
        benchmark="sweep",
        case=name,
        shape="many",
        kind="geometric mean",
        median=statistics.geometric_mean(speeds),
        q1=min(speeds),
        q3=max(speeds),
        repeats=len(rows),
    )
