"""Identities of layers: the process keeps those in use, and no others."""

import copy
import gc

import torch
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm
from syncbn.distributed.layer_id import ANONYMOUS, Identity, identity_from, identity_named


def test_a_graphs_input_gives_back_the_identity_of_a_layer_and_of_its_copies():
    layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))[0]
    copied = copy.deepcopy(layer)
    assert identity_from(layer._syncbn.graph_input) is layer._syncbn.identity
    assert identity_from(copied._syncbn.graph_input) is layer._syncbn.identity
    assert layer._syncbn.identity.name == "0"
    assert identity_from(0) is ANONYMOUS


def test_a_deleted_layer_keeps_its_number_and_no_memory():
    gc.collect()  # layers of other tests
    before = len(Identity.by_key)
    layers = [SyncBatchNorm(1) for _ in range(10)]
    for number, layer in enumerate(layers):
        layer._syncbn = layer._syncbn.with_name(f"layer{number}")
    given, last = layers[9]._syncbn.graph_input, layers[9]._syncbn.identity
    assert len(Identity.by_key) == before + 10
    key, number = last.key, last.number
    del layers, layer, last
    gc.collect()
    assert len(Identity.by_key) == before
    found = identity_from(given)
    assert (found.key, found.number) == (key, number)


def test_names_in_graphs_have_one_key_each():
    first, again, other = (identity_named(name) for name in ("a", "a", "b"))
    assert first.key == again.key < 0 and first.number == again.number == Identity("a").number
    assert len({first.key, other.key, *(Identity("a").key for _ in range(3))}) == 5
    assert identity_named("") is ANONYMOUS and ANONYMOUS.key == ANONYMOUS.number == 0


def test_a_compiled_graph_runs_its_backward_pass_after_its_layer_was_deleted():
    layer = SyncBatchNorm(3)
    x = torch.rand(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x)[0].sum(), x)
    loss = torch.compile(layer, backend="aot_eager")(x)[0].sum()
    del layer
    torch._dynamo.reset()
    gc.collect()
    loss.backward()
    # float32: a formula of torch's expressions in place of the operator.
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-6)
