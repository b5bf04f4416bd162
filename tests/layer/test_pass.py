"""The training pass in C++ and in Python: which of them makes a pass, and the same bits."""

import copy
import os
import subprocess
import sys
import types
import warnings

import pytest
import torch
from support.cases import DTYPES, to_layout
from torch.profiler import profile

from syncbn import SyncBatchNorm, training
from syncbn.distributed import passes

needs_library = pytest.mark.skipif(
    passes.library is None, reason=f"Python makes the passes: {passes.library_missing}"
)


def is_made_in_cpp(output):
    return "CppNode" in output.grad_fn.name()


def train(layer, input, grad_output):
    """Return all that a pass computes, and whether C++ has made it."""
    input = input.clone().requires_grad_()
    output = layer(input)
    output.backward(grad_output)
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [output, input.grad, *gradients, *layer.buffers()], is_made_in_cpp(output)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"bias": False}, {"track_running_stats": False}],
    ids=str,
)
def test_same_bits(dtype, layout, options, monkeypatch):
    in_cpp = SyncBatchNorm(3, dtype=dtype, **options)
    in_python = copy.deepcopy(in_cpp)
    input, grad_output = (to_layout(torch.randn(4, 3, 5, 6, dtype=dtype), layout) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(training, "backward_of_library", None)
        actual, is_cpp = train(in_cpp, input, grad_output)
    assert is_cpp
    monkeypatch.setattr(training, "library", None)
    expected, is_cpp = train(in_python, input, grad_output)
    assert not is_cpp
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, check_stride=True)


def with_a_residual(layer, x):
    return layer(x, x)


def with_a_mask(layer, x):
    return layer(x, mask=torch.ones(4, 5, 6, dtype=torch.bool))


def with_an_activation(layer, x):
    layer.activation = "relu"
    return layer(x)


def with_gaps(layer, x):
    return layer(x[..., ::2])


def in_a_profile(layer, x):
    with profile(acc_events=True):
        return layer(x)


def with_an_integral_momentum(layer, x):
    layer.momentum = 1
    return layer(x)


@needs_library
@pytest.mark.parametrize(
    "call",
    [
        with_a_residual,
        with_a_mask,
        with_an_activation,
        with_gaps,
        in_a_profile,
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
def test_python_makes_other_backward_passes(differentiate, monkeypatch):
    layer, x = SyncBatchNorm(3), torch.randn(4, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    actual = differentiate(layer(leaf), leaf)
    monkeypatch.setattr(training, "library", None)
    leaf = x.clone().requires_grad_()
    expected = differentiate(layer(leaf), leaf)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


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
