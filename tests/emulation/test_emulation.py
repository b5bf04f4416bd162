"""The emulation of CUDA threads finds each fault."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from support.emulated import EMULATION, INCLUDES, ORDERS, PLAIN, SANITIZED, compile_cxx

pytestmark = pytest.mark.any_torch

# Faults of sample_kernels.cpp, and their messages.
FAULTS = {
    "missing_threadfence": "signals other blocks without a fence behind the stores of its block",
    "threads_exit_before_barrier": r"waits at __syncthreads, but thread \(64, 0, 0\) has exited",
    "lanes_exit_before_shuffle": "waits at __shfl_down_sync with 8 bytes, but .* has exited",
    "lanes_at_barrier_and_shuffle": "__shfl_down_sync with 8 bytes, but .* waits at __syncthreads",
    "shuffles_of_two_sizes": "__shfl_down_sync with 8 bytes, but .* __shfl_down_sync with 4 bytes",
    "partial_warp": "waits at __shfl_down_sync with 8 bytes, but its warp has only 31 threads",
    "partial_mask": "expected the mask 0xffffffff of a whole warp",
    "misaligned_load": "accesses 16 bytes at 0x.*4, which is not aligned to them",
    "shared_overflow": "wrote byte 32 of 32 bytes of shared memory",
    "shared_too_small": "uses 32 bytes of shared memory, but the launch has 31",
}
# Faults that only show in a wrong result, and the order that always shows them.
RACES = {
    "missing_syncthreads": "forward",
    "missing_second_syncthreads": "reverse",
    "late_partial": "shuffled",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulation")


def compile_samples(program: Path, flags: list[str]) -> Path:
    source = EMULATION / "sample_kernels.cpp"
    compile_cxx(*flags, *INCLUDES, source, "-o", program)
    return program


@pytest.fixture(scope="module")
def plain(folder):
    return compile_samples(folder / "plain", PLAIN)


@pytest.fixture(scope="module")
def sanitized(folder):
    return compile_samples(folder / "sanitized", SANITIZED)


def outcome(program, kernel, order):
    # A failed launch abandons its threads' stacks: these leaks do not matter.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [program, kernel, order], capture_output=True, text=True, env=environment, timeout=60
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", ["plain", "sanitized"])
@pytest.mark.parametrize("kernel", ["none", "warp_operations"])
def test_correct_kernel_passes(kernel, build, order, request):
    done = outcome(request.getfixturevalue(build), kernel, order)
    assert (done.returncode, done.stdout, done.stderr) == (0, "passed\n", "")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_ends_the_launch_with_a_message(plain, fault, order):
    done = outcome(plain, fault, order)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(rf"block \(\d, 0, 0\): .*{FAULTS[fault]}\n", done.stderr), done.stderr


@pytest.mark.parametrize("fault", RACES)
def test_race_changes_the_result_of_one_order(plain, fault):
    done = outcome(plain, fault, RACES[fault])
    assert done.returncode == 1 and "wrong sum" in done.stderr, done.stderr


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("out_of_bounds_lane", "heap-buffer-overflow"),
        ("shared_overflow", "use-after-poison"),
    ],
)
def test_access_past_an_allocation_is_found_by_address_sanitizer(sanitized, fault, error, order):
    done = outcome(sanitized, fault, order)
    assert done.returncode != 0 and done.stdout == ""
    # The report shows the thread's own stack, although it is a fiber's.
    assert f"AddressSanitizer: {error}" in done.stderr and "sum_kernel" in done.stderr


@pytest.fixture(scope="module")
def convert(folder):
    source, library = EMULATION / "conversions.cpp", folder / "conversions.so"
    compile_cxx(*PLAIN, *INCLUDES, "-shared", source, "-o", library)
    functions = ctypes.CDLL(str(library))

    def call(name, values, dtype):
        result = torch.empty(values.shape, dtype=dtype)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (values, result))
        getattr(functions, name)(*pointers, ctypes.c_int64(values.numel()))
        return result

    return call


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bfloat16", torch.bfloat16)])
def test_conversions_of_16_bit_types_are_torchs(convert, name, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    floats = convert(f"{name}_to_float", every, torch.float32)
    torch.testing.assert_close(floats, every.float(), rtol=0, atol=0, equal_nan=True)

    # Each value, the ties between neighbors, and the floats next to both.
    finite = floats[floats.isfinite()].sort().values
    ties = (finite[1:].double() + finite[:-1].double()).float() / 2
    ends = torch.tensor([65519.996, 65520.0, 3.3961775e38, 3.4e38, torch.inf])
    exact = torch.cat([finite, ties, ends, -ends])
    inputs = [exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(-ends[-1:])]
    inputs = torch.cat([*inputs, torch.tensor([torch.nan])])
    rounded = convert(f"float_to_{name}", inputs, dtype)
    expected = inputs.to(dtype)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded[:-1].view(torch.int16), expected[:-1].view(torch.int16))
