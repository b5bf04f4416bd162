"""The CUDA kernels on the emulated threads of ``tests/standin/threads/``.

``Library`` compiles the kernels' source; the stand-in runs nvcc's PTX. ``Device`` has the
operators with the signatures of ``syncbn.ops``, on CPU tensors.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from support.cases import reference_moments
from support.paths import ROOT

EMULATION = ROOT / "tests" / "emulation"
INCLUDES = [f"-I{EMULATION}", f"-I{ROOT / 'tests' / 'standin' / 'threads'}"]
KERNELS = ROOT / "csrc" / "cuda" / "kernels"

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]  # nvcc knows unroll
PLAIN = ["-O1"]
# Two of these libraries in one process have variables of the same names.
OWN_VARIABLES = ["-fno-gnu-unique"]
SANITIZED = ["-O1", "-fsanitize=address"]  # finds accesses outside of allocations

ORDERS = ["forward", "reverse", "shuffled"]  # of blocks and threads
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # as in DType
# The share of a block is rows or vectors, each with `values` values of a channel.
PLAN = ["matrix", "vector", "aligned", "block_x", "block_y", "tiles", "splits", "share", "values"]
MARGIN_BYTES = 64

# AddressSanitizer only checks accesses: one order on one device is enough.
IS_SANITIZED = "SYNCBN_SANITIZED" in os.environ
MULTIPROCESSORS = [8] if IS_SANITIZED else [1, 8, 132]


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"


def compile_cxx(*arguments: str | Path, warnings: list[str] = WARNINGS) -> None:
    # The tests preload g++'s run-time library of the sanitizer.
    compiler = "g++" if SANITIZED[-1] in arguments else os.environ.get("CXX", "c++")
    environment = {**os.environ, "LD_PRELOAD": ""}  # a sanitized compiler is five times slower
    run([compiler, "-std=c++17", "-fPIC", *warnings, *arguments], environment)


class Library:
    """The operators on emulated threads. Each is compiled when it is first called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.functions: dict[str, Callable[..., bytes | None]] = {}

    def __getitem__(self, name: str) -> Callable[..., bytes | None]:
        """Return the function of ``tests/emulation/bindings`` of this name."""
        if name not in self.functions:
            function = getattr(self._build(name), name)
            function.restype = ctypes.c_char_p
            self.functions[name] = function
        return self.functions[name]

    def _build(self, name: str) -> ctypes.CDLL:
        flags = SANITIZED if IS_SANITIZED else PLAIN + OWN_VARIABLES
        # Kernels read the same memory as vectors and as values, which nvcc permits.
        flags = [*flags, "-fno-strict-aliasing", *INCLUDES, f"-I{ROOT / 'csrc'}"]
        library = self.folder / f"{name}.so"
        kernel = KERNELS / f"{name}.cu"
        sources = [EMULATION / "bindings" / f"{name}.cpp", *([kernel] if kernel.exists() else [])]
        compile_cxx(*flags, "-shared", "-x", "c++", *sources, "-o", library)
        return ctypes.CDLL(str(library))


class Call(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("dim", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("multiprocessors", ctypes.c_int),
        ("order", ctypes.c_int),
        ("only_last_block", ctypes.c_bool),
    )


class ChannelVector(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int))


class Tail(ctypes.Structure):
    _fields_ = (("present", ctypes.c_bool), ("values", 3 * ctypes.c_double))


class Expectation(ctypes.Structure):
    _fields_ = (("present", ctypes.c_bool), ("tail_sum", ctypes.c_double))


class Verifier(ctypes.Structure):
    _fields_ = (
        ("present", ctypes.c_bool),
        ("tail_sum", ctypes.c_double),
        ("status", ctypes.c_void_p),
    )


class Activation(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("negative_slope", ctypes.c_double))


class Epilogue(ctypes.Structure):
    _fields_ = (
        ("activation", Activation),
        ("residual", ctypes.c_void_p),
        ("constants", ctypes.c_void_p),
    )


