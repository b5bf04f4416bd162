import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.cases import make_input
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm, sync_batch_norm

pytestmark = pytest.mark.usefixtures("each_device")


def buffers():
    return torch.zeros(3).double(), torch.ones(3).double()


@pytest.mark.parametrize("training", [True, False])
def test_arguments_are_those_of_batch_norm(training):
    x = make_input((4, 3, 5), "contiguous", torch.float64)
    weight, bias = torch.rand(3).double(), torch.rand(3).double()
    ours, theirs = buffers(), buffers()
    a = sync_batch_norm(x, *ours, weight, bias, training, 0.3, 1e-3)
    b = F.batch_norm(x, *theirs, weight, bias, training, 0.3, 1e-3)
    torch.testing.assert_close(a, b)  # float64 rounding
    torch.testing.assert_close(ours, theirs)


def test_bias_without_weight():
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    bias = torch.rand(3, requires_grad=True)
    y = sync_batch_norm(x, None, None, None, bias, training=True)
    torch.testing.assert_close(y, F.batch_norm(x, None, None, None, bias, training=True))
    y.sum().backward()
    assert bias.grad.tolist() == [20.0] * 3 and bias.grad.dtype == torch.float32


def test_evaluation_needs_running_statistics():
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    with pytest.raises(ValueError, match="expected running_mean and running_var when training"):
        sync_batch_norm(x, None, None)


def test_gradcheck():
    x = make_input((3, 2, 4), "contiguous", torch.float64).requires_grad_()
    weight = torch.rand(2, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def layer(x, weight, bias):
        return sync_batch_norm(x, None, None, weight, bias, training=True)

    assert torch.autograd.gradcheck(layer, (x, weight, bias))
    assert torch.autograd.gradgradcheck(layer, (x, weight, bias))


def test_expanded_gradient():
    x = make_input((3, 2, 4), "channels_last", torch.float64).requires_grad_()
    dy = torch.tensor([1.0, 2.0, 4.0]).double().view(3, 1, 1).expand(3, 2, 4)
    sync_batch_norm(x, None, None, training=True).backward(dy)
    y = x.detach().clone().requires_grad_()
    F.batch_norm(y, None, None, training=True).backward(dy)
    torch.testing.assert_close(x.grad, y.grad)  # float64 rounding


def test_running_statistics_may_change_before_backward():
    x = make_input((3, 2, 4), "contiguous", torch.float64).requires_grad_()
    mean, var = torch.zeros(2).double(), torch.ones(2).double()
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    y = sync_batch_norm(x, mean, var, None, bias, training=True)
    mean.add_(1.0)
    var.mul_(2.0)
    with torch.no_grad():
        bias.add_(1.0)
    y.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
def test_backward_of_evaluation_raises_if_running_statistics_changed(masked):
    """pytorch#13402: evaluate, train, then backward of the evaluation, which needs old values."""
    x = make_input((3, 2, 4), "contiguous", torch.float64).requires_grad_()
    mean, var = torch.zeros(2).double(), torch.ones(2).double()
    mask = torch.ones(3, 4, dtype=torch.bool) if masked else None
    y = sync_batch_norm(x, mean, var)
    sync_batch_norm(x, mean, var, training=True, mask=mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_a_pass_that_writes_increments_the_versions():
    layer = SyncBatchNorm(2)
    x = make_input((3, 2, 4), "contiguous", torch.float32).requires_grad_()

    def versions():
        return [buffer._version for buffer in layer.buffers()]

    def raised(function):
        before = versions()
        result = function()
        return result, [b > a for a, b in zip(before, versions(), strict=True)]

    y, in_training = raised(lambda: checkpoint(layer, x, use_reentrant=False))
    _, in_recomputation = raised(lambda: y.sum().backward())
    _, in_evaluation = raised(lambda: layer.eval()(x))
    assert in_training == [True] * 3
    assert in_recomputation == in_evaluation == [False] * 3


def test_running_statistics_made_in_inference_mode_have_no_version():
    with torch.inference_mode():
        mean, var = torch.zeros(2), torch.ones(2)
    sync_batch_norm(make_input((3, 2, 4), "contiguous", torch.float32), mean, var, training=True)
    assert mean.ne(0).all()


class Labelled(torch.Tensor):
    """A tensor whose label operators pass on, like the tensors of MONAI and fastai."""

    label = ""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            result.label = next((a.label for a in args if isinstance(a, cls)), "")
        return result


def labelled(tensor):
    tensor = tensor.as_subclass(Labelled)
    tensor.label = "kept"
    return tensor


OPERANDS = ("input", "running_mean", "weight", "residual", "mask")


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OPERANDS)
def test_tensor_subclass_before_an_operation_in_place(name, training, activation):
    """pytorch#86456, MONAI#5283: the output is of the subclass, with a plain tensor's values."""

    def run(wrap):
        torch.manual_seed(0)
        operands = dict(input=torch.randn(4, 3, 5), running_mean=torch.zeros(3))
        operands |= dict(running_var=torch.ones(3), weight=torch.rand(3), bias=torch.rand(3))
        if name == "residual" or activation:
            operands |= dict(residual=torch.randn(4, 3, 5))
        if name == "mask":
            operands |= dict(mask=torch.rand(4, 5) > 0.3)
        operands[name] = wrap(operands[name])
        leaves = [operands[key].requires_grad_() for key in ("input", "weight", "bias")]
        y = sync_batch_norm(**operands, training=training, activation=activation)
        z = y + 0 if activation else y  # an activation may keep its output
        z.mul_(2)
        z.square().sum().backward()
        return y, [y, *(leaf.grad for leaf in leaves), operands["running_mean"]]

    expected = run(lambda tensor: tensor)[1]
    y, results = run(labelled)
    assert type(y) is Labelled
    if name == "input":
        assert y.label == "kept"
    for result, plain in zip(results, expected, strict=True):
        assert torch.equal(result.as_subclass(torch.Tensor), plain)


def test_second_derivative_of_a_tensor_subclass():
    def run(wrap):
        torch.manual_seed(0)
        x = torch.randn(4, 3, 5).double().requires_grad_()
        y = sync_batch_norm(wrap(x), None, None, training=True, activation="silu")
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0].as_subclass(torch.Tensor)

    assert torch.equal(run(labelled), run(lambda x: x))


