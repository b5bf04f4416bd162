"""The state of a layer beside torch's attributes."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from syncbn.distributed import collectives
from syncbn.distributed.collectives import GroupReference, ProcessGroup
from syncbn.distributed.layer_id import Identity
from syncbn.pickles import RECONSTRUCTIONS, _reconstruct


class LayerState:
    """All that a layer holds beside torch's attributes; copies of the layer share it.

    A change replaces the whole object, so that the copies keep theirs. A pickle holds the name and
    the values that freezing stored, because the rest is of this process.
    """

    def __init__(self, name: str = "", frozen: dict[str, bool] | None = None) -> None:
        # The layer's name in its model, from conversion; empty if unknown.
        self.identity = Identity(name)
        # The same for compiled graphs, which would be compiled again for each name.
        self.graph_input = self.identity.as_input()
        # From freeze_statistics: the mode and the flags requires_grad that unfreezing restores.
        self.frozen = frozen
        # The ranks that share a batch; None is all of them.
        self.group: GroupReference | None = None
        # Whether a compiled graph can hold the group. Decided before torch.compile traces, which
        # refuses code that looks at a group without a name.
        self.fits_graph = True
        # While the forward of a user's class runs: whether it has called ours, or has failed.
        self.reached: bool | None = None
        # While a program's own check of the input runs: the check that it may call.
        self.inner_check: Callable[[Any, Tensor], None] | None = None
        # While recompute_statistics runs: the function that takes the sums of each pass.
        self.observe: Callable[[Tensor], None] | None = None

    def replaced(self, **changes: Any) -> "LayerState":
        """Return a copy with other values."""
        new = LayerState.__new__(LayerState)
        new.__dict__.update(self.__dict__, **changes)
        return new

    def with_name(self, name: str) -> "LayerState":
        """Return a copy of another name."""
        identity = Identity(name)
        return self.replaced(identity=identity, graph_input=identity.as_input())

    def with_group(self, group: ProcessGroup | None) -> "LayerState":
        """Return a copy of another group."""
        has_name = group is None or collectives.name_of(group) != ""
        fits_graph = has_name or not collectives.is_member(group)
        reference = None if group is None else GroupReference(group)
        return self.replaced(group=reference, fits_graph=fits_graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerState":
        return self

    def __reduce__(self) -> Any:
        if self.group is not None:
            warnings.warn(
                "a process group cannot be pickled: the SyncBatchNorm layer will be loaded with "
                "process_group=None, all ranks; set its process_group again after loading",
                stacklevel=2,
            )
        return _reconstruct, ("state", self.identity.name, self.frozen)


RECONSTRUCTIONS["state"] = LayerState
