"""A layer's use of the CUDA operators, without a GPU: running statistics, parameters, ranks."""

import pytest
import torch
from support.cases import (
    DTYPES,
    EMPTY_SHAPES,
    assert_normalized_close,
    make_input,
    per_channel,
    reduced_dims,
    reference_moments,
)
from support.emulated import Device, on_all_devices, totals_of

EPS = 1e-5


@pytest.fixture
def device(library):
    return Device(library, 8, "shuffled")


def apply(device, x, mean, var, tracked=None, momentum=0.1, totals=None):
    totals = totals_of(x) if totals is None else totals
    return device.batch_norm_apply(x, totals, None, None, mean, var, tracked, momentum, EPS)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("vector_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_buffers_of_any_dtype_and_stride(library, dtype, vector_dtype, layout):
    x = make_input((6, 37, 9, 5), layout, dtype)
    dy = make_input((6, 37, 9, 5), layout, dtype, mean=0.1, seed=1)
    table = (torch.rand(37, 4, generator=torch.Generator().manual_seed(0)) + 0.5).to(vector_dtype)
    weight, bias, old_mean, old_var = table.double().unbind(1)
    mean, var = reference_moments(x)
    invstd = (var + EPS).rsqrt()
    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    products = dy.double() * xhat
    sums = torch.cat([dy.double().sum(reduced_dims(x)), products.sum(reduced_dims(x))])
    count = torch.tensor([x.numel() / 37]).double()

    def run(device):
        columns = table.clone().unbind(1)
        output, *_ = device.batch_norm_apply(x, totals_of(x), *columns, None, 0.3, EPS)
        _, grad_weight, grad_bias = device.batch_norm_backward_reduce(
            dy, x, mean, invstd, columns[0].dtype, columns[1].dtype
        )
        grad_input = device.batch_norm_backward_apply(dy, x, mean, invstd, weight, sums, count)
        again = device.batch_norm_backward_apply(dy, x, mean, invstd, columns[0], sums, count)
        assert torch.equal(again, grad_input)
        return output, *columns, grad_weight, grad_bias

    expected = xhat * per_channel(weight, x) + per_channel(bias, x)
    # The vector's own rounding or float64's of the sums; for gradients the rounding of float sums
    eps = max(torch.finfo(vector_dtype).eps, 1e-14)
    for _, results in on_all_devices(library, run, x, torch.empty_like(x)):
        output, *vectors, grad_weight, grad_bias = results
        assert_normalized_close(output, expected, dtype)
        assert torch.equal(torch.stack(vectors[:2], 1), table[:, :2])
        moved = 0.7 * old_mean + 0.3 * mean, 0.7 * old_var + 0.3 * var * 270 / 269
        for actual, value in zip(vectors[2:], moved, strict=True):
            torch.testing.assert_close(actual.double(), value, rtol=eps, atol=eps)
        assert grad_weight.dtype == grad_bias.dtype == vector_dtype
        for actual, value in zip((grad_bias, grad_weight), sums.chunk(2), strict=True):
            torch.testing.assert_close(actual.double(), value, rtol=max(eps, 1e-6), atol=2e-4)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_cumulative_average(library, layout):
    shape = (6, 70, 4)  # several tiles of channels: all see the same count
    batches = [make_input(shape, layout, torch.float32, seed=seed) for seed in range(3)]

    def run(device):
        mean, var, tracked = torch.zeros(70), torch.ones(70), torch.tensor(0)
        for x in batches:
            apply(device, x, mean, var, tracked, momentum=None)
        return mean, var, tracked

    x = batches[0]
    for _, (mean, var, tracked) in on_all_devices(library, run, x, x):
        expected = [torch.stack([x.mean((0, 2)) for x in batches]).mean(0)]
        expected += [torch.stack([x.movedim(1, 0).flatten(1).var(1) for x in batches]).mean(0)]
        torch.testing.assert_close([mean, var], expected)  # float32 roundings
        assert tracked.item() == 3


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_bad_channel_keeps_its_running_statistics_or_has_no_average(device, momentum, when):
    batches = [make_input((6, 70, 4), "contiguous", torch.float32, seed=seed) for seed in range(3)]
    batches[when][1, 66, 2] = torch.inf
    mean, var, tracked = torch.zeros(70), torch.ones(70), torch.tensor(0)
    for number, x in enumerate(batches):
        before = mean[66].item(), var[66].item()
        apply(device, x, mean, var, tracked, momentum)
        after = mean[66].item(), var[66].item()
        if momentum is None:
            assert mean[66].isnan() == var[66].isnan() == (number >= when)
        else:
            assert (after == before) == (number == when)
        others = torch.arange(70) != 66
        assert mean[others].isfinite().all() and tracked.item() == number + 1


@pytest.mark.parametrize("shape", [(700, 2100), (3, 5, 91, 101)], ids=["matrix", "planar"])
def test_statistics_move_once_for_all_blocks(library, shape):
    x = make_input(shape, "contiguous", torch.float32)  # split over blocks, most of them
    expected = [0.1 * moment for moment in reference_moments(x)]
    count = x.numel() // shape[1]
    expected[1] = 0.9 + expected[1] * count / (count - 1)

    def run(device):
        mean, var = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
        tracked = torch.tensor(2**40)
        apply(device, x, mean, var, tracked)
        return mean, var, tracked

    splits = []
    for plan, (mean, var, tracked) in on_all_devices(library, run, x, x):
        splits.append(plan["splits"])
        torch.testing.assert_close([mean, var], expected)  # float64 sums
        assert tracked.item() == 2**40 + 1
    assert max(splits) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty_group_updates_nothing(device, shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    totals = device.batch_norm_stats(x)
    assert torch.equal(totals, torch.zeros(7).double())
    mean, var, tracked = torch.full((3,), 0.25), torch.full((3,), 0.5), torch.tensor(3)
    for momentum in (0.1, None):
        output, *statistics = apply(device, x, mean, var, tracked, momentum, totals)
        assert output.shape == x.shape and output.dtype == dtype
        assert all(torch.isfinite(t).all() for t in statistics)
        assert mean.tolist() == [0.25] * 3 and var.tolist() == [0.5] * 3 and tracked.item() == 3
    sums, *gradients = device.batch_norm_backward_reduce(x, x, *statistics[:2])
    assert not any(t.any() for t in (sums, *gradients))
    grad = device.batch_norm_backward_apply(x, x, *statistics[:2], None, sums, statistics[2])
    assert grad.shape == x.shape and grad.dtype == dtype


def test_gradient_is_finite_where_every_value_is_masked(device):
    """The layer fills masked values on CUDA, and clears their gradients afterwards."""
    x = make_input((3, 2), "contiguous", torch.float32)
    zeros, ones = torch.zeros(2).double(), torch.ones(2).double()
    sums, count = torch.zeros(4).double(), torch.zeros(1).double()
    grad = device.batch_norm_backward_apply(x, x, zeros, ones, None, sums, count)
    torch.testing.assert_close(grad, x)


def train(device, shards, grad_outputs, weight, bias):
    """Run a step of a layer whose ranks hold the shards; return each rank's results."""
    buffers = [(torch.zeros(len(weight)), torch.ones(len(weight)), torch.tensor(0)) for _ in shards]
    totals = sum(device.batch_norm_stats(x) for x in shards)
    forward = [
        device.batch_norm_apply(x, totals, weight, bias, *running, 0.1, EPS)
        for x, running in zip(shards, buffers, strict=True)
    ]
    local = [
        device.batch_norm_backward_reduce(dy, x, mean, invstd, weight.dtype, bias.dtype)
        for x, dy, (_, mean, invstd, _) in zip(shards, grad_outputs, forward, strict=True)
    ]
    sums = sum(one for one, _, _ in local)
    grad_inputs = [
        device.batch_norm_backward_apply(dy, x, mean, invstd, weight, sums, count)
        for x, dy, (_, mean, invstd, count) in zip(shards, grad_outputs, forward, strict=True)
    ]
    outputs = [output for output, *_ in forward]
    grad_weight, grad_bias = (sum(one[i] for one in local) for i in (1, 2))
    return outputs, grad_inputs, grad_weight, grad_bias, buffers


@pytest.mark.parametrize("sizes", [[7], [4, 3], [0, 7], [7, 0], [2, 0, 5]], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_ranks_train_as_one_whole_batch(library, dtype, layout, sizes, multiprocessors):
    device = Device(library, multiprocessors, "shuffled")
    x = make_input((7, 19, 11, 13), layout, dtype)
    dy = make_input((7, 19, 11, 13), layout, dtype, mean=0.1, seed=1)
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(2, 19, generator=generator).to(x.dtype).float()
    outputs, grad_inputs, grad_weight, grad_bias, buffers = train(
        device, x.split(sizes), dy.split(sizes), weight, bias
    )

    whole = x.double().requires_grad_()
    parameters = [t.double().requires_grad_() for t in (weight, bias)]
    running = torch.zeros(19).double(), torch.ones(19).double()
    output = torch.nn.functional.batch_norm(whole, *running, *parameters, True, 0.1, EPS)
    output.backward(dy.double())
    assert_normalized_close(torch.cat(outputs), output.detach(), dtype)
    assert_normalized_close(torch.cat(grad_inputs), whole.grad, dtype)
    # Float sums of 1,001 values of order one, in ranks' parts
    for actual, parameter in zip((grad_weight, grad_bias), parameters, strict=True):
        torch.testing.assert_close(actual.double(), parameter.grad, rtol=1e-5, atol=1e-3)
    for mean, var, tracked in buffers:
        torch.testing.assert_close((mean, var), (buffers[0][0], buffers[0][1]), rtol=0, atol=0)
        torch.testing.assert_close((mean.double(), var.double()), running, rtol=1e-6, atol=1e-6)
        assert tracked.item() == 1
