"""Bad input: each case raises the right type, naming the expected and the actual value."""

import gc
import warnings
import weakref
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from support.ranks import Failure
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm
from syncbn.ops import checks

X = make_input((4, 3, 5), "contiguous", torch.float32)


def quantized():
    return torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)


BAD_INPUTS = [
    (lambda: [1.0], TypeError, r"expected input to be a torch\.Tensor, but got list"),
    (lambda: torch.rand(3), ValueError, r"^expected at least 2D input \(got 1D input\)"),
    (lambda: torch.tensor(1.0), ValueError, r"^expected at least 2D input \(got 0D input\)"),
    (lambda: X[:, :0], ValueError, "^SyncBatchNorm number of input channels should be non-zero"),
    (lambda: X.repeat(1, 2, 1), ValueError, r"3 channels.*got 6 in input of shape \[4, 6, 5\]"),
    (lambda: X.long(), TypeError, "dtype float16, .* but got int64"),
    (lambda: X.cfloat(), TypeError, "but got complex64"),
    (lambda: X.bool(), TypeError, "but got bool"),
    (lambda: X.to(torch.float8_e4m3fn), TypeError, "but got float8_e4m3fn"),
    (lambda: X[0].to_sparse(), TypeError, r"dense input, but got layout torch\.sparse_coo"),
    (quantized, TypeError, "but got quint8"),
]


