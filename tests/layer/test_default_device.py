"""Layers on the CPU do not depend on the default device."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import syncbn
from syncbn import SyncBatchNorm

# A program with a model on the CPU, for any default device.
PROGRAM = """
import copy, pickle, sys
import torch

torch.set_default_device(sys.argv[1])
import syncbn

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.activation = torch.nn.BatchNorm1d(3), torch.nn.ReLU()

    def forward(self, x):
        return self.activation(self.norm(x))

for device in (sys.argv[1], "cpu"):
    torch.set_default_device(device)
    torch._dynamo.reset()
    print("---")
    with torch.device("cpu"):
        x = torch.arange(12.0).view(4, 3).square()
        mask = torch.tensor([True, True, False, True])
        nets = [Net(), Net()]
    model, other = map(syncbn.convert_sync_batchnorm, nets)
    print(syncbn.explain_fusion(model))
    syncbn.fuse_activations(model)
    for net in (model, torch.compile(other, backend="aot_eager", fullgraph=True)):
        net(x).square().sum().backward()
        print(net.norm.weight.grad)
    print(copy.deepcopy(model)(x), pickle.loads(pickle.dumps(model))(x), model.norm(x, mask=mask))
    syncbn.recompute_statistics(model, [x, x + 1])
    syncbn.check_synchronized(model)
    syncbn.freeze_statistics(model)
    print(model(x), list(model.buffers()))
    syncbn.unfreeze_statistics(model)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
    print(torch.autograd.grad(grad.square().sum(), leaf))
    print(torch.export.export(other, (x,)).module()(x))
    print(syncbn.revert_sync_batchnorm(model))
"""


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_layer_on_the_cpu_ignores_the_default_device(device):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, device]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    # torch prints a tensor's device if another one is the default.
    _, printed, expected = ran.stdout.replace(", device='cpu'", "").split("---\n")
    assert printed == expected


def use_with_default(rank, world_size):
    model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    x = torch.arange(12.0).view(4, 3) + rank
    torch.set_default_device("meta")
    try:
        syncbn.fuse_activations(model)
        model(x).square().sum().backward()
        syncbn.recompute_statistics(model, [x, x + 1][: rank + 1])
        syncbn.check_synchronized(model)
        with pytest.raises(ValueError, match="but this rank normalizes"):
            SyncBatchNorm(3 + rank, device="cpu")(torch.zeros(2, 3 + rank, device="cpu"))
        return model[0].running_mean
    finally:
        torch.set_default_device(None)


def test_ranks_on_cpus_ignore_the_default_device(two_ranks):
    first, second = two_ranks.run(use_with_default)
    assert torch.equal(first, second) and not first.is_meta
