"""Converted subclasses with a forward of their own, compiled, traced, exported, under DDP."""

import copy

import pytest
import torch
from support.compiling import Backend, Swish, assert_equal, batch, build, compiled, step, swishes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import convert_sync_batchnorm, revert_sync_batchnorm


def compare(rank, world_size):
    backend = Backend("aot_eager")
    eager = build(swishes)
    fast = compiled(copy.deepcopy(eager), backend)
    for seed in range(2):
        x = batch(rank, (3, 5), 6, seed)
        assert_equal(step(fast, x), step(eager, x))
    return backend.graphs


@pytest.mark.works("converted subclasses with a forward of their own: torch.compile")
def test_compiled_subclasses_are_one_graph(compiling_ranks):
    assert compiling_ranks.run(compare) == [1, 1]


def train(rank, world_size):
    model = DistributedDataParallel(build(swishes))
    return step(model, batch(rank, (3, 5), 6, 0))[1]


@pytest.mark.works("converted subclasses with a forward of their own: DistributedDataParallel")
def test_ranks_train_as_the_whole_batch(compiling_ranks):
    x = torch.cat([batch(rank, (3, 5), 6, 0) for rank in range(2)])
    _, expected = step(swishes().double(), x)
    for state in compiling_ranks.run(train):
        for name, value in expected.items():
            # DDP divides the sums of the gradients by the number of ranks
            scale = 2 if name.endswith("grad") else 1
            # float64, by its default tolerances
            torch.testing.assert_close(state[name] * scale, value, msg=name)


@pytest.mark.works("converted subclasses with a forward of their own: torch.fx, as one node")
@pytest.mark.parametrize("training", [True, False])
def test_symbolic_tracing_records_one_node(training):
    model = build(swishes).train(training)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    calls = [(node.op, node.target) for node in traced.graph.nodes][1:-1]
    assert calls == [("call_module", name) for name in "012"]
    x = batch(0, (3,), 6, 0)
    for mode in (training, not training):
        assert torch.equal(traced.train(mode)(x), model.train(mode)(x))
    assert type(revert_sync_batchnorm(traced).get_submodule("1")) is Swish


@pytest.mark.works("converted subclasses with a forward of their own: torch.export in evaluation")
def test_exported_subclasses():
    model, x = build(swishes).eval(), batch(0, (3,), 6, 0)
    exported = torch.export.export(model, (x,)).module()
    # torch's operator in both; float64, by its default tolerances
    torch.testing.assert_close(exported(x), model(x))


class ByItself(nn.BatchNorm2d):
    def forward(self, input):
        return nn.BatchNorm2d.forward(self, input)


def test_class_that_normalizes_by_itself_is_named_when_it_is_compiled():
    model = convert_sync_batchnorm(nn.Sequential(ByItself(3)))
    call, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.rand(2, 3, 4, 4)
    with pytest.warns(UserWarning, match="'0' is a ByItself that normalizes by itself"):
        call(x)
    call(x)
    assert model[0].num_batches_tracked == 2


class Square(nn.BatchNorm2d):
    def _check_input_dim(self, input):
        super()._check_input_dim(input)
        if input.size(2) != input.size(3):
            raise ValueError("expected a square")


def test_check_of_the_class_is_compiled():
    model, x = convert_sync_batchnorm(nn.Sequential(Square(3))), torch.rand(2, 3, 4, 4)
    call = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(x), model(x))  # float32 rounding
    call = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"expected a square \[layer '0'\]"):
        call(x[..., :2])
