"""Devices of the stand-in: their number, the current one, and their errors."""

import ctypes

import pytest
import torch
from runtime_calls import CudaError, call, library, run_script

NUMBER = """
    number = ctypes.c_int()
    print(library.cudaGetDeviceCount(ctypes.byref(number)), number.value)
"""


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [("3", None, "0 3"), ("3", "0,1", "0 2"), ("1", "0,1", "0 1"), ("2", "", "100 0")],
)
def test_the_number_of_devices_is_a_setting(devices, visible, expected):
    settings = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert run_script(NUMBER, STANDIN_DEVICES=devices, **settings) == expected


def test_a_fork_of_a_process_that_has_counted_devices_is_refused():
    script = """
        import os
        def in_fork(function, *arguments):
            read, write = os.pipe()
            if os.fork() == 0:
                os.write(write, str(function(*arguments)).encode())
                os._exit(0)
            return os.read(read, 9).decode()
        count = library.cudaGetDeviceCount, ctypes.byref(ctypes.c_int())
        found = [in_fork(*count), count[0](count[1]), in_fork(*count)]
        print(*found, in_fork(library.cudaSetDevice, 0), library.cudaSetDevice(0))
    """
    assert run_script(script) == "0 0 3 3 0"


def test_torch_sees_the_device():
    assert torch.cuda.get_device_name() == "standin H100"
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.multi_processor_count) == (9, 132)


def test_a_missing_device_is_refused():
    with pytest.raises(CudaError, match="^invalid device ordinal$"):
        call("cudaSetDevice", 100)


def test_an_unknown_attribute_is_refused():
    with pytest.raises(CudaError, match="^standin: cudaDeviceGetAttribute of attribute 9999$"):
        call("cudaDeviceGetAttribute", ctypes.byref(ctypes.c_int()), 9999, 0)


def test_an_error_is_read_once():
    assert library.cudaSetDevice(100) == 101
    assert library.cudaPeekAtLastError() == 101
    assert library.cudaGetLastError() == 101
    assert library.cudaGetLastError() == 0


def test_threads_have_their_own_device():
    script = """
        import threading
        def device():
            number = ctypes.c_int()
            call("cudaGetDevice", ctypes.byref(number))
            return number.value
        call("cudaSetDevice", 1)
        found = []
        thread = threading.Thread(target=lambda: found.append(device()))
        thread.start()
        thread.join()
        print(device(), found)
    """
    assert run_script(script, STANDIN_DEVICES="2") == "1 [0]"


def test_a_missing_function_of_the_driver_writes_its_name(capfd):
    function = ctypes.c_void_p()
    call(
        "cudaGetDriverEntryPointByVersion",
        b"cuNothing",
        ctypes.byref(function),
        13000,
        ctypes.c_ulonglong(0),
        None,
    )
    assert ctypes.CFUNCTYPE(ctypes.c_int)(function.value)() == 801
    assert "standin: cuNothing is not implemented" in capfd.readouterr().err
