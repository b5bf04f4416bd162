"""Failures of compiled layers: the errors of eager ones, on all ranks, also with fullgraph=True."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def test_bad_input_to_a_compiled_layer_is_named():
    torch._dynamo.reset()
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ValueError, match=r"expected input to have 3 channels .*\[layer '0'\]"):
        torch.compile(model, backend="aot_eager")(torch.rand(2, 4, 3, 3))


def fail_in_one_graph(rank, world_size, bad):
    """All ranks are compiled; rank 1 gets bad input from the first or the second step on."""
    model = convert_sync_batchnorm(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)))
    fast = compiled(model)
    if bad != "at first":
        fast(torch.rand(4, 3, 5))
    fast(torch.rand(4, 3 + rank, 5))


@pytest.mark.parametrize("bad", ["at first", "later"])
def test_bad_input_to_one_compiled_rank_is_an_error_on_all(compiling_ranks, bad):
    other, failed = compiling_ranks.outcomes(fail_in_one_graph, bad)
    assert failed.kind == "ValueError"
    assert "expected input to have 3 channels (num_features), but got 4" in failed.message
    assert "[layer '1', rank 1 of 2]" in failed.message
    assert other.kind == "RuntimeError"
    assert "another rank of the process group aborted" in other.message
    assert "[layer '1', rank 0 of 2]" in other.message


MISFITS = {
    "weight": (torch.ones(4), "expected weight to have shape [3], but got [4]"),
    "bias": (torch.zeros(3, dtype=torch.int64), "expected bias to have dtype float32 or float64"),
    "residual": (torch.rand(4, 3, 4), "expected residual to have shape [4, 3, 5]"),
    "running_var": (torch.ones(2), "expected running_var to have shape [3], but got [2]"),
}


def test_unwritable_arguments_fail_as_in_eager_mode():
    layer = compiled(SyncBatchNorm(3))
    with pytest.raises(ValueError, match=r"got input size torch.Size\(\[1, 3, 1\]\)"):
        layer(torch.rand(1, 3, 1))
    layer = SyncBatchNorm(3)
    layer.running_var = torch.ones(1).expand(3)
    with pytest.raises(ValueError, match="running_var to have memory for each channel"):
        compiled(layer)(torch.rand(4, 3, 5))


def misfit_in_one_graph(rank, world_size, name):
    arguments = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    if rank == 1:
        arguments[name] = MISFITS[name][0]
    compiled(partial(sync_batch_norm, training=True))(torch.rand(4, 3, 5), **arguments)


@pytest.mark.parametrize("name", MISFITS)
def test_tensor_that_does_not_fit_on_one_compiled_rank(compiling_ranks, name):
    other, failed = compiling_ranks.outcomes(misfit_in_one_graph, name)
    assert MISFITS[name][1] in failed.message and "[rank 1 of 2]" in failed.message
    assert failed.kind == ("TypeError" if name == "bias" else "ValueError")
    assert "another rank of the process group aborted" in other.message


def train_with_meta_on_one_rank(rank, world_size, on_meta):
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    x = torch.rand(4, 3)
    if rank == 1 and on_meta == "buffer":
        model[0].running_mean = model[0].running_mean.to("meta")
    elif rank == 1:
        x = x.to("meta")
    compiled(model)(x)


@pytest.mark.parametrize("on_meta", ["buffer", "input"])
def test_tensor_on_meta(compiling_ranks, on_meta):
    words = {"buffer": "running_mean to be on cpu", "input": "weight to be on meta"}
    other, failed = compiling_ranks.outcomes(train_with_meta_on_one_rank, on_meta)
    assert (
        failed.kind == "ValueError"
        and words[on_meta] in failed.message
        and "[layer '0', rank 1 of 2]" in failed.message
    )
    assert "another rank of the process group aborted" in other.message


@pytest.mark.parametrize("bad", [None, 3.0, "text", [1.0], np.zeros((2, 3))])
def test_input_that_no_graph_takes(bad):
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    torch._dynamo.reset()
    words = rf"expected input to be a torch\.Tensor, but got {type(bad).__name__}"
    with pytest.raises(TypeError, match=rf"{words} \[layer '0'\]"):
        torch.compile(model, backend="aot_eager")(bad)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(model)(bad)


def train_with_other_dimensions(rank, world_size):
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    compiled(model)(torch.rand(4, 3, 2) if rank == 1 else torch.rand(4, 3, 2, 2))


def test_compiled_layer_checks_dimensions_as_the_class_that_it_comes_from(compiling_ranks):
    other, failed = compiling_ranks.outcomes(train_with_other_dimensions)
    assert failed.kind == "ValueError" and "expected 4D input (got 3D input)" in failed.message
    assert "[layer '0', rank 1 of 2]" in failed.message
    assert "another rank of the process group aborted" in other.message


def train_on_one_value(rank, world_size, mode):
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    before = copy.deepcopy(model.state_dict())
    x = torch.rand(rank, 3)
    if mode == "exported":
        run = torch.export.export(model, (x,), strict=False).module()
    else:
        torch._dynamo.reset()
        run = torch.compile(model, backend=mode, fullgraph=True)
    words = None
    try:
        run(x)
    except ValueError as error:
        words = str(error)
    state = (run if mode == "exported" else model).state_dict()
    return words, all(torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.parametrize("mode", ["aot_eager", "inductor", "exported"])
def test_one_value_in_the_whole_group_is_an_error_on_all_ranks(compiling_ranks, mode):
    for rank, result in enumerate(compiling_ranks.run(train_on_one_value, mode)):
        assert result == (
            "Expected more than 1 value per channel when training, got 1 in the whole batch "
            f"[layer '0', rank {rank} of 2]",
            True,
        )


def train_on_nothing_on_one_rank(rank, world_size):
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager")(torch.rand(4, 3) if rank == 0 else None)


def train_with_numbers_of_numpy(rank, world_size):
    layer = SyncBatchNorm(3, momentum=np.float64(0.1))
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager")(torch.full((4, 3), float(rank)))
    return layer.running_mean.tolist()


def test_ranks_with_a_number_that_no_graph_takes(compiling_ranks):
    for mean in compiling_ranks.run(train_with_numbers_of_numpy):
        assert mean == pytest.approx([0.05] * 3)


def test_rank_that_breaks_its_graph_aborts(compiling_ranks):
    other, failed = compiling_ranks.outcomes(train_on_nothing_on_one_rank)
    assert failed.kind == "TypeError" and "but got NoneType" in failed.message
    assert "another rank of the process group aborted" in other.message


# Dynamo reads gradients of tensors that are no leaves: torch warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_numpy_numbers_run_uncompiled():
    eager = SyncBatchNorm(3, eps=np.float64(1e-5), momentum=np.float64(0.1))
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    x = torch.rand(4, 3)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), eager(x))
    assert torch.equal(model.running_mean, eager.running_mean)


def test_recorded_graphs_need_a_group_with_a_name():
    model, x = (
        SyncBatchNorm(3, process_group=torch.distributed.ProcessGroup(0, 2)),
        torch.rand(4, 3),
    )
    with pytest.raises(ValueError, match="expected a process group with a name"):
        torch.export.export(model, (x,), strict=False)
    with pytest.raises(ValueError, match="expected a process group with a name"):
        make_fx(model)(x)


def test_layer_that_was_converted_in_inference_mode():
    model = nn.BatchNorm1d(3)
    with torch.inference_mode():
        model = convert_sync_batchnorm(model)
    compiled(model)(torch.rand(4, 3)).sum().backward()
    assert model.bias.grad.tolist() == [4.0] * 3


def test_group_without_a_name_runs_uncompiled():
    group = torch.distributed.ProcessGroup(0, 1)
    eager, model = SyncBatchNorm(3), SyncBatchNorm(3, process_group=group)
    x = torch.rand(4, 3)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="runs uncompiled: its process group has no name"):
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), eager(x))
    assert torch.equal(model.running_mean, eager.running_mean)
    with pytest.raises(RuntimeError, match="its process group has no name"):
        compiled(model)(x)
    torch.export.export(model, (x,), strict=False)  # like a layer without other ranks
    model.process_group = None
    torch.testing.assert_close(compiled(model)(x), eager(x))


@pytest.mark.parametrize(("name", "number"), [("eps", None), ("eps", -1.0), ("momentum", "fast")])
def test_bad_numbers(name, number):
    layer = SyncBatchNorm(3)
    setattr(layer, name, number)
    torch._dynamo.reset()
    with pytest.raises((TypeError, ValueError), match=f"expected {name} to be"):
        torch.compile(layer, backend="aot_eager")(torch.rand(4, 3))
