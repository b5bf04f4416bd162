"""Values that tracing takes for constants: a graph is compiled again if they change."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from syncbn import SyncBatchNorm, sync_batch_norm


@contextlib.contextmanager
def world_of(num_ranks):
    """A group of torch's fake backend, whose collectives do nothing, in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Recorder:
    """A backend that records the group's name in each graph that runs, and counts the graphs."""

    def __init__(self):
        torch._dynamo.reset()
        self.names, self.graphs = [], 0

    def __call__(self, graph, inputs):
        (call,) = [n for n in graph.graph.nodes if "compiled_train" in str(n.target)]
        name = next((a for a in call.args if isinstance(a, str)), None)
        self.graphs += 1

        def run(*args):
            self.names.append(name)
            return graph(*args)

        return run


def normalize(x):
    return sync_batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("make", [lambda: SyncBatchNorm(4), lambda: normalize])
def test_a_default_group_that_is_created_resized_or_destroyed(make):
    recorder, x = Recorder(), torch.rand(6, 4)
    run = torch.compile(make(), backend=recorder, fullgraph=True)
    run(x)
    with world_of(2):
        name = dist.group.WORLD.group_name
        run(x)
    run(x)
    with world_of(1):
        run(x)
    with world_of(2):
        run(x)
    assert recorder.names == [None, name, None, None, name]


def test_another_group_of_a_layer_or_of_a_call():
    with world_of(4):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2]), None, dist.new_group([0])]
        names = [groups[0].group_name, groups[1].group_name, dist.group.WORLD.group_name, None]
        x, layer = torch.rand(6, 4), SyncBatchNorm(4)
        recorder = Recorder()
        run = torch.compile(layer, backend=recorder, fullgraph=True)
        for group in groups * 2:
            layer.process_group = group
            run(x)
        assert recorder.names == names * 2 and recorder.graphs == 4
        recorder = Recorder()
        run = torch.compile(
            lambda x, group: sync_batch_norm(x, None, None, training=True, process_group=group),
            backend=recorder,
            fullgraph=True,
        )
        for group in groups * 2:
            run(x, group)
        assert recorder.names == names * 2 and recorder.graphs == 4


def test_a_graph_refuses_a_destroyed_group():
    with world_of(2):
        group = dist.new_group([0, 1])
        layer = SyncBatchNorm(4, process_group=group)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        run(torch.rand(6, 4))
        dist.destroy_process_group(group)
        with pytest.raises((RuntimeError, ValueError), match="destroyed"):
            run(torch.rand(6, 4))
