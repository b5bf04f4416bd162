"""Identities of layers: their names in errors, and their numbers in messages between ranks."""

import functools
import hashlib
import itertools
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "ANONYMOUS",
    "Identity",
    "Layer",
    "identity_from",
    "identity_named",
    "identity_numbered",
    "identity_of",
]


_keys = itertools.count(1)
_names: dict[int, str] = {0: ""}


class Identity:
    """What tells a layer from others.

    ``name`` is that in its model, the same on all ranks, or empty. ``number`` is a number of 29
    bits for the name. ``key`` is this process's own number of the layer, which copies share.
    """

    __slots__ = ("key", "name", "number")

    def __init__(self, name: str, key: int | None = None) -> None:
        self.name = name
        self.key = next(_keys) if key is None else key
        self.number = _number(name)
        _names[self.number] = name

    def __str__(self) -> str:
        return f"layer {self.name!r}" if self.name else "a layer"

    def as_tensor(self) -> Tensor:
        """Return what :func:`identity_from` takes: an input that graphs of several layers share."""
        with torch.inference_mode(False):  # autograd saves it
            return torch.tensor([self.key, self.number], device="cpu")


class _State(Protocol):
    identity: Identity
    identity_tensor: Tensor


class _Identified(Protocol):
    @property
    def _syncbn(self) -> _State: ...


# What a pass is told of its layer: the identity; the name in a graph of torch.fx; or, under
# torch.compile, the layer itself, where reading the name would add a guard and compile the graph
# again for each layer.
Layer = Identity | str | _Identified


def identity_of(layer: Layer) -> Identity:
    """Return the identity of what a pass was told."""
    if isinstance(layer, Identity):
        return layer
    return identity_named(layer) if isinstance(layer, str) else layer._syncbn.identity


@functools.cache
def identity_named(name: str) -> Identity:
    """Return the identity of a layer of which a graph has kept only the name."""
    return Identity(name) if name else ANONYMOUS


def identity_from(tensor: Tensor | None) -> Identity:
    """Return the identity that was made into a tensor; :data:`ANONYMOUS` for None."""
    if tensor is None:
        return ANONYMOUS
    key, number = tensor.tolist()
    return identity_numbered(number, key)


def identity_numbered(number: int, key: int = 0) -> Identity:
    """Return the identity of a layer whose name has this number; the name of none is empty."""
    identity = Identity.__new__(Identity)
    identity.key, identity.number, identity.name = key, number, _names.get(number, "")
    return identity


def _number(name: str) -> int:
    if not name:
        return 0
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (2**29 - 1) + 1


# Of a call of the function, and of a layer without a name under a tracer.
ANONYMOUS = Identity("", key=0)
