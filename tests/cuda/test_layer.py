"""The layer on CUDA: launches, copies, waits, streams, mixed precision."""

import copy

import pytest
import torch
from support.cases import make_input
from torch import nn

from benchmarks.measure import record_launches
from syncbn import SyncBatchNorm, convert_sync_batchnorm

# torch's own warning if a backward pass is the first matrix multiplication of its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

# A large input, with each channel split over blocks; a small one; and an empty one.
SHAPES = [(64, 4, 56, 56), (8, 512, 7, 7), (256, 2048), (0, 3, 4, 4)]


def step(layer, x, dy):
    """Forward and backward without accumulating gradients, as two calls."""
    results = []

    def forward():
        results[:] = [layer(x)]

    def backward():
        inputs = [x, *layer.parameters()]
        results[1:] = torch.autograd.grad(results[0], inputs, dy, retain_graph=True)

    return forward, backward, results


def make_step(shape, layout="contiguous", dtype=torch.float32, **options):
    layer = SyncBatchNorm(shape[1], **options)
    x = make_input(shape, layout, dtype).requires_grad_()
    return step(layer, x, make_input(shape, layout, dtype, seed=1))


@pytest.mark.cuda
@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"activation": "relu"}, {"activation": "silu"}], ids=str
)
@pytest.mark.parametrize(
    ("layout", "dtype"), [("contiguous", torch.float32), ("channels_last", torch.bfloat16)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_at_most_three_kernels_each_way_and_nothing_else(shape, layout, dtype, options):
    forward, backward, _ = make_step(shape, layout, dtype, **options)
    for direction in (forward, backward):
        direction()  # one-time setup
        found = record_launches(direction)
        # An empty input launches too: it sends zeros, and updates the running statistics.
        assert 0 < len(found.kernels) <= 3, found
        assert all("syncbn" in name for name in found.kernels), found
        assert found.copies == [] and found.waits == [], found


@pytest.mark.cuda
def test_counting_finds_kernels_copies_and_waits():
    x = torch.rand(1000, device="cuda")
    y = torch.empty(1000, device="cuda")

    def call():
        y.zero_()
        torch.add(x, 1, out=y)
        y.sum().item()

    call()
    found = record_launches(call)
    assert len(found.kernels) >= 2 and len(found.copies) >= 1 and len(found.waits) >= 1, found


@pytest.mark.cuda
@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_training_on_a_side_stream(shape):
    forward, backward, expected = make_step(shape)
    forward()
    backward()
    x = make_input(shape, "contiguous", torch.float32)
    late = torch.zeros_like(x).requires_grad_()
    dy = make_input(shape, "contiguous", torch.float32, seed=1)
    forward, backward, results = step(SyncBatchNorm(shape[1]), late, dy)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # about 30 ms
        with torch.no_grad():
            late.copy_(x)  # a kernel on another stream sees the zeros
        forward()
        backward()
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_has_the_dtypes_of_batch_norm(each_device, dtype):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    ours = convert_sync_batchnorm(copy.deepcopy(theirs))
    x = make_input((4, 3, 9, 9), "contiguous", torch.float32)
    outputs = []
    for model in (theirs, ours):
        dtypes = []
        model[1].register_forward_hook(
            lambda module, args, output, dtypes=dtypes: dtypes.append((args[0].dtype, output.dtype))
        )
        with torch.autocast(each_device.type, dtype):
            y = model(x)
        y.float().square().mean().backward()
        outputs.append((y, dtypes))
    assert outputs[0][1] == outputs[1][1] == [(dtype, dtype)]
    # Two layers in 16 bits, of values of order one.
    eps = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(outputs[1][0], outputs[0][0], rtol=eps, atol=eps)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=eps, atol=eps)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # of the same 16-bit input
