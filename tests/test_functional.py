import pytest
import torch
import torch.nn.functional as F
from cases import make_input

from syncbn import sync_batch_norm

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
    (sync_batch_norm(x, None, None, training=True) * x.detach()).sum().backward()
    y = x.detach().clone().requires_grad_()
    (F.batch_norm(y, None, None, training=True) * y.detach()).sum().backward()
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


def test_version_of_running_statistics_stays():
    """As torch's batch norm: evaluate, train, then backward through the evaluation."""
    x = make_input((3, 2, 4), "contiguous", torch.float64).requires_grad_()
    mean, var = torch.zeros(2).double(), torch.ones(2).double()
    y = sync_batch_norm(x, mean, var)
    sync_batch_norm(x, mean, var, training=True)
    y.sum().backward()


# torch's own: entering forward mode scripts decompositions.
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_forward_mode_says_it_is_not_supported():
    x = make_input((3, 2), "contiguous", torch.float64)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises((NotImplementedError, RuntimeError), match="forward|jvp"),
    ):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        sync_batch_norm(dual, None, None, training=True)
