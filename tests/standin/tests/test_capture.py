"""Captures of the stand-in: captured work, and calls that are refused as on a GPU."""

import contextlib
import ctypes
import threading

import pytest
from runtime_calls import (
    BLOCKING,
    CAPTURED_EVENT,
    GLOBAL,
    ILLEGAL_STATE,
    IMPLICIT,
    INVALID_VALUE,
    INVALIDATED,
    ISOLATION,
    LEGACY,
    MERGE,
    RELAXED,
    THREAD_LOCAL,
    UNJOINED,
    UNMATCHED,
    UNSUPPORTED_IN_CAPTURE,
    WRONG_THREAD,
    CudaError,
    allocate,
    call,
    copy,
    library,
    make,
    make_event,
    make_stream,
    read,
    write,
)

pytestmark = pytest.mark.any_torch

SET_DEPENDENCIES = 1


def begin(stream, mode=GLOBAL):
    call("cudaStreamBeginCapture", stream, mode)


def end(stream):
    graph = ctypes.c_void_p()
    call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    return graph


def dependencies(stream):
    """Return the nodes that the next one of a stream depends on."""
    status, number, nodes = ctypes.c_int(), ctypes.c_size_t(), ctypes.POINTER(ctypes.c_void_p)()
    outputs = ctypes.byref(status), None, None, ctypes.byref(nodes), None, ctypes.byref(number)
    call("cudaStreamGetCaptureInfo", stream, *outputs)
    return nodes[: number.value]


def nodes_of(graph):
    number = ctypes.c_size_t()
    call("cudaGraphGetNodes", graph, None, ctypes.byref(number))
    nodes = (ctypes.c_void_p * number.value)()
    call("cudaGraphGetNodes", graph, nodes, ctypes.byref(number))
    return list(nodes)


def fork(stream, other):
    event = make_event()
    call("cudaEventRecord", event, stream)
    call("cudaStreamWaitEvent", other, event, 0)


@contextlib.contextmanager
def raises(code, words):
    with pytest.raises(CudaError, match=f"^standin: {words}$") as error:
        yield
    assert error.value.code == code


@pytest.fixture
def stream():
    """A stream that captures; the capture ends with the test."""
    stream = make_stream()
    begin(stream)
    yield stream
    library.cudaStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))
    library.cudaGetLastError()


def test_an_event_takes_a_stream_into_the_capture(stream):
    other = make_stream()
    fork(stream, other)
    assert library.standin_is_capturing(other)


# --- Refusals


@pytest.mark.parametrize(
    ("name", "make_arguments", "words"),
    [
        ("cudaStreamSynchronize", lambda s: [s], "{} of a stream that is capturing"),
        ("cudaStreamQuery", lambda s: [s], "{} of a stream that is capturing"),
        ("cudaStreamAddCallback", lambda s: [s, None, None, 0], "{} of a stream that is capturing"),
        ("cudaDeviceSynchronize", lambda s: [], "{} while a stream is capturing"),
        ("cudaMalloc", lambda s: [ctypes.byref(ctypes.c_void_p()), 8],
         "{} while a stream is capturing"),
        ("cudaHostAlloc", lambda s: [ctypes.byref(ctypes.c_void_p()), 8, 0],
         "{} while a stream is capturing"),
        ("cudaFree", lambda s: [ctypes.c_void_p(8)], "{} while a stream is capturing"),
        ("cudaFreeHost", lambda s: [ctypes.c_void_p(8)], "{} while a stream is capturing"),
        ("cudaEventQuery", lambda s: [make_event()], "{} while a stream is capturing"),
        ("cudaMemcpy", lambda s: [None, None, 1, 4], "{} while a stream is capturing"),
    ],
)  # fmt: skip
def test_calls_that_wait_or_allocate_are_refused(stream, name, make_arguments, words):
    with raises(UNSUPPORTED_IN_CAPTURE, words.format(name)):
        call(name, *make_arguments(stream))
    with pytest.raises(CudaError) as error:
        end(stream)
    assert error.value.code == INVALIDATED


def test_work_after_a_refusal_is_refused():
    address, stream = allocate(), make_stream()
    begin(stream)
    library.cudaStreamQuery(stream)
    with raises(INVALIDATED, "the capture is invalid"):
        write(address, 7, stream)
    library.cudaStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))
    write(address, 7, stream)
    assert read(address) == 7


def test_copies_of_pageable_memory_are_refused():
    address, stream, pageable = allocate(), make_stream(), ctypes.c_ubyte(5)
    begin(stream)
    with raises(UNSUPPORTED_IN_CAPTURE, "a copy of pageable memory while the stream is capturing"):
        copy(address, ctypes.addressof(pageable), stream)
    with pytest.raises(CudaError):
        end(stream)


def test_waiting_for_an_event_from_outside_is_refused(stream):
    event = make_event()
    call("cudaEventRecord", event, make_stream())
    with raises(ISOLATION, "a stream that is capturing waits for an event from outside"):
        call("cudaStreamWaitEvent", stream, event, 0)


def test_waiting_for_a_captured_event_is_refused(stream):
    event = make_event()
    call("cudaEventRecord", event, stream)
    with raises(CAPTURED_EVENT, "cudaEventSynchronize of a captured event"):
        call("cudaEventSynchronize", event)


def test_waiting_for_an_event_of_another_capture_is_refused(stream):
    other, event = make_stream(), make_event()
    begin(other)
    call("cudaEventRecord", event, other)
    with raises(MERGE, "a stream that is capturing waits for an event of another capture"):
        call("cudaStreamWaitEvent", stream, event, 0)
    library.cudaStreamEndCapture(other, ctypes.byref(ctypes.c_void_p()))


