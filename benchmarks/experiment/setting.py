"""The conditions of a measurement and the form of its rows. Needs torch, but not syncbn."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import results
from benchmarks.cases import Case
from benchmarks.measure import Clock, Samples, gpu_clock, host_clock
from benchmarks.results import Row, spread


class Setting(NamedTuple):
    """The device and the length of a run."""

    device: torch.device
    multiprocessors: int
    l2_bytes: int
    stream: int
    clock: Clock
    repeats: int
    sample_seconds: float  # the least for each sample

    @classmethod
    def gpu(cls) -> "Setting":
        """Return the conditions on the GPU."""
        device = torch.device("cuda")
        properties = torch.cuda.get_device_properties(device)
        return cls(
            device,
            properties.multi_processor_count,
            properties.L2_cache_size,
            torch.cuda.current_stream().cuda_stream,
            gpu_clock,
            repeats=9,
            sample_seconds=4e-4,
        )

    @classmethod
    def dry(cls) -> "Setting":
        """Return the conditions of a dry run on a CPU, for a GPU of few multiprocessors."""
        return cls(torch.device("cpu"), 8, 1 << 20, 0, host_clock, repeats=3, sample_seconds=1e-4)

    def num_sets(self, case: Case) -> int:
        """Return the number of tensors that exceeds four times the L2 cache."""
        return 1 + 4 * self.l2_bytes // case.num_bytes


def timed_rows(benchmark: str, case: Case, quantity: str, samples: Samples) -> Iterator[Row]:
    """Yield each variant's time."""
    for variant, seconds in samples.items():
        of_all = spread([1e6 * value for value in seconds])
        key = (*case.columns, 1, "tuned", quantity, variant, "measured")
        yield Row(benchmark, *key, *of_all, "us", len(seconds))


def write(path: Path, rows: Iterable[Row], setting: Setting) -> None:
    """Append rows to a CSV file at once."""
    version, device = str(torch.__version__), results.device_slug(setting.device.type)
    results.write(path, (replace(row, torch=version, device=device) for row in rows))
