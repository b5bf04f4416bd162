"""A rank that dies under torchrun, which starts all ranks again."""

import os
import runpy
import subprocess
import sys

import torch
import torch.distributed as dist
from support.ranks import Ranks

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from syncbn import convert_sync_batchnorm

folder = Path(sys.argv[1])
checkpoint, has_died = folder / "checkpoint", folder / "has died"
# A store for each start: with torch 2.15 ranks can find addresses of those before in torchrun's.
rank, start = (os.environ[name] for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
rank, store = int(rank), f"file://{folder}/store {start}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
model = DistributedDataParallel(convert_sync_batchnorm(model))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
begin = 0
if checkpoint.exists():
    begin, *states = torch.load(checkpoint)
    for part, state in zip((model, optimizer), states):
        part.load_state_dict(state)
for step in range(begin, 6):
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = model(x).square().mean()
    if rank == 1 and step == 3 and len(sys.argv) > 2 and not has_died.exists():
        has_died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save((step + 1, model.state_dict(), optimizer.state_dict()), folder / "new")
        (folder / "new").rename(checkpoint)
    dist.barrier()
dist.destroy_process_group()
"""


def train(rank, world_size, program, folder):
    """Train as torchrun does, without a death."""
    dist.barrier()  # a rank that is still connecting would find its connections closed
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), TORCHELASTIC_RESTART_COUNT="0")
    sys.argv = [program, folder]
    runpy.run_path(program, run_name="__main__")


def test_restart_from_a_checkpoint_ends_with_the_same_weights(tmp_path):
    program, undisturbed, disturbed = (
        tmp_path / name for name in ("train.py", "undisturbed", "disturbed")
    )
    program.write_text(PROGRAM)
    undisturbed.mkdir()
    disturbed.mkdir()
    with Ranks(2) as ranks:
        ranks.run(train, str(program), str(undisturbed))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "--max-restarts=1", program, disturbed, "with a death"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(torchrun, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert (disturbed / "has died").exists()
    steps, weights, _ = torch.load(disturbed / "checkpoint")
    expected_steps, expected, _ = torch.load(undisturbed / "checkpoint")
    assert steps == expected_steps == 6
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
