import math

import pytest
import torch
from support import ops
from support.cases import (
    DTYPES,
    EMPTY_SHAPES,
    all_cases,
    assert_normalized_close,
    make_input,
    make_vector,
    per_channel,
    reference_moments,
)

pytestmark = [pytest.mark.any_torch, pytest.mark.usefixtures("each_device")]


def apply(x, *, weight=None, bias=None, mean=None, var=None, tracked=None, momentum=0.1, eps=1e-5):
    totals = ops.batch_norm_stats(x)
    return ops.batch_norm_apply(x, totals, weight, bias, mean, var, tracked, momentum, eps)


@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases())
def test_output_matches_float64(shape, layout, dtype):
    x = make_input(shape, layout, dtype)
    channels = shape[1]
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    weight = make_vector(channels, parameter_dtype, seed=1)
    bias = make_vector(channels, parameter_dtype, seed=2)
    output, mean, invstd, count = apply(x, weight=weight, bias=bias)

    expected_mean, expected_var = reference_moments(x)
    expected_invstd = (expected_var + 1e-5).rsqrt()
    xhat = (x.double() - per_channel(expected_mean, x)) * per_channel(expected_invstd, x)
    expected = xhat * per_channel(weight.double(), x) + per_channel(bias.double(), x)
    assert output.dtype == dtype and output.stride() == x.stride()
    # The message costs the variance some eps of float64 of the mean square, the output half of it.
    loss = 2 * torch.finfo(torch.float64).eps * (expected_mean.square() * expected_invstd.square())
    message_error = (xhat * per_channel(weight.double() * loss, x)).abs()
    assert_normalized_close(output, expected, dtype, message_error.max().item())
    assert mean.dtype == invstd.dtype == count.dtype == torch.float64
    assert count.tolist() == [x.numel() / channels]
    # float32 sums, compensated or of a few dozen values; float64 after them
    torch.testing.assert_close(mean, expected_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(invstd, expected_invstd, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_mean_does_not_cost_the_output(layout):
    x = make_input((16, 5, 24, 24), layout, torch.float32, mean=1e3, std=1.0)
    output, *_ = apply(x)
    mean, var = reference_moments(x)
    expected = (x.double() - per_channel(mean, x)) * per_channel((var + 1e-5).rsqrt(), x)
    # A mean rounded to float32 would cost 3e-5 here.
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


def test_variance_that_ranks_round_below_zero_is_zero():
    x = make_input((4, 1), "contiguous", torch.float64)
    squares = torch.tensor(0.09).double() * 4
    totals = torch.stack([torch.tensor(1.2).double(), squares - 1e-12, torch.tensor(4.0).double()])
    buffers = (torch.zeros(1).double(), torch.ones(1).double(), None)
    _, _, invstd, _ = ops.batch_norm_apply(x, totals, None, None, *buffers, 1.0, 1e-20)
    # The square root of only eps; the variance would be -2.5e-13.
    torch.testing.assert_close(invstd, torch.full_like(invstd, 1e10))
    assert buffers[1].item() == 0.0


@pytest.mark.parametrize("shape", [(4, 3, 5), (3, 3), (2, 3)])  # the fewest values are special
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_running_statistics_move_toward_mean_and_unbiased_variance(buffer_dtype, shape):
    x = make_input(shape, "contiguous", torch.bfloat16)
    count = x.numel() // 3
    mean = torch.tensor([1.0, -1.0, 0.5], dtype=buffer_dtype)
    var = torch.tensor([2.0, 1.0, 0.5], dtype=buffer_dtype)
    tracked = torch.tensor(7)
    expected_mean, expected_var = reference_moments(x)
    expected_mean = 0.7 * mean.double() + 0.3 * expected_mean
    expected_var = 0.7 * var.double() + 0.3 * expected_var * count / (count - 1)
    apply(x, mean=mean, var=var, tracked=tracked, momentum=0.3)
    eps = max(torch.finfo(buffer_dtype).eps, 1e-6)  # the buffer's rounding, the statistics' own
    torch.testing.assert_close(mean.double(), expected_mean, rtol=eps, atol=1e-7)
    torch.testing.assert_close(var.double(), expected_var, rtol=eps, atol=1e-7)
    assert tracked.item() == 8


def test_strided_parameters_and_buffers():
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    table = torch.rand(3, 4)
    expected = table.clone()
    columns, copies = table.unbind(1), [c.clone() for c in expected.unbind(1)]
    output, *_ = apply(x, weight=columns[0], bias=columns[1], mean=columns[2], var=columns[3])
    dense, *_ = apply(x, weight=copies[0], bias=copies[1], mean=copies[2], var=copies[3])
    assert torch.equal(output, dense)
    assert torch.equal(table, torch.stack(copies, 1))
    assert not torch.equal(table[:, 2:], expected[:, 2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty_group_updates_nothing(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    mean, var, tracked = torch.full((3,), 0.25), torch.full((3,), 0.5), torch.tensor(3)
    output, *statistics = apply(x, mean=mean, var=var, tracked=tracked, momentum=None)
    assert output.shape == x.shape and output.dtype == dtype
    assert all(torch.isfinite(t).all() for t in statistics)
    assert mean.tolist() == [0.25] * 3 and var.tolist() == [0.5] * 3 and tracked.item() == 3


def test_one_value_in_the_group_gives_no_infinite_variance():
    mean, var = torch.zeros(2), torch.ones(2)
    output, *_ = apply(torch.tensor([[3.0, 4.0]]), mean=mean, var=var, momentum=0.5)
    assert output.tolist() == [[0.0, 0.0]]
    assert mean.tolist() == [1.5, 2.0] and var.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_channel_keeps_its_running_statistics(bad):
    x = make_input((3, 4, 6), "contiguous", torch.float32)
    clean, *_ = apply(x)
    x[0, 2, 0] = bad
    mean, var, tracked = torch.zeros(4), torch.ones(4), torch.tensor(0)
    output, *_ = apply(x, mean=mean, var=var, tracked=tracked)
    assert torch.isnan(output[:, 2]).all()
    others = [0, 1, 3]
    assert torch.equal(output[:, others], clean[:, others])
    assert mean[2] == 0 and var[2] == 1 and tracked.item() == 1
    assert (mean[others] != 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("when", [0, 1])
def test_bad_channel_of_a_cumulative_average_is_nan(bad, when):
    """As in torch: the batch counts for all channels, so the channel's average is unknown."""
    mean, var, tracked = torch.zeros(4), torch.ones(4), torch.tensor(0)
    batches = [make_input((6, 4), "contiguous", torch.float32, seed=seed) for seed in range(3)]
    batches[when][1, 2] = bad
    for number, x in enumerate(batches):
        apply(x, mean=mean, var=var, tracked=tracked, momentum=None)
        is_bad = number >= when
        assert mean[2].isnan() == var[2].isnan() == is_bad
    others = [0, 1, 3]
    # three float32 roundings of a running average
    torch.testing.assert_close(
        mean[others], torch.stack([x.mean(0) for x in batches]).mean(0)[others]
    )
    torch.testing.assert_close(
        var[others], torch.stack([x.var(0) for x in batches]).mean(0)[others]
    )
    assert tracked.item() == 3


# A buffer has the input's dtype or float32, and only its own dtype counts.
@pytest.mark.parametrize(
    ("input_dtype", "dtype", "representable", "variance"),
    [
        (torch.float16, torch.float16, 65504.0, 65520.0),
        (torch.bfloat16, torch.bfloat16, 3.38e38, 3.3999e38),
        *((dtype, torch.float32, 3.402e38, 3.4029e38) for dtype in DTYPES),
    ],
)
def test_variance_past_the_dtype_of_a_buffer_leaves_it_alone(
    input_dtype, dtype, representable, variance
):
    x = torch.zeros(2, 1, dtype=input_dtype)

    def updated(variance, momentum=1.0):
        totals = torch.tensor([0.0, variance, 2.0], dtype=torch.float64)  # of two values
        mean, var = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
        counter = torch.tensor(0) if momentum is None else None
        ops.batch_norm_apply(x, totals, None, None, mean, var, counter, momentum, 1e-5)
        return mean.item(), var.item()

    assert updated(representable) == (0.0, torch.tensor(representable).to(dtype).item())
    assert updated(variance) == (0.0, 1.0)
    assert all(math.isnan(value) for value in updated(variance, momentum=None))


def test_aborted_rank_is_an_error_or_nan_and_changes_nothing(each_device):
    x = make_input((3, 2), "contiguous", torch.float32)
    totals = ops.batch_norm_stats(x)
    totals[-1] = torch.nan
    mean, var, tracked = torch.zeros(2), torch.ones(2), torch.tensor(0)
    arguments = (x, totals, None, None, mean, var, tracked, 0.1, 1e-5)
    if each_device.type == "cuda":  # CUDA never waits for the count
        assert all(result.isnan().all() for result in ops.batch_norm_apply(*arguments))
    else:
        with pytest.raises(RuntimeError, match="another rank of the process group aborted"):
            ops.batch_norm_apply(*arguments)
    assert mean.tolist() == [0, 0] and var.tolist() == [1, 1] and tracked.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1000.1, 7.7e-5])
def test_constant_channel_has_a_running_variance_of_zero(each_device, value, dtype):
    """Reading a message subtracts exactly the value that writing it has added."""
    x = torch.full((3, 4, 5, 7), value, dtype=dtype)
    running_mean, running_var = torch.zeros(4).double(), torch.ones(4).double()
    totals = ops.batch_norm_stats(x)
    ops.batch_norm_apply(x, totals, None, None, running_mean, running_var, None, 1.0, 1e-5)
    assert running_var.min() == running_var.max() == 0
    assert (running_mean - x[0, 0, 0, 0].double()).abs().max() <= abs(value) * 2**-53
