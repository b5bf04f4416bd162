"""Streams of the stand-in: when work runs, and which streams wait for which."""

import time

import pytest
from runtime_calls import (
    INVALID_RESOURCE_HANDLE,
    CudaError,
    call,
    make_stream,
    run_script,
)

pytestmark = pytest.mark.any_torch

LONG = {"STANDIN_DELAY_MS": "60000"}  # nothing runs before somebody waits


def test_each_stream_has_a_number_that_no_other_has_had():
    script = """
        numbers, handles = set(), set()
        for _ in range(100):
            stream, number = make_stream(), ctypes.c_ulonglong()
            call("cudaStreamGetId", stream, ctypes.byref(number))
            call("cudaStreamDestroy", stream)
            numbers.add(number.value)
            handles.add(stream.value)
        print(len(numbers), len(handles) < 100)
    """
    assert run_script(script, STANDIN_STREAMS="inline") == "100 True"


def test_late_work_runs_after_its_delay():
    script = """
        import time
        address = allocate()
        write(address, 7, make_stream())
        begin = time.monotonic()
        while read(address) != 7:
            time.sleep(0.01)
        print(time.monotonic() - begin > 0.2)
    """
    assert run_script(script, STANDIN_STREAMS="late", STANDIN_DELAY_MS="300") == "True"


def test_late_work_runs_once_a_stream_is_queried():
    script = """
        import time
        address, stream = allocate(), make_stream()
        write(address, 7, stream)
        codes = []
        while not codes or codes[-1]:
            codes.append(library.cudaStreamQuery(stream))
            time.sleep(0.01)
        print(set(codes[:-1]) <= {NOT_READY}, read(address))
    """
    assert run_script(script, STANDIN_STREAMS="late", **LONG) == "True 7"


def seen_by(reader, writer, mode="late"):
    """Return the value that one stream reads just after another was told to write it."""
    script = f"""
        first, second = allocate(), allocate()
        reader, writer = {reader}, {writer}
        sleep(0.2, writer)
        write(first, 7, writer)
        copy(second, first, reader)
        synchronize(reader)
        print(read(second))
    """
    return run_script(script, STANDIN_STREAMS=mode, **LONG)


@pytest.mark.parametrize("mode", ["async", "late"])
def test_non_blocking_streams_wait_for_nobody(mode):
    assert seen_by("make_stream()", "make_stream()", mode) == "255"


@pytest.mark.parametrize("mode", ["async", "late"])
def test_the_legacy_stream_waits_for_blocking_streams(mode):
    assert seen_by("LEGACY", "make_stream(BLOCKING)", mode) == "7"
    assert seen_by("None", "make_stream(BLOCKING)", mode) == "7"


@pytest.mark.parametrize("mode", ["async", "late"])
def test_blocking_streams_wait_for_the_legacy_stream(mode):
    assert seen_by("make_stream(BLOCKING)", "LEGACY", mode) == "7"


def test_the_legacy_and_a_non_blocking_stream_do_not_wait_for_each_other():
    assert seen_by("LEGACY", "make_stream()") == "255"
    assert seen_by("make_stream()", "LEGACY") == "255"


def test_blocking_streams_do_not_wait_for_each_other():
    assert seen_by("make_stream(BLOCKING)", "make_stream(BLOCKING)") == "255"


def test_the_stream_of_a_thread_is_blocking():
    assert seen_by("LEGACY", "ctypes.c_void_p(2)") == "7"


def test_the_legacy_stream_does_not_wait_for_another_device():
    script = """
        first, second = allocate(), allocate()
        writer = make_stream(BLOCKING)
        write(first, 7, writer)
        call("cudaSetDevice", 1)
        copy(second, first, LEGACY)
        synchronize(LEGACY)
        print(read(second))
    """
    assert run_script(script, STANDIN_STREAMS="late", STANDIN_DEVICES="2", **LONG) == "255"


def test_waiting_for_a_device_waits_for_all_its_streams():
    script = """
        addresses = [allocate() for _ in range(3)]
        for address, stream in zip(addresses, [LEGACY, make_stream(), make_stream(BLOCKING)]):
            write(address, 7, stream)
        call("cudaDeviceSynchronize")
        print([read(address) for address in addresses])
    """
    assert run_script(script, STANDIN_STREAMS="late", **LONG) == "[7, 7, 7]"


def test_a_destroyed_stream_ends_its_work():
    script = """
        address, stream = allocate(), make_stream()
        write(address, 7, stream)
        call("cudaStreamDestroy", stream)
        call("cudaDeviceSynchronize")
        print(read(address))
    """
    assert run_script(script, STANDIN_STREAMS="late", **LONG) == "7"


def test_a_destroyed_stream_is_unknown():
    stream = make_stream()
    call("cudaStreamDestroy", stream)
    words = "standin: cudaStreamSynchronize of a stream that does not exist"
    with pytest.raises(CudaError, match=words) as error:
        call("cudaStreamSynchronize", stream)
    assert error.value.code == INVALID_RESOURCE_HANDLE


@pytest.mark.parametrize("mode", ["async", "late"])
def test_a_process_ends_while_streams_have_work(mode):
    script = """
        streams = [make_stream() for _ in range(5)]
        addresses = [allocate() for _ in streams]
        for stream, address in zip(streams, addresses):
            sleep(0.05, stream)
            for value in range(200):
                write(address, value, stream)
            sleep(60, stream)
        print("done")
    """
    begin = time.monotonic()
    assert run_script(script, STANDIN_STREAMS=mode, STANDIN_DELAY_MS="10") == "done"
    assert time.monotonic() - begin < 30


def test_no_work_begins_once_the_process_ends():
    script = """
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(1000000), None)  # runs after the stand-in's
        stream = make_stream()
        sleep(0.3, stream)
        call("cudaLaunchHostFunc", stream, libc.abort, None)
        print("done")
    """
    assert run_script(script, STANDIN_STREAMS="async") == "done"


def test_an_unknown_mode_ends_the_process():
    with pytest.raises(AssertionError, match="standin: STANDIN_STREAMS=later is unknown"):
        run_script("make_stream()", STANDIN_STREAMS="later")
