"""torch's operators on the stand-in: the values of the CPU, the waits and errors of a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from standin_plugin import take_log
from torch import nn
from torch.nn import functional

DEVICE = "cuda"


def log_of(call):
    """Return what a call did: pairs such as ("kernel", "aten::add.Tensor")."""
    torch.cuda.synchronize()
    take_log()
    call()
    return take_log()


def waits(call):
    return [name for kind, name in log_of(call) if kind == "wait"]


def launches(call):
    return [name for kind, name in log_of(call) if kind == "kernel"]


def sequence(*shape, dtype=torch.float32):
    """Values that are no multiples of each other, on the device."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64).sin() * 3).reshape(shape).to(DEVICE, dtype)


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
    torch.testing.assert_close(on_cpu(list(arguments)), copies)  # what it mutates, too


# --- Values


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
def test_operators_have_the_values_of_the_cpu(function):
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


def test_batch_norm_has_the_values_of_the_cpu():
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


# --- Waits


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x.clone()),
        lambda x: x.int().abs().flatten().bincount(),
        lambda x: bool((x > 0).any()),
        lambda x: x.index_put((x > 0,), x.flatten()[:1]),
        lambda x: x[torch.tensor([0, 1])],  # indices of the CPU
        lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.long, device=DEVICE), 0),
    ],
)
def test_the_host_waits_where_a_result_depends_on_values(function):
    x = sequence(4, 5)
    assert waits(lambda: function(x))


def optimize(kind, **options):
    def function(x):
        weight = nn.Parameter(x.clone())
        optimizer = kind([weight], lr=0.1, **options)
        for _ in range(2):
            weight.grad = x
            optimizer.step()

    return function


def train(x):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, device=DEVICE),
        nn.BatchNorm2d(4, device=DEVICE, track_running_stats=False),  # counters are copied there
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    output = net(x.repeat(5, 2, 2, 1).reshape(5, 2, 8, 5))
    target = torch.arange(5, device=DEVICE) % 4
    functional.cross_entropy(output, target).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def unscale(x):
    found, scale = torch.zeros(1, device=DEVICE), torch.full((1,), 2.0, device=DEVICE)
    torch._amp_foreach_non_finite_check_and_unscale_([x], found, scale)
    torch._amp_update_scale_(scale, torch.zeros(1, dtype=torch.int, device=DEVICE), found, 2, 2, 1)


def assign_where(x):
    x[x > 0] = 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add_(1).mul(x).sum(),
        lambda x: torch.where(x.isnan() | x.isfinite(), x, 0),
        lambda x: x[torch.arange(2, device=DEVICE)],
        lambda x: x.index_put_((torch.arange(1, device=DEVICE),), x[:1]),
        lambda x: x.aminmax(),
        lambda x: x.cummax(0),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
        lambda x: functional.multi_margin_loss(
            x.requires_grad_(), torch.zeros(4, dtype=torch.long, device=DEVICE)
        ).backward(),
        lambda x: functional.dropout(x.normal_(), 0.5).bernoulli(0.5),
        lambda x: torch.randperm(5, device=DEVICE),
        lambda x: x.abs().multinomial(2),
        lambda x: torch._foreach_norm([x, x]),
        lambda x: torch._foreach_lerp_([x], [x.clone()], 0.1),
        lambda x: x.topk(2),
        assign_where,
        unscale,
        train,
        optimize(torch.optim.SGD, momentum=0.9, foreach=True),
        optimize(torch.optim.SGD, momentum=0.9, fused=True),
        optimize(torch.optim.Adam, foreach=True),
        optimize(torch.optim.Adam, fused=True),
        optimize(torch.optim.AdamW, fused=True, capturable=True),
    ],
)
def test_the_host_does_not_wait(function):
    x = sequence(4, 5)
    assert waits(lambda: function(x)) == []


def test_an_operator_is_one_launch():
    x = sequence(4, 5)
    assert launches(lambda: x + 1) == ["aten::add.Tensor"]
    assert launches(lambda: x.view(20).t()) == []
    assert launches(lambda: torch.batch_norm_stats(x, 1e-5)) == ["aten::batch_norm_stats"]


def test_a_graph_repeats_operators():
    x = sequence(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2 + 1).double().cumsum(0)
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [7, 14, 21, 28]