def test_unjoined_work_is_refused():
    address, stream, other = allocate(), make_stream(), make_stream()
    begin(stream)
    fork(stream, other)
    write(address, 7, other)
    with raises(UNJOINED, "captured work was not joined: memset"):
        end(stream)
    assert not library.standin_is_capturing(other)


def test_joined_work_is_not_refused():
    address, stream, other = allocate(), make_stream(), make_stream()
    begin(stream)
    fork(stream, other)
    write(address, 7, other)
    fork(other, stream)
    assert len(nodes_of(end(stream))) == 1


def test_the_legacy_stream_cannot_be_captured():
    with raises(UNSUPPORTED_IN_CAPTURE, "capture of the legacy stream"):
        begin(LEGACY)


def test_work_of_the_legacy_stream_is_refused_while_a_blocking_stream_captures():
    address, stream = allocate(), make_stream(BLOCKING)
    begin(stream)
    words = "memset in the legacy stream while a stream is capturing that it waits for"
    with raises(IMPLICIT, words):
        write(address, 7, LEGACY)
    with pytest.raises(CudaError):
        end(stream)


def test_work_of_the_legacy_stream_runs_while_a_non_blocking_stream_captures():
    address, stream = allocate(), make_stream()
    begin(stream)
    write(address, 7, LEGACY)
    end(stream)
    assert read(address) == 7


def test_a_second_begin_is_refused(stream):
    with raises(ILLEGAL_STATE, "cudaStreamBeginCapture of a stream that is capturing"):
        begin(stream)


def test_an_end_without_a_begin_is_refused():
    with raises(ILLEGAL_STATE, "cudaStreamEndCapture of a stream that is not capturing"):
        end(make_stream())


def test_the_capture_ends_where_it_began(stream):
    other = make_stream()
    fork(stream, other)
    words = "cudaStreamEndCapture of another stream than the one where the capture began"
    with raises(UNMATCHED, words):
        end(other)


# --- Threads and modes


def in_thread(function):
    """Return the exception of a function in another thread, or None."""
    raised = []

    def run():
        try:
            raised.append(function() and None)
        except CudaError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


def test_a_global_capture_forbids_allocations_of_other_threads(stream):
    assert "cudaMalloc while a stream is capturing" in str(in_thread(allocate))


def test_a_thread_local_capture_forbids_allocations_of_its_own_thread():
    stream = make_stream()
    begin(stream, THREAD_LOCAL)
    assert in_thread(allocate) is None
    with raises(UNSUPPORTED_IN_CAPTURE, "cudaMalloc while a stream is capturing"):
        allocate()
    with pytest.raises(CudaError):
        end(stream)


def test_a_relaxed_capture_forbids_no_allocation():
    stream = make_stream()
    begin(stream, RELAXED)
    allocate()
    end(stream)


def test_a_relaxed_thread_may_allocate(stream):
    mode = ctypes.c_int(RELAXED)
    call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == GLOBAL
    allocate()
    call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def test_a_capture_ends_in_its_thread(stream):
    error = in_thread(lambda: end(stream))
    assert error.code == WRONG_THREAD
    assert "in another thread than the one where the capture began" in str(error)


# --- Dependencies


def test_a_capture_gives_the_dependencies_of_the_next_node():
    address, stream, other = allocate(), make_stream(), make_stream()
    begin(stream)
    assert dependencies(stream) == []
    write(address, 1, stream)
    (first,) = dependencies(stream)
    fork(stream, other)
    write(address, 2, other)
    write(address, 3, stream)
    assert first not in dependencies(stream) + dependencies(other)
    fork(other, stream)
    joined = dependencies(stream)
    write(address, 4, stream)
    assert len(joined) == 2 and set(joined) < set(nodes_of(end(stream)))


def test_nodes_keep_their_handles():
    address, stream = allocate(), make_stream()
    begin(stream)
    handles = []
    for value in range(100):
        write(address, value, stream)
        handles += dependencies(stream)
    assert nodes_of(end(stream)) == handles


def test_replaced_dependencies_need_not_be_joined():
    address, stream, other = allocate(), make_stream(), make_stream()
    begin(stream)
    fork(stream, other)
    write(address, 1, other)
    call("cudaStreamUpdateCaptureDependencies", other, None, None, 0, SET_DEPENDENCIES)
    assert dependencies(other) == []
    end(stream)


def test_dependencies_are_of_the_same_graph(stream):
    node, graph = ctypes.c_void_p(), make("cudaGraphCreate", 0)
    call("cudaGraphAddEmptyNode", ctypes.byref(node), graph, None, 0)
    words = "cudaStreamUpdateCaptureDependencies with a node of another graph"
    with raises(INVALID_VALUE, words):
        call("cudaStreamUpdateCaptureDependencies", stream, ctypes.byref(node), None, 1, 0)


def test_an_empty_node_in_a_capture_need_not_be_joined():
    address, stream, node = allocate(), make_stream(), ctypes.c_void_p()
    graph, status = ctypes.c_void_p(), ctypes.c_int()
    begin(stream)
    write(address, 1, stream)
    rest = None, ctypes.byref(graph), None, None, None
    call("cudaStreamGetCaptureInfo", stream, ctypes.byref(status), *rest)
    before = (ctypes.c_void_p * 1)(*dependencies(stream))
    call("cudaGraphAddEmptyNode", ctypes.byref(node), graph, before, 1)
    assert nodes_of(end(stream)) == [*before, node.value]
