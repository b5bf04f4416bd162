"""The CUDA operators against the CPU's, and features without a counterpart there.

Agreement with float64 and opcheck are tested together with the CPU operators.
"""

import pytest
import torch
from support import ops
from support.cases import (
    MASKED_OPS,
    OPS,
    all_cases,
    arguments,
    layouts,
    make_input,
    make_vector,
    operator,
    per_channel,
    reference_moments,
    sum_tolerance,
)
from support.cuda_device import IS_STANDIN
from support.emulated import placed

pytestmark = [pytest.mark.cuda, pytest.mark.any_torch, pytest.mark.usefixtures("on_cuda")]

# Shapes that are split over grids or blocks of threads.
LARGE_SHAPES = [
    (16, 70001),  # more channels than a grid has rows
    (8, 65537, 3),
    (70001, 2, 3),  # more samples than that
    (1, 1, 1021, 1031),  # one plane of a prime size for the whole device
    (64, 4, 56, 56),  # few channels, each split over many blocks
    (4099, 48),
]
# Where a thread of a kernel takes a CPU's time, with one dtype: these shapes test grids.
LARGE_CASES = [
    case for case in all_cases(LARGE_SHAPES) if not IS_STANDIN or case.values[2] == torch.bfloat16
]
SUMMING_OPS = [name for name in OPS if "apply" not in name and name != "verify_sums"]
SPLIT_SHAPES = [(64, 4, 56, 56), (4099, 48), (8, 300, 7, 7)]
# The stand-in always runs blocks in one order: a second call shows state that the first one left.
ATTEMPTS = 2 if IS_STANDIN else 20
SLEEP_CYCLES = 50_000_000  # about 30 ms: the host launches operators that should run at once


def run(name, args):
    """Return an operator's results as a tuple."""
    result = operator(name)(*args)
    return result if isinstance(result, tuple) else (result,)


def same_bits(results, others):
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


def training_step(x, dy, weight, bias, running_mean, running_var):
    """All results of the four operators; running statistics are updated in place."""
    running = (running_mean, running_var, torch.tensor(0, device=x.device), 0.3, 1e-5)
    message = ops.batch_norm_stats(x)
    output, mean, invstd, count = ops.batch_norm_apply(x, message, weight, bias, *running)
    sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
        dy, x, mean, invstd, weight.dtype, bias.dtype
    )
    grad_input = ops.batch_norm_backward_apply(dy, x, mean, invstd, weight, sums, count)
    return {
        "message": message,
        "output": output,
        "mean": mean,
        "invstd": invstd,
        "count": count,
        "sums": sums,
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "grad_input": grad_input,
        "running_mean": running_mean,
        "running_var": running_var,
        "num_batches_tracked": running[2],
    }


@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases() + LARGE_CASES)
def test_results_are_those_of_the_cpu(shape, layout, dtype):
    check_against_cpu(shape, layout, dtype)


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0), (1, 2)], ids="offsets{0[0]}{0[1]}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [(shape, layout) for shape in [(700, 24), (9, 3, 28, 28)] for layout in layouts(shape)],
)
def test_input_and_gradient_of_different_alignment(shape, layout, dtype, offsets):
    check_against_cpu(shape, layout, dtype, offsets)


def check_against_cpu(shape, layout, dtype, offsets=(0, 0)):
    """``offsets`` are those of input and gradient to an aligned address, in values."""
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [
        placed(make_input(shape, layout, dtype), offsets[0]),
        placed(make_input(shape, layout, dtype, mean=0.1, seed=1), offsets[1]),
        *(make_vector(shape[1], parameter_dtype, seed=seed) for seed in (2, 3, 4, 5)),
    ]
    on_cpu = [tensor.cpu() for tensor in inputs]
    assert on_cpu[0].stride() == inputs[0].stride()
    expected, results = training_step(*on_cpu), training_step(*inputs)
    bounds = error_bounds(on_cpu[0].double(), on_cpu[1].double(), dtype, expected)
    for name, right in expected.items():
        result = results[name]
        assert result.is_cuda and result.dtype == right.dtype, name
        assert result.stride() == right.stride(), name
        error = (result.cpu().double() - right.double()).abs()
        assert (error <= bounds.get(name, 0.0)).all(), f"{name}: wrong by {error.max()}"


