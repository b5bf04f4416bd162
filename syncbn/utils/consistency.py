"""check_synchronized(): whether the ranks hold the same parameters and statistics."""

import ctypes
import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup
from syncbn.modules import SyncBatchNorm
from syncbn.utils.freeze import layers_of

_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_MAX_LINES = 20


class Content(NamedTuple):
    """Shape and dtype of a tensor as text, and a digest of its bytes."""

    kind: str
    digest: str


Table = dict[tuple[str, str], Content]  # by the names of layer and tensor


def check_synchronized(model: nn.Module) -> None:
    """Check that the ranks' :class:`syncbn.SyncBatchNorm` layers hold the same, bit for bit.

    Compares weight, bias, running_mean, running_var and num_batches_tracked of each layer over the
    ranks of its process group, which all call this: digests, in one collective of 64 bytes for each
    group where all is equal. A NaN equals the same NaN. Ranks outside of a layer's group skip it.
    Sharded parameters, as of FSDP2, are not compared: each rank holds another part of them. Where
    torch.distributed is not initialized, and in groups of one rank, nothing is to compare.

    Args:
        model: The model; nothing in it is changed. Its layers are compared by their names in it.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no layer of ours.
        RuntimeError: Ranks of a group differ; on each of its ranks, with the names of layers and
            tensors and the ranks that differ from most others.

    Example:
        >>> from torch import nn
        >>> from syncbn import check_synchronized, convert_sync_batchnorm
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> check_synchronized(model)
    """
    no_layers: ValueError | None = None
    layers: dict[str, SyncBatchNorm] = {}
    tables: dict[ProcessGroup, Table] = {}
    try:
        layers = layers_of(model)
    except ValueError as error:  # for the report of ranks that have layers
        no_layers = error
        default = collectives.resolve_group(None)
        if default is not None:
            tables[default] = {}
    for name, layer in layers.items():
        if collectives.is_member(layer.process_group):
            group = collectives.resolve_group(layer.process_group)
            if group is not None:
                tables.setdefault(group, {}).update(_contents(name, layer))
    # In an order that does not depend on the model: ranks may have different models.
    ordered = sorted(tables.items(), key=lambda item: collectives.name_of(item[0]))
    are_equal = collectives.are_equal([(group, _digest(table)) for group, table in ordered])
    lines: list[str] = []
    for (group, table), is_equal in zip(ordered, are_equal, strict=True):
        if not is_equal:
            ranks = [collectives.global_rank(group, rank) for rank in range(group.size())]
            lines += _differences(dict(zip(ranks, collectives.gather(table, group), strict=True)))
    if lines:
        num_more = len(lines) - _MAX_LINES
        more = [f"and {num_more} more"] if num_more > 0 else []
        raise RuntimeError(
            "expected the SyncBatchNorm layers of all ranks of a group to hold the same, but:\n  "
            + "\n  ".join(lines[:_MAX_LINES] + more)
            + "\nload the same state_dict on these ranks, or broadcast that of one of them"
        )
    if no_layers is not None:
        raise no_layers


def _contents(name: str, layer: SyncBatchNorm) -> Table:
    tensors = {tensor: getattr(layer, tensor) for tensor in _TENSORS}
    return {
        (name, tensor): _content(value)
        for tensor, value in tensors.items()
        if value is not None and not _is_sharded(value)
    }


def _is_sharded(tensor: Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def _content(tensor: Tensor) -> Content:
    if hasattr(tensor, "to_local"):  # a DTensor, which has no memory of its own
        tensor = tensor.to_local()
    values = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
    data = ctypes.string_at(values.data_ptr(), values.numel()) if values.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Content(f"{dtype} {list(tensor.shape)}", digest)


def _digest(table: Table) -> bytes:
    return hashlib.blake2b(repr(table).encode(), digest_size=16).digest()


def _differences(tables: dict[int, Table]) -> list[str]:
    """Return the differences of the ranks' tables, a line for each layer's tensor."""
    lines = []
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        holders: dict[Content | None, list[int]] = {}
        for rank, table in tables.items():
            holders.setdefault(table.get(key), []).append(rank)
        if len(holders) == 1:
            continue
        # The value of the most ranks; of two as frequent values, the lowest rank's.
        usual = max(holders, key=lambda content: len(holders[content]))
        layer, tensor = key
        usual_kind = _holding(usual)
        line = f"layer {layer!r}: {tensor} is {usual_kind} on {_ranks(holders.pop(usual))}"
        for content, ranks in holders.items():
            kind = _holding(content)
            line += f", {'of other values' if kind == usual_kind else kind} on {_ranks(ranks)}"
        lines.append(line)
    return lines or ["the layers stand in another order on some ranks"]


def _holding(content: Content | None) -> str:
    return "missing" if content is None else content.kind


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
