"""torch's operators on the stand-in give the CPU's values."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from values import DEVICE, sequence


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return [on_cpu(v) for v in value] if isinstance(value, list | tuple) else value


def assert_as_on_cpu(function, *arguments, **tolerances):
    """Compare a function's results with those of the same operators on the CPU."""
    copies = on_cpu(list(arguments))
    results = function(*arguments)
    expected = function(*copies)
    assert results.is_cuda and results.dtype == expected.dtype
    torch.testing.assert_close(results.cpu(), expected, **tolerances)
    torch.testing.assert_close(on_cpu(list(arguments)), copies)  # also arguments that it mutates


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y.t(),
        lambda x, y: torch.where(x > y, x, 2.0),
        lambda x, y: torch.cat([x, y.half()]).cumsum(0),
        lambda x, y: torch.stack([x, y])[:, 1:, ::2].logsumexp(-1),
        lambda x, y: functional.pad(x, (1, 2)).softmax(1) * y.sum(),
        lambda x, y: x.gather(1, y.argsort(1)),
        lambda x, y: torch.cdist(x, y),
        lambda x, y: x.to(torch.float16).lerp(y.half(), 0.25),
    ],
)
def test_operators_give_the_values_of_the_cpu(function):
    assert_as_on_cpu(function, sequence(5, 6), sequence(5, 6).flip(1))


def test_in_place_operators_write_views():
    def fill(x):
        x.t()[1:].mul_(2).add_(x[:, :1].t(), alpha=3)
        x[1:3, ::2] = 7
        return x

    assert_as_on_cpu(fill, sequence(4, 4))


def test_in_place_operators_return_the_argument():
    x = sequence(4)
    assert x.add_(1) is x


def test_out_is_written():
    out = torch.empty(3, device=DEVICE)
    address = out.data_ptr()
    torch.add(sequence(3), 1, out=out)
    assert out.data_ptr() == address
    torch.testing.assert_close(out.cpu(), sequence(3).cpu() + 1)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("size", [0, 2, 12])
def test_out_of_another_shape_is_resized(size):
    out = torch.empty(size, device=DEVICE)
    torch.mul(sequence(2, 3), 2, out=out)
    torch.testing.assert_close(out.cpu(), sequence(2, 3).cpu() * 2)


def test_copies_on_write_do_not_change_the_original():
    x = sequence(4)
    before = x.cpu()
    lazy = torch._lazy_clone(x)
    assert torch._C._is_cow_tensor(lazy)
    lazy + 1
    assert torch._C._is_cow_tensor(lazy)  # a reader copies nothing
    lazy.mul_(2)
    assert not torch._C._is_cow_tensor(lazy)
    torch.testing.assert_close(x.cpu(), before)
    torch.testing.assert_close(lazy.cpu(), before * 2)


def test_conjugated_and_negated_views():
    x = torch.complex(sequence(3, 3), sequence(3, 3).t())
    assert x.conj().is_conj() and x.conj().imag.is_neg()
    assert_as_on_cpu(lambda z: (z.conj() @ z + z.conj().imag).clone(), x)
    assert_as_on_cpu(lambda z: torch.empty_like(z).copy_(z.conj()), x)
    assert_as_on_cpu(lambda z: torch.empty_like(z.real).copy_(z.conj().imag), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float32])
def test_python_numbers_promote_as_on_the_cpu(dtype):
    assert_as_on_cpu(lambda x: x * 2.5, sequence(3, dtype=dtype))
    assert_as_on_cpu(lambda x: x.sum() * 2.5, sequence(3, dtype=dtype))
    assert_as_on_cpu(lambda x: 1 - x, sequence(3, dtype=dtype))


def test_numbers_of_the_cpu_are_operands():
    number = torch.tensor(2.5, dtype=torch.float64)
    x = sequence(3)
    torch.testing.assert_close((x * number).cpu(), x.cpu() * number)
    torch.testing.assert_close((number - x).cpu(), number - x.cpu())


def test_a_number_of_the_cpu_is_read_at_the_call():
    number = torch.tensor(2.0)
    graph = torch.cuda.CUDAGraph()
    x = sequence(3)
    with torch.cuda.graph(graph):
        y = x * number
    number.fill_(100)
    graph.replay()
    torch.testing.assert_close(y.cpu(), x.cpu() * 2)


def test_an_operator_that_returns_a_view_shares_memory():
    x = sequence(4, 6)
    for view in (x.t(), x[1:].unfold(1, 2, 2), x.view(2, 12), x.expand(2, 4, 6)):
        view_address = view.untyped_storage().data_ptr()
        assert view_address == x.untyped_storage().data_ptr()


def test_foreach_takes_lists_of_mixed_devices():
    lists = [sequence(3), sequence(3).cpu()]
    torch._foreach_add_(lists, 1)
    torch._foreach_copy_(lists, lists[::-1])
    torch.testing.assert_close(lists[0].cpu(), lists[1])


def test_batch_norm_gives_the_values_of_the_cpu():
    def step(x, training=True):
        torch.manual_seed(0)
        layer = nn.BatchNorm2d(3).to(x.device).train(training)
        x = x.detach().requires_grad_()
        y = layer(x)
        (y * y.detach().cos()).sum().backward()
        parts = [y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
        return torch.cat([part.detach().double().flatten() for part in parts])

    # Sums of 100 values in another order.
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert_as_on_cpu(step, sequence(4, 3, 5, 5), **close)
    assert_as_on_cpu(lambda x: step(x, training=False), sequence(4, 3, 5, 5), **close)
    with torch.backends.cudnn.flags(enabled=False):
        assert_as_on_cpu(step, sequence(4, 3, 5, 5), **close)


def test_batch_norm_of_half_precision_keeps_statistics_in_float32():
    layer = nn.BatchNorm2d(3, device=DEVICE)
    x = sequence(4, 3, 5, 5, dtype=torch.bfloat16).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (layer.running_mean.dtype, layer.weight.grad.dtype) == (torch.float32, torch.float32)


def test_sync_batch_norm_operators_agree_with_batch_norm():
    x, grad = sequence(4, 3, 5, 5), sequence(4, 5, 5, 3).permute(0, 3, 1, 2)
    weight, bias = sequence(3), sequence(3)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([100.0], device=DEVICE)
    running = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        x, mean[None], invstd[None], *running, 0.1, 1e-5, count
    )
    y = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)
    sums = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, True, True)
    dx = torch.batch_norm_backward_elemt(
        grad, x, mean, invstd, weight, *sums[:2], count.to(torch.int32)
    )

    leaf, w, b = (t.cpu().double().requires_grad_() for t in (x, weight, bias))
    expected_running = torch.zeros(3).double(), torch.ones(3).double()
    expected = functional.batch_norm(leaf, *expected_running, w, b, True)
    expected.backward(grad.cpu().double())
    results = (y, dx, sums[2], sums[3], *running)
    references = (expected.detach(), leaf.grad, w.grad, b.grad, *expected_running)
    for result, reference in zip(results, references, strict=True):
        torch.testing.assert_close(result.cpu().double(), reference, rtol=1e-4, atol=1e-4)


def test_convolutions_and_attention_train():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.ReLU(), nn.MaxPool2d(2))
    net = net.to(DEVICE)
    tokens = net(sequence(2, 3, 8, 8)).flatten(2).transpose(1, 2)
    functional.scaled_dot_product_attention(tokens, tokens, tokens).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in net.parameters())
