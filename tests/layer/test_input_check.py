"""A program's own check of the input: in its class, in its layer, or in place of torch's."""

import pytest
import torch
from support.subclasses import Square, Unchecked, WithoutMethods
from torch import nn

from syncbn import (
    SyncBatchNorm2d,
    convert_sync_batchnorm,
)

OBLONG = torch.arange(24.0).view(2, 3, 2, 2).repeat(1, 1, 1, 2)


@pytest.mark.parametrize("training", [True, False])
def test_check_of_the_class_runs(training):
    model = convert_sync_batchnorm(nn.Sequential(Square(3), Unchecked(3))).train(training)
    model(OBLONG[..., :2])
    words = r"expected a square, but got \[2, 3, 2, 4\] \[layer '0'\]"
    with pytest.raises(ValueError, match=words):
        model(OBLONG)
    with pytest.raises(ValueError, match="expected 4D input"):
        model(OBLONG[0])
    model[1](OBLONG[..., 0])


def refused(rank, world_size):
    torch.manual_seed(0)
    layer = convert_sync_batchnorm(nn.Sequential(Square(3)))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        layer(OBLONG if rank == 1 else OBLONG[..., :2])
    layer(OBLONG[..., :2])
    return str(caught.value)


def test_check_of_the_class_fails_on_all_ranks(two_ranks):
    others, own = two_ranks.run(refused)
    assert own.startswith("expected a square") and "rank 1: ValueError: expected a square" in others


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, WithoutMethods, SyncBatchNorm2d])
@pytest.mark.parametrize("training", [True, False])
def test_check_set_by_a_program_runs(monkeypatch, cls, training):
    layer = convert_sync_batchnorm(cls(3)).train(training)
    for owner in (layer, type(layer), cls, nn.BatchNorm2d):
        with monkeypatch.context() as patch:
            check = (lambda input: None) if owner is layer else (lambda self, input: None)
            patch.setattr(owner, "_check_input_dim", check)
            layer(OBLONG[..., 0])
        with pytest.raises(ValueError, match="expected 4D input"):
            layer(OBLONG[..., 0])


def test_check_set_by_a_program_may_call_the_previous_one():
    layer = convert_sync_batchnorm(Square(3))
    before = layer._check_input_dim

    def check(input):
        before(input)
        raise ValueError("never")

    layer._check_input_dim = check
    for x, words in (
        (OBLONG[..., :2], "never"),
        (OBLONG, "expected a square"),
        (OBLONG[..., 0], "expected 4D"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(x)
    del layer._check_input_dim
    layer(OBLONG[..., :2])
