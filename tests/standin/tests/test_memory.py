"""Memory of the stand-in: its limits, the content of new memory, and queries of addresses."""

import ctypes

import pytest
from runtime_calls import (
    INVALID_VALUE,
    OUT_OF_MEMORY,
    POISON,
    CudaError,
    allocate,
    allocate_pinned,
    call,
    copy,
    library,
    make,
    make_stream,
    read,
    run_script,
    write,
)

HOST, DEVICE = 1, 2  # cudaMemoryType


class Attributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


def attributes(address):
    found = Attributes()
    call("cudaPointerGetAttributes", ctypes.byref(found), ctypes.c_void_p(address))
    return found


def free_bytes():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def free(address):
    call("cudaFree", ctypes.c_void_p(address))


def test_new_memory_is_poisoned():
    address = allocate(1000)
    assert {read(address + i) for i in range(1000)} == {POISON}
    assert read(allocate_pinned()) == POISON


def test_an_empty_allocation_is_null():
    assert allocate(0) is None


def test_a_device_counts_its_memory():
    before = free_bytes()
    address = allocate(1000)
    assert free_bytes() == before - 1000
    free(address)
    assert free_bytes() == before


def test_a_device_runs_out_of_memory():
    with pytest.raises(CudaError, match="^out of memory$") as error:
        allocate(free_bytes() + 1)
    assert error.value.code == OUT_OF_MEMORY


def test_torch_reports_that_memory_is_out():
    script = """
        import torch
        try:
            torch.empty(1 << 28, device="cuda")
        except torch.OutOfMemoryError as error:
            print("out of memory" in str(error), torch.ones(3, device="cuda").sum().item())
    """
    assert run_script(script, STANDIN_MEMORY=str(1 << 27)) == "True 3.0"


@pytest.mark.parametrize(
    ("make_address", "kind", "offset"), [(allocate, DEVICE, 5), (allocate_pinned, HOST, 0)]
)
def test_the_owner_of_an_address_is_known(make_address, kind, offset):
    address = make_address(10) + offset
    found = attributes(address)
    assert (found.type, found.device, found.device_pointer) == (kind, 0, address)
    assert found.host_pointer == (address if kind == HOST else None)


def test_memory_of_the_process_is_not_registered():
    assert attributes(ctypes.addressof(ctypes.c_int())).type == 0


def test_registered_memory_is_pinned():
    buffer = (ctypes.c_ubyte * 64)()
    call("cudaHostRegister", buffer, ctypes.c_size_t(64), 0)
    assert attributes(ctypes.addressof(buffer)).type == HOST
    call("cudaHostUnregister", buffer)
    assert attributes(ctypes.addressof(buffer)).type == 0


def test_an_allocation_is_found_by_any_of_its_addresses():
    address, values = allocate(10), [ctypes.c_uint64() for _ in range(2)]
    device = ctypes.c_int()
    outputs = [ctypes.byref(value) for value in (*values, device)]
    assert library.standin_find_allocation(ctypes.c_uint64(address + 9), *outputs)
    assert [value.value for value in values] == [address, address + 10] and device.value == 0
    free(address)
    assert not library.standin_find_allocation(ctypes.c_uint64(address + 9), *outputs)


def test_memory_is_freed_once():
    address = allocate()
    free(address)
    words = "^standin: memory is freed that is no allocation$"
    with pytest.raises(CudaError, match=words) as error:
        free(address)
    assert error.value.code == INVALID_VALUE


def test_freeing_waits_for_the_work_of_the_device():
    script = """
        address, other, stream = allocate(), allocate(), make_stream()
        write(other, 7, stream)
        call("cudaFree", ctypes.c_void_p(address))
        print(read(other))
    """
    late = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
    assert run_script(script, **late) == "7"


@pytest.mark.parametrize("is_source", [False, True])
def test_a_copy_stays_within_its_allocations(is_source):
    small, large, stream = allocate(10), allocate(20), make_stream()
    pair = (large, small + 4) if is_source else (small + 4, large)
    words = "^standin: cudaMemcpyAsync of 7 bytes where 6 are$"
    with pytest.raises(CudaError, match=words) as error:
        copy(*pair, stream, 7)
    assert error.value.code == INVALID_VALUE
    copy(*pair, stream, 6)


def test_a_memset_outside_of_allocations_is_refused():
    words = "^standin: cudaMemsetAsync of memory that is no allocation$"
    with pytest.raises(CudaError, match=words):
        write(ctypes.addressof(ctypes.c_int()), 0, make_stream())


def test_pageable_memory_is_read_before_the_call_returns():
    script = """
        source, address, stream = ctypes.c_ubyte(7), allocate(), make_stream()
        copy(address, ctypes.addressof(source), stream)
        source.value = 8
        before = read(address)
        synchronize(stream)
        print(before, read(address))
    """
    late = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
    assert run_script(script, **late) == "255 7"


def test_pageable_memory_is_written_before_the_call_returns():
    script = """
        target, address, stream = ctypes.c_ubyte(), allocate(), make_stream()
        write(address, 7, stream)
        copy(ctypes.addressof(target), address, stream)
        print(target.value)
    """
    late = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
    assert run_script(script, **late) == "7"


def test_pinned_memory_is_read_and_written_late():
    script = """
        source, target, stream = allocate_pinned(), allocate_pinned(), make_stream()
        ctypes.memset(source, 7, 1)
        copy(target, source, stream)
        ctypes.memset(source, 8, 1)
        before = read(target)
        synchronize(stream)
        print(before, read(target))
    """
    late = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
    assert run_script(script, **late) == "255 8"


def test_pinned_memory_has_its_own_function():
    assert attributes(make("cudaMallocHost", ctypes.c_size_t(8)).value).type == HOST
