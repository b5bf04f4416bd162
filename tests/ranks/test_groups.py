"""Groups of neighboring ranks, by their size or as a mesh's dimension."""

import copy
import gc
import os
import pickle
import re
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from support.groups import make_by_hand
from support.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from syncbn import (
    SyncBatchNorm,
    check_synchronized,
    convert_sync_batchnorm,
    recompute_statistics,
    sync_batch_norm,
    training,
)
from syncbn.distributed.state import group_state

WORLD = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).double()


def share(rank):
    # Each rank has its own spread, so that each grouping has other statistics.
    return make_input((2, 3, 4, 4), "contiguous", torch.float64, seed=rank) * (rank + 1)


def normalize(rank, world_size, group_size):
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        converted = convert_sync_batchnorm(model(), group_size=group_size)
    ours = [layer for layer in converted if isinstance(layer, SyncBatchNorm)]
    assert len(ours) == 2 and ours[0].process_group is ours[1].process_group
    converted = DistributedDataParallel(converted)
    output = converted(share(rank))
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in converted.parameters()]
    return output.detach(), converted.module[1].running_var, gradients


@pytest.mark.works('groups: `convert_sync_batchnorm(model, group_size=8)` and `"node"`')
@pytest.mark.parametrize("group_size", [1, 2, 4, "node"])
def test_each_group_has_the_statistics_of_its_own_batch(ranks, group_size):
    size = 2 if group_size == "node" else group_size
    outputs, gradients, variances = [], [], []
    for first in range(0, WORLD, size):
        reference = model()
        output = reference(torch.cat([share(rank) for rank in range(first, first + size)]))
        output.square().sum().backward()
        outputs += output.detach().chunk(size)
        gradients.append([parameter.grad for parameter in reference.parameters()])
        variances += [reference[1].running_var] * size
    averages = [sum(grads) / WORLD for grads in zip(*gradients, strict=True)]
    for rank, (output, variance, own) in enumerate(ranks(WORLD).run(normalize, group_size)):
        # float64, by its default tolerances
        torch.testing.assert_close(output, outputs[rank])
        torch.testing.assert_close(variance, variances[rank])
        # Gradients in front of a normalization are sums that cancel: their rounding is that of
        # some hundred terms of up to ten.
        torch.testing.assert_close(own, averages, rtol=1e-7, atol=1e-10)


def count_groups(rank, world_size):
    made = []
    with mock.patch.object(dist, "new_subgroups", side_effect=dist.new_subgroups) as new:
        for size in (2, 2, 4, 2):
            converted = convert_sync_batchnorm(model(), group_size=size)
            made.append(converted[1].process_group)
    again = convert_sync_batchnorm(converted, group_size=4)
    shared = made[0] is made[1] is made[3] and again[1].process_group is dist.group.WORLD
    return new.call_count, shared, [group.size() for group in made]


def test_groups_are_made_once_for_a_size():
    with Ranks(WORLD) as ranks:
        assert ranks.run(count_groups) == [(1, True, [2, 2, 4, 2])] * WORLD


def renew_groups(rank, world_size):
    before = convert_sync_batchnorm(model(), group_size=2)[1].process_group
    dist.barrier()  # a rank that is still connecting would find its connections closed
    dist.destroy_process_group(before)
    converted = convert_sync_batchnorm(model(), group_size=2)
    return converted(share(rank)).shape, converted[1].process_group is before


def test_groups_that_were_destroyed_are_made_again():
    with Ranks(WORLD) as ranks:
        assert ranks.run(renew_groups) == [((2, 4, 4, 4), False)] * WORLD


def destroy_world(rank, world_size):
    converted = convert_sync_batchnorm(model(), group_size=world_size)
    converted(share(rank))
    group = weakref.ref(converted[1].process_group)
    del converted
    dist.destroy_process_group()
    gc.collect()
    return group() is None


def test_group_of_all_ranks_ends_when_it_is_destroyed():
    with Ranks(2) as ranks:
        assert ranks.run(destroy_world) == [True] * 2


def fail_in_a_second_group_of_a_store(rank, world_size, path):
    """As under torchrun; in the first group, only rank 0 has come to a pass."""
    store = dist.FileStore(path, world_size)
    for attempt in range(2):
        dist.barrier()  # a rank that is still connecting would find its connections closed
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
        )
        if attempt == 0 and rank == 0:
            group_state(dist.group.WORLD)
    dist.barrier()
    x = torch.rand(3, 4)
    SyncBatchNorm(4)(x.long() if rank == 1 else x)


def test_groups_of_a_store_have_keys_of_their_own(tmp_path):
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(fail_in_a_second_group_of_a_store, str(tmp_path / "store"))
    assert "rank 1: TypeError" in outcomes[0].message and outcomes[1].kind == "TypeError"


