"""Automatic mixed precision: dtypes as torch's layer's, and running statistics that stay finite."""

import copy

import pytest
import torch
from support.cases import make_input
from torch import nn

from syncbn import convert_sync_batchnorm


def models():
    """A convolution, which autocast casts, between two layers; torch's and ours."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    return model, convert_sync_batchnorm(copy.deepcopy(model))


def dtypes(model, x, run, autocast_dtype):
    """The dtype of each output, each gradient and each buffer; and the last output."""
    found = []
    for module in model:
        module.register_forward_hook(lambda module, input, output: found.append(output.dtype))
    with torch.autocast("cpu", autocast_dtype):
        y = run(x)
    if model.training:
        y.float().square().sum().backward()
        found += [x.grad.dtype, *(p.grad.dtype for p in model.parameters())]
    return [*found, *(buffer.dtype for buffer in model.buffers())], y.detach()


@pytest.mark.works("torch.autocast on CPUs: the dtypes of torch's layer")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_under_autocast_are_torchs(input_dtype, training, compiled):
    x = make_input((4, 3, 6, 6), "contiguous", input_dtype)
    theirs, ours = (model.train(training) for model in models())
    torch._dynamo.reset()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    expected, b = dtypes(theirs, x.clone().requires_grad_(), theirs, torch.bfloat16)
    actual, a = dtypes(ours, x.clone().requires_grad_(), run, torch.bfloat16)
    assert actual == expected
    # bfloat16's rounding of both layers and the convolution
    torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=2**-6)


def scaled_step(model, x, scale):
    """One step under loss scaling; return whether the optimizer stepped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(list(model.parameters()))
    scaler.scale(model(x).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return not all(map(torch.equal, before, model.parameters()))


@pytest.mark.works("GradScaler: a skipped step")
def test_skipped_step_counts_its_batch_as_torchs_layer_does():
    """The forward pass was sound, only the scaled gradients overflowed."""
    x = make_input((4, 3, 6, 6), "contiguous", torch.float32)
    theirs, ours = models()
    assert scaled_step(ours, x, 1.0)
    theirs.load_state_dict(ours.state_dict())
    for model in (theirs, ours):
        assert not scaled_step(model, x, 3e38)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)  # float32 rounding
        assert torch.isfinite(a).all()


@pytest.mark.works("GradScaler: a forward pass that overflows leaves running statistics finite")
def test_overflow_in_the_forward_pass_leaves_running_statistics_finite():
    x = make_input((4, 3, 6, 6), "contiguous", torch.float32)
    _, model = models()
    x[0, 0, 0, 0] = torch.inf
    before = copy.deepcopy(dict(model.named_buffers()))
    assert not scaled_step(model, x, 1.0)
    after = dict(model.named_buffers())
    for name in ("0.running_mean", "0.running_var"):  # the channel keeps its own, others move
        assert after[name][0] == before[name][0] and (after[name][1:] != before[name][1:]).all()
    for name in ("2.running_mean", "2.running_var"):  # after it everything is NaN
        assert torch.equal(after[name], before[name])
