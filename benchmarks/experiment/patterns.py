"""The memory patterns that memory.cu is compiled for. Needs only Python."""

from collections.abc import Iterator
from typing import NamedTuple

# Orders of the chunks, which are as many vectors as a block has in flight. `flat`: one chunk for
# each block. `dealt`: resident blocks take them in turn. `segments`: each resident block has
# neighboring ones. `planes`: segments of one channel of a planar tensor. `dealt planes`: chunks of
# one channel in turn, as in csrc/cuda/kernels/planar.h.
ORDERS = (
    "flat",
    *(
        f"{share} {direction}"
        for share in ("dealt", "segments", "planes", "dealt planes")
        for direction in ("up", "down")
    ),
)


class Pattern(NamedTuple):
    """One way of reading and writing tensors of vectors of 16 bytes."""

    reads: int  # tensors
    writes: int
    order: str
    vectors: int  # of a tensor that a thread has in flight
    blocks: int  # of a multiprocessor
    loads: str = "evict first"
    stores: str = "plain"

    @property
    def family(self) -> str:
        """What is read and written."""
        return f"{self.reads} read, {self.writes} written"

    @property
    def name(self) -> str:
        """The pattern among those of its family."""
        policies = f"{self.loads} loads" + (f", {self.stores} stores" if self.writes else "")
        return f"{self.order}, {self.vectors} vectors, {self.blocks} blocks, {policies}"


def _patterns() -> Iterator[Pattern]:
    for reads, vectors in ((1, 4), (2, 2)):
        for order in ORDERS:
            yield Pattern(reads, 1, order, vectors, 3)
        for order in ("dealt planes down", "dealt down", "flat"):
            for policies in (
                ("plain", "plain"),
                ("plain", "evict first"),
                ("evict first", "evict first"),
                ("evict first", "write through"),
                ("no allocate", "plain"),
                ("128 bytes", "plain"),
            ):
                yield Pattern(reads, 1, order, vectors, 3, *policies)
        for order in ("dealt down", "flat"):
            for in_flight in ((1, 8), (2, 4), (2, 6), (2, 8), (4, 2), (4, 4), (8, 2)):
                yield Pattern(reads, 1, order, *in_flight, "plain")
        if reads == 1:  # two inputs would need too many registers
            yield Pattern(reads, 1, "dealt down", 4, 6, "plain")
            yield Pattern(reads, 1, "dealt down", 8, 3, "plain")
    for reads in (1, 2):
        for order in ("dealt planes up", "planes up", "dealt up", "segments up", "flat"):
            for vectors, blocks in ((8 // reads, 2), (4 // reads, 4), (8 // reads, 3)):
                yield Pattern(reads, 0, order, vectors, blocks, "plain")


PATTERNS = tuple(_patterns())

# The patterns of the present kernels, for planar tensors.
PRESENT = (
    Pattern(1, 1, "dealt planes down", 4, 3),
    Pattern(2, 1, "dealt planes down", 2, 3),
    Pattern(1, 0, "dealt planes up", 8, 2, "plain"),
    Pattern(2, 0, "dealt planes up", 4, 2, "plain"),
)


def instances() -> str:
    """Return a line ``INSTANCE(number, ...)`` of C++ for each pattern."""

    def enumerator(kind: str, name: str) -> str:
        return f"{kind}::k" + "".join(word.capitalize() for word in name.split())

    lines = []
    for number, pattern in enumerate(PATTERNS):
        arguments = (
            number,
            pattern.reads,
            "true" if pattern.writes else "false",
            pattern.vectors,
            pattern.blocks,
            enumerator("Order", pattern.order),
            enumerator("Loads", pattern.loads),
            enumerator("Stores", pattern.stores),
        )
        lines.append(f"INSTANCE({', '.join(map(str, arguments))})\n")
    return "".join(lines)
