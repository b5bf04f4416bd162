"""Out of memory: torch's words and class, which programs look for, and no path of our sources."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from cases import OPS, arguments
from paths import ROOT
from ranks import Ranks

from syncbn import SyncBatchNorm, _extension, ops

# Each operator that allocates a tensor of the input's size, where the next one of that size is too
# much. In a process of its own: the limit is the process's.
PROGRAM = """
import resource
import torch
from syncbn import ops

x = torch.ones(1, 4, 4096, 4096)
totals = ops.batch_norm_stats(x)
mean, invstd, count = totals[:4].clone(), totals[4:8].clone(), totals[8:].clone()
with open("/proc/self/statm") as status:
    used = int(status.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
try:
    {call}
except RuntimeError as error:
    print(error)
"""
CALLS = {
    "apply": "ops.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, 1e-5)",
    "backward_apply": "ops.batch_norm_backward_apply(x, x, mean, invstd, None, totals[:8], count)",
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_says_it_in_torchs_words(name):
    program = PROGRAM.format(call=CALLS[name])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = "DefaultCPUAllocator: can't allocate memory: syncbn tried to allocate 268435456 bytes"
    assert result.stdout.strip() == said, result.stderr
    assert should_reduce_batch_size(RuntimeError(said))


def run_out(*args):
    raise RuntimeError("CUDA out of memory. syncbn tried to allocate 8 bytes on device 0")


@pytest.mark.parametrize("name", [name for name in OPS if " " not in name])
def test_class_on_cuda_is_torchs(name, monkeypatch):
    args = arguments(name, torch.rand(4, 3))
    monkeypatch.setattr(ops, f"_{name}", run_out)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. syncbn") as error:
        getattr(ops, name)(*args)
    assert should_reduce_batch_size(error.value)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_layer_names_itself(stage, monkeypatch):
    monkeypatch.setattr(ops, f"_batch_norm_{stage}", run_out)
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    with pytest.raises(torch.OutOfMemoryError, match=r"on device 0 \[layer 'body.bn1'\]$"):
        layer(torch.rand(4, 3, requires_grad=True)).sum().backward()


def run_out_on_one_rank(rank, world_size, stage):
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    layer(torch.rand(4, 3))
    if rank == 1:
        setattr(ops, f"_batch_norm_{stage}", run_out)
    layer(torch.rand(4, 3))


@pytest.mark.parametrize("stage", ["stats", "apply"])
def test_rank_that_runs_out_names_its_layer(stage):
    with Ranks(2, case_seconds=30) as ranks:
        other, failed = ranks.outcomes(run_out_on_one_rank, stage)
    assert failed.kind == "OutOfMemoryError"
    assert failed.message.endswith("[layer 'body.bn1', rank 1 of 2]")
    if stage == "stats":  # before the collective
        assert "another rank of the process group withdrew" in other.message


def test_errors_hold_no_path_of_the_machine_that_built():
    libraries = [*Path(_extension._C.__file__).parent.glob("_*.so")]
    assert libraries
    for library in libraries:
        code = library.read_bytes()
        assert str(ROOT).encode() not in code and b"/torch/include/" not in code, library
