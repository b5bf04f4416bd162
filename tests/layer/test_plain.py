"""The operators as torch's expressions, and layers on a device that has only these.

The device is a stand-in, in a process of its own (tests/support/plain_device.py).
tests/support/hidden.py runs other tests by the expressions.
"""

import copy
import os
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
from support import hidden, ops, plain_device
from support.cases import DTYPES, EMPTY_SHAPES, OPS, arguments, layouts, make_input, operator
from support.paths import ROOT
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm, check_synchronized, recompute_statistics, sync_batch_norm
from syncbn.ops import fallback
from syncbn.ops.epilogue import NUMBERS


@pytest.fixture
def device(ranks):
    """A process whose default device has no operators."""
    return ranks(1, "plain", "plain")


# Both round to float32 (float64 to itself) a handful of times, and sums of some hundred values.
def close(actual, expected, dtype):
    wide = dtype == torch.float64
    eps = torch.finfo(expected.dtype if expected.dtype.itemsize < 4 else dtype).eps
    eps = max(eps, torch.finfo(torch.float64 if wide else torch.float32).eps)
    scale = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
    options = {"rtol": 2 * eps, "atol": 16 * eps * max(scale, 1.0)}
    torch.testing.assert_close(actual, expected, **options, equal_nan=True)  # of empty batches


