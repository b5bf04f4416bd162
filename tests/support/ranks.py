"""Runs functions of a test file on several ranks at once, on the CPU or on GPUs.

Starting a process and importing torch takes seconds, so one set of processes serves many cases:
``Ranks.run`` sends them a function by name, its arguments and the filters of warnings, and returns
each rank's result. A case that hangs fails within a minute with each rank's stack; processes never
outlive their set.

They start at once, as forks of a process that has imported torch and done nothing else. On the CPU,
ranks with their own environment start as new processes, because torch reads it at import.

On "plain" the default device is the one of plain_device.py. On CUDA a function finds its GPU as the
default device. Ranks share GPUs if there are fewer, over NCCL as well: this tests correctness, not
speed.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import multiprocessing.forkserver
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

CASE_SECONDS = 45  # with the start and the stack dump, a hang is reported within a minute
CUDA_START_SECONDS = 60  # more for the first case, which creates contexts and communicators
AFTER_FAILURE_SECONDS = 10  # for the others, once a rank has failed
COLLECTIVE_SECONDS = 40  # a collective gives up before its case does
_SYNCBN = re.compile(r"syncbn")
# Imported once: by a first step and by the functions of tests.
FORKSERVER_IMPORTS = ["syncbn", "support.plain_device", "support.trial"]


# A process that starts asks for the exit status of all others. The fork server gives it once, and a
# thread that asks at the same moment would find none.
_polling = threading.Lock()


@functools.cache
def _start_fork_server() -> None:
    """Start the server once: to copy the environment, as mock does, is not safe among threads."""
    import torch

    imports = [*FORKSERVER_IMPORTS]
    # Imported by a first compilation. It counts the GPUs, and forks of a process that has done so
    # cannot use them.
    if not torch.cuda.is_available():
        imports.append("torch._inductor.lowering")
    multiprocessing.set_forkserver_preload(imports)
    multiprocessing.forkserver.ensure_running()


class RankError(AssertionError):
    """A failure on some rank, with each rank's traceback or stack."""


class Failure:
    """An exception that a rank's function raised, or how its process ended."""

    def __init__(self, kind: str, message: str, text: str) -> None:
        self.kind, self.message, self.text = kind, message, text

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"


class Ranks:
    """``world_size`` processes in one group of torch.distributed; a context manager."""

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        case_seconds: float = CASE_SECONDS,
        collective_seconds: float = COLLECTIVE_SECONDS,
        backend: str = "gloo",
        device: str = "cpu",
        after_failure_seconds: float = AFTER_FAILURE_SECONDS,
    ) -> None:
        self.world_size = world_size
        self.after_failure_seconds = after_failure_seconds
        self.backend = backend
        self.device = device
        self.env = env or {}
        self.case_seconds = case_seconds
        self.collective_seconds = collective_seconds
        self.folder = tempfile.TemporaryDirectory(prefix="syncbn-ranks-")
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self.folder.cleanup()

    def start(self) -> None:
        if self.device == "plain":
            from support import plain_device

            plain_device.build()  # once, outside of a case's time
        alike = self.device == "cuda" or not self.env
        context: Any = multiprocessing.get_context("forkserver" if alike else "spawn")
        if alike:
            _start_fork_server()
        store = str(Path(tempfile.mkdtemp(dir=self.folder.name)) / "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self.world_size,
                    self.backend,
                    self.device,
                    store,
                    theirs,
                    self._stack(rank),
                    self.env,
                    self.collective_seconds,
                ),
                daemon=True,
            )
            with _polling:
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def run(self, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Return ``function(rank, world_size, ...)`` of each rank; raise if one failed."""
        outcomes = self.outcomes(function, *args, **kwargs)
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            text = "\n".join(
                f"--- rank {rank}: " + (o.text if isinstance(o, Failure) else "finished")
                for rank, o in enumerate(outcomes)
            )
            self.stop()  # its group may be unusable now
            raise RankError(f"{function.__name__} failed\n{text}")
        return outcomes

    def outcomes(self, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Return each rank's result, or a :class:`Failure`.

        Ranks that raised continue: syncbn leaves them a working group.
        """
        seconds = self.case_seconds
        if not self.processes:
            self.start()
            seconds += CUDA_START_SECONDS if self.device == "cuda" else 0
        code = function.__code__.co_filename, function.__qualname__
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((*code, args, kwargs, warnings.filters))
        deadline = time.monotonic() + seconds
        outcomes: list[Any] = [None] * self.world_size
        waiting = dict(enumerate(self.pipes))
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(list(waiting.values()), timeout=1):
                rank = self.pipes.index(pipe)
                del waiting[rank]
                try:
                    outcomes[rank] = pipe.recv()
                    if isinstance(outcomes[rank], Failure):
                        deadline = min(deadline, time.monotonic() + self.after_failure_seconds)
                except (EOFError, ConnectionResetError):
                    multiprocessing.connection.wait([self.processes[rank].sentinel])
                    with _polling:
                        self.processes[rank].join()
                    code = self.processes[rank].exitcode
                    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    outcomes[rank] = Failure("died", name, f"the process died: {name}")
        for rank in waiting:
            outcomes[rank] = Failure("hung", "", f"hung\n{self._dump_stack(rank)}")
        if any(isinstance(o, Failure) and o.kind in ("died", "hung") for o in outcomes):
            self.stop()
        return outcomes

    def _stack(self, rank: int) -> str:
        return str(Path(self.folder.name) / f"stack-{rank}")

    def _dump_stack(self, rank: int) -> str:
        stack = Path(self._stack(rank))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            if stack.exists() and stack.stat().st_size:
                return stack.read_text()
        return "(no stack: it hangs outside of Python's reach)"


def _serve(
    rank: int,
    world_size: int,
    backend: str,
    device: str,
    store: str,
    pipe: Any,
    stack: str,
    env: dict[str, str],
    collective_seconds: float,
) -> None:
    stack_file = open(stack, "w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **_nccl_on_shared_gpus(rank), **env})

    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    from support import hidden, plain_device

    hidden.hide()
    torch.set_num_threads(1)
    if device == "plain":
        plain_device.install()
        torch.set_default_device("plain")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_seconds),
    )
    while True:
        try:
            file, name, args, kwargs, filters = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.resetwarnings()
                warnings.filters.extend(map(_only_of_syncbn, filters))
                outcome = _load(file, name)(rank, world_size, *args, **kwargs)
            # Tensors on a GPU would be shared between the processes, for as long as both live.
            outcome = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), outcome)
        except BaseException as error:
            outcome = Failure(type(error).__name__, str(error), traceback.format_exc())
        try:
            pipe.send(outcome)
        except Exception as error:  # a result that cannot be pickled
            pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))


def _only_of_syncbn(rule: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a filter by which no warning of another module, such as torch, is an error."""
    action, message, category, module, line = rule
    return action, message, category, _SYNCBN if action == "error" else module, line


def _nccl_on_shared_gpus(rank: int) -> dict[str, str]:
    """Return variables that make NCCL accept several ranks on one GPU, as different hosts.

    From 2.30 on NCCL also requires an explicit permission.
    """
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _load(file: str, name: str) -> Any:
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, file)
        assert spec is not None and spec.loader is not None
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return getattr(sys.modules[file], name)
