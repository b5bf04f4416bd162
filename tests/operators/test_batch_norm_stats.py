import pytest
import torch
from support import ops
from support.cases import (
    DTYPES,
    EMPTY_SHAPES,
    all_cases,
    assert_moments_close,
    make_input,
    reference_moments,
    to_layout,
)

pytestmark = [pytest.mark.any_torch, pytest.mark.usefixtures("each_device")]


def read_message(message, channels):
    count = message[-1]
    mean = message[:channels] / count
    return mean, message[channels:-1] / count - mean * mean, count


@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases())
def test_moments_match_float64(shape, layout, dtype):
    check_moments(make_input(shape, layout, dtype))


def check_moments(x):
    assert_moments_close(ops.batch_norm_stats(x), x.movedim(1, -1).flatten(0, -2))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_variance_survives_a_large_mean(layout, ratio):
    x = make_input((16, 5, 24, 24), layout, torch.float32, mean=ratio, std=1.0)
    _, var, _ = read_message(ops.batch_norm_stats(x), 5)
    # 1.1e-16 * mean²/var from the message, and a few roundings of the float sum of squares.
    bound = 4 * 1.1e-16 * ratio**2 + 1e-6
    _, expected = reference_moments(x)
    torch.testing.assert_close(var, expected, rtol=bound, atol=0.0)


def test_outlier_where_a_segment_of_work_begins():
    """On the CPU the second of two segments begins at a channel's value 75776: 200 * 377 + 376."""
    x = make_input((397, 2, 377), "contiguous", torch.float32, mean=0.0, std=1.0)
    x[200, :, 376] = 1e4
    _, var, _ = read_message(ops.batch_norm_stats(x), 2)
    _, expected = reference_moments(x)
    torch.testing.assert_close(var, expected, rtol=1e-6, atol=0.0)  # float sums of squares


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shift", [-0.5, 0.0, 20.0, 1e5])
@pytest.mark.parametrize("shape", [(2, 3, 1), (8, 3, 5), (64, 3, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_large_values(dtype, shape, shift, layout):
    """The bounds of docs/numerics.md, with all values at one of two ends."""
    root = (shape[0] * shape[2]) ** 0.5
    ends = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu") < 0.5
    ends[0, :, :], ends[1, :, :] = False, True
    unit = (ends.to(torch.float64) + shift).to(torch.empty(0).device)
    distance = 9e18 / root if dtype != torch.float64 else 1e153 / root / max(1, abs(shift) + 1)
    x = to_layout((unit * distance).to(dtype), layout)
    mean, var, _ = read_message(ops.batch_norm_stats(x), 3)
    # Moments of the rounded values, without overflow in float64.
    expected_mean, expected_var = reference_moments(x.double() / distance)
    # 4 eps of float64 of the mean square, and a few roundings of a float sum
    loss = 1e-15 * (shift + 1) ** 2
    torch.testing.assert_close(mean / distance, expected_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(var / distance / distance, expected_var, rtol=1e-6, atol=loss)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_beyond_the_bounds(dtype, layout):
    x = make_input((4, 3, 5), "contiguous", dtype)
    clean = ops.batch_norm_stats(to_layout(x, layout))
    x[:, 1] = 1e155 if dtype == torch.float64 else 2e19
    x[2:, 1] *= -1
    message = ops.batch_norm_stats(to_layout(x, layout))
    assert not torch.isfinite(message[4])  # the sum of squares; the other channels are as before
    assert torch.equal(message[[0, 2, 3, 5, 6]], clean[[0, 2, 3, 5, 6]])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_misleading_samples_cost_no_accuracy(layout):
    """The CPU guesses each mean from eight values of a segment, all of which are far off here."""
    x = make_input((1, 3, 128, 128), "contiguous", torch.float32, mean=0.0, std=1.0)
    x.view(3, 16384)[:, 1024::2048] = 1e3
    _, var, _ = read_message(ops.batch_norm_stats(to_layout(x, layout)), 3)
    _, expected = reference_moments(x)
    # float sums of squares; around the guessed value the error would be larger
    torch.testing.assert_close(var, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty_input_sends_zeros(shape, dtype):
    message = ops.batch_norm_stats(torch.empty(shape, dtype=dtype))
    assert torch.equal(message, torch.zeros(2 * shape[1] + 1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2, 33), (224, 64)])  # on CUDA chunks of 7 rows
def test_constant_channel_has_no_variance(shape, dtype):
    message = ops.batch_norm_stats(torch.full(shape, 3.0, dtype=dtype))
    _, var, _ = read_message(message, shape[1])
    assert torch.equal(var, torch.zeros(shape[1], dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_bad_value_stays_in_its_channel(bad, layout):
    x = make_input((3, 5, 7, 7), layout, torch.float32)
    clean = ops.batch_norm_stats(x)
    x[1, 2, 3, 4] = bad
    message = ops.batch_norm_stats(x)
    spoiled = [2, 5 + 2]
    assert not torch.isfinite(message[spoiled]).any()
    kept = [i for i in range(11) if i not in spoiled]
    assert torch.equal(message[kept], clean[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_unaligned_storage(layout, dtype):
    x = make_input((3, 5, 7, 7), layout, dtype)
    moved = torch.empty(x.numel() + 1, dtype=dtype)[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    assert moved.data_ptr() % (2 * moved.element_size()) != 0 or moved.element_size() == 8
    check_moments(moved)