# --- Errors


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.copy_(x).addmm(x, y),
        lambda x, y: functional.linear(x, y),
    ],
)
def test_tensors_of_two_devices_are_an_error_in_torchs_words(function):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but"):
        function(sequence(3, 3), torch.ones(3, 3))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x + sequence(4), "must match the size"),
        (lambda x: x @ sequence(4, 4), "shapes cannot be multiplied"),
        (lambda x: x.bernoulli_(generator=torch.Generator()), "Expected a 'cuda' device type"),
        (lambda x: x.add_(sequence(2, 3, 3)), "doesn't match the broadcast shape"),
    ],
)
def test_wrong_arguments_leave_the_device_usable(function, message):
    x = sequence(3, 3)
    with pytest.raises(RuntimeError, match=message):
        function(x)
    assert (x * 0).sum().item() == 0


@pytest.mark.skipif(
    os.environ.get("STANDIN_STREAMS", "inline") != "inline",
    reason="what only the CPU's operator checks is found when it runs",
)
def test_an_error_of_work_within_the_call_leaves_the_device_usable():
    x = sequence(3, 3)
    with pytest.raises(RuntimeError, match="same dtype"):
        x @ x.half()
    assert (x * 0).sum().item() == 0


def run_apart(program, **variables):
    """Return the output of a program of its own, with the stand-in."""
    command = [sys.executable, "-c", f"import torch\n{program}"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()


def test_an_index_out_of_bounds_fails_the_device():
    program = """
x = torch.zeros(3, device="cuda")
for call in (lambda: x[torch.full((1,), 7, device="cuda")].sum().item(), lambda: x.sum().item()):
    try:
        call()
    except RuntimeError:
        print("failed")
"""
    assert run_apart(program) == ["failed", "failed"]


def test_copies_between_devices_convert_and_keep_strides():
    program = """
x = torch.arange(6.0, device="cuda:0").reshape(2, 3)
y = torch.empty(3, 2, dtype=torch.int32, device="cuda:1").copy_(x.t())
print(*y.flatten().tolist())
try:
    x + x.to("cuda:1")
except RuntimeError as error:
    print("cuda:1" in str(error))
"""
    assert run_apart(program, STANDIN_DEVICES="2") == ["0", "3", "1", "4", "2", "5", "True"]


def test_an_operator_without_counterpart_says_so():
    with pytest.raises(NotImplementedError, match=r"standin: aten::_thnn_fused_lstm_cell has no"):
        nn.LSTMCell(3, 3, device=DEVICE)(sequence(2, 3))


# --- Random numbers


def draws(device=DEVICE):
    x = torch.ones(50, device=device)
    return torch.cat(
        [
            torch.rand(50, device=device),
            torch.randn(50, device=device),
            x.bernoulli(0.5),
            functional.dropout(x, 0.5),
            torch.randperm(50, device=device),
            torch.randint(9, (50,), device=device),
            x.multinomial(50),
        ]
    )


def test_a_seed_repeats_random_numbers():
    torch.manual_seed(3)
    first, second = draws(), draws()
    torch.manual_seed(3)
    assert torch.equal(first, draws())
    assert not torch.equal(first, second)


def test_a_state_repeats_random_numbers():
    state = torch.cuda.get_rng_state()
    first = draws()
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, draws())


def test_a_generator_has_numbers_of_its_own():
    generator = torch.Generator(DEVICE).manual_seed(5)
    first = torch.rand(9, device=DEVICE, generator=generator)
    draws()
    generator.manual_seed(5)
    assert torch.equal(first, torch.rand(9, device=DEVICE, generator=generator))


def test_the_generator_of_the_cpu_is_left_alone():
    state = torch.get_rng_state()
    draws()
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_drops_its_part_and_scales_the_rest():
    y = functional.dropout(torch.ones(10_000, device=DEVICE), 0.25)
    assert y.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert 0.72 < (y > 0).float().mean().item() < 0.78


def test_replays_of_a_graph_draw_other_numbers():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers = torch.rand(9, device=DEVICE)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(numbers.tolist())
    assert seen[0] != seen[1]
    torch.manual_seed(1)
    graph.replay()
    first = numbers.tolist()
    torch.manual_seed(1)
    graph.replay()
    assert numbers.tolist() == first
