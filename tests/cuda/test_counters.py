"""The counters that a launch gets: csrc/cuda/counters.cu without the operators.

Overlapping launches that share counters occasionally give wrong sums: only on a GPU, and only if
their blocks end in a certain order.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from support.cuda_device import IS_STANDIN

from tools import cuda

pytestmark = pytest.mark.cuda

SOURCE = Path(__file__).parents[2] / "csrc" / "cuda" / "counters.cu"
TAKE = "_ZN6syncbn4cuda13take_countersEiP11CUstream_stl"


@pytest.fixture(scope="module")
def take(tmp_path_factory):
    """``take(stream, number)``: the bytes of the counters of a launch; None if it has none."""
    nvcc = cuda.find("bin/nvcc")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    torch.cuda.init()
    library = tmp_path_factory.mktemp("counters") / "counters.so"
    options = ["-std=c++17", "-shared", "-cudart=shared", "-Xcompiler=-fPIC"]
    subprocess.run([nvcc, *options, SOURCE, "-o", library], check=True)
    function = ctypes.CDLL(str(library))[TAKE]
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
    function.restype = ctypes.c_void_p

    def call(stream, number):
        address = function(0, stream.cuda_stream, number)
        return address and range(address, address + 4 * number)

    return call


def overlap(some, others):
    return some.start < others.stop and others.start < some.stop


def test_each_stream_has_counters_of_its_own(take):
    streams = [torch.cuda.Stream() for _ in range(4)]
    taken = [take(stream, number) for number in (7, 4096) for stream in streams]
    assert [counters.start for counters in taken[:4]] == [counters.start for counters in taken[4:]]
    assert not any(overlap(a, b) for i, a in enumerate(taken[4:]) for b in taken[4:][:i])


def test_stream_with_a_handle_of_a_destroyed_one_has_counters_of_its_own(take):
    """The work of the destroyed stream may still run."""
    runtime = torch.cuda.cudart()
    taken, handles = set(), set()
    for _ in range(100):
        handle = ctypes.c_void_p()
        torch.cuda.check_error(runtime.cudaStreamCreate(ctypes.addressof(handle)))
        taken.add(take(torch.cuda.ExternalStream(handle.value), 7).start)
        handles.add(handle.value)
        torch.cuda.check_error(runtime.cudaStreamDestroy(handle.value))
    assert len(taken) == 100
    assert len(handles) < 100 or not IS_STANDIN


def test_launches_that_allocate_their_counters(take):
    assert take(torch.cuda.Stream(), 4096) is not None
    assert take(torch.cuda.Stream(), 4097) is None
    per_thread = torch.cuda.ExternalStream(2)  # cudaStreamPerThread, which threads do not share
    assert take(per_thread, 7) is None


def test_each_captured_launch_has_counters_of_its_own(take):
    before = take(torch.cuda.current_stream(), 4096)
    taken = []
    for _ in range(2):
        x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.zero_()
            taken += [take(torch.cuda.current_stream(), 7) for _ in range(2)]
    of_stream = take(torch.cuda.graph.default_capture_stream, 4096)  # where both were captured
    taken += [before, of_stream]
    assert not any(overlap(a, b) for i, a in enumerate(taken) for b in taken[:i])