@pytest.mark.filterwarnings("ignore:.*quant.*")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("passes_before", [0, 1])
@pytest.mark.parametrize(("make", "kind", "message"), BAD_INPUTS)
def test_bad_input(make, kind, message, passes_before, training):
    layer = SyncBatchNorm(3).train(training)
    for _ in range(passes_before):
        layer(X)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises(kind, match=message):
        layer(make())
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_dimensions_are_checked_in_each_pass(training):
    layer = convert_sync_batchnorm(nn.BatchNorm2d(3)).train(training)
    layer(torch.rand(2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)"):
        layer(torch.rand(2, 3, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
def test_nested_input(training):
    nested = torch.nested.nested_tensor([torch.rand(3, 2), torch.rand(3, 5)])
    with pytest.raises(TypeError, match="expected a dense input, but got a nested tensor"):
        SyncBatchNorm(3).train(training)(nested)


GOOD = {
    "running_mean": torch.zeros(3),
    "running_var": torch.ones(3),
    "weight": torch.ones(3),
    "bias": torch.zeros(3),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (torch.ones(4), ValueError, r"expected {} to have shape \[3\], but got \[4\]"),
        (torch.ones(3, 1), ValueError, r"expected {} to have shape \[3\], but got \[3, 1\]"),
        (
            torch.ones(3).long(),
            TypeError,
            "expected {} to have dtype float32 or float64, .* got int64",
        ),
        (
            torch.ones(3).half(),
            TypeError,
            "expected {} to have dtype float32 or float64, .* got float16",
        ),
        (torch.ones(3, device="meta"), ValueError, "expected {} to be on cpu, .* got meta"),
        ([1.0, 1.0, 1.0], TypeError, r"expected {} to be a torch\.Tensor or None, but got list"),
    ],
)
def test_bad_channel_vector(name, bad, kind, message, training):
    with pytest.raises(kind, match=message.format(name)):
        sync_batch_norm(X, **{**GOOD, name: bad}, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_one_of_the_running_statistics(name, training):
    missing = {"running_mean": "running_var", "running_var": "running_mean"}[name]
    with pytest.raises(ValueError, match=f"both of .* or neither, but got only {missing}"):
        sync_batch_norm(X, **{**GOOD, name: None}, training=training)


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_expanded_running_statistics_can_only_be_read(name):
    arguments = {**GOOD, name: torch.ones(1).expand(3)}
    with pytest.raises(ValueError, match=f"expected {name} to have memory .* but it is expanded"):
        sync_batch_norm(X, **arguments, training=True)
    assert sync_batch_norm(X, **arguments).shape == X.shape
    one = torch.ones(1).expand(1)
    sync_batch_norm(X[:, :1], one, one.clone(), training=True)


@pytest.mark.parametrize(
    ("eps", "kind", "message"),
    [
        (-1e-5, ValueError, "expected eps to be finite and not negative, but got -1e-05"),
        (float("nan"), ValueError, "but got nan"),
        (float("inf"), ValueError, "but got inf"),
        ("small", TypeError, "expected eps to be a number, but got str"),
        (None, TypeError, "expected eps to be a number, but got NoneType"),
    ],
)
def test_bad_eps(eps, kind, message):
    with pytest.raises(kind, match=message):
        SyncBatchNorm(3, eps=eps)
    for training in (True, False):
        with pytest.raises(kind, match=message):
            sync_batch_norm(X, **GOOD, training=training, eps=eps)


@pytest.mark.parametrize(
    ("momentum", "kind", "message"),
    [
        ("fast", TypeError, "expected momentum to be a number, but got str"),
        (True, TypeError, "expected momentum to be a number, but got bool"),
        (float("nan"), ValueError, "expected momentum to be finite, but got nan"),
    ],
)
def test_bad_momentum(momentum, kind, message):
    with pytest.raises(kind, match=message):
        SyncBatchNorm(3, momentum=momentum)
    with pytest.raises(kind, match=message):
        sync_batch_norm(X, **GOOD, training=True, momentum=momentum)
    layer = SyncBatchNorm(3)
    layer.momentum = momentum
    with pytest.raises(kind, match=message):
        layer(X)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "number", [Fraction(1, 4), np.float32(0.25), torch.tensor(0.25), torch.tensor(1), 1]
)
@pytest.mark.parametrize("name", ["momentum", "eps", "negative_slope"])
def test_real_numbers_of_any_class(name, number, training):
    layers = [SyncBatchNorm(3, activation="leaky_relu").train(training) for _ in range(2)]
    setattr(layers[0], name, number)
    setattr(layers[1], name, float(number))
    mask, outputs = torch.ones(4, 5, dtype=torch.bool), []
    for layer in layers:
        layer(X)  # later calls skip the checks of these numbers
        x = X.clone().requires_grad_()
        y = layer(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=training)
        value = getattr(layer, name)
        function = sync_batch_norm(
            X, **GOOD, training=training, activation="leaky_relu", **{name: value}
        )
        outputs.append([y, dx, function, layer(X, mask=mask), layer.running_mean])
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("name", ["momentum", "eps", "negative_slope"])
@pytest.mark.parametrize("number", [True, Decimal(1), torch.ones(1), torch.ones(2), 1 + 0j])
def test_equal_number_of_a_wrong_type_is_checked(name, number):
    layer = SyncBatchNorm(3)
    setattr(layer, name, 1.0)
    layer(X)
    setattr(layer, name, number)
    with pytest.raises(TypeError, match=f"expected {name} to be a number"):
        layer(X)


def test_device_is_checked_after_a_pass_on_another(monkeypatch):
    devices = []
    monkeypatch.setattr(checks.fallback, "check_device", devices.append)
    layer = SyncBatchNorm(3)
    layer(X)
    devices.clear()
    layer.to("meta")(X.to("meta"))
    assert devices == [torch.device("meta")]


def test_number_too_large_for_a_float():
    layer = SyncBatchNorm(3)
    layer.eps = Fraction(10**400)
    with pytest.raises(OverflowError):
        layer(X)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_zeros_without_memory(activation, training):
    """Some gradients that torch computes are such tensors."""
    zeros = torch._efficientzerotensor(X.shape)
    layers = [SyncBatchNorm(3, activation=activation).train(training) for _ in range(2)]
    results = []
    for layer, z in zip(layers, (zeros, zeros.clone()), strict=True):
        x = X.clone().requires_grad_()
        y = layer(x, z)
        mask = z[:, 0].bool()
        results.append([y, *torch.autograd.grad(y, [x, layer.weight], z), layer(z, mask=mask)])
        results[-1] += [layer(z), layer.running_var]
    assert all(map(torch.equal, *results))


def test_zeros_without_memory_cannot_be_written_to():
    layer = SyncBatchNorm(3)
    layer.running_mean = torch._efficientzerotensor((3,))
    with pytest.raises(TypeError, match="can be written to, but got a zero tensor"):
        layer(X)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_sparse_gradient(activation, create_graph):
    layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))[0]
    layer.activation = activation
    x = X.clone().requires_grad_()
    words = r"dense grad_output, but got layout torch\.sparse_coo.*\[layer '0'\]"
    with pytest.raises(TypeError, match=words):
        torch.autograd.grad(layer(x), x, X.to_sparse(), create_graph=create_graph)


