"""The stand-in's CUDA runtime by ctypes, and scripts that run with other settings of it.

Device memory is the host's, so that it can be read before late work has run.
"""

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

# Codes of CUDA's errors.
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION = 1, 2, 9
INVALID_DEVICE_FUNCTION, INVALID_RESOURCE_HANDLE, ILLEGAL_STATE, NOT_READY = 98, 400, 401, 600
UNSUPPORTED_IN_CAPTURE, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION = range(900, 906)
IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 906, 907, 908

LEGACY = ctypes.c_void_p(1)
BLOCKING, NON_BLOCKING = 0, 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
POISON = 0xFF

library = ctypes.CDLL(None)
if hasattr(library, "standin_take_log"):
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.standin_take_log.restype = ctypes.c_char_p
    library.standin_is_capturing.restype = ctypes.c_bool
    library.standin_find_allocation.restype = ctypes.c_bool


class CudaError(Exception):
    def __init__(self, code):
        self.code = code
        super().__init__(library.cudaGetErrorString(code).decode())


def call(name, *arguments):
    """Call a function of the runtime; raise its error, and clear the last error."""
    code = getattr(library, name)(*arguments)
    if code:
        error = CudaError(code)
        library.cudaGetLastError()
        raise error


def make(name, *arguments):
    """Return the handle that a function of the runtime makes."""
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle), *arguments)
    return handle


def make_stream(flags=NON_BLOCKING):
    return make("cudaStreamCreateWithFlags", flags)


def make_event(flags=0):
    return make("cudaEventCreateWithFlags", flags)


def allocate(size=1):
    return make("cudaMalloc", ctypes.c_size_t(size)).value


def allocate_pinned(size=1):
    return make("cudaHostAlloc", ctypes.c_size_t(size), 0).value


def write(address, value, stream, size=1):
    call("cudaMemsetAsync", ctypes.c_void_p(address), value, ctypes.c_size_t(size), stream)


def copy(to, source, stream, size=1):
    pointers = ctypes.c_void_p(to), ctypes.c_void_p(source)
    call("cudaMemcpyAsync", *pointers, ctypes.c_size_t(size), 4, stream)


def read(address):
    """Return the present value of a byte, without waiting for work."""
    return ctypes.c_ubyte.from_address(address).value


def sleep(seconds, stream):
    """Make a stream sleep."""
    microseconds = ctypes.c_void_p(int(seconds * 1e6))
    call("cudaLaunchHostFunc", stream, ctypes.CDLL(None).usleep, microseconds)


def synchronize(stream):
    call("cudaStreamSynchronize", stream)


def take_log():
    return library.standin_take_log().decode().splitlines()


def run_script(script, **settings):
    """Run Python in a process with these settings; return its last line."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), **settings}
    done = subprocess.run(
        [sys.executable, "-c", "from runtime_calls import *\n" + textwrap.dedent(script)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    lines = done.stdout.splitlines()
    return lines[-1] if lines else ""
