"""The CUDA kernels without a GPU: on emulated threads, against float64.

Each result is computed as GPUs of 1, 8 and 132 multiprocessors would split it, and must be the
same bits in whatever order blocks and threads run.
"""

import math

import pytest
import torch
from support.cases import (
    CUDA_SHAPES,
    DTYPES,
    UNALIGNED_SHAPES,
    assert_normalized_close,
    layouts,
    make_input,
    per_channel,
    reduced_dims,
    reference_moments,
    to_layout,
)
from support.emulated import MULTIPROCESSORS, Device, on_all_devices, placed, totals_of

EPS = 1e-5


def all_cases():
    return [
        pytest.param(shape, layout, dtype, id=f"{shape}-{layout}-{str(dtype)[6:]}")
        for shape in CUDA_SHAPES
        for layout in layouts(shape)
        for dtype in DTYPES
    ]


@pytest.fixture
def device(library):
    return Device(library, 8, "shuffled")


def sum_tolerance(dtype, terms, plan, in_chunks):
    """Bound the error of sums per channel by half an eps of the sum of magnitudes per rounding.

    A value passes through a subtraction, a product, the sum of its vector, the sum of its thread's
    vectors, and pairwise sums of threads. In chunks, vectors are added up to a mean and then
    deviations from it, and chunks are merged: a merge of two means or variances is five roundings.
    Blocks are added up in float64.
    """
    threads = plan["block_y"] if plan["matrix"] else plan["block_x"]
    vectors = math.ceil(plan["share"] / threads)
    if in_chunks:
        chunk = min(16, 128 // (plan["vector"] * dtype.itemsize)) if plan["matrix"] else 8
        vectors = chunk + 8 + 5 * math.ceil(vectors / chunk)
    roundings = 2 + plan["vector"] + vectors + 5 * math.ceil(math.log2(threads))
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return roundings * eps / 2 * terms.abs().sum(reduced_dims(terms)) + math.ulp(1.0)


def check_stats(library, x, dy):
    mean, var = reference_moments(x)
    n = x.numel() / x.size(1)
    deviations = x.double() - per_channel(mean, x)
    # Floats are summed up as distances from one of them, 16-bit values as they are.
    reach = deviations.abs().amax(reduced_dims(x), keepdim=True) + per_channel(mean.abs(), x)

    def run(device):
        return (device.batch_norm_stats(x),)

    for plan, (message,) in on_all_devices(library, run, x):
        sums, squares, count = message.split([x.size(1), x.size(1), 1])
        assert count.item() == n
        error = (sums - n * mean).abs()
        assert (error <= sum_tolerance(x.dtype, reach.expand_as(x), plan, in_chunks=True)).all()
        # The message's own rounding: float64's eps of the sum of squares.
        rounding = 4 * torch.finfo(torch.float64).eps * n * (mean.square() + var)
        error = (squares - sums.square() / n - n * var).abs()
        assert (
            error <= sum_tolerance(x.dtype, deviations.square(), plan, in_chunks=True) + rounding
        ).all()


def channel_values(x, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.randn(x.size(1), generator=generator, dtype=dtype)


def check_apply(library, x, dy):
    totals, weight, bias = totals_of(x), channel_values(x, 1), channel_values(x, 2)
    mean, var = reference_moments(x)
    invstd = (var + EPS).rsqrt()
    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    expected = xhat * per_channel(weight.double(), x) + per_channel(bias.double(), x)

    def run(device):
        return device.batch_norm_apply(x, totals, weight, bias, None, None, None, 0.1, EPS)

    # The output is aligned, as new tensors are.
    for _, (output, *statistics) in on_all_devices(library, run, x, placed(x, 0)):
        assert output.dtype == x.dtype and output.stride() == x.stride()
        assert_normalized_close(output, expected, x.dtype)
        # float64's rounding of the totals, of which the variance is a difference
        bound = 1e-15 * (1 + (mean.square() / (var + EPS)).max().item())
        for actual, value in zip(statistics, (mean, invstd, totals[-1:]), strict=True):
            torch.testing.assert_close(actual, value, rtol=bound, atol=1e-15)


def check_backward_reduce(library, x, dy):
    mean, var = reference_moments(x)
    invstd = (var + EPS).rsqrt()
    products = dy.double() * (x.double() - per_channel(mean, x)) * per_channel(invstd, x)

    def run(device):
        return device.batch_norm_backward_reduce(dy, x, mean, invstd)

    for plan, results in on_all_devices(library, run, dy, x):
        sums, grad_weight, grad_bias = results
        dy_sums, product_sums = sums.chunk(2)
        error = (dy_sums - dy.double().sum(reduced_dims(x))).abs()
        assert (error <= sum_tolerance(x.dtype, dy.double(), plan, in_chunks=False)).all()
        error = (product_sums - products.sum(reduced_dims(x))).abs()
        assert (error <= sum_tolerance(x.dtype, products, plan, in_chunks=False)).all()
        assert torch.equal(grad_bias, dy_sums) and torch.equal(grad_weight, product_sums)


def check_backward_apply(library, x, dy):
    mean, var = reference_moments(x)
    invstd, weight = (var + EPS).rsqrt(), channel_values(x, 3)
    # The formula holds for any sums and count, such as those of a larger group.
    sums = 5 * torch.cat([channel_values(x, 4), channel_values(x, 5)]).double()
    count = torch.tensor([2.0 * x.numel() / x.size(1)]).double()
    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    mean_dy, mean_dy_xhat = (per_channel(s, x) for s in (sums / count).chunk(2))
    gain = per_channel(weight.double() * invstd, x)
    expected = (dy.double() - mean_dy - xhat * mean_dy_xhat) * gain

    def run(device):
        return (device.batch_norm_backward_apply(dy, x, mean, invstd, weight, sums, count),)

    for _, (grad_input,) in on_all_devices(library, run, dy, x, placed(x, 0)):
        assert grad_input.dtype == x.dtype and grad_input.stride() == x.stride()
        assert_normalized_close(grad_input, expected, x.dtype)


CHECKS = {
    "stats": check_stats,
    "apply": check_apply,
    "backward_reduce": check_backward_reduce,
    "backward_apply": check_backward_apply,
}
each_operator = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


@each_operator
@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases())
def test_matches_float64(library, check, shape, layout, dtype):
    x = make_input(shape, layout, dtype)
    check(library, placed(x, 0), placed(make_input(shape, layout, dtype, mean=0.1, seed=1), 0))


# The tensors of the input's shape begin this many values past an aligned address.
OFFSETS = [(1, 1), (2, 2), (1, 0)]


@each_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("offsets", OFFSETS, ids="offsets{0[0]}{0[1]}".format)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [(shape, layout) for shape in UNALIGNED_SHAPES for layout in layouts(shape)],
)
def test_any_alignment(library, check, shape, layout, offsets, dtype):
    x = make_input(shape, layout, dtype)
    dy = make_input(shape, layout, dtype, mean=0.1, seed=1)
    check(library, placed(x, offsets[0]), placed(dy, offsets[1]))