def use_after_destruction(rank, world_size):
    layer = SyncBatchNorm(3, process_group=dist.new_group()).double()
    layer._syncbn = layer._syncbn.with_name("bn1")
    x = share(rank).requires_grad_()
    output = layer(x)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    group = weakref.ref(layer.process_group)
    dist.destroy_process_group(group())
    assert group() is None  # though layer, output and gradient are alive
    words = f"rank {rank} is to use the process_group '.*', which was destroyed; .*layer 'bn1'"
    for use in (
        lambda: layer(x),
        lambda: layer.process_group,
        lambda: copy.deepcopy(layer).process_group,
        lambda: check_synchronized(layer),
        lambda: recompute_statistics(layer, [x]),
        output.sum().backward,
        gradient.sum().backward,
    ):
        with pytest.raises(ValueError, match=words):
            use()
    assert layer.eval()(x).shape == x.shape
    with pytest.warns(UserWarning, match="cannot be pickled"):
        assert pickle.loads(pickle.dumps(layer)).process_group is None
    layer.process_group = None
    layer.train()(x).sum().backward()
    return True


def test_layers_and_graphs_of_a_destroyed_group():
    with Ranks(2) as ranks:
        assert ranks.run(use_after_destruction) == [True] * 2


def let_go_before_the_backward_pass(rank, world_size, path):
    """Return whether backward passes take place without any other reference to their group."""
    layer = SyncBatchNorm(3, process_group=make_by_hand(path, rank, world_size))
    x = torch.rand(2, 3, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    outputs = []
    for library in (training.library, None):  # in C++ where it can, and in Python
        with mock.patch.object(training, "library", library):
            outputs.append(layer(x))
    group = weakref.ref(layer.process_group)
    del layer
    held = [group() is not None]
    while outputs:
        outputs.pop().sum().backward()
        held.append(group() is not None)
    return held


def test_a_graph_holds_a_group_made_by_hand(two_ranks, tmp_path):
    held = two_ranks.run(let_go_before_the_backward_pass, str(tmp_path / "store"))
    assert held == [[True, True, False]] * 2


def hold_after_an_error(rank, world_size):
    """Return whether a rank that has caught an error of a layer still holds the group."""
    layers = [SyncBatchNorm(channels, process_group=dist.group.WORLD) for channels in (3, 4)]
    gc.disable()
    with pytest.raises((ValueError, RuntimeError), match="same channels|aborted") as error:
        layers[rank](torch.rand(2, 3 + rank))
    del error
    group = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    return group() is not None


def test_an_error_that_was_caught_holds_no_group():
    with Ranks(2) as ranks:
        assert ranks.run(hold_after_an_error) == [False] * 2


def convert_with(rank, world_size, options, environment):
    original = model()
    options = dict(options)
    if options.pop("with group", False):
        options["process_group"] = dist.group.WORLD
    with (
        mock.patch.dict(os.environ, environment),
        pytest.raises((TypeError, ValueError)) as error,
    ):
        convert_sync_batchnorm(original, **options)
    assert type(original[1]) is type(original[2]) is nn.BatchNorm2d
    # The ranks still agree.
    assert convert_sync_batchnorm(original, group_size=2)[1].process_group.size() == 2
    return f"{error.type.__name__}: {error.value}"


BAD = [
    ({"group_size": 3}, {}, "ValueError: group_size=3 must divide .* 4 ranks 1 would be left"),
    ({"group_size": 8}, {}, "ValueError: group_size=8 must divide .* 4 ranks 4 would be left"),
    ({"group_size": 0}, {}, "ValueError: expected group_size to be positive, but got 0"),
    ({"group_size": -2}, {}, "ValueError: expected group_size to be positive, but got -2"),
    ({"group_size": 2.0}, {}, "TypeError: .* a number or 'node', but got float"),
    ({"group_size": True}, {}, "TypeError: .* a number or 'node', but got bool"),
    ({"group_size": "rack"}, {}, "ValueError: .* a number or 'node', but got 'rack'"),
    (
        {"group_size": "node"},
        {},
        "ValueError: .* needs .* LOCAL_WORLD_SIZE, .* which torchrun sets",
    ),
    (
        {"group_size": "node"},
        {"LOCAL_WORLD_SIZE": "3"},
        r"ValueError: the node's 3 ranks \(LOCAL_WORLD_SIZE\) must divide",
    ),
    (
        {"group_size": 2, "with group": True},
        {},
        "ValueError: .* process_group or group_size, .* both",
    ),
]


@pytest.mark.parametrize(("options", "environment", "words"), BAD)
def test_errors_are_on_all_ranks_and_nothing_is_converted(ranks, options, environment, words):
    for said in ranks(WORLD).run(convert_with, options, environment):
        assert re.match(words, said), said


def convert_differently(rank, world_size, sizes):
    original = model()
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"} if rank else {}):
        try:
            convert_sync_batchnorm(original, group_size=sizes[rank])
        finally:
            assert type(original[1]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 2), ["rank 0 gave 1 and rank 1 gave 2", "rank 1 gave 2 and rank 0 gave 1"]),
        (
            ("node", "node"),
            ["needs the environment", "no groups of 2 ranks were made: rank 0: .*needs"],
        ),
    ],
)
def test_ranks_that_differ_are_an_error_on_all(sizes, words):
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(convert_differently, sizes)
    for outcome, expected in zip(outcomes, words, strict=True):
        assert outcome.kind == "ValueError"
        assert re.search(expected, outcome.message)


