"""Rows of the table and the picture: training steps of layers, with all threads."""

from benchmarks.rows import Row

QUANTITY = "forward+backward"


def training_steps(rows: list[Row], allocator: str = "tuned") -> list[Row]:
    """Return the rows of layers, fused layers, sweeps and the small layer, with an allocator."""
    names = ("layer", "fused", "sweep", "overhead")
    layers = [row for name in names for row in rows if row.benchmark == name]
    threads = max(row.threads for row in layers)
    how = (QUANTITY, threads, allocator)
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
