"""Memory in the order of streams: cudaMallocAsync, cudaFreeAsync and the default pool."""

import ctypes

import pytest
from runtime_calls import (
    GLOBAL,
    INVALID_VALUE,
    POISON,
    CudaError,
    allocate,
    call,
    library,
    make,
    make_stream,
    read,
    run_script,
    synchronize,
    write,
)

USED_NOW, USED_MOST = 7, 8  # cudaMemPoolAttr
LATE = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}


def allocate_async(stream, size=8):
    return make("cudaMallocAsync", ctypes.c_size_t(size), stream)


def free_async(memory, stream):
    call("cudaFreeAsync", memory, stream)


def is_allocated(memory):
    outputs = [ctypes.byref(ctypes.c_uint64()) for _ in range(3)]
    return library.standin_find_allocation(ctypes.c_uint64(memory.value), *outputs)


def pool_attribute(number):
    value = ctypes.c_uint64()
    call("cudaMemPoolGetAttribute", make("cudaDeviceGetDefaultMemPool", 0), number,
         ctypes.byref(value))  # fmt: skip
    return value.value


def test_memory_of_the_pool_is_used_and_given_back():
    stream = make_stream()
    memory = allocate_async(stream)
    assert read(memory.value) == POISON
    write(memory.value, 7, stream)
    assert read(memory.value) == 7
    free_async(memory, stream)
    assert not is_allocated(memory)


def test_the_pool_counts_its_memory():
    stream, before = make_stream(), pool_attribute(USED_NOW)
    memory = allocate_async(stream, 1000)
    assert pool_attribute(USED_NOW) == before + 1000
    free_async(memory, stream)
    assert pool_attribute(USED_NOW) == before
    assert pool_attribute(USED_MOST) >= before + 1000


def test_memory_is_given_back_in_the_order_of_the_stream():
    script = """
        stream, result = make_stream(), allocate()
        memory = make("cudaMallocAsync", ctypes.c_size_t(8), stream)
        write(memory.value, 7, stream)
        copy(result, memory.value, stream)
        call("cudaFreeAsync", memory, stream)
        outputs = [ctypes.byref(ctypes.c_uint64()) for _ in range(3)]
        find = lambda: library.standin_find_allocation(ctypes.c_uint64(memory.value), *outputs)
        before = find()
        synchronize(stream)
        print(before, find(), read(result))
    """
    assert run_script(script, **LATE) == "True False 7"


def test_memory_used_before_its_stream_allocates_it_loses_its_values():
    script = """
        stream, other = make_stream(), make_stream()
        memory = make("cudaMallocAsync", ctypes.c_size_t(8), stream).value
        write(memory, 7, other)
        synchronize(other)
        synchronize(stream)
        print(read(memory))
    """
    assert run_script(script, **LATE) == "255"


def test_a_full_device_waits_for_frees_in_the_stream():
    script = """
        stream = make_stream()
        first = make("cudaMallocAsync", ctypes.c_size_t(900), stream)
        call("cudaFreeAsync", first, stream)
        print(make("cudaMallocAsync", ctypes.c_size_t(900), stream).value is not None)
    """
    assert run_script(script, STANDIN_MEMORY="1000", **LATE) == "True"


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ("cudaFreeAsync", "^standin: cudaFreeAsync of memory that is no allocation$"),
        ("cudaFree", "^standin: memory is freed that is no allocation$"),
    ],
)
def test_memory_of_the_pool_is_freed_once(free, words):
    stream = make_stream()
    memory = allocate_async(stream)
    free_async(memory, stream)
    with pytest.raises(CudaError, match=words) as error:
        call(free, memory, stream)
    assert error.value.code == INVALID_VALUE


def test_a_second_free_is_refused_before_the_first_has_run():
    script = """
        stream = make_stream()
        memory = make("cudaMallocAsync", ctypes.c_size_t(8), stream)
        call("cudaFreeAsync", memory, stream)
        try:
            call("cudaFreeAsync", memory, stream)
        except CudaError as error:
            print(error)
    """
    words = "standin: cudaFreeAsync of memory that is freed already"
    assert run_script(script, **LATE) == words


def test_a_captured_allocation_lives_as_long_as_the_graph():
    stream, result, graph = make_stream(), allocate(), ctypes.c_void_p()
    call("cudaStreamBeginCapture", stream, GLOBAL)
    memory = allocate_async(stream)
    write(memory.value, 7, stream)
    call("cudaMemcpyAsync", ctypes.c_void_p(result), memory, ctypes.c_size_t(1), 4, stream)
    free_async(memory, stream)
    call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    launched = make("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    call("cudaGraphDestroy", graph)
    for _ in range(2):
        write(result, 1, stream)
        call("cudaGraphLaunch", launched, stream)
        synchronize(stream)
        assert (read(result), read(memory.value)) == (7, POISON)
    call("cudaGraphExecDestroy", launched)
    assert not is_allocated(memory)


def test_a_capture_frees_only_what_it_allocates():
    stream = make_stream()
    memory = allocate_async(stream)
    call("cudaStreamBeginCapture", stream, GLOBAL)
    words = "cudaFreeAsync in a capture of memory that was not allocated in it"
    with pytest.raises(CudaError, match=words):
        free_async(memory, stream)
    call("cudaStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))
    free_async(memory, stream)


@pytest.mark.parametrize("mode", ["inline", "late"])
def test_torch_allocates_in_the_order_of_streams(mode):
    script = """
        import torch
        x = torch.ones(1000, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = (x * 3 + 1) / 2
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        print(torch.cuda.get_allocator_backend(), (y + x).sum().item())
    """
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "STANDIN_STREAMS": mode}
    assert run_script(script, **settings) == "cudaMallocAsync 3000.0"