def sparse_gradient_on_one_rank(rank, world_size):
    x = X.clone().requires_grad_()
    y = SyncBatchNorm(3)(x)
    torch.autograd.grad(y, x, X.to_sparse() if rank == 1 else X)


def test_sparse_gradient_on_one_rank_fails_the_others_at_once(two_ranks):
    waiting, failed = two_ranks.outcomes(sparse_gradient_on_one_rank)
    assert failed.kind == "TypeError" and "dense grad_output" in failed.message
    assert "another rank of the process group aborted" in waiting.message


@pytest.mark.parametrize("counter", [torch.tensor(False), torch.tensor(0j), torch.zeros(2).long()])
def test_bad_batch_counter(counter):
    layer = SyncBatchNorm(3)
    layer.num_batches_tracked = counter
    with pytest.raises(TypeError, match="expected num_batches_tracked to be one number, but got"):
        layer(X)


@pytest.mark.parametrize("vectors", [GOOD, {"running_mean": None, "running_var": None}])
def test_functional_has_no_cumulative_average(vectors):
    with pytest.raises(TypeError, match="expected momentum to be a number, but got NoneType"):
        sync_batch_norm(X, **vectors, training=True, momentum=None)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)])
def test_one_value_per_channel_in_one_process(shape):
    layer = SyncBatchNorm(3)
    message = r"^Expected more than 1 value per channel when training, got input size torch\.Size"
    with pytest.raises(ValueError, match=message):
        layer(torch.rand(shape))
    assert layer.num_batches_tracked.item() == 0
    assert layer.eval()(torch.rand(shape)).shape == shape


@pytest.mark.parametrize("group", ["nccl", [0, 1], 7, object()])
def test_process_group_of_the_wrong_kind(group):
    message = (
        r"expected process_group to be a torch\.distributed\.ProcessGroup, a DeviceMesh or None"
    )
    with pytest.raises(TypeError, match=message):
        SyncBatchNorm(3, process_group=group)
    with pytest.raises(TypeError, match=message):
        sync_batch_norm(X, None, None, training=True, process_group=group)


def use_group_of_others(rank, world_size):
    group = dist.new_group([0])
    layer = SyncBatchNorm(3, process_group=group)
    layer(X) if rank == 0 else layer.eval()(X)
    layer.train()
    return layer(X) is not None


def test_rank_outside_of_the_group(two_ranks):
    member, outsider = two_ranks.outcomes(use_group_of_others)
    assert member is True
    assert outsider.kind == "ValueError"
    assert "rank 1 is not a member of this layer's process_group" in outsider.message


BAD_ON_ONE_RANK = [
    (torch.rand(4, 5, 2), "ValueError", "3 channels"),
    (torch.rand(3), "ValueError", "at least 2D"),
    (torch.ones(4, 3).long(), "TypeError", "int64"),
    ("text", "TypeError", "torch.Tensor, but got str"),
]


def train_named_layer(rank, world_size, bad, options):
    layer = SyncBatchNorm(3, **options)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    layer(torch.rand(2, 3) if rank == 0 else bad)