class EpilogueGradient(ctypes.Structure):
    _fields_ = (
        ("activation", Activation),
        ("constants", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("dz", ctypes.c_void_p),
    )


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def to_tail(tail: Tensor | None) -> Tail:
    return Tail() if tail is None else Tail(True, tuple(tail.tolist()))


def to_verifier(tail_sum: float | None, status: Tensor | None) -> Verifier:
    return Verifier(tail_sum is not None, tail_sum or 0.0, pointer(status))


def channel_vector(tensor: Tensor | None) -> ChannelVector:
    if tensor is None:
        return ChannelVector()
    return ChannelVector(tensor.data_ptr(), tensor.stride(0), DTYPES.index(tensor.dtype))


def placed(x: Tensor, offset: int) -> Tensor:
    """Return a copy of x that begins ``offset`` values past its allocation, and ends with it."""
    storage = torch.full((offset + x.numel(),), torch.nan, dtype=x.dtype)
    return storage.as_strided(x.shape, x.stride(), offset).copy_(x)


def with_margins(like: Tensor) -> Tensor:
    """Return a tensor of NaN like another, between margins of NaN."""
    margin = MARGIN_BYTES // like.element_size()
    storage = torch.full((like.numel() + 2 * margin,), torch.nan, dtype=like.dtype)
    return storage.as_strided(like.shape, like.stride(), margin)


def assert_margins_untouched(*tensors: Tensor) -> None:
    for tensor in tensors:
        margin = MARGIN_BYTES // tensor.element_size()
        storage = tensor.as_strided((tensor.numel() + 2 * margin,), (1,), 0)
        assert storage[:margin].isnan().all() and storage[-margin:].isnan().all()


class Device:
    """A device with a number of multiprocessors; blocks and threads run in one of ``ORDERS``.

    With ``only_last_block`` the other blocks of a launch do not run.
    """

    def __init__(
        self, library: Library, multiprocessors: int, order: str, only_last_block: bool = False
    ) -> None:
        self.library = library
        self.multiprocessors, self.order = multiprocessors, order
        self.only_last_block = only_last_block

    def _run(self, name: str, like: Tensor, *args: object) -> None:
        sizes = (ctypes.c_int64 * like.dim())(*like.shape)
        strides = (ctypes.c_int64 * like.dim())(*like.stride())
        dtype = DTYPES.index(like.dtype)
        order = ORDERS.index(self.order)
        how = (self.multiprocessors, order, self.only_last_block)
        call = Call(sizes, strides, like.dim(), dtype, *how)
        native = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg = ctypes.c_void_p(arg.data_ptr())
            elif isinstance(arg, ctypes.Structure):
                arg = ctypes.byref(arg)
            elif isinstance(arg, bool):
                arg = ctypes.c_bool(arg)
            elif isinstance(arg, float):
                arg = ctypes.c_double(arg)
            native.append(arg)
        error = self.library[name](ctypes.byref(call), *native)
        if error is not None:
            raise RuntimeError(error.decode())

    def plan(self, *tensors: Tensor) -> dict[str, int]:
        """Return the plan for the tensors of the input's shape."""
        fields = (ctypes.c_int64 * len(PLAN))()
        three = (*tensors, *tensors, *tensors)[:3]
        self._run("plan", tensors[0], *three, fields)
        return dict(zip(PLAN, fields, strict=True))

    def batch_norm_stats(self, input: Tensor, tail: Tensor | None = None) -> Tensor:
        message = statistics(2 * input.size(1) + (1 if tail is None else 4))
        self._run("batch_norm_stats", input, input, message, to_tail(tail))
        assert_margins_untouched(message)
        return message

    def batch_norm_apply(
        self,
        input: Tensor,
        totals: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
        tail_sum: float | None = None,
        status: Tensor | None = None,
        residual: Tensor | None = None,
        activation: int = 0,
        negative_slope: float = 0.0,
        constants: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = with_margins(input)
        mean, invstd, count = (statistics(n) for n in (input.size(1), input.size(1), 1))
        self._run(
            "batch_norm_apply",
            input,
            input,
            totals,
            *map(channel_vector, (weight, bias, running_mean, running_var)),
            num_batches_tracked,
            momentum is None,
            float(momentum or 0),
            eps,
            output,
            mean,
            invstd,
            count,
            to_verifier(tail_sum, status),
            Epilogue(Activation(activation, negative_slope), pointer(residual), pointer(constants)),
        )
        assert_margins_untouched(output, mean, invstd, count)
        return output, mean, invstd, count

    def batch_norm_backward_reduce(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight_dtype: torch.dtype = torch.float64,
        bias_dtype: torch.dtype = torch.float64,
        tail: Tensor | None = None,
        constants: Tensor | None = None,
        activation: int = 0,
        negative_slope: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        epilogue = EpilogueGradient(Activation(activation, negative_slope), pointer(constants))
        operands = (grad_output, input, mean, invstd)
        return self._reduce(operands, weight_dtype, bias_dtype, tail, epilogue)

    def batch_norm_backward_reduce_dz(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype,
        tail: Tensor | None,
        constants: Tensor | None,
        activation: int,
        negative_slope: float,
        residual: Tensor | None,
        output: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dz = with_margins(input)
        tensors = map(pointer, (constants, residual, output, dz))
        epilogue = EpilogueGradient(Activation(activation, negative_slope), *tensors)
        operands = (grad_output, input, mean, invstd)
        results = self._reduce(operands, weight_dtype, bias_dtype, tail, epilogue)
        assert_margins_untouched(dz)
        return *results, dz

    def _reduce(
        self,
        operands: tuple[Tensor, Tensor, Tensor, Tensor],
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype,
        tail: Tensor | None,
        epilogue: EpilogueGradient,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, input, mean, _ = operands
        channels = input.size(1)
        sums = statistics(2 * channels + (0 if tail is None else 4))
        grad_weight, grad_bias = (with_margins(mean.to(d)) for d in (weight_dtype, bias_dtype))
        gradients = map(channel_vector, (grad_weight, grad_bias))
        name = "batch_norm_backward_reduce"
        self._run(name, input, *operands, sums, *gradients, to_tail(tail), epilogue)
        assert_margins_untouched(sums, grad_weight, grad_bias)
        return sums, grad_weight, grad_bias

    def batch_norm_backward_apply(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        sums: Tensor,
        count: Tensor,
        tail_sum: float | None = None,
        status: Tensor | None = None,
        constants: Tensor | None = None,
        activation: int = 0,
        negative_slope: float = 0.0,
    ) -> Tensor:
        grad_input = with_margins(input)
        vector = channel_vector(weight)
        tensors = (grad_output, input, mean, invstd, vector, sums, count, grad_input)
        verifier = to_verifier(tail_sum, status)
        epilogue = EpilogueGradient(Activation(activation, negative_slope), pointer(constants))
        self._run("batch_norm_backward_apply", input, *tensors, verifier, epilogue)
        assert_margins_untouched(grad_input)
        return grad_input

    def verify_sums(
        self,
        sums: Tensor,
        tail_sum: float,
        other_tail_sum: float | None = None,
        status: Tensor | None = None,
    ) -> Tensor:
        verified = statistics(sums.size(0) - 3)
        verifier = to_verifier(tail_sum, status)
        other = Expectation(other_tail_sum is not None, other_tail_sum or 0.0)
        self._run(
            "verify_sums", sums, sums, ctypes.c_int64(sums.size(0) - 3), verifier, other, verified
        )
        assert_margins_untouched(verified)
        return verified


def statistics(size: int) -> Tensor:
    return with_margins(torch.empty(size, dtype=torch.float64))


def on_all_devices(
    library: Library,
    run: Callable[[Device], tuple[Tensor, ...]],
    *tensors: Tensor,
) -> Iterator[tuple[dict[str, int], tuple[Tensor, ...]]]:
    """Yield each plan for the tensors, and ``run(device)``'s result.

    The result must be the same bits in each order of blocks and threads.
    """
    plans = []
    for multiprocessors in MULTIPROCESSORS:
        devices = [Device(library, multiprocessors, order) for order in ORDERS]
        plan = devices[0].plan(*tensors)
        if plan in plans:  # a small tensor is split the same way everywhere
            continue
        plans.append(plan)
        first, *others = [run(device) for device in (devices[-1:] if IS_SANITIZED else devices)]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
        yield plan, first


def totals_of(x: Tensor) -> Tensor:
    """Return the message of a group whose ranks hold x, in float64."""
    mean, var = reference_moments(x)
    n = x.numel() / x.size(1)
    return torch.cat([n * mean, n * (var + mean.square()), torch.tensor([n]).double()])