@each_operator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 8])  # 8 planes together have whole vectors
def test_every_small_inner_size(library, check, channels, dtype):
    for inner in range(2, 18):
        x = make_input((5, channels, inner), "contiguous", dtype)
        dy = make_input((5, channels, inner), "contiguous", dtype, mean=0.1, seed=1)
        check(library, placed(x, inner % 3), placed(dy, inner % 3))


@each_operator
@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_end_in_each_load_of_a_thread(library, check, dtype):
    shape = (256 // dtype.itemsize, 3, 261)  # more than two turns of loads on one multiprocessor
    x = make_input(shape, "contiguous", dtype)
    check(
        library, placed(x, 0), placed(make_input(shape, "contiguous", dtype, mean=0.1, seed=1), 0)
    )


@each_operator
@pytest.mark.parametrize("vectors", range(8))  # of those that a thread loads at once
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_ends_within_a_vector(library, check, vectors, dtype):
    width = 16 // dtype.itemsize
    # A warp's threads load `vectors` vectors, then ten of them load one more.
    inner = width * (32 * vectors + 10) + width - 1
    x = make_input((1, 1, inner), "contiguous", dtype)
    dy = make_input((1, 1, inner), "contiguous", dtype, mean=0.1, seed=1)
    check(library, placed(x, 0), placed(dy, 0))


@each_operator
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 65537), torch.float32), ((3, 65536), torch.bfloat16), ((2, 16385, 2), torch.float16)],
)
def test_more_channels_than_a_grid_may_be_high(library, check, shape, dtype):
    x = make_input(shape, "contiguous", dtype)
    check(library, placed(x, 0), make_input(shape, "contiguous", dtype, mean=0.1, seed=1))


