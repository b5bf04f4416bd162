"""What a training pass reads and writes in its group: the bases of the classes of state.py.

With the library of csrc/pass its C++ code owns these values. It makes the usual passes, and uses
torch's full interface: one library fits one minor version of torch. Without it Python makes all
passes.
"""

import importlib
import os
import re
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

_RELEASE = re.compile(r"\d+\.\d+\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?")


def load() -> tuple[ModuleType | None, str]:
    """Return the library for this torch or None, and the reason for None."""
    if os.environ.get("SYNCBN_PYTHON_PASS") == "1":
        return None, "SYNCBN_PYTHON_PASS=1 is set"
    major, minor, *_ = torch.__version__.split(".")
    try:
        found = importlib.import_module(f"syncbn._pass_torch_{major}_{minor}")
    except ModuleNotFoundError:
        return None, f"this build has none for torch {major}.{minor}"
    except ImportError as error:
        return None, f"its library cannot be loaded: {error}"
    versions = {found.torch_version, torch.__version__}
    # The interface of a version in development may still change.
    if len(versions) > 1 and not all(map(_RELEASE.fullmatch, versions)):
        return None, f"its library was built with torch {found.torch_version}"
    return found, ""


library, library_missing = load()

# The next size after which several sizes have followed: neither 0 nor the size of a message.
SEVERAL = 1


class Record:
    """One direction of one layer: its fingerprint, and the sizes that have followed."""

    __slots__ = (
        *("__weakref__", "direction", "fingerprint", "is_forward", "kept_tail", "next_size"),
        "sizes",
    )

    def __init__(self, direction: str, fingerprint: float) -> None:
        self.direction, self.is_forward = direction, direction == "forward"
        self.fingerprint = fingerprint
        self.forget_sizes()

    def forget_sizes(self) -> None:
        """Forget the sizes of the messages that have followed."""
        self.sizes: list[int] = []
        # The size that is expected to follow; 0 if none is, SEVERAL if several have followed.
        self.next_size = 0
        # The tail of the next message; None until it is made.
        self.kept_tail: Tensor | None = None

    def add_size(self, size: int) -> None:
        """Remember the size of the message that has followed."""
        self.sizes.append(size)
        self.next_size = size if len(self.sizes) == 1 else SEVERAL
        self.kept_tail = None


class Group:
    """The passes that this rank has made in a group."""

    def __init__(
        self, adds_up: bool, waits_for_cuda: bool, num_ranks: int, sizes_sent: deque[int]
    ) -> None:
        # Whether the collective sums; a group for tests does not.
        self.adds_up = adds_up
        # gloo adds up on the CPU, so that the host waits in the sum of CUDA tensors.
        self.waits_for_cuda = waits_for_cuda
        # NCCL: whether the ranks may have made different numbers of passes.
        self.is_misaligned = False
        # The number of passes that this rank has made, aborted ones included.
        self.num_passes = 0
        # The last pass, and the number of passes since the last change between forward passes and
        # others.
        self.last = Record("forward", 0.0)
        self.num_in_row = 0
        # The size of this rank's message, of the latest messages, and the next size that it sent.
        self.size = 0
        self.sizes_sent = sizes_sent
        self.next_size_sent = 0
        # The sums of the last pass, and how many messages they are of.
        self.totals: Tensor | None = None
        self.num_summed = num_ranks if adds_up else 1
        # CUDA: the notes of devices by index, see device_status.py.
        self.notes: dict[int, Tensor] = {}


if not TYPE_CHECKING and library is not None:
    Record, Group = library.Record, library.Group