def convert_on_one_rank(rank, world_size):
    if rank == 0:
        dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=2))
        convert_sync_batchnorm(model(), group_size=1)


def test_rank_that_does_not_come():
    with Ranks(2, case_seconds=30) as ranks:
        waiting, _ = ranks.outcomes(convert_on_one_rank)
    assert waiting.kind == "RuntimeError"
    assert "rank 0 makes groups of 1 ranks, but rank 1 does not" in waiting.message


def test_without_torch_distributed():
    original = model()
    with pytest.raises(
        RuntimeError, match=r"group_size=1 .* not initialized; .*init_process_group"
    ):
        convert_sync_batchnorm(original, group_size=1)
    assert type(original[1]) is nn.BatchNorm2d


def use_a_mesh(rank, world_size):
    init = dist.device_mesh.init_device_mesh
    mesh = init("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    one = mesh["dp"]
    layers = [
        convert_sync_batchnorm(nn.BatchNorm2d(3), one),
        SyncBatchNorm(3, process_group=one),
        SyncBatchNorm(3),
    ]
    layers[2].process_group = one
    assert all(layer.process_group is one.get_group() for layer in layers)
    for make in (SyncBatchNorm, convert_sync_batchnorm):
        with pytest.raises(ValueError, match=r"one dimension, but got a mesh of 2; .*mesh\['dp'\]"):
            make(3 if make is SyncBatchNorm else nn.BatchNorm2d(3), process_group=mesh)
    x = share(rank)
    outputs = [layer.double()(x).detach() for layer in layers]
    return [*outputs, sync_batch_norm(x, None, None, training=True, process_group=one)]


@pytest.mark.works('a one-dimensional `DeviceMesh` in place of a group: `mesh["dp"]`')
def test_mesh_of_one_dimension_stands_for_its_group(ranks):
    results = ranks(WORLD).run(use_a_mesh)
    for first in (0, 2):
        x = torch.cat([share(first), share(first + 1)])
        expected = nn.functional.batch_norm(x, None, None, training=True).chunk(2)
        for rank in (0, 1):
            for output in results[first + rank]:
                # float64, by its default tolerances
                torch.testing.assert_close(output, expected[rank])


class Meshed(nn.BatchNorm1d):
    """A user's layer with a mesh in an attribute named process_group."""

    def __init__(self, mesh):
        super().__init__(3)
        self.process_group = mesh


def convert_with_a_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "dp"))
    layer = convert_sync_batchnorm(Meshed(mesh["dp"]))
    assert layer.process_group is mesh["dp"].get_group()
    layer(torch.ones(2, 3) * rank)
    with pytest.warns(UserWarning, match="left as it is"):
        layer = convert_sync_batchnorm(Meshed(mesh))
    assert type(layer) is Meshed and layer.process_group is mesh


def test_mesh_of_a_users_class_is_its_group(ranks):
    ranks(WORLD).run(convert_with_a_mesh)


def train_outside_of_the_mesh(rank, world_size):
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    return SyncBatchNorm(3, process_group=mesh).double()(share(rank)).shape


def test_rank_outside_of_the_mesh(three_ranks):
    *members, outsider = three_ranks.outcomes(train_outside_of_the_mesh)
    assert members == [(2, 3, 4, 4)] * 2 and outsider.kind == "ValueError"
    assert "rank 2 is not a member of this layer's process_group" in outsider.message


def normalize_distributed(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    layer = SyncBatchNorm(3, process_group=mesh).double()
    x = share(rank)
    distributed = DTensor.from_local(x, mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"a local tensor, but got a DTensor; normalize .*to_local"):
        layer(distributed)
    output = layer(distributed.to_local())
    output = DTensor.from_local(output, distributed.device_mesh, distributed.placements)
    return output.detach().full_tensor()


def test_distributed_tensors_are_an_error_that_says_what_to_do(two_ranks):
    whole = torch.cat([share(rank) for rank in range(2)])
    expected = torch.nn.functional.batch_norm(whole, None, None, training=True)
    for output in two_ranks.run(normalize_distributed):
        torch.testing.assert_close(output, expected)  # float64, default tolerances
