"""The log of the stand-in, which counts launches and waits where a GPU has a profiler."""

import ctypes

import pytest
from runtime_calls import (
    GLOBAL,
    LEGACY,
    allocate,
    allocate_pinned,
    call,
    copy,
    library,
    make,
    make_event,
    make_stream,
    sleep,
    synchronize,
    take_log,
    write,
)

pytestmark = pytest.mark.any_torch


@pytest.fixture(autouse=True)
def empty_log():
    take_log()


def test_copies_are_logged():
    address, pinned, stream = allocate(), allocate_pinned(), make_stream()
    take_log()
    write(address, 7, stream)
    copy(pinned, address, stream)
    assert take_log() == ["copy memset", "copy memcpy"]


def test_allocations_are_logged():
    allocate()
    allocate_pinned()
    assert take_log() == ["allocation cudaMalloc", "allocation cudaHostAlloc"]


def test_waits_are_logged_by_the_names_of_the_calls():
    address, stream, event, value = allocate(), make_stream(), make_event(), ctypes.c_ubyte()
    take_log()
    synchronize(stream)
    call("cudaEventSynchronize", event)
    call("cudaDeviceSynchronize")
    copy(ctypes.addressof(value), address, stream)
    call("cudaMemcpy", ctypes.c_void_p(address), ctypes.byref(value), ctypes.c_size_t(1), 4)
    assert [line for line in take_log() if line.startswith("wait")] == [
        "wait cudaStreamSynchronize",
        "wait cudaEventSynchronize",
        "wait cudaDeviceSynchronize",
        "wait cudaMemcpyAsync to pageable memory",
        "wait cudaMemcpy",
    ]


def test_calls_that_neither_wait_nor_launch_are_not_logged():
    stream, event, pinned, address = make_stream(), make_event(), allocate_pinned(), allocate()
    take_log()
    call("cudaEventRecord", event, stream)
    call("cudaStreamWaitEvent", LEGACY, event, 0)
    library.cudaStreamQuery(stream)
    library.cudaEventQuery(event)
    sleep(0, stream)
    library.standin_flush(stream)
    assert take_log() == []
    copy(pinned, address, stream)
    assert take_log() == ["copy memcpy"]


def test_captured_work_is_logged_when_its_graph_is_launched():
    address, stream, graph = allocate(), make_stream(), ctypes.c_void_p()
    take_log()
    call("cudaStreamBeginCapture", stream, GLOBAL)
    write(address, 7, stream)
    call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    launched = make("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    assert take_log() == []
    call("cudaGraphLaunch", launched, stream)
    call("cudaGraphLaunch", launched, stream)
    assert take_log() == ["copy memset", "copy memset"]


def test_other_parts_add_lines():
    library.standin_log(b"collective", b"ncclAllReduce")
    assert take_log() == ["collective ncclAllReduce"]


def test_the_log_keeps_the_newest_lines():
    for i in range(100_010):
        library.standin_log(b"kernel", b"%d" % i)
    lines = take_log()
    assert (len(lines), lines[0], lines[-1]) == (100_000, "kernel 10", "kernel 100009")
