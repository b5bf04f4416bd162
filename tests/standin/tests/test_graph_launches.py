"""Launches of the stand-in's graphs: their order, and lifetimes."""

import contextlib
import ctypes

import pytest
from runtime_calls import (
    GLOBAL,
    POISON,
    allocate,
    call,
    copy,
    make,
    make_event,
    make_stream,
    read,
    run_script,
    write,
)

pytestmark = pytest.mark.any_torch

DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@contextlib.contextmanager
def captured(stream):
    """Capture into a graph, whose handle is set at the end."""
    graph = ctypes.c_void_p()
    call("cudaStreamBeginCapture", stream, GLOBAL)
    yield graph
    call("cudaStreamEndCapture", stream, ctypes.byref(graph))


def instantiate(graph):
    return make("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))


def wait_for(stream, other):
    event = make_event()
    call("cudaEventRecord", event, other)
    call("cudaStreamWaitEvent", stream, event, 0)


def test_a_launch_runs_the_work_each_time():
    address, stream = allocate(), make_stream()
    with captured(stream) as graph:
        write(address, 7, stream)
    launched = instantiate(graph)
    for _ in range(2):
        write(address, 1, stream)
        call("cudaGraphLaunch", launched, stream)
        assert read(address) == 7


def test_a_launch_keeps_the_order_of_dependencies():
    first, second, third = allocate(), allocate(), allocate()
    stream, other = make_stream(), make_stream()
    with captured(stream) as graph:
        write(first, 7, stream)
        wait_for(other, stream)
        copy(second, first, other)
        wait_for(stream, other)
        copy(third, second, stream)
    call("cudaGraphLaunch", instantiate(graph), stream)
    assert [read(address) for address in (first, second, third)] == [7, 7, 7]


def test_a_missing_dependency_changes_the_result():
    """The copy is captured after the write, but does not depend on it."""
    first, second = allocate(), allocate()
    stream, other = make_stream(), make_stream()
    with captured(stream) as graph:
        wait_for(other, stream)
        write(first, 7, stream)
        copy(second, first, other)
        wait_for(stream, other)
    call("cudaGraphLaunch", instantiate(graph), stream)
    assert (read(first), read(second)) == (7, POISON)


def test_a_launch_keeps_the_order_of_its_stream():
    script = """
        address, result, stream = allocate(), allocate(), make_stream()
        call("cudaStreamBeginCapture", stream, GLOBAL)
        copy(result, address, stream)
        graph = ctypes.c_void_p()
        call("cudaStreamEndCapture", stream, ctypes.byref(graph))
        launched = make("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        write(address, 7, stream)
        call("cudaGraphLaunch", launched, stream)
        write(address, 8, stream)
        before = read(result)
        synchronize(stream)
        print(before, read(result))
    """
    late = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
    assert run_script(script, **late) == "255 7"


def test_an_executable_graph_outlives_its_graph():
    address, stream = allocate(), make_stream()
    with captured(stream) as graph:
        write(address, 7, stream)
    launched = instantiate(graph)
    call("cudaGraphDestroy", graph)
    call("cudaGraphLaunch", launched, stream)
    assert read(address) == 7


def test_a_launch_in_a_capture_is_part_of_the_graph():
    address, stream = allocate(), make_stream()
    with captured(stream) as inner:
        write(address, 7, stream)
    launched = instantiate(inner)
    with captured(stream) as graph:
        call("cudaGraphLaunch", launched, stream)
    assert read(address) == POISON
    call("cudaGraphLaunch", instantiate(graph), stream)
    assert read(address) == 7


def test_a_capture_continues_a_graph():
    address, stream, graph = allocate(), make_stream(), make("cudaGraphCreate", 0)
    call("cudaStreamBeginCaptureToGraph", stream, graph, None, None, ctypes.c_size_t(0), GLOBAL)
    write(address, 7, stream)
    found = ctypes.c_void_p()
    call("cudaStreamEndCapture", stream, ctypes.byref(found))
    assert found.value == graph.value
    call("cudaGraphLaunch", instantiate(graph), stream)
    assert read(address) == 7


def test_a_user_object_lives_as_long_as_the_last_graph():
    destroyed = []
    destroy = DESTRUCTOR(lambda _: destroyed.append(True))
    graph = make("cudaGraphCreate", 0)
    thing = make("cudaUserObjectCreate", None, destroy, 1, 1)
    call("cudaGraphRetainUserObject", graph, thing, 1, 1)  # the reference is now the graph's
    launched = instantiate(graph)
    call("cudaGraphDestroy", graph)
    assert not destroyed
    call("cudaGraphExecDestroy", launched)
    assert destroyed == [True]


def test_a_graph_is_drawn(tmp_path):
    address, stream, path = allocate(), make_stream(), tmp_path / "graph.dot"
    with captured(stream) as graph:
        write(address, 7, stream)
        copy(address, address, stream)
    call("cudaGraphDebugDotPrint", graph, str(path).encode(), 0)
    text = path.read_text()
    assert 'n0 [label="memset"]' in text and "n0 -> n1" in text