@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}])
@pytest.mark.parametrize(("bad", "kind", "message"), BAD_ON_ONE_RANK)
def test_bad_input_on_one_rank_fails_the_others_at_once(bad, kind, message, options, two_ranks):
    waiting, failed = two_ranks.outcomes(train_named_layer, bad, options)
    assert isinstance(failed, Failure) and failed.kind == kind
    assert message in failed.message and "[layer 'body.bn1', rank 1 of 2]" in failed.message
    assert isinstance(waiting, Failure) and waiting.kind == "RuntimeError"
    assert "another rank of the process group aborted" in waiting.message
    assert "[layer 'body.bn1', rank 0 of 2]" in waiting.message


def bad_argument_on_one_rank(rank, world_size, bad):
    arguments = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    if rank == 1:
        arguments |= bad
    sync_batch_norm(torch.rand(2, 3), **arguments, training=True)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"momentum": None}, "expected momentum to be a number"),
        ({"running_var": torch.ones(1).expand(3)}, "but it is expanded"),
    ],
)
def test_bad_argument_of_the_function_on_one_rank_fails_the_others_at_once(bad, message, two_ranks):
    waiting, failed = two_ranks.outcomes(bad_argument_on_one_rank, bad)
    assert message in failed.message
    assert "[rank 1 of 2]" in failed.message
    assert "another rank of the process group aborted" in waiting.message


def trace_on_one_rank(rank, world_size):
    warnings.simplefilter("ignore")  # torch deprecates it
    layer, x = SyncBatchNorm(3), torch.rand(4, 3)
    layer(x) if rank == 0 else torch.jit.trace(layer, x)


def test_trace_on_one_rank_fails_the_others_at_once(two_ranks):
    waiting, failed = two_ranks.outcomes(trace_on_one_rank)
    assert failed.kind == "NotImplementedError" and "torch.jit.trace" in failed.message
    assert "another rank of the process group aborted" in waiting.message


@pytest.mark.parametrize("training", [True, False])
def test_ordinary_arguments_skip_the_detailed_checks(training, monkeypatch):
    monkeypatch.setattr(checks, "check_objects", None)
    SyncBatchNorm(3).train(training)(X)
    sync_batch_norm(X, **GOOD, training=training)


def batch_the_gradients(rank, world_size, num_steps_before):
    layer, x = SyncBatchNorm(3), torch.rand(4, 3, requires_grad=True)
    for _ in range(num_steps_before):
        layer(x).sum().backward()
    y = layer(x)
    torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_batched_gradients_of_ranks_are_refused(num_steps_before, two_ranks):
    outcomes = two_ranks.outcomes(batch_the_gradients, num_steps_before)
    assert all(failed.kind == "NotImplementedError" for failed in outcomes)
    assert all("is_grads_batched" in failed.message for failed in outcomes)


def refused(rank, world_size, what):
    """Return a layer's error, and whether it keeps no frame, and so no tensor, alive."""
    layer = SyncBatchNorm(3)
    if what == "check":
        layer.eps = torch.nan
    elif what == "operator":  # in a group a check finds it
        layer.running_mean = torch.zeros(4)
    elif rank == 0:  # another pass than rank 1
        layer._syncbn = layer._syncbn.with_name("other")
    references = []

    def call():
        x = torch.rand(4, 3, requires_grad=True)
        references.append(weakref.ref(x))
        layer(x)

    gc.collect()
    gc.disable()
    try:
        call()
    except (RuntimeError, ValueError) as error:
        words = str(error)
    finally:
        gc.enable()
    return words, references[0]() is None


@pytest.mark.parametrize("what", ["check", "operator"])
def test_error_keeps_no_frame_alive(what):
    words, is_gone = refused(0, 1, what)
    assert "expected" in words and is_gone


@pytest.mark.parametrize("what", ["check", "operator", "pass"])
def test_error_of_ranks_keeps_no_frame_alive(what, two_ranks):
    for words, is_gone in two_ranks.run(refused, what):
        assert "expected" in words or "different passes" in words
        assert is_gone