def run_operator(rank, world_size, name, shape, layout, dtype):
    """Return the results, and the written tensors, on the CPU and on the device."""
    with torch.device("cpu"):
        given = arguments(name, make_input(shape, layout, dtype))
    moved = [v.to("plain", copy=True) if isinstance(v, torch.Tensor) else v for v in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the device has no operators
        results = [operator(name)(*values) for values in (given, moved)]
    outputs = [[r] if isinstance(r, torch.Tensor) else list(r) for r in results]
    for values, output in zip((given, moved), outputs, strict=True):
        output += [value for value in values if isinstance(value, torch.Tensor)]
    expected, actual = outputs
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and a.device.type == "plain"
    return [t.cpu() for t in actual], expected


SHAPES = [(7, 3), (5, 70), (3, 5, 6, 7), (4, 1, 9, 11), (2, 3, 4, 5, 6), *EMPTY_SHAPES]


@pytest.mark.any_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_operator_agrees_with_the_cpus(device, name, dtype):
    for shape in SHAPES:
        for layout in layouts(shape):
            ((actual, expected),) = device.run(run_operator, name, shape, layout, dtype)
            for a, b in zip(actual, expected, strict=True):
                close(a, b, dtype)


def message_far_from_zero(rank, world_size):
    x = make_input((8, 5, 31, 33), "contiguous", torch.float32, mean=1e3, std=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        message = ops.batch_norm_stats(x).cpu()
    *sums, count = message
    sums, squares = torch.stack(sums).chunk(2)
    mean, var = sums / count, (squares - sums * sums / count) / count
    expected_var, expected_mean = torch.var_mean(x.cpu().double(), (0, 2, 3), correction=0)
    return mean, expected_mean, var, expected_var


def test_mean_of_a_thousand_standard_deviations(device):
    ((mean, expected_mean, var, expected_var),) = device.run(message_far_from_zero)
    # In float32, deviations from a number near the mean are exact; a float32 mean would cost 3e-8.
    torch.testing.assert_close(mean, expected_mean, rtol=1e-12, atol=0)
    # Reading a variance from float64 sums costs 1e-16 (mean / std)², see csrc/common/message.h; and
    # 8,000 squares and their sum are rounded to float32.
    torch.testing.assert_close(var, expected_var, rtol=1e-6, atol=0)


# Inconsistent sums, if nothing may wait for the device: NaN, and a status.


@pytest.mark.parametrize(
    ("count", "tail_sum", "note"),
    [(12.0, 7.0, 0.0), (torch.nan, 7.0, -7.0), (12.0, 8.0, 8.0)],
)
@pytest.mark.parametrize("noted", [0.0, 3.0])
def test_status_takes_the_first_note(count, tail_sum, note, noted):
    x, channels = make_input((4, 3, 3), "contiguous", torch.float32), 3
    totals = ops.batch_norm_stats(x, torch.tensor([7.0, 0, 0]).double())
    totals[2 * channels] = count
    status = torch.tensor([noted], dtype=torch.float64)
    mean, var, tracked = torch.zeros(3), torch.ones(3), torch.tensor(0)
    y, *_, found = fallback.batch_norm_apply(
        x, totals, None, None, mean, var, tracked, 0.1, 1e-5, tail_sum, status
    )
    is_sound = note == 0
    assert status.item() == (noted or note)
    assert bool(y.isfinite().all()) == is_sound and bool(y.isnan().all()) != is_sound
    assert (found.item() == 12) == is_sound and tracked.item() == is_sound
    assert (mean == 0).all() != is_sound
    statistics = torch.ones(3, dtype=torch.float64)
    status.fill_(noted)
    sums = torch.cat([totals[:-4], totals[-4:] * torch.tensor([1.0, 1, 0, 0])])
    counted = torch.tensor([12.0], dtype=torch.float64)
    dx = fallback.batch_norm_backward_apply(
        x, x, statistics, statistics, None, sums, counted, tail_sum, status
    )
    assert status.item() == (noted or note)
    assert bool(dx.isfinite().all()) == is_sound and bool(dx.isnan().all()) != is_sound


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_a_bad_channel_are_those_of_the_operator(momentum):
    ours, theirs = [(torch.zeros(3), torch.ones(3), torch.tensor(0)) for _ in range(2)]
    for size, value in ((4, torch.inf), (4, 0.0), (0, 0.0), (4, 0.0)):  # one batch is empty
        x = make_input((size, 3), "contiguous", torch.float32)
        x[:1, 1] += value
        totals = ops.batch_norm_stats(x)
        for apply, running in (
            (fallback.batch_norm_apply, ours),
            (torch.ops.syncbn.batch_norm_apply, theirs),
        ):
            apply(x, totals, None, None, *running, momentum, 1e-5)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)  # float32 rounding


def test_inconsistent_sums_raise_the_operators_error():
    x = make_input((4, 3), "contiguous", torch.float32)
    arguments = (None, None, None, None, None, 0.0, 1e-5)
    for count, tail_sum in ((torch.nan, 7.0), (1.0, 7.0), (4.0, 8.0)):
        totals = ops.batch_norm_stats(x, torch.tensor([7.0, 0, 0]).double())
        totals[6] = count
        with pytest.raises(RuntimeError) as theirs:
            torch.ops.syncbn.batch_norm_apply(x, totals, *arguments, tail_sum)
        with pytest.raises(RuntimeError) as ours:
            fallback.batch_norm_apply(x, totals, *arguments, tail_sum)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.filterwarnings("ignore:syncbn has no operators")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("activation", NUMBERS)
def test_nothing_waits_for_a_cuda_device(activation, momentum):
    """FakeTensorMode raises if a value is read."""
    number = NUMBERS[activation]
    tail = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, residual = (torch.empty(4, 3, 5, device="cuda") for _ in range(2))
        running = torch.empty(2, 3, device="cuda").unbind()
        tracked = torch.empty((), dtype=torch.int64, device="cuda")
        status = torch.empty(1, dtype=torch.float64)
        constants = torch.empty(6, dtype=torch.float64, device="cuda") if number else None
        message = fallback.batch_norm_stats(x, tail)
        following = (residual, number, 0.1, constants)
        y, mean, invstd, count = fallback.batch_norm_apply(
            x, message, None, None, *running, tracked, momentum, 1e-5, 2.0, status, *following
        )
        assert y.device == message.device == count.device == x.device
        dtypes = (torch.float32, torch.float32)
        through = (constants, number, 0.1)
        sums, *_ = fallback.batch_norm_backward_reduce(x, x, mean, invstd, *dtypes, tail, *through)
        dx = fallback.batch_norm_backward_apply(
            x, x, mean, invstd, None, sums, count, 2.0, status, *through
        )
        assert dx.device == x.device
        with pytest.raises(DataDependentOutputException):  # the mode works
            message.tolist()


# Layers.


def make_layer(activation):
    layer = SyncBatchNorm(5, activation=activation, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 2, 5, device="cpu"))
        layer.bias.copy_(torch.linspace(-1, 1, 5, device="cpu"))
    return layer


