"""A residual and an activation in the layer's own passes, against torch's separate modules."""

import pytest
import torch
import torch.nn.functional as F
from support import ops
from support.cases import DTYPES, make_input
from support.fusing import (
    ACTIVATIONS,
    FUSED,
    assert_error_at_most_twice,
    make_layer,
    make_operands,
    run_separately,
    sum_errors,
)
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    functional,
    revert_sync_batchnorm,
    sync_batch_norm,
)

pytestmark = pytest.mark.usefixtures("each_device")

fused = pytest.mark.parametrize(("activation", "with_residual"), FUSED)


def run_layer(operands, activation):
    layer = make_layer(operands, activation)
    y = layer(operands.x, operands.residual)
    y.backward(operands.dy)
    gradients = [operands.x.grad, layer.weight.grad, layer.bias.grad]
    if operands.residual is not None:
        gradients.append(operands.residual.grad)
    return [y.detach(), *gradients]


@fused
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(4, 16, 5, 7), (8, 130, 14, 14), (3, 70, 33, 33)])
def test_error_is_at_most_twice_that_of_separate_modules(
    shape, layout, dtype, activation, with_residual
):
    operands = make_operands(shape, layout, dtype, with_residual=with_residual)
    exact = run_separately(operands.as_leaves(torch.float64), activation)
    theirs = run_separately(operands.as_leaves(), activation)
    ours = run_layer(operands.as_leaves(), activation)
    assert_error_at_most_twice(ours, theirs, exact, sum_errors(operands.x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 5, 31, 33), (64, 70, 3, 3), (999, 7)])
def test_backward_sees_the_sign_that_forward_saw(shape, layout, dtype):
    """The gradient is zero exactly where the output is, also for values next to zero."""
    if len(shape) == 2 and layout == "channels_last":
        pytest.skip("a matrix has one layout")
    operands = make_operands(shape, layout, dtype, with_residual=False)
    # Many normalized values are tiny, of either sign: half of the 16-bit types' smallest number,
    # which they round to zero.
    channels = shape[1]
    operands.x[::2] *= 1e-3
    tiny = {torch.float16: 2e-8, torch.bfloat16: 5e-41}.get(dtype, 1e-9)
    x = operands.x.clone().requires_grad_()
    weight = torch.full((channels,), tiny, dtype=operands.weight.dtype)
    layer = SyncBatchNorm(channels, dtype=weight.dtype, activation="relu")
    layer.weight = nn.Parameter(weight)
    y = layer(x)
    y.backward(torch.ones_like(y))
    # The gradient of the bias counts the values with a gradient.
    dims = [d for d in range(y.dim()) if d != 1]
    assert torch.equal(layer.bias.grad.double(), (y > 0).double().sum(dims))
    assert 0.05 < (y > 0).double().mean() < 0.95


@fused
def test_evaluation_is_torchs_own_operators(activation, with_residual):
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float32, with_residual=with_residual)
    layer = make_layer(operands, activation).eval()
    z = F.batch_norm(
        operands.x, layer.running_mean, layer.running_var, operands.weight, operands.bias
    )
    z = z if operands.residual is None else z + operands.residual
    assert torch.equal(layer(operands.x, operands.residual), ACTIVATIONS[activation](z))


def test_the_input_may_be_the_residual():
    x = make_input((4, 3, 5, 5), "contiguous", torch.float64).requires_grad_()
    y = SyncBatchNorm(3, dtype=torch.float64, activation="relu")(x, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    expected = F.relu(F.batch_norm(x, None, None, training=True) + x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_residual_may_have_any_strides(activation):
    operands = make_operands((4, 6, 5, 7), "contiguous", torch.float32, with_residual=True)
    leaves = operands.as_leaves()
    strided = operands.residual.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    y = make_layer(leaves, activation)(leaves.x, strided)
    y.backward(operands.dy)
    dense = run_layer(operands.as_leaves(), activation)
    assert torch.equal(y, dense[0]) and torch.equal(strided.grad, dense[-1])


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_in_the_residual(activation, value):
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float32, with_residual=True)
    operands.residual[0, 0, 0, 0] = value
    ours = run_layer(operands.as_leaves(), activation)
    theirs = run_separately(operands.as_leaves(), activation)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our.isnan(), their.isnan()) and torch.equal(our.isinf(), their.isinf())


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu"])
def test_nan_in_the_input(activation):
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float32, with_residual=False)
    operands.x[0, 0, 0, 0] = float("nan")
    ours = run_layer(operands.as_leaves(), activation)
    theirs = run_separately(operands.as_leaves(), activation)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our.isnan(), their.isnan())


