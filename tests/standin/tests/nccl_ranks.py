"""Ranks that call the stand-in's libnccl by ctypes: processes without torch, which start at once.

Device memory is the host's, so that values are written and read as they are.
"""

import contextlib
import ctypes
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SECONDS = 30  # of a case

# Codes, operations and types of nccl.h.
SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 4, 5, 6
SUM, PROD, MAX = range(3)
FLOAT16 = 6
TYPES = {
    ctypes.c_uint8: 1,
    ctypes.c_int32: 2,
    ctypes.c_int64: 4,
    ctypes.c_float: 7,
    ctypes.c_double: 8,
}

library = ctypes.CDLL(None)
if hasattr(library, "ncclGetLastError"):
    library.ncclGetLastError.restype = ctypes.c_char_p


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class NcclError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(library.ncclGetLastError(None).decode())


def check(code: int) -> None:
    if code != SUCCESS:
        raise NcclError(code)


class Buffer:
    """Values in the memory of the device."""

    def __init__(self, values: Iterable[float], kind: Any = ctypes.c_float) -> None:
        values = list(values)
        self.type, self.count = TYPES[kind], len(values)
        self.address = ctypes.c_void_p()
        size = max(1, len(values)) * ctypes.sizeof(kind)
        assert library.cudaMalloc(ctypes.byref(self.address), ctypes.c_size_t(size)) == 0
        self.array = (kind * len(values)).from_address(self.address.value)
        self.array[:] = values

    def get(self) -> list[float]:
        assert library.cudaDeviceSynchronize() == 0
        return list(self.array)


class Stream(ctypes.c_void_p):
    def __init__(self) -> None:
        super().__init__()
        non_blocking = 1
        assert library.cudaStreamCreateWithFlags(ctypes.byref(self), non_blocking) == 0


def capture(stream: Stream, enqueue: Callable[[], None]) -> ctypes.c_void_p:
    """Return a graph of what ``enqueue`` enqueues on the stream, to be launched."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.cudaStreamBeginCapture(stream, 0) == 0
    enqueue()
    assert library.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    no_flags = ctypes.c_ulonglong(0)
    assert library.cudaGraphInstantiate(ctypes.byref(executable), graph, no_flags) == 0
    return executable


class Communicator:
    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        self.stream = Stream()

    def split(self, color: int, key: int) -> "Communicator | None":
        made = ctypes.c_void_p()
        check(library.ncclCommSplit(self.handle, color, key, ctypes.byref(made), None))
        return Communicator(made) if made.value else None

    def call(self, name: str, *arguments: Any, stream: Stream | None = None) -> None:
        """Call an NCCL function whose last arguments are a communicator and a stream."""
        check(getattr(library, name)(*arguments, self.handle, stream or self.stream))

    def all_reduce(self, buffer: Buffer, op: int = SUM, stream: Stream | None = None) -> None:
        count = ctypes.c_size_t(buffer.count)
        self.call(
            "ncclAllReduce", buffer.address, buffer.address, count, buffer.type, op, stream=stream
        )

    def broadcast(self, buffer: Buffer, root: int) -> None:
        count = ctypes.c_size_t(buffer.count)
        self.call("ncclBcast", buffer.address, count, buffer.type, root)

    def error(self) -> int:
        error = ctypes.c_int()
        check(library.ncclCommGetAsyncError(self.handle, ctypes.byref(error)))
        return error.value

    def wait_for_error(self, seconds: float = 5) -> int:
        deadline = time.monotonic() + seconds
        while (error := self.error()) == SUCCESS and time.monotonic() < deadline:
            time.sleep(0.01)
        return error

    def destroy(self) -> None:
        check(library.ncclCommDestroy(self.handle))

    def abort(self) -> None:
        check(library.ncclCommAbort(self.handle))


@contextlib.contextmanager
def group() -> Any:
    check(library.ncclGroupStart())
    yield
    check(library.ncclGroupEnd())


class Meeting:
    """Where the ranks of a test join communicators, one after another."""

    def __init__(self, folder: str, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size, self.number = Path(folder), rank, world_size, 0

    def join(self) -> Communicator:
        self.number += 1
        name = f"id-{self.number}"
        unique_id = UniqueId()
        if self.rank == 0:
            check(library.ncclGetUniqueId(ctypes.byref(unique_id)))
            self.tell(name, bytes(unique_id))
        ctypes.memmove(ctypes.byref(unique_id), self.hear(name), 128)
        handle = ctypes.c_void_p()
        init = library.ncclCommInitRank
        check(init(ctypes.byref(handle), self.world_size, unique_id, self.rank))
        return Communicator(handle)

    def tell(self, name: str, data: bytes = b"") -> None:
        """Send a named message to the other ranks, or only its name."""
        (self.folder / f"{name}.part").write_bytes(data)
        (self.folder / f"{name}.part").rename(self.folder / name)

    def hear(self, name: str) -> bytes:
        while not (self.folder / name).exists():
            time.sleep(0.001)
        return (self.folder / name).read_bytes()


def run(
    function: Callable[..., Any], world_size: int, *arguments: Any, streams: str = "inline"
) -> list[Any]:
    """Return each rank's ``function(meeting, *arguments)``, its exception, or "died"."""
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("STANDIN_STREAMS")
    os.environ["STANDIN_STREAMS"] = streams
    outcomes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            meeting = Meeting(folder, rank, world_size)
            process = context.Process(
                target=_serve, args=(theirs, function, meeting, arguments), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        deadline = time.monotonic() + SECONDS
        for pipe in pipes:
            try:
                in_time = pipe.poll(max(0, deadline - time.monotonic()))
                outcomes.append(pipe.recv() if in_time else "hangs")
            except EOFError:
                outcomes.append("died")
        for process in processes:
            process.kill()
            process.join()
    if before is None:
        del os.environ["STANDIN_STREAMS"]
    else:
        os.environ["STANDIN_STREAMS"] = before
    return outcomes


def _serve(pipe: Any, function: Callable[..., Any], meeting: Meeting, arguments: Any) -> None:
    try:
        outcome = function(meeting, *arguments)
    except NcclError as error:
        outcome = (error.code, str(error))
    except BaseException:
        outcome = traceback.format_exc()
    pipe.send(outcome)
    with contextlib.suppress(EOFError):
        pipe.recv()  # stays alive until all ranks have an outcome
