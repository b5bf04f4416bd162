"""Ranks of torch.distributed over NCCL: processes that serve many cases."""

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

SECONDS = 180  # of a case, and of the processes' start


class Failure(str):
    """The traceback of a rank's function, or "hangs" or "died"."""


class Ranks:
    """The ranks that :func:`started` yields."""

    def __init__(self, pipes: list[Any]) -> None:
        self.pipes = pipes

    def outcomes(self, function: Any, *arguments: Any) -> list[Any]:
        """Return each rank's ``function(rank, world_size, *arguments)``, or a :class:`Failure`."""
        for pipe in self.pipes:
            pipe.send((function.__code__.co_filename, function.__name__, arguments))
        deadline = time.monotonic() + SECONDS
        return [self._receive(pipe, deadline) for pipe in self.pipes]

    def _receive(self, pipe: Any, deadline: float) -> Any:
        try:
            in_time = pipe.poll(max(0, deadline - time.monotonic()))
            return pipe.recv() if in_time else Failure("hangs")
        except EOFError:
            return Failure("died")

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """Return each rank's result; a failure fails the test."""
        outcomes = self.outcomes(function, *arguments)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        assert not failures, "\n".join(failures)
        return outcomes


@contextlib.contextmanager
def started(world_size: int, **environment: str) -> Iterator[Ranks]:
    """Start processes with additional environment variables, and end them afterwards."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, f"file://{folder}/store", environment)
            processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield Ranks(pipes)
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Any, rank: int, world_size: int, store: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # torch reads it at import
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device("cuda")
    dist.init_process_group(
        "nccl",
        init_method=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    modules: dict[str, Any] = {}
    while True:
        try:
            file, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if file not in modules:
                spec = importlib.util.spec_from_file_location(file, file)
                modules[file] = sys.modules[file] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[file])
            torch.manual_seed(0)
            outcome = getattr(modules[file], name)(rank, world_size, *arguments)
        except BaseException:
            outcome = Failure(traceback.format_exc())
        pipe.send(outcome)