def error_bounds(x, dy, dtype, expected):
    """Twice the tolerances of each operator's tests, because each side may have the error."""
    mean, var = reference_moments(x)
    xhat = (x - per_channel(mean, x)) * per_channel((var + 1e-5).rsqrt(), x)
    terms = {"grad_bias": dy, "grad_weight": dy * xhat}
    sums = {name: 2 * sum_tolerance(dtype, values) for name, values in terms.items()}
    squares = torch.cat([sum_tolerance(dtype, x), sum_tolerance(dtype, x.square())])
    count = squares.new_zeros(1)  # exact
    compute_eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps

    def scaled(name, roundings):
        return roundings * compute_eps * expected[name].double().abs().max().clamp(min=1)

    def rounded(name):
        return torch.finfo(expected[name].dtype).eps * expected[name].double().abs()

    averages = ("mean", "invstd", "running_mean", "running_var")
    elementwise = ("output", "grad_input")
    return {
        "message": torch.cat([2 * squares, count]),
        "sums": torch.cat([sums["grad_bias"], sums["grad_weight"]]),
        **{name: bound + rounded(name) for name, bound in sums.items()},
        **{name: scaled(name, 64) for name in averages},
        **{name: scaled(name, 16) + 2 * rounded(name) for name in elementwise},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "layout"), [(shape, layout) for shape in SPLIT_SHAPES for layout in layouts(shape)]
)
@pytest.mark.parametrize("name", SUMMING_OPS)
def test_same_bits_while_other_kernels_run(name, shape, layout, dtype):
    x = make_input(shape, layout, dtype)
    results = []
    other = torch.cuda.Stream()
    matrix = torch.rand(512, 512)
    torch.cuda.synchronize()
    for attempt in range(ATTEMPTS):
        args = arguments(name, x)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(attempt % 5):  # occupies multiprocessors: blocks end in another order
                matrix @ matrix
        results.append(run(name, args))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("name", OPS)
def test_runs_on_the_current_stream(name):
    args = arguments(name, make_input((16, 8, 32, 32), "contiguous", torch.float32))
    expected = run(name, args)
    values = args[0].clone()
    args[0].zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        args[0].copy_(values)  # a kernel on another stream sees the zeros
        result = run(name, args)
    torch.cuda.default_stream().synchronize()  # or work there might begin after the copy
    side.synchronize()
    assert same_bits(result, expected)


