"""A kernel that is a Python function, registered and launched as nvcc's code does."""

import ctypes

from runtime_calls import call, library

KERNEL = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


@KERNEL
def store(_data, grid, block, shared_bytes, arguments):
    """Store the sum of the launch's numbers at the address that is the argument."""
    address = ctypes.c_uint64.from_address(arguments[0]).value
    total = sum(grid[:3]) + sum(block[:3]) + shared_bytes
    ctypes.c_ubyte.from_address(address).value = total


FUNCTION = ctypes.c_ubyte()  # in place of nvcc's stub of the kernel


def register():
    sizes = (ctypes.c_size_t * 1)(8)
    library.standin_register_kernel(b"kernel_of_the_tests", sizes, ctypes.c_size_t(1), store, None)
    library.__cudaRegisterFunction(
        None, ctypes.byref(FUNCTION), None, b"kernel_of_the_tests", -1, *[None] * 5
    )


def launch(function, address, stream, grid=(2, 1, 1)):
    argument = ctypes.c_uint64(address)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    call("cudaLaunchKernel", ctypes.byref(function), Dim3(*grid), Dim3(32, 1, 1), arguments,
         ctypes.c_size_t(16), stream)  # fmt: skip
