"""No operator of a compiled graph takes tensors of two devices.

From torch 2.15 on, Inductor would keep it out of CUDA graphs, under ``mode="reduce-overhead"``.
"""

import pytest
import torch
from support.compiling import small
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

from syncbn import convert_sync_batchnorm


def devices_by_node(graph):
    """The devices of the tensors that each call takes and makes."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            values = [other.meta.get("val") for other in (*node.all_input_nodes, node)]
            tensors = [v for v in torch.utils._pytree.tree_leaves(values) if torch.is_tensor(v)]
            found[str(node)] = {tensor.device.type for tensor in tensors}
    return found


class Watcher:
    """A compiler that notes the devices in each graph."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        self.seen.append(devices_by_node(graph))
        return graph.forward


def watched(forward, backward):
    torch._dynamo.reset()
    average = nn.BatchNorm2d(3, momentum=None)
    model = convert_sync_batchnorm(nn.Sequential(average, *small()))
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    return torch.compile(model, backend=backend, fullgraph=True)


def check_devices(graph, operator):
    names = [name for name in graph if name.startswith(operator)]
    assert len(names) == 3, graph  # of three layers
    assert all(devices == {"cuda"} for devices in graph.values()), graph


def trace_forward(rank, world_size):
    watcher = Watcher()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.device("cuda"), torch.no_grad():  # autograd would ask for a GPU
        watched(watcher, watcher)(torch.randn(4, 3, 6, 6))
    return watcher.seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA cannot start in a fork")
def test_forward(compiling_ranks):
    for (graph,) in compiling_ranks.run(trace_forward):
        check_devices(graph, "compiled_forward")


def train_step(rank, world_size):
    forward, backward = Watcher(), Watcher()
    watched(forward, backward)(torch.randn(4, 3, 6, 6)).sum().backward()
    return forward.seen + backward.seen


@pytest.mark.cuda
def test_both_directions(ranks):
    for forward, backward in ranks(2, "nccl", "cuda").run(train_step):
        check_devices(forward, "compiled_forward")
        check_devices(backward, "compiled_backward")
