"""Launches of kernels on the stand-in, as nvcc's code makes them."""

import contextlib
import ctypes
import time

import pytest
import torch
from own_kernel import FUNCTION, launch, register
from runtime_calls import (
    INVALID_CONFIGURATION,
    INVALID_DEVICE_FUNCTION,
    CudaError,
    allocate,
    library,
    make_stream,
    read,
    run_script,
    take_log,
)


@contextlib.contextmanager
def raises(code, words):
    with pytest.raises(CudaError, match=f"^standin: {words}$") as error:
        yield
    assert error.value.code == code


def test_a_kernel_gets_its_launch_and_its_arguments():
    register()
    address = allocate()
    launch(FUNCTION, address, make_stream())
    assert read(address) == 2 + 1 + 1 + 32 + 1 + 1 + 16


def test_arguments_are_copied_at_the_call():
    script = """
        from own_kernel import *
        register()
        address, stream = allocate(), make_stream()
        launch(FUNCTION, address, stream)
        before = read(address)
        synchronize(stream)
        print(before, read(address))
    """
    late = {"STANDIN_STREAMS": "late", "STANDIN_DELAY_MS": "60000"}
    assert run_script(script, **late) == "255 54"


def test_a_function_that_was_not_registered_is_no_kernel():
    with raises(INVALID_DEVICE_FUNCTION, "a launch of a function that is no kernel"):
        launch(ctypes.c_int(), 0, make_stream())


def test_a_kernel_without_code_is_named():
    function = ctypes.c_ubyte()
    library.__cudaRegisterFunction(
        None, ctypes.byref(function), None, b"_Z7unknownPfi", -1, *[None] * 5
    )
    with raises(INVALID_DEVICE_FUNCTION, r"no code for the kernel unknown\(float\*, int\)"):
        launch(function, 0, make_stream())


def test_a_launch_of_no_blocks_is_refused():
    register()
    with raises(INVALID_CONFIGURATION, "a launch of nothing of kernel_of_the_tests"):
        launch(FUNCTION, 0, make_stream(), grid=(0, 1, 1))


def test_a_launch_is_on_a_stream_of_the_current_device():
    script = """
        from own_kernel import *
        register()
        stream = make_stream()
        call("cudaSetDevice", 1)
        try:
            launch(FUNCTION, allocate(), stream)
        except CudaError as error:
            print(error)
    """
    words = "standin: a launch on a stream of device 0 while device 1 is current"
    assert run_script(script, STANDIN_DEVICES="2") == words


def test_torch_sleeps_in_its_stream():
    begin = time.monotonic()
    take_log()
    torch.cuda._sleep(170_000_000)
    torch.cuda.synchronize()
    assert time.monotonic() - begin > 0.099
    assert [line for line in take_log() if "spin_kernel" in line]


def test_skipped_kernels_do_nothing():
    script = """
        import time
        import torch
        from own_kernel import *
        register()
        address, stream = allocate(), make_stream()
        launch(FUNCTION, address, stream)
        begin = time.monotonic()
        torch.cuda._sleep(17_000_000_000)
        synchronize(stream)
        torch.cuda.synchronize()
        print(read(address), time.monotonic() - begin < 5, len(take_log()) >= 2)
    """
    assert run_script(script, STANDIN_KERNELS="skip") == "255 True True"


def test_a_failed_device_stays_failed():
    script = """
        import torch
        x = torch.arange(3, device="cuda")
        errors = []
        for call in (
            lambda: x.gather(0, torch.tensor([7], device="cuda")),
            torch.cuda.synchronize,
            lambda: torch.ones(3, device="cuda"),
        ):
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:
                errors.append("aten::gather" in str(error))
        print(errors)
    """
    assert run_script(script) == "[True, True, True]"


@pytest.mark.parametrize("ends_device", [False, True])
def test_a_launch_can_be_made_to_fail(ends_device):
    script = f"""
        from own_kernel import *
        register()
        address, stream = allocate(), make_stream()
        library.standin_fail_launch(2, {ends_device})
        outcomes = []
        for _ in range(4):
            try:
                launch(FUNCTION, address, stream)
                outcomes.append("runs")
            except CudaError as error:
                outcomes.append(error)
        print(*outcomes, sep=", ")
    """
    failed = "standin: a planted failure"
    after = [failed] * 2 if ends_device else ["runs"] * 2
    assert run_script(script) == ", ".join(["runs", failed, *after])