def weighted(model, x):
    """A scalar with a gradient that does not vanish."""
    return (model(x) * torch.arange(x.numel(), dtype=x.dtype, device=x.device).view_as(x)).sum()


def transforms(model):
    """Each transform of torch.func, applied to a layer, as a function without arguments."""
    x = make_input((4, 3, 5), "contiguous", torch.float64)
    f = partial(weighted, model)
    return {
        "grad": lambda: torch.func.grad(f)(x),
        "vmap": lambda: torch.func.vmap(model)(torch.stack([x, 2 * x])),
        "jvp": lambda: torch.func.jvp(f, (x,), (x,))[1],
        "vjp": lambda: torch.func.vjp(model, x)[1](x)[0],
        "jacrev": lambda: torch.func.jacrev(model)(x),
        "forward mode": lambda: forward_derivative(f, x),
        "compiled grad": lambda: torch.compile(torch.func.grad(f), backend="eager")(x),
    }


def forward_derivative(f, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        return torch.autograd.forward_ad.unpack_dual(f(dual)).tangent


TRANSFORMS = list(transforms(None))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_training_say_what_to_do_instead(name):
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="training mode .* torch.autograd.grad"):
        transforms(SyncBatchNorm(3).double())[name]()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.trouble(
    "“torch.jit.trace” refuses the model",
    "It cannot record a layer in training mode",
    "`eval()`, or [`revert_sync_batchnorm`](api.md#syncbn.revert_sync_batchnorm) first",
)
def test_trace_of_training_says_what_to_do_instead():
    layer, x = SyncBatchNorm(3), torch.rand(4, 3)
    with pytest.raises(NotImplementedError, match="torch.jit.trace; call eval"):
        torch.jit.trace(layer, x)
    assert layer.num_batches_tracked.item() == 0


@pytest.mark.works("torch.func transforms in evaluation: grad, vmap, jvp, vjp, jacrev")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_evaluation_are_torchs(name):
    torch._dynamo.reset()
    ours, theirs = SyncBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    ours(make_input((4, 3, 5), "contiguous", torch.float64))
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(transforms(ours.eval())[name](), transforms(theirs.eval())[name]())


@pytest.mark.works("torch.func.functional_call")
@pytest.mark.parametrize("training", [True, False])
def test_functional_call(training):
    """Parameters and buffers come from outside, and those from outside are updated."""
    x = make_input((4, 3, 5), "contiguous", torch.float64)
    layer, other = (SyncBatchNorm(3).double().train(training) for _ in range(2))
    torch.nn.init.normal_(other.weight)
    before = copy.deepcopy(layer.state_dict())
    outside = {name: value.detach().clone() for name, value in other.state_dict().items()}
    outside["weight"].requires_grad_()
    y = torch.func.functional_call(layer, outside, (x,))
    expected = other(x)
    assert torch.equal(y, expected)
    weighted(lambda x: y, x).backward()
    weighted(lambda x: expected, x).backward()
    assert torch.equal(outside["weight"].grad, other.weight.grad) and layer.weight.grad is None
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(outside[name], other.state_dict()[name])
