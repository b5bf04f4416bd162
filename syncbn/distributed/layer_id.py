"""The identity of a layer: its name in errors, and its number in messages between ranks."""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

from syncbn import _compat

_NUMBER_BITS = 29


class Identity:
    """The name of a layer, and two numbers."""

    __slots__ = ("__weakref__", "key", "name", "number", "record")

    # The keys of the next layers.
    new_keys: ClassVar[Iterator[int]] = itertools.count(1)
    # The identities that were made inputs of graphs, by key. Weak: a layer holds its identity.
    by_key: ClassVar[WeakValueDictionary[int, "Identity"]] = WeakValueDictionary()

    def __init__(self, name: str, key: int | None = None) -> None:
        # The name of the layer in its model, the same on all ranks; empty if unknown.
        self.name = name
        # This process's own number of the layer, which copies share.
        self.key = next(Identity.new_keys) if key is None else key
        self.number = digest(name) if name else 0
        # The record of the layer's last forward pass, a syncbn.distributed.state.PassRecord.
        self.record: Any = None

    def __str__(self) -> str:
        return f"layer {self.name!r}" if self.name else "a layer"

    def copy(self) -> "Identity":
        """Return an identity of the same name and numbers."""
        copied = Identity("", self.key)
        copied.name, copied.number = self.name, self.number
        return copied

    def as_input(self) -> int:
        """Return an input of graphs for :func:`identity_from`, so that layers can share one."""
        Identity.by_key[self.key] = self
        given: int = _compat.DynamicInt(self.key << _NUMBER_BITS | self.number)
        return given


class Identified(Protocol):
    """The state of a layer."""

    identity: Identity
    graph_input: int


# A pass gets the state of its layer, from which a graph of torch.compile takes only the input:
# reading the name would add a guard and compile the graph for each layer. In a graph of torch.fx it
# gets the name.
Layer = Identified | Identity | str


def identity_of(layer: Layer) -> Identity:
    """Return the identity of a layer."""
    if isinstance(layer, Identity):
        return layer
    return identity_named(layer) if isinstance(layer, str) else layer.identity


def identity_named(name: str) -> Identity:
    """Return the identity of a layer in a graph that holds only the name.

    Its key is negative, and the same in each call.
    """
    return Identity(name, -digest(name)) if name else ANONYMOUS


def identity_from(given: int) -> Identity:
    """Return the identity that was made an input of a graph; :data:`ANONYMOUS` for 0."""
    if given == 0:
        return ANONYMOUS
    key = given >> _NUMBER_BITS
    identity = Identity.by_key.get(key)
    if identity is None:  # the layer was deleted before the backward pass of its graph
        identity = Identity("", key)
        identity.number = given & ((1 << _NUMBER_BITS) - 1)
    return identity


def digest(*parts: object) -> int:
    """Return a number of 29 bits, at least 1, for these parts: the same on all ranks.

    Sums of such numbers over millions of ranks are exact in float64.
    """
    text = " ".join(map(str, parts)).encode(errors="surrogatepass")
    hashed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    return hashed % ((1 << _NUMBER_BITS) - 1) + 1


# The identity for calls of the function, and for a layer without a name under a tracer.
ANONYMOUS = Identity("", key=0)
