"""Times of a layer's forward collective by world size; each rank has a GPU or a process."""

import functools
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rows import Row, spread
from benchmarks.timer import Call, host_clock, interleave

CHANNELS = (64, 256, 2048)
ROUNDS = 15
CALLS = 100  # in a row, the same number on all ranks

Samples = dict[tuple[int, int], dict[str, list[float]]]  # by world size and channels


def _calls(channels: int, device: torch.device, group: Any) -> dict[str, Call]:
    """Return our collective and torch.nn.SyncBatchNorm's."""
    size = 2 * channels + 1
    sums = torch.zeros(2 * channels + 4, dtype=torch.float64, device=device)
    own = torch.zeros(size, device=device)
    gathered = torch.zeros(group.size() * size, device=device)
    return {
        "syncbn": lambda: dist.all_reduce(sums, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, own, group=group),
    }


def _seconds(device: torch.device, call: Call, calls: int) -> float:
    """Return the time of one call, averaged over ``CALLS * calls``, up to the device's end."""

    def all_calls() -> None:
        for _ in range(CALLS * calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return host_clock(all_calls, 1) / (CALLS * calls)


def _measure(
    rank: int, worlds: Sequence[int], backend: str, device_type: str, store: str
) -> Samples:
    """Measure on one rank of the largest world; runs in a spawned process."""
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    url = f"file://{store}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=max(worlds))
    samples: Samples = {}
    for world in worlds:
        # An int on ranks outside of the group, which skip it.
        group: Any = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        for channels in CHANNELS:
            calls = _calls(channels, device, group)
            clocks = dict.fromkeys(calls, functools.partial(_seconds, device))
            samples[world, channels] = interleave(calls, clocks, ROUNDS, 0.0)
    dist.destroy_process_group()
    return samples


def collective_rows(worlds: Sequence[int], backend: str, device_type: str) -> Iterator[Row]:
    """Yield the times of rank 0."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            max(worlds), mp_context=multiprocessing.get_context("spawn")
        ) as processes,
    ):
        store = str(Path(folder) / "store")
        jobs = [
            processes.submit(_measure, rank, worlds, backend, device_type, store)
            for rank in range(max(worlds))
        ]
        samples = jobs[0].result()
        for job in jobs:
            job.result()
    for (world, channels), by_variant in samples.items():
        for variant, seconds in by_variant.items():
            times = spread([1e6 * value for value in seconds])
            inputs = (f"world {world}", "float32", "contiguous", str(channels), 1, "tuned")
            row = (*inputs, "forward collective", variant, "measured")
            yield Row("collectives", *row, *times, "us", len(seconds))
