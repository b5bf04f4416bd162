"""Errors of torch's operators on the stand-in: torch's messages, and their consequences."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from values import DEVICE, sequence


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
def test_tensors_of_two_devices_raise_torchs_error(function):
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
    reason="errors that only the CPU's operator finds are raised when it runs",
)
def test_an_error_of_work_within_the_call_leaves_the_device_usable():
    x = sequence(3, 3)
    with pytest.raises(RuntimeError, match="same dtype"):
        x @ x.half()
    assert (x * 0).sum().item() == 0


def run_apart(program, **variables):
    """Return the output of a program in its own process, with the stand-in."""
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


def test_an_operator_without_counterpart_is_named():
    with pytest.raises(NotImplementedError, match=r"standin: aten::_thnn_fused_lstm_cell has no"):
        nn.LSTMCell(3, 3, device=DEVICE)(sequence(2, 3))
