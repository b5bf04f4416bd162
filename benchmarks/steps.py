"""Rows that the table and the picture show: training steps of layers, by all threads."""

from benchmarks.rows import Row

QUANTITY = "forward+backward"


def training_steps(rows: list[Row], allocator: str = "tuned") -> list[Row]:
    """Return the rows of layers, fused ones, sweeps and the small one, under an allocator."""
    names = ("layer", "fused", "sweep", "overhead")
    layers = [row for name in names for row in rows if row.benchmark == name]
    threads = max(row.threads for row in layers)
    how = (QUANTITY, threads, allocator)
    return [row for row in layers if (row.quantity, row.threads, row.allocator) == how]


def case_name(row: Row) -> str:
    """Return the name of a case in words."""
    return "small layer" if row.benchmark == "overhead" else row.case


def column(row: Row) -> str:
    """Return the dtype, and the layout where it is not the ordinary one."""
    return row.dtype if row.layout == "contiguous" else f"{row.dtype} {row.layout}"


def is_cuda(rows: list[Row]) -> bool:
    """Whether results are of a GPU: launches are counted only there."""
    return any(row.benchmark == "launches" for row in rows)
