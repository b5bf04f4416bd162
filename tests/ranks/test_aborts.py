"""A rank fails in code around a pass of a layer: the others raise its error at once."""

import contextlib
import itertools
import re
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from syncbn import convert_sync_batchnorm, fuse_activations
from syncbn.ops import reference

SECONDS = 10  # a busy machine takes less; the group's timeout is 40


class Own(nn.BatchNorm1d):
    """A user's layer, which fails before, during or after its call of ours."""

    fails = ""

    def forward(self, x):
        if self.fails == "before":
            raise KeyError("before")
        y = super().forward(x, *([None] * 5 if self.fails == "in" else []))
        if self.fails == "after":
            raise KeyError("after")
        return y


class Failing(nn.Module):
    def forward(self, weight):
        raise ZeroDivisionError("no weight")


class FailingMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise KeyError("mode")


class Unwilling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ == "train":
            raise KeyError("subclass")
        return super().__torch_function__(function, types, args, kwargs or {})


def network(kind=""):
    first = Own(3) if kind == "own" else nn.BatchNorm1d(3)
    model = nn.Sequential(first, nn.ReLU(), nn.BatchNorm1d(3))
    model = convert_sync_batchnorm(model)
    return fuse_activations(model) if kind == "fused" else model


def batch():
    return torch.rand(4, 3).requires_grad_() * 1


def delete(name):
    return lambda model: delattr(model[0], name)


def replace_weight(model):
    del model[0].weight
    model[0].weight = 3


def parametrize_weight(model):
    parametrize.register_parametrization(model[0], "weight", Failing(), unsafe=True)


def call_under_a_mode(model):
    x = batch()
    with FailingMode():
        model[0](x)


def fail_in(where):
    return lambda model: setattr(model[0], "fails", where)


FORWARD = {
    "deleted buffer": (delete("running_mean"), "AttributeError"),
    "deleted number": (delete("eps"), "AttributeError"),
    "deleted activation": (delete("activation"), "AttributeError"),
    "deleted buffer, fused": (delete("running_mean"), "AttributeError"),
    "no tensor": (replace_weight, "TypeError: expected weight to be a torch.Tensor"),
    "parametrization": (parametrize_weight, "ZeroDivisionError: no weight"),
    "unknown argument": (lambda model: model[0](batch(), bad=1), "TypeError: .*'bad'"),
    "no argument": (lambda model: model[0](), "TypeError: .*'input'"),
    "mode": (call_under_a_mode, "KeyError: 'mode'"),
    "subclass": (lambda model: model(batch().as_subclass(Unwilling)), "KeyError: 'subclass'"),
    "own forward": (fail_in("before"), "KeyError: 'before'"),
    "own call of forward": (fail_in("in"), "TypeError: .*positional arguments"),
}


def outcome_of(step):
    """Return the error of a step and its time, after which both ranks train on."""
    begin = time.monotonic()
    try:
        step()
        error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - begin
    network()(batch()).sum().backward()
    return error, seconds


def fail_forward(rank, world_size, name):
    model = network("fused" if "fused" in name else "own" if "own" in name else "")

    def step(fails):
        fails(model)
        model(batch()).square().sum().backward()

    for _ in range(2):
        step(lambda model: None)
    return outcome_of(lambda: step(FORWARD[name][0] if rank == 1 else lambda model: None))


def check(outcomes, error, direction):
    (others, _), (own, _) = outcomes
    assert re.match(error, own)
    words = f"aborted this {direction} because of an error; rank 1: {error}"
    assert re.search(words, others), others
    assert max(seconds for _, seconds in outcomes) < SECONDS


@pytest.mark.parametrize("name", FORWARD)
def test_failure_before_a_forward_pass(name, two_ranks):
    check(two_ranks.run(fail_forward, name), FORWARD[name][1], "forward pass")


def fail_after(rank, world_size):
    model = network("own")
    for _ in range(2):
        model(batch()).square().sum().backward()
    if rank == 1:
        model[0].fails = "after"
        with pytest.raises(KeyError, match="after"):
            model(batch())
        model[0].fails = ""
        return model[2](batch()).sum().item()
    return model(batch()).sum().item()


def test_failure_after_a_pass_does_not_abort_the_next(two_ranks):
    assert abs(sum(two_ranks.run(fail_after))) < 1e-4  # the mean of the whole batch is 0


def do_not_bring_back(tensor):
    raise MemoryError("not brought back")


def fail_backward(rank, world_size, name):
    model = network("silu" if "SiLU" in name else "")
    model[0].activation = "silu" if "SiLU" in name else None
    create_graph = "double" in name

    def step(x, changes):
        hooks = contextlib.nullcontext()
        if changes and "hook" in name:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, do_not_bring_back)
        with hooks:
            y = checkpoint(model, x, use_reentrant=False) if "checkpoint" in name else model(x)
        if changes and "weight" in name:
            with torch.no_grad():
                model[2].weight.add_(1)
        if changes and "input" in name:
            x.add_(1)
        if changes and "checkpoint" in name:
            del model[2].running_mean
        failing = contextlib.nullcontext()
        if changes and "sum" in name:
            failing = fail_at_call(int(name[-1]))
        with failing:
            y.square().sum().backward(create_graph=create_graph)

    for _ in range(2):
        step(batch(), False)
    x = batch()
    return outcome_of(lambda: step(x, rank == 1))


def fail_at_call(number):
    """Let the code between the sums of a double backward pass run out of memory."""
    original, calls = reference.tensors.per_channel, itertools.count(1)

    def per_channel(*arguments):
        if next(calls) == number:
            raise MemoryError("between sums")
        return original(*arguments)

    return mock.patch.object(reference.tensors, "per_channel", per_channel)


IN_PLACE = "RuntimeError: one of the variables needed for gradient computation has been modified"
BACKWARD = {
    "input": (IN_PLACE, "backward pass"),
    "weight": (IN_PLACE, "backward pass"),
    "hook": ("MemoryError: not brought back", "backward pass"),
    "checkpoint": ("AttributeError: .*'running_mean'", "recomputation"),
    "double, weight": (IN_PLACE, "double backward pass"),
    "double, sum 1": ("MemoryError: between sums", "double backward pass"),
    "double, sum 2": ("MemoryError: between sums", "double backward pass"),
    "double of SiLU, sum 9": ("MemoryError: between sums", "double backward pass"),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", BACKWARD)
def test_failure_before_a_backward_pass(name, two_ranks):
    check(two_ranks.run(fail_backward, name), *BACKWARD[name])