@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases())
def test_every_value_counts_once(device, shape, layout, dtype):
    """Sums of small integers are exact in any order if each value is added once."""
    generator = torch.Generator().manual_seed(0)
    dy, x = torch.randint(0, 4, (2, *shape), generator=generator).to(dtype)
    zeros, ones = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
    dims = reduced_dims(x)
    expected = torch.cat([dy.double().sum(dims), (dy.double() * x.double()).sum(dims)])
    for offset in (0, 1):
        tensors = [placed(to_layout(t, layout), offset) for t in (dy, x)]
        sums, _, _ = device.batch_norm_backward_reduce(*tensors, zeros, ones)
        assert torch.equal(sums, expected)


# Several tiles with so many splits that several threads reduce the partial sums of a channel,
# each with all its loads in flight.
MANY_SEGMENTS = {
    "rows of single channels": lambda width: (5200, 67),
    "rows of pairs": lambda width: (5200, 130),
    "rows of vectors": lambda width: (5000, 17 * width),
    "planes as columns": lambda width: (600, 16, 7, 7),
    "short planes": lambda width: (10_000, 3, 3),
    "aligned planes": lambda width: (2, 2, 16_000 * width),
    "unaligned planes": lambda width: (2, 3, 16_000 * width + 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MANY_SEGMENTS.values(), ids=MANY_SEGMENTS)
def test_partial_sums_of_many_blocks(library, shape, dtype):
    check_partial_sums(library, shape, dtype)


def check_partial_sums(library, shape, dtype):
    device = Device(library, 132, "shuffled")
    generator = torch.Generator().manual_seed(0)
    shape = shape(16 // dtype.itemsize)
    dy, x = (placed(t, 0) for t in torch.randint(0, 4, (2, *shape), generator=generator).to(dtype))
    plan = device.plan(dy, x)
    assert plan["splits"] > 8 and plan["tiles"] > 1  # 8: the loads of a reducing thread
    zeros, ones = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()

    def sums_of(*tensors):
        return torch.cat([t.double().sum(reduced_dims(t)) for t in tensors])

    sums, _, _ = device.batch_norm_backward_reduce(dy, x, zeros, ones)
    assert torch.equal(sums, sums_of(dy, dy * x))
    # Threads merge means and squared deviations, which are rounded to float32.
    sums = device.batch_norm_stats(x)[:-1]
    torch.testing.assert_close(sums, sums_of(x, x * x), rtol=1e-6, atol=0)


def moments(message):
    sums, squares, count = message.split([len(message) // 2, len(message) // 2, 1])
    return sums / count, squares / count - (sums / count).square()


def with_means_up_to(mean, layout):
    """Return values of unit variance in 8 channels, with means from -mean to mean."""
    x = make_input((8, 8, 24, 24), layout, torch.float64, mean=0.0, std=1.0)
    means = mean * torch.linspace(-1, 1, 8, dtype=torch.float64)
    return (x + per_channel(means, x)).float()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_variance_survives_a_large_mean(library, layout, ratio):
    x = with_means_up_to(ratio, layout)
    _, expected = reference_moments(x)
    # 1.1e-16 * mean²/var from the message, and a few roundings of the float sum of squares.
    bound = 4 * 1.1e-16 * ratio**2 + 1e-6
    for multiprocessors in MULTIPROCESSORS:
        _, var = moments(Device(library, multiprocessors, "forward").batch_norm_stats(x))
        torch.testing.assert_close(var, expected, rtol=bound, atol=0.0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_output_survives_a_large_mean(device, layout):
    x = with_means_up_to(1e3, layout)
    totals = totals_of(x)
    output, *_ = device.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, EPS)
    mean, var = reference_moments(x)
    expected = (x.double() - per_channel(mean, x)) * per_channel((var + EPS).rsqrt(), x)
    # A mean rounded to float32 would cost 3e-5 here.
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradient_survives_a_large_mean(device, layout):
    x = with_means_up_to(1e3, layout)
    dy = make_input((8, 8, 24, 24), layout, torch.float32, mean=0.5, seed=1)
    mean, var = reference_moments(x)
    invstd = (var + EPS).rsqrt()
    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    sums, *_ = device.batch_norm_backward_reduce(dy, x, mean, invstd)
    products = dy.double() * xhat
    # Roundings of float sums; a mean rounded to float32 would cost 3e-5 of the sum of dy.
    bound = 2e-6 * products.abs().sum(reduced_dims(x))
    assert ((sums[8:] - products.sum(reduced_dims(x))).abs() <= bound).all()

    count = torch.tensor([x.numel() / 8]).double()
    grad_input = device.batch_norm_backward_apply(dy, x, mean, invstd, None, sums, count)
    mean_dy, mean_dy_xhat = (per_channel(s, x) for s in (sums / count).chunk(2))
    expected = (dy.double() - mean_dy - xhat * mean_dy_xhat) * per_channel(invstd, x)
    torch.testing.assert_close(grad_input.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, -1])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_variance_survives_an_outlier(library, layout, position):
    """Also if the NaN or infinity is the pivot."""
    x = make_input((41, 2, 829), layout, torch.float32, mean=0.0, std=1.0)
    x[0, :, position] = 1e4
    x[20, :, position] = 1e4
    _, expected = reference_moments(x)
    for multiprocessors in MULTIPROCESSORS:
        _, var = moments(Device(library, multiprocessors, "forward").batch_norm_stats(x))
        torch.testing.assert_close(var, expected, rtol=2e-6, atol=0.0)  # float sums of squares


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_float64_survives_an_outlier(device, layout):
    """Few values, so that the outlier is a thread's only one."""
    x = make_input((16, 64, 1), layout, torch.float64, mean=0.0, std=1.0)
    x[0] += 1e4
    _, var = moments(device.batch_norm_stats(x))
    # Seven roundings of 16 squares; squared distances from the outlier would cost 5e-15.
    torch.testing.assert_close(var, reference_moments(x)[1], rtol=1.6e-15, atol=0.0)


# In the second shape most threads have seven rows: 1/7 in float32 times the sum of seven of these
# values is not the value.
@pytest.mark.parametrize("shape", [(40, 2, 33), (1700, 8, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_constant_channel_has_no_variance(device, layout, dtype, shape):
    value = 205 / 128
    x = to_layout(torch.full(shape, value, dtype=dtype), layout)
    mean, var = moments(device.batch_norm_stats(x))
    assert (mean == value).all() and not var.any()


def zeros_and_ones(shape, generator):
    return torch.randint(0, 2, shape, generator=generator).bfloat16()


def normal_values(shape, generator):
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.parametrize(
    ("draw", "shape", "bound"),
    [(zeros_and_ones, (24, 8, 7, 1), 4e-9), (normal_values, (1, 8, 7001), 2e-9)],
    ids=["threads of columns", "lanes of warps"],
)
def test_merged_means_are_more_exact_than_floats(device, draw, shape, bound):
    """A thread's mean is exact or nearly so; the mean of several threads is not a float."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(8):
        x = draw(shape, generator)
        mean, _ = moments(device.batch_norm_stats(x))
        errors.append(mean - reference_moments(x)[0])
    # Two to three times the error, which is three to six times as large if merged means are floats.
    assert torch.stack(errors).square().mean().sqrt() < bound


@pytest.mark.parametrize("shift", [-0.5, 0.0, 20.0])
@pytest.mark.parametrize("shape", [(2, 3, 1), (8, 3, 5), (64, 3, 400)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values(device, dtype, layout, shape, shift):
    """The bounds of docs/numerics.md, with all values at one of two ends."""
    distance = 9e18 / (shape[0] * shape[2]) ** 0.5
    ends = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    ends[0], ends[1] = False, True
    x = to_layout((ends.double() + shift).mul(distance).to(dtype), layout)
    mean, var = moments(device.batch_norm_stats(x))
    expected_mean, expected_var = reference_moments(x.double() / distance)
    torch.testing.assert_close(mean / distance, expected_mean, rtol=1e-6, atol=1e-6)
    # float sums of squares; 401 times eps of float64 is far less
    torch.testing.assert_close(var / distance / distance, expected_var, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [5, 8])  # planes share vectors, with masks and as columns
def test_bad_value_stays_in_its_channel(device, bad, layout, dtype, channels):
    x = make_input((3, channels, 7, 7), layout, dtype)
    dy = make_input((3, channels, 7, 7), layout, dtype, seed=1)
    mean, var = reference_moments(x)
    clean = device.batch_norm_stats(x), device.batch_norm_backward_reduce(dy, x, mean, var)[0]
    for position in [(0, 0), (3, 4), (6, 6)]:
        spoilt_x, spoilt_dy = x.clone(), dy.clone()
        spoilt_x[(1, 2, *position)] = bad
        spoilt_dy[(1, 2, *position)] = bad
        message = device.batch_norm_stats(spoilt_x)
        sums, *_ = device.batch_norm_backward_reduce(spoilt_dy, x, mean, var)
        kept = [i for i in range(2 * channels) if i % channels != 2]
        for spoilt, expected in zip((message, sums), clean, strict=True):
            assert not spoilt[[2, channels + 2]].isfinite().any()
            assert torch.equal(spoilt[kept], expected[kept])