@pytest.mark.parametrize(
    ("shape", "layout"), [(shape, layout) for shape in SPLIT_SHAPES for layout in layouts(shape)]
)
@pytest.mark.parametrize("name", ["batch_norm_stats", "batch_norm_backward_reduce"])
def test_streams_at_once_do_not_disturb_each_other(name, shape, layout):
    """Blocks that share a channel count themselves; each stream needs counters of its own."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [
        arguments(name, make_input(shape, layout, torch.float32, seed=seed))
        for seed in range(len(streams))
    ]
    expected = [run(name, args) for args in inputs]
    torch.cuda.synchronize()
    results = [[] for _ in streams]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
    for _ in range(ATTEMPTS):
        for stream, args, found in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(name, args))
    torch.cuda.synchronize()
    for right, found in zip(expected, results, strict=True):
        assert all(same_bits(result, right) for result in found)


@pytest.mark.parametrize("name", OPS)
def test_device_that_is_not_current(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("this test needs two CUDA devices")
    x = make_input((16, 8, 32, 32), "contiguous", torch.float32)
    expected = run(name, arguments(name, x))
    results = run(name, arguments(name, x.to("cuda:1")))
    assert torch.cuda.current_device() == 0
    for a, b in zip(results, expected, strict=True):
        assert a.device == torch.device("cuda:1")
        # Another model of GPU may split the sums differently: float rounding.
        torch.testing.assert_close(a.to("cuda:0"), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPS[1:])
def test_mixed_devices_are_an_error(name):
    args = arguments(name, make_input((3, 4, 5), "contiguous", torch.float32))
    for index, value in enumerate(args[1:], 1):
        if isinstance(value, torch.Tensor):
            mixed = (*args[:index], value.cpu(), *args[index + 1 :])
            with pytest.raises(RuntimeError, match="the device of (input|the other tensors)"):
                run(name, mixed)


def test_input_on_the_cpu_beside_a_status_on_cuda_is_an_error():
    """The dispatcher calls a CUDA operator because of the status; no check compares devices."""
    args = arguments("batch_norm_apply", torch.rand(3, 4, device="cpu"))
    status = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="input to be on the device of the other tensors"):
        run("batch_norm_apply", (*args, None, status))


@pytest.mark.parametrize(("number", "dtype"), [(1, torch.float32), (2, torch.float64)])
def test_status_of_another_kind_is_an_error(number, dtype):
    args = arguments("batch_norm_apply", torch.rand(3, 4))
    with pytest.raises(RuntimeError, match="expected status to be one float64"):
        run("batch_norm_apply", (*args, None, torch.zeros(number, dtype=dtype)))


@pytest.mark.parametrize("name", MASKED_OPS)
def test_a_mask_is_an_error(name):
    args = arguments(name, make_input((3, 4, 5), "contiguous", torch.float32))
    with pytest.raises(RuntimeError, match="expected no mask; masks are for CPU tensors"):
        run(name.split()[0], args)


def test_dz_without_a_residual_is_an_error():
    x = make_input((3, 4, 5), "contiguous", torch.float32)
    *args, _, output = arguments("batch_norm_backward_reduce_dz of SiLU", x)
    with pytest.raises(RuntimeError, match="expected a residual; without it CUDA kernels store no"):
        run("batch_norm_backward_reduce_dz", (*args, None, output))


HUGE = [
    pytest.param((33, 64, 1024, 1024), "contiguous", id="planar"),
    pytest.param((33, 64, 1024, 1024), "channels_last", id="channels_last"),
    pytest.param((2**25 + 1, 65), "contiguous", id="2-D"),
    pytest.param((3, 1, 2**15, 2**15), "contiguous", id="one channel"),
]


@pytest.mark.parametrize(("shape", "layout"), HUGE)
def test_more_than_2_to_the_31_elements(shape, layout):
    """Against chunks of fewer elements, which the other tests check."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 40 * 2**30:
        pytest.skip(f"40 GiB of GPU memory are needed, and {free / 2**30:.0f} are free")
    check_in_chunks(shape, layout)


def check_in_chunks(shape, layout):
    x, dy = random_tensor(shape, layout), random_tensor(shape, layout)
    rest = (None,) * 5
    message = ops.batch_norm_stats(x)
    chunks = list(zip(x.chunk(3), dy.chunk(3), strict=True))
    expected = sum(ops.batch_norm_stats(chunk) for chunk, _ in chunks)
    assert message[-1] == expected[-1] == x.numel() // shape[1]
    # Values of order one: float sums of up to 64, see sum_tolerance in cases.py, on either side.
    bound = 2 * 32 * torch.finfo(torch.float32).eps * message[-1]
    assert ((message - expected).abs() <= bound).all()

    output, mean, invstd, count = ops.batch_norm_apply(x, message, *rest, 0.1, 1e-5)
    for (chunk, _), part in zip(chunks, output.chunk(3), strict=True):
        right, *_ = ops.batch_norm_apply(chunk, message, *rest, 0.1, 1e-5)
        assert_one_rounding_apart(part, right)
    del output, part, right

    sums, *_ = ops.batch_norm_backward_reduce(dy, x, mean, invstd)
    expected = sum(
        ops.batch_norm_backward_reduce(dchunk, chunk, mean, invstd)[0] for chunk, dchunk in chunks
    )
    assert ((sums - expected).abs() <= bound).all()

    grad_input = ops.batch_norm_backward_apply(dy, x, mean, invstd, None, sums, count)
    for (chunk, dchunk), part in zip(chunks, grad_input.chunk(3), strict=True):
        right = ops.batch_norm_backward_apply(dchunk, chunk, mean, invstd, None, sums, count)
        assert_one_rounding_apart(part, right)


def random_tensor(shape, layout):
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return torch.empty(shape, dtype=torch.bfloat16, memory_format=memory_format).normal_()


def assert_one_rounding_apart(a, b):
    eps = torch.finfo(a.dtype).eps
    assert ((a - b).abs() <= eps * b.abs() + 1e-6).all()
