"""Events of the stand-in: waits for them, and their times."""

import ctypes

import pytest
from runtime_calls import (
    INVALID_RESOURCE_HANDLE,
    CudaError,
    call,
    library,
    make_event,
    make_stream,
    run_script,
    sleep,
)

pytestmark = pytest.mark.any_torch

LATE = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
DISABLE_TIMING = 2


def elapsed(begin, end):
    milliseconds = ctypes.c_float()
    call("cudaEventElapsedTime", ctypes.byref(milliseconds), begin, end)
    return milliseconds.value


def test_a_stream_waits_for_an_event():
    script = """
        first, second = allocate(), allocate()
        writer, reader, event = make_stream(), make_stream(), make_event()
        write(first, 7, writer)
        call("cudaEventRecord", event, writer)
        call("cudaStreamWaitEvent", reader, event, 0)
        copy(second, first, reader)
        synchronize(reader)
        print(read(second))
    """
    assert run_script(script, **LATE) == "7"


def test_an_event_covers_work_enqueued_before_it():
    script = """
        address, stream, event = allocate(), make_stream(), make_event()
        write(address, 7, stream)
        call("cudaEventRecord", event, stream)
        write(address, 8, stream)
        call("cudaEventSynchronize", event)
        print(read(address))
    """
    assert run_script(script, **LATE) == "7"


def test_a_wait_is_for_the_record_before_it():
    script = """
        address, other, event = allocate(), make_stream(), make_event()
        stream = make_stream()
        call("cudaEventRecord", event, stream)
        call("cudaStreamWaitEvent", other, event, 0)
        write(address, 7, stream)
        call("cudaEventRecord", event, stream)
        synchronize(other)
        print(read(address))
    """
    assert run_script(script, **LATE) == "255"


def test_late_work_runs_once_an_event_is_queried_repeatedly():
    script = """
        import time
        address, stream, event = allocate(), make_stream(), make_event()
        write(address, 7, stream)
        call("cudaEventRecord", event, stream)
        first = library.cudaEventQuery(event), read(address)
        while library.cudaEventQuery(event):
            time.sleep(0.01)
        print(first == (NOT_READY, POISON), read(address))
    """
    assert run_script(script, **LATE) == "True 7"


def test_an_event_that_was_not_recorded_is_ready():
    event = make_event()
    assert library.cudaEventQuery(event) == 0
    call("cudaStreamWaitEvent", make_stream(), event, 0)
    call("cudaEventSynchronize", event)


def test_the_time_between_events_is_the_works():
    begin, end, stream = make_event(), make_event(), make_stream()
    call("cudaEventRecord", begin, stream)
    sleep(0.05, stream)
    call("cudaEventRecord", end, stream)
    assert 49 < elapsed(begin, end) < 5000


@pytest.mark.parametrize(
    ("flags", "records", "words"),
    [
        (0, False, "standin: the time of an event that was not recorded"),
        (DISABLE_TIMING, True, "standin: the time of an event without timing"),
    ],
)
def test_events_without_a_time_are_refused(flags, records, words):
    event = make_event(flags)
    if records:
        call("cudaEventRecord", event, make_stream())
    with pytest.raises(CudaError, match=words) as error:
        elapsed(event, event)
    assert error.value.code == INVALID_RESOURCE_HANDLE


def test_an_event_belongs_to_one_device():
    script = """
        event = make_event()
        call("cudaSetDevice", 1)
        try:
            call("cudaEventRecord", event, make_stream())
        except CudaError as error:
            print(error.code, error)
    """
    words = f"{INVALID_RESOURCE_HANDLE} standin: an event and a stream of two devices"
    assert run_script(script, STANDIN_DEVICES="2") == words
