"""Drawn passes of one process against float64: by the formula, and by torch's own BatchNorm."""

import dataclasses

import torch
import torch.nn.functional as F
from support.cases import per_channel
from support.fuzzing import (
    Layout,
    assert_near,
    cases,
    check_alone,
    fuzz,
    make_batch,
    make_layer,
    note_repeat,
    rows,
)
from torch import nn

TORCHS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def has_values(case):
    return 0 not in case.shapes[0]


def is_evaluated_precisely(case):
    """torch's operator for evaluation rounds 1/std to 16 bits if its vectors have 16 bits."""
    dtypes = [dtype or case.dtype for dtype in case.vectors]
    has_running = case.vectors[2] is not None
    return has_values(case) and has_running and all(dtype.itemsize > 2 for dtype in dtypes)


def places(x):
    """Return the strides, without those of dimensions of size one."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@fuzz(examples=300, case=cases(1))
def test_training(case):
    check_alone(case)


@fuzz(examples=60, case=cases(1).filter(lambda c: len(c.shapes[0]) in TORCHS and has_values(c)))
def test_torchs_layer_in_float64_agrees_with_the_reference(case):
    """Within float32's tolerances, and except for empty batches, which change torch's statistics.

    torch's backward pass reads the gaps of weights, and misreads gradients of other layouts.
    """
    dim = len(case.shapes[0])
    plain = Layout(order=tuple(range(dim)), steps=(1,) * dim, expanded=(), offset=0)
    case = dataclasses.replace(
        case, dtype=torch.float32, inputs=(plain,), grads=(plain,), vector_stride=1
    )
    check_alone(case, TORCHS[len(case.shapes[0])], torch.float64)


@fuzz(examples=100, case=cases(1).filter(has_values))
def test_output_has_the_strides_of_torchs(case):
    note_repeat(case)
    x, _ = make_batch(case, 0, 0)
    torchs = F.batch_norm(x, None, None, training=True)
    # Evaluation is torch's operator, whose output is contiguous if a vector has gaps.
    without_gaps = dataclasses.replace(case, vector_stride=1)
    for training, of_mode in ((True, case), (False, without_gaps)):
        y = make_layer(of_mode).train(training)(x)
        assert y.dtype == torchs.dtype and places(y) == places(torchs)


@fuzz(examples=100, case=cases(1).filter(is_evaluated_precisely))
def test_evaluation(case):
    note_repeat(case)
    x, _ = make_batch(case, 0, 0)
    layer = make_layer(case).eval()
    mean, var = layer.running_mean, layer.running_var
    weight = torch.ones(case.channels) if layer.weight is None else layer.weight.detach()
    bias = torch.zeros(case.channels) if layer.bias is None else layer.bias.detach()
    scale = weight.double() * (var.double() + case.eps).rsqrt()
    y = per_channel(scale, x) * (x.double() - per_channel(mean.double(), x))
    y += per_channel(bias.double(), x)
    # torch's kernels compute a handful of operations on these terms, one of them x * scale.
    eps = torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    terms = scale.abs() * (rows(x).abs().amax(0) + mean.double().abs()) + bias.double().abs()
    assert_near("output", layer(x).detach(), rows(y), 8 * eps * terms)