def train(layer, place, dtype, layout, with_residual, create_graph=False):
    leaves = [make_input((4, 5, 3, 7), layout, dtype, seed=seed).to(place) for seed in (0, 1)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = layer(*leaves[: 1 + with_residual])
    loss = y.float().square().sum() / y.numel()
    if create_graph:
        (dx,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        loss = (1000 * dx).float().square().sum()
    loss.backward()
    gradients = [t.grad for t in (*leaves[: 1 + with_residual], layer.weight, layer.bias)]
    results = [y.detach(), *gradients, *layer.buffers()]
    return [t.cpu() for t in results if t is not None]


def run_layer(rank, world_size, *case):
    activation, *others = case
    layer = make_layer(activation)
    on_device = copy.deepcopy(layer).to("plain")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(on_device, "plain", *others), train(layer, "cpu", *others)


@pytest.mark.works("training on a device without operators of ours")
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", NUMBERS)
def test_layer_trains_as_on_the_cpu(device, activation, with_residual):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layout in ("contiguous", "channels_last"):
            case = (activation, dtype, layout, with_residual)
            ((actual, expected),) = device.run(run_layer, *case)
            for a, b in zip(actual, expected, strict=True):
                close(a, b, dtype)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", NUMBERS)
def test_double_backward(device, activation, with_residual):
    case = (activation, torch.float32, "contiguous", with_residual, True)
    ((actual, expected),) = device.run(run_layer, *case)
    for a, b in zip(actual, expected, strict=True):
        # The loss is of 1000 times values that were computed from outputs of order 1, rounded to
        # float32; sums of such terms cancel.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, b.abs().max().item()))


def recompute_and_check(rank, world_size):
    batches = [make_input((6, 5), "contiguous", torch.float32, seed=seed) for seed in range(3)]
    layer = SyncBatchNorm(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recompute_statistics(layer, batches)
        check_synchronized(layer)
    whole = torch.cat([batch.cpu() for batch in batches]).double()
    return [b.cpu() for b in layer.buffers()], [whole.mean(0), whole.var(0)]


def test_recomputed_statistics(device):
    (((mean, var, tracked), expected),) = device.run(recompute_and_check)
    torch.testing.assert_close([mean, var], [e.float() for e in expected])
    assert tracked.item() == 3


def train_checkpointed(rank, world_size):
    model = nn.Sequential(nn.Linear(3, 5), SyncBatchNorm(5, activation="silu"), nn.Linear(5, 1))
    other = type(model)(nn.Linear(3, 5), SyncBatchNorm(5, activation="silu"), nn.Linear(5, 1))
    other.load_state_dict(model.state_dict())
    x = make_input((6, 3), "contiguous", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x).sum().backward()
        checkpoint(other, x, use_reentrant=False).sum().backward()
    return [
        [t.cpu() for t in (*m[1].buffers(), *(p.grad for p in m.parameters()))]
        for m in (model, other)
    ]


def test_checkpoint_updates_once(device):
    ((expected, actual),) = device.run(train_checkpointed)
    torch.testing.assert_close(actual, expected)


# Devices without float64.


def without_float64(rank, world_size, case):
    """Return the error of training, and the results of evaluation before and after it."""
    torch._dynamo.reset()
    x = make_input((4, 5, 3), "contiguous", torch.float32)
    layer = SyncBatchNorm(5, activation="silu" if case == "activation" else None)
    forward = layer
    options = {"mask": torch.ones(4, 3, dtype=torch.bool)} if case == "mask" else {}
    if case == "compiled":
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    evaluated = layer.eval()(x).detach()
    layer.train()
    with plain_device.without_float64():
        with pytest.raises(NotImplementedError) as error:
            forward(x, **options)
        return str(error.value), evaluated, layer.eval()(x).detach()


@pytest.mark.parametrize("case", ["plain", "activation", "mask", "compiled"])
@pytest.mark.trouble(
    "“expected a device with float64”",
    "The device, such as Apple's MPS, cannot compute the statistics",
    "Train on a CPU or on CUDA. [Devices](install.md#devices-without-float64)",
)
def test_device_without_float64_is_an_error_in_training_alone(device, case):
    ((message, before, after),) = device.run(without_float64, case)
    assert message == (
        "expected a device with float64, in which statistics are computed, but got 'plain:0'; "
        "move the model to a CPU or CUDA device, or train torch's own layers there: "
        "syncbn.revert_sync_batchnorm(model)"
    )
    assert torch.equal(before, after)


def float32_in_place_of_float64(rank, world_size):
    def ones(*size, dtype, device):
        return torch.full(size, 1.0, dtype=torch.float32, device=device)

    with mock.patch.object(torch, "ones", ones), plain_device.without_float64():
        return fallback._has_float64(torch.device("plain"))


def test_device_that_computes_in_float32_instead_has_no_float64(device):
    assert device.run(float32_in_place_of_float64) == [False]


def refuse_float64(rank, world_size):
    with plain_device.without_float64():
        with pytest.raises(TypeError, match="does not support float64"):
            torch.ones(3, dtype=torch.float64)
        with pytest.raises(TypeError, match="does not support float64"):
            torch.ones(3).to(torch.float64)
        with pytest.raises(TypeError, match="does not support float64"):
            torch.ones(3).sum(dtype=torch.float64)
        with pytest.raises(TypeError, match="does not support float64"):
            torch.ones(3, dtype=torch.float64, device="cpu").to("plain", torch.float32)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3) + torch.ones(3, device="cpu")


def test_the_stand_in_itself(device):
    device.run(refuse_float64)


# Under torch.compile.


def train_compiled(rank, world_size):
    torch._dynamo.reset()
    layer, other = (make_layer(None).to("plain") for _ in range(2))
    # Inductor generates code for devices that it knows.
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = train(layer, "plain", torch.float32, "contiguous", False)
        return train_module(compiled, other), expected


def train_module(compiled, layer):
    x = make_input((4, 5, 3, 7), "contiguous", torch.float32).requires_grad_()
    y = compiled(x)
    (y.float().square().sum() / y.numel()).backward()
    results = (y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers())
    return [t.cpu() for t in results]


def test_compiled_in_one_graph(device):
    ((actual, expected),) = device.run(train_compiled)
    for a, b in zip(actual, expected, strict=True):
        close(a, b, torch.float32)


# The warning.

ANNOUNCED = """
import sys, warnings
sys.path.insert(0, {tests!r})
from support import hidden
hidden.hide()
import torch
from syncbn import SyncBatchNorm

layers = torch.nn.Sequential(SyncBatchNorm(3), SyncBatchNorm(3), torch.nn.ReLU())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        layers(torch.rand(4, 3)).sum().backward()
    layers.eval()(torch.rand(4, 3))
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


@pytest.mark.any_torch
@pytest.mark.parametrize("is_hidden", [True, False])
def test_one_warning_for_a_device(is_hidden):
    script = ANNOUNCED.format(tests=str(ROOT / "tests"))
    environment = {**os.environ, hidden.VARIABLE: "1" if is_hidden else ""}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if not is_hidden:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith("UserWarning syncbn has no operators for 'cpu' tensors")
    assert "python -m syncbn info" in line


def test_function_on_the_device(device):
    ((actual, expected),) = device.run(call_function)
    close(actual, expected, torch.float32)


def call_function(rank, world_size):
    x = make_input((4, 5), "contiguous", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = sync_batch_norm(x, None, None, training=True)
    return y.cpu(), sync_batch_norm(x.cpu(), None, None, training=True)
