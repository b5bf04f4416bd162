"""The training pass in C++ and in Python: which of them makes a pass, and the same bits."""

import copy
import gc
import os
import subprocess
import sys
import traceback
import types
import warnings
import weakref

import pytest
import torch
from support.cases import DTYPES, to_layout
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from syncbn import SyncBatchNorm, training
from syncbn.distributed import passes

needs_library = pytest.mark.skipif(
    passes.library is None, reason=f"Python makes the passes: {passes.library_missing}"
)


def is_made_in_cpp(output):
    return "CppNode" in output.grad_fn.name()


def train(layer, input, grad_output, residual=None):
    """Return all that a pass computes, and whether C++ has made it."""
    operands = [input, *([] if residual is None else [residual])]
    operands = [operand.clone().requires_grad_() for operand in operands]
    output = layer(*operands)
    output.backward(grad_output)
    gradients = [leaf.grad for leaf in (*operands, *layer.parameters())]
    return [output, *gradients, *layer.buffers()], is_made_in_cpp(output)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"momentum": None}, {"affine": False}, {"bias": False}),
        *({"track_running_stats": False}, {"activation": "relu"}),
        {"activation": "leaky_relu", "negative_slope": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_same_bits(dtype, layout, options, has_residual, monkeypatch):
    in_cpp = SyncBatchNorm(3, dtype=dtype, **options)
    in_python = copy.deepcopy(in_cpp)
    number = 3 if has_residual else 2
    operands = [to_layout(torch.randn(4, 3, 5, 6, dtype=dtype), layout) for _ in range(number)]
    with monkeypatch.context() as patched:
        patched.setattr(training, "backward_of_library", None)
        actual, is_cpp = train(in_cpp, *operands)
    assert is_cpp
    monkeypatch.setattr(training, "library", None)
    expected, is_cpp = train(in_python, *operands)
    assert not is_cpp
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, check_stride=True)


def with_another_layout_of_the_residual(layer, x):
    return layer(x, x.contiguous(memory_format=torch.channels_last))


def with_a_mask(layer, x):
    return layer(x, mask=torch.ones(4, 5, 6, dtype=torch.bool))


def with_silu(layer, x):
    layer.activation = "silu"
    return layer(x)


def with_gaps(layer, x):
    return layer(x[..., ::2])


def in_a_profile(layer, x):
    with profile(acc_events=True):
        return layer(x)


def under_a_mode(layer, x):
    with FlopCounterMode(display=False):
        return layer(x)


def with_an_integral_momentum(layer, x):
    layer.momentum = 1
    return layer(x)


@needs_library
@pytest.mark.parametrize(
    "call",
    [
        with_another_layout_of_the_residual,
        with_a_mask,
        with_silu,
        with_gaps,
        in_a_profile,
        under_a_mode,
        with_an_integral_momentum,
    ],
)
def test_python_makes_other_passes(call):
    layer, x = SyncBatchNorm(3), torch.randn(4, 3, 5, 6)
    assert is_made_in_cpp(layer(x))
    output = call(layer, x)
    assert not is_made_in_cpp(output)
    output.sum().backward()


def double_backward(output, x):
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.pow(2).sum(), x)[0]


def after_a_change(output, x):
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@needs_library
@pytest.mark.parametrize("differentiate", [double_backward, after_a_change])
@pytest.mark.parametrize("activation", [None, "leaky_relu"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_python_makes_other_backward_passes(differentiate, activation, has_residual, monkeypatch):
    layer, x = SyncBatchNorm(3, activation=activation), torch.randn(4, 3, dtype=torch.float64)
    residual = torch.randn_like(x).requires_grad_() if has_residual else None
    results = []
    for library in (training.library, None):
        monkeypatch.setattr(training, "library", library)
        leaf = x.clone().requires_grad_()
        output = layer(leaf) if residual is None else layer(leaf, residual)
        assert is_made_in_cpp(output) == (library is not None)
        results.append(differentiate(output, leaf))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@needs_library
@pytest.mark.parametrize("activation", [None, "relu"])
def test_only_the_residual_needs_a_gradient(activation, monkeypatch):
    layer = SyncBatchNorm(3, activation=activation, affine=False)
    x, residual = torch.randn(4, 3), torch.randn(4, 3).requires_grad_()
    gradients = []
    for library in (training.library, None):
        monkeypatch.setattr(training, "library", library)
        output = layer(x, residual)
        assert is_made_in_cpp(output) == (library is not None)
        gradients += torch.autograd.grad(output.pow(3).sum(), residual)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@needs_library
@pytest.mark.parametrize("kind", [KeyboardInterrupt, LookupError])
def test_an_error_of_a_hook_passes_as_it_is_and_keeps_no_frame(kind):
    def unpack(packed):
        raise kind("of the hook")

    references = []

    def call():
        x = torch.randn(4, 3, requires_grad=True)
        references.append(weakref.ref(x))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            output = SyncBatchNorm(3)(x)
        assert is_made_in_cpp(output)
        output.sum().backward()

    gc.collect()
    gc.disable()
    try:
        call()
    except kind as error:
        words, frames = str(error), traceback.extract_tb(error.__traceback__)
    finally:
        gc.enable()
    assert words == "of the hook" and frames[-1].name == "unpack"
    assert references[0]() is None


def run_info(**variables):
    command = [sys.executable, "-P", "-m", "syncbn", "info"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def test_info_tells_who_makes_the_passes():
    reason = passes.library_missing
    (row,) = [line for line in run_info().splitlines() if line.startswith("training pass:")]
    assert row.split(maxsplit=2)[2] == (f"Python: {reason}" if reason else "C++")
    assert "Python: SYNCBN_PYTHON_PASS=1 is set" in run_info(SYNCBN_PYTHON_PASS="1")


def test_an_unknown_torch_gets_no_library_and_no_warning(monkeypatch):
    monkeypatch.delenv("SYNCBN_PYTHON_PASS", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert passes.load() == (None, "this build has none for torch 2.99")


@needs_library
@pytest.mark.parametrize(
    ("built_with", "is_taken"),
    [
        ("2.99.1+cpu", True),
        ("2.99.0+cu130", True),
        ("2.99.0.dev20260101", False),
        ("2.99.0a0", False),
    ],
)
def test_a_version_in_development_gets_its_own_library_only(built_with, is_taken, monkeypatch):
    monkeypatch.delenv("SYNCBN_PYTHON_PASS", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    found = types.SimpleNamespace(torch_version=built_with)
    monkeypatch.setattr(passes.importlib, "import_module", lambda name: found)
    library, reason = passes.load()
    assert (library is found) == is_taken
    assert is_taken or reason == f"its library was built with torch {built_with}"


def test_a_library_that_does_not_load_is_a_reason(monkeypatch):
    monkeypatch.delenv("SYNCBN_PYTHON_PASS", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.0")

    def fail(name):
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(passes.importlib, "import_module", fail)
    library, reason = passes.load()
    assert library is None
    assert reason == "its library cannot be loaded: syncbn._pass_torch_2_99: undefined symbol"
