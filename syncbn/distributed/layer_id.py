"""The identity of a layer: its name in errors, and its number in messages between ranks."""

import hashlib
import itertools
from collections.abc import Iterator
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from syncbn import _compat


class Identity:
    """The name of a layer, and two numbers."""

    __slots__ = ("__weakref__", "key", "name", "number")

    # The keys of the next layers.
    new_keys: ClassVar[Iterator[int]] = itertools.count(1)
    # The identities that were made into tensors, by key. Weak: a layer holds its identity, and so
    # do a group's records of its passes.
    by_key: ClassVar[WeakValueDictionary[int, "Identity"]] = WeakValueDictionary()

    def __init__(self, name: str, key: int | None = None) -> None:
        # The name of the layer in its model, the same on all ranks; empty if unknown.
        self.name = name
        # This process's own number of the layer, which copies share.
        self.key = next(Identity.new_keys) if key is None else key
        # A number of 29 bits for the name, the same on all ranks.
        self.number = _number(name)

    def __str__(self) -> str:
        return f"layer {self.name!r}" if self.name else "a layer"

    def as_inputs(self) -> "tuple[GraphInput, GraphInput]":
        """Return two inputs of :func:`identity_from`, so that layers can share a compiled graph.

        The second is for the backward pass: a CUDA graph of Inductor can use such an input or pass
        it on, but not both.
        """
        if _TYPE is not None:
            return SealedIdentity(self), SealedIdentity(self)
        Identity.by_key[self.key] = self
        with torch.inference_mode(False):  # autograd saves it
            numbers = torch.tensor([self.key, self.number], device="cpu")
            return numbers, numbers.clone()


class SealedIdentity(_compat.OpaqueBase):
    """An identity into which compilers do not look, unlike into one that eager code takes."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity


# An identity where operators of compiled graphs take it, and its type in their schemas. From torch
# 2.15 on, Inductor keeps an operator that takes tensors of the CPU and of CUDA out of CUDA graphs.
GraphInput = SealedIdentity | Tensor
_TYPE = _compat.register_opaque(SealedIdentity)
GRAPH_INPUT_TYPE = _TYPE or "Tensor"


class _State(Protocol):
    identity: Identity
    graph_inputs: tuple[GraphInput, GraphInput]


class _Identified(Protocol):
    @property
    def _syncbn(self) -> _State: ...


# A pass gets the identity of its layer; in a graph of torch.fx the name; under torch.compile the
# layer itself, because reading its name would add a guard and compile the graph for each layer.
Layer = Identity | str | _Identified


def identity_of(layer: Layer) -> Identity:
    """Return the identity of a layer."""
    if isinstance(layer, Identity):
        return layer
    return identity_named(layer) if isinstance(layer, str) else layer._syncbn.identity


def identity_named(name: str) -> Identity:
    """Return the identity of a layer in a graph that holds only the name.

    Its key is negative, and the same in each call.
    """
    return Identity(name, -_number(name)) if name else ANONYMOUS


def identity_from(given: GraphInput | None = None) -> Identity:
    """Return the identity that was made an input of a graph; :data:`ANONYMOUS` for None."""
    if given is None:
        return ANONYMOUS
    if isinstance(given, SealedIdentity):
        return given.identity
    key, number = given.tolist()
    identity = Identity.by_key.get(key)
    if identity is None:  # the layer was deleted before the backward pass of its graph
        identity = Identity("", key)
        identity.number = number
    return identity


def _number(name: str) -> int:
    if not name:
        return 0
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (2**29 - 1) + 1


# The identity for calls of the function, and for a layer without a name under a tracer.
ANONYMOUS = Identity("", key=0)