# Tensors that backward needs: autograd raises if they change in place.
NEEDED = {
    ("relu", False): ["x", "weight"],
    ("relu", True): ["x", "weight", "output"],
    ("leaky_relu", True): ["x", "weight", "output"],
    ("silu", False): ["x", "weight"],
    ("silu", True): ["x", "weight", "residual"],
    (None, True): ["x", "weight"],
}


@pytest.mark.parametrize(("activation", "with_residual"), NEEDED)
@pytest.mark.parametrize("changed", ["x", "weight", "bias", "residual", "output"])
def test_change_before_backward_is_an_error_or_harmless(activation, with_residual, changed):
    if changed == "residual" and not with_residual:
        pytest.skip("there is no residual")
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float64, with_residual=with_residual)
    expected = run_layer(operands.as_leaves(), activation)
    leaves = operands.as_leaves()
    layer = make_layer(leaves, activation)
    inputs = leaves.x * 1, None if leaves.residual is None else leaves.residual * 1
    y = layer(*inputs)
    with torch.no_grad():
        tensors = {"x": inputs[0], "residual": inputs[1], "output": y}
        tensors |= {"weight": layer.weight, "bias": layer.bias}
        tensors[changed].detach().mul_(2)
    if changed in NEEDED[activation, with_residual] or (changed == "bias" and activation == "silu"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(operands.dy)
        return
    y.backward(operands.dy)
    gradients = [leaves.x.grad, layer.weight.grad, layer.bias.grad]
    if with_residual:
        gradients.append(leaves.residual.grad)
    for gradient, right in zip(gradients, expected[1:], strict=True):
        assert torch.equal(gradient, right)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("residual", "kind", "words"),
    [
        (
            torch.zeros(4, 3, 5, 4),
            ValueError,
            r"residual to have shape \[4, 3, 5, 5\].*\[4, 3, 5, 4\]",
        ),
        (torch.zeros(3, 1, 1), ValueError, "residual to have shape"),
        (torch.zeros(4, 3, 5, 5).double(), TypeError, "float32, the dtype of input.*float64"),
        (1.0, TypeError, "residual to be a torch.Tensor or None, but got float"),
        (torch.zeros(4, 3, 5, 5).to_sparse(), TypeError, "dense residual"),
    ],
)
def test_a_residual_that_does_not_fit(residual, kind, words, training):
    if isinstance(residual, torch.Tensor):
        residual = residual.to(torch.get_default_device())
    layer = SyncBatchNorm(3, activation="relu").train(training)
    with pytest.raises(kind, match=words):
        layer(torch.rand(4, 3, 5, 5), residual)


def test_under_autocast_a_residual_of_another_dtype_is_an_error():
    x = torch.rand(4, 3, 5, 5)
    with pytest.raises(TypeError, match="bfloat16, the dtype of input, but got float32"):
        SyncBatchNorm(3)(x.bfloat16(), x)


@pytest.mark.parametrize("training", [True, False])
def test_module_that_is_set_later_is_an_error(training):
    for layer in (SyncBatchNorm(3), convert_sync_batchnorm(nn.BatchNorm1d(3))):
        layer.train(training).activation = nn.ReLU()
        with pytest.raises(ValueError, match=r"expected activation to be .*, but got ReLU\(\)"):
            layer(torch.randn(4, 3))


@pytest.mark.parametrize("activation", [nn.ReLU(), "gelu"])
def test_unknown_activation_of_a_reverted_layer_is_an_error(activation):
    layer = revert_sync_batchnorm(SyncBatchNorm(3))
    layer.activation = activation
    with pytest.raises(ValueError, match="expected None, 'relu', .*, but got (gelu|ReLU)"):
        layer(torch.randn(4, 3))


