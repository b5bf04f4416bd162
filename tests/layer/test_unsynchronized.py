"""Warnings where training is not synchronized though it seems to be."""

import warnings

import pytest
import torch

from syncbn import SyncBatchNorm, modules
from syncbn.distributed import collectives

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}


def train_where_launched(monkeypatch, environment, run):
    """Train twice by ``run(layer, x)``; return the texts of the warnings of a group."""
    collectives.warn_without_group.cache_clear()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    layer = SyncBatchNorm(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(layer, torch.rand(4, 3))
    collectives.warn_without_group.cache_clear()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "init_process_group" in text]


def run_compiled(layer, x):
    return torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.trouble(
    "“torch.distributed is not initialized”, a warning; each rank has statistics of its own",
    "A launcher such as torchrun has started several processes, and the program does not join them",
    "Call `torch.distributed.init_process_group` before the first step",
)
@pytest.mark.parametrize("run", [SyncBatchNorm.__call__, run_compiled], ids=["eager", "compiled"])
def test_training_without_a_group_under_a_launcher_warns_once(run, monkeypatch):
    (text,) = train_where_launched(monkeypatch, LAUNCHED, run)
    assert "one of 4 processes" in text and "torch.distributed is not initialized" in text


@pytest.mark.parametrize("change", [{"WORLD_SIZE": "1"}, {"WORLD_SIZE": "all"}, {"WORLD_SIZE": ""}])
def test_training_in_one_process_does_not_warn(change, monkeypatch):
    assert not train_where_launched(monkeypatch, LAUNCHED | change, SyncBatchNorm.__call__)


def test_evaluation_without_a_group_does_not_warn(monkeypatch):
    assert not train_where_launched(monkeypatch, LAUNCHED, lambda layer, x: layer.eval()(x))


@pytest.mark.trouble(
    "“not the replicas of torch.nn.DataParallel”, a warning",
    "DataParallel runs replicas in threads of one process, and each normalizes its part by itself",
    "Train with DistributedDataParallel, one process for each GPU",
)
def test_replicas_of_data_parallel_warn_once_in_training():
    modules._warn_of_replicas.cache_clear()
    layer = SyncBatchNorm(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.eval()._replicate_for_data_parallel()
    layer.train()
    with pytest.warns(UserWarning, match="not the replicas of torch.nn.DataParallel") as caught:
        replicas = [layer._replicate_for_data_parallel() for _ in range(2)]
    assert len(caught) == 1
    assert all(type(replica) is SyncBatchNorm and replica is not layer for replica in replicas)
