"""Out of memory: torch's message and class, which programs look for, and no path of our sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ops
from support.cases import OPS, arguments
from support.paths import ROOT
from support.ranks import Ranks

from syncbn import SyncBatchNorm
from syncbn.ops import _extension


def should_reduce_batch_size(error):
    """Whether accelerate takes an error for out of memory."""
    return pytest.importorskip("accelerate.utils.memory").should_reduce_batch_size(error)


# Each operator that allocates a tensor of the input's size, under a limit that such a tensor
# exceeds. In a separate process: the limit is the process's.
PROGRAM = """
import resource
import torch
from syncbn import ops

x = torch.ones(1, 4, 4096, 4096)
totals = ops.usual.batch_norm_stats(x)
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
    "apply": "ops.usual.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, 1e-5)",
    "backward_apply": (
        "ops.usual.batch_norm_backward_apply(x, x, mean, invstd, None, totals[:8], count)"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_raises_torchs_message(name):
    program = PROGRAM.format(call=CALLS[name])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = "DefaultCPUAllocator: can't allocate memory: syncbn tried to allocate 268435456 bytes"
    assert result.stdout.strip() == said, result.stderr
    assert should_reduce_batch_size(RuntimeError(said))


FAULTS = {
    "kernel": """
try:
    torch.arange(3, device="cuda")[torch.tensor([100], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError:
    pass
call()
""",
    "capture": """
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(side):
    graph.capture_begin()
    try:
        torch.cuda.synchronize()  # forbidden: the capture ends
    except RuntimeError:
        pass
    call()
""",
}
CUDA_PROGRAM = """
import os
import torch
from syncbn import ops

x = torch.ones(64, 8, 128, 256, device="cuda")  # memory of a size that no allocator has in stock
totals = ops.usual.batch_norm_stats(x)
torch.cuda.synchronize()

def call():
    try:
        ops.usual.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, 1e-5)
    except RuntimeError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)  # the device cannot be left in order

"""


@pytest.mark.cuda
@pytest.mark.parametrize("fault", FAULTS)
def test_an_earlier_error_on_cuda_is_not_called_out_of_memory(fault):
    """Programs that retry with a smaller batch would never end. In separate processes."""
    program = CUDA_PROGRAM + FAULTS[fault]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1" if fault == "capture" else "0"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env
    )
    assert result.stdout.startswith("RuntimeError syncbn"), result.stdout + result.stderr
    assert "cannot allocate 67108864 bytes on CUDA device 0, because" in result.stdout
    assert not should_reduce_batch_size(RuntimeError(result.stdout))


# In a separate process: the memory that other tests have freed would suffice.
TOO_MUCH_ON_CUDA = """
import torch
from syncbn import ops

x = torch.ones(64, 8, 128, 256, device="cuda")
totals = ops.usual.batch_norm_stats(x)
torch.cuda.empty_cache()
used = torch.cuda.memory_reserved() + 2**20
torch.cuda.set_per_process_memory_fraction(used / torch.cuda.mem_get_info()[1])
try:
    ops.usual.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, 1e-5)
except RuntimeError as error:
    print(type(ops.in_its_class(error)).__name__, error)
"""


@pytest.mark.cuda
def test_too_much_on_cuda_is_out_of_memory():
    command = [sys.executable, "-c", TOO_MUCH_ON_CUDA]
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout.strip()
    words = "OutOfMemoryError CUDA out of memory. syncbn tried to allocate"
    assert said.startswith(words), result.stderr
    assert said.endswith("67108864 bytes on device 0")
    assert should_reduce_batch_size(torch.OutOfMemoryError(said))


def run_out(*args):
    raise RuntimeError("CUDA out of memory. syncbn tried to allocate 8 bytes on device 0")


@pytest.mark.parametrize("name", [name for name in OPS if " " not in name])
def test_class_on_cuda_is_torchs(name):
    args = arguments(name, torch.rand(4, 3))
    raised = pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. syncbn")
    with ops.replaced(**{name: run_out}), raised as error:
        getattr(ops, name)(*args)
    assert should_reduce_batch_size(error.value)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_layer_names_itself(stage):
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    raised = pytest.raises(torch.OutOfMemoryError, match=r"on device 0 \[layer 'body.bn1'\]$")
    with ops.replaced(**{f"batch_norm_{stage}": run_out}), raised:
        layer(torch.rand(4, 3, requires_grad=True)).sum().backward()


def run_out_on_one_rank(rank, world_size, stage):
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    layer(torch.rand(4, 3))
    with ops.replaced(**{f"batch_norm_{stage}": run_out} if rank == 1 else {}):
        layer(torch.rand(4, 3))


@pytest.mark.parametrize("stage", ["stats", "apply"])
@pytest.mark.trouble(
    "One rank runs out of memory, “OutOfMemoryError”, and the others raise too",
    "The batch does not fit into the memory of that rank",
    "A smaller batch, or catch the error on all ranks and [continue](failures.md)",
)
def test_rank_that_runs_out_names_its_layer(stage):
    with Ranks(2, case_seconds=30) as ranks:
        other, failed = ranks.outcomes(run_out_on_one_rank, stage)
    assert failed.kind == "OutOfMemoryError"
    assert failed.message.endswith("[layer 'body.bn1', rank 1 of 2]")
    if stage == "stats":  # before the collective
        assert "another rank of the process group aborted" in other.message


def test_errors_hold_no_path_of_the_build_machine():
    libraries = [*Path(_extension._C.__file__).parent.glob("_*.so")]
    assert libraries
    for library in libraries:
        code = library.read_bytes()
        assert str(ROOT).encode() not in code and b"/torch/include/" not in code, library