@pytest.mark.parametrize("activation", ["gelu", "ReLU", 1])
def test_unknown_activations(activation):
    with pytest.raises(ValueError, match="one of None, 'relu', 'leaky_relu', 'silu'"):
        SyncBatchNorm(3, activation=activation)
    layer = SyncBatchNorm(3)
    layer.activation = activation
    for training in (True, False):
        with pytest.raises(ValueError, match="one of None, 'relu'"):
            layer.train(training)(torch.rand(4, 3))


@pytest.mark.parametrize("slope", [-0.1, float("nan"), float("inf")])
def test_slopes_that_are_refused(slope):
    with pytest.raises(ValueError, match="negative_slope to be finite and not negative"):
        SyncBatchNorm(3, activation="leaky_relu", negative_slope=slope)
    with pytest.raises(ValueError, match="negative_slope"):
        sync_batch_norm(
            torch.rand(4, 3),
            None,
            None,
            training=True,
            activation="leaky_relu",
            negative_slope=slope,
        )
    with pytest.raises(TypeError, match="negative_slope to be a number"):
        SyncBatchNorm(3, negative_slope="0.1")


def test_repr_shows_the_package_and_options_that_are_not_default():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3)))
    assert "(0): syncbn.SyncBatchNorm2d(3, eps" in str(model)
    assert "(1): syncbn.SyncBatchNorm(3, eps" in str(model)
    assert "activation" not in repr(SyncBatchNorm(3))
    layer = SyncBatchNorm(3, activation="leaky_relu", negative_slope=0.2)
    assert repr(layer).endswith("activation='leaky_relu', negative_slope=0.2)")
    assert "negative_slope" not in repr(SyncBatchNorm(3, activation="relu"))


@fused
def test_checkpointing(activation, with_residual):
    operands = make_operands((4, 3, 5, 5), "contiguous", torch.float64, with_residual=with_residual)
    expected = run_layer(operands.as_leaves(), activation)
    leaves = operands.as_leaves()
    layer = make_layer(leaves, activation)
    y = torch.utils.checkpoint.checkpoint(layer, leaves.x, leaves.residual, use_reentrant=False)
    y.backward(operands.dy)
    for ours, right in zip((y, leaves.x.grad, layer.weight.grad), expected, strict=False):
        assert torch.equal(ours, right)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_empty_batch(activation):
    x = torch.rand(0, 3, 5, 5, requires_grad=True)
    y = sync_batch_norm(
        x, None, None, training=True, residual=torch.rand(0, 3, 5, 5), activation=activation
    )
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 5, 5)


def test_symbolic_tracing_keeps_the_residual():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = SyncBatchNorm(3, activation="relu")

        def forward(self, x, residual):
            return self.bn(x, residual)

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    operands = torch.rand(4, 3, 5, 5), torch.rand(4, 3, 5, 5)
    assert torch.equal(traced(*operands), model(*operands))
    assert torch.equal(traced.eval()(*operands), model.eval()(*operands))


def test_the_plain_layer_gives_operators_nothing_more(monkeypatch):
    """Unused features cost nothing, not even an argument."""
    given = {}

    def spy(name):
        def call(original, *args):
            given[name] = len(args)
            return original(*args)

        return call

    names = ("batch_norm_forward", "batch_norm_backward")
    monkeypatch.setattr(functional.epilogue, "apply_epilogue", None)
    x = torch.rand(4, 3, requires_grad=True)
    with ops.replaced(**{name: spy(name) for name in names}):
        SyncBatchNorm(3)(x).sum().backward()
    # Their arguments up to eps and bias_dtype.
    assert list(given.values()) == [8, 8]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu"])
def test_tensors_kept_for_backward(activation, with_residual):
    """With SiLU one less than separate modules, whose SiLU keeps its argument."""
    operands = make_operands(
        (4, 3, 5, 7), "contiguous", torch.float32, with_residual=with_residual
    ).as_leaves()
    kept = set()

    def pack(tensor):
        if tensor.numel() >= operands.x.numel():
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    layer = make_layer(operands, activation)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(operands.x, operands.residual)
    expected = [operands.x]
    if with_residual:
        expected.append(operands.residual if activation == "silu" else y)
    assert kept == {tensor.untyped_storage().data_ptr() for tensor in expected}
