"""A launch fails, and what comes after it: on the stand-in only."""

import subprocess
import sys

import pytest
import torch
from support.cuda_device import IS_STANDIN, fail_launch

from syncbn import SyncBatchNorm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not IS_STANDIN, reason="a launch on a GPU cannot be made to fail"),
]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (512, 8, 16, 16), (2, 3)])
def test_running_statistics_and_counter_change_together(shape, momentum):
    """Whichever launch of a forward pass fails."""
    layer = SyncBatchNorm(shape[1], momentum=momentum, device="cuda")
    x = torch.rand(shape, device="cuda")
    layer(x)
    num_failed = 0
    for number in range(1, 10):
        before = [buffer.clone() for buffer in layer.buffers()]
        torch.cuda.synchronize()
        fail_launch(number)
        try:
            layer(x * number)
        except RuntimeError as error:
            assert "a planted failure" in str(error)
            num_failed += 1
        fail_launch(0)
        torch.cuda.synchronize()
        same = {torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True)}
        assert len(same) == 1, number
    assert num_failed > 0
    assert layer.num_batches_tracked == 10 - num_failed


# In a separate process, whose device has failed for good.
AFTER_A_FAILURE = """
import ctypes, torch
from syncbn.ops import usual as ops

x = torch.ones(64, 8, 128, 256, device="cuda")
totals = ops.batch_norm_stats(x)
torch.cuda.synchronize()
ctypes.CDLL(None).standin_fail_launch(1, True)
for _ in range(2):  # the first call fails at its launch, the second one at an allocation
    try:
        ops.batch_norm_apply(x, totals, *[None] * 5, 0.1, 1e-5)
    except RuntimeError as error:
        print(error)
        torch.cuda.empty_cache()
"""


def test_an_allocation_after_a_failure_is_not_called_out_of_memory():
    command = [sys.executable, "-c", AFTER_A_FAILURE]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert "cannot allocate 67108864 bytes on CUDA device 0, because an earlier" in said, said
    assert "perhaps not syncbn's, has failed (CUDA_LAUNCH_BLOCKING=1" in said
    assert "out of memory" not in said
