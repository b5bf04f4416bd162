"""Types of converted models, as type checkers see them: a model stays what it is."""

import subprocess
import sys

import pytest
from paths import ROOT

pytestmark = pytest.mark.any_torch

PROGRAM = """
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import assert_type

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)


def models(block: Block, module: nn.Module) -> None:
    assert_type(convert_sync_batchnorm(block), Block)
    assert_type(convert_sync_batchnorm(block, process_group=None).bn, nn.BatchNorm2d)
    assert_type(convert_sync_batchnorm(module), nn.Module)
    assert_type(SyncBatchNorm.convert_sync_batchnorm(block, None), Block)
    assert_type(SyncBatchNorm.convert_sync_batchnorm(module), nn.Module)
    assert_type(revert_sync_batchnorm(block).bn, nn.BatchNorm2d)
    assert_type(revert_sync_batchnorm(module), nn.Module)


def layers(ordinary: nn.BatchNorm2d, torchs: nn.SyncBatchNorm, ours: SyncBatchNorm) -> None:
    assert_type(convert_sync_batchnorm(ordinary), _BatchNorm)
    assert_type(convert_sync_batchnorm(torchs), _BatchNorm)
    assert_type(convert_sync_batchnorm(ours), _BatchNorm)
    assert_type(SyncBatchNorm.convert_sync_batchnorm(ordinary), _BatchNorm)
    assert_type(revert_sync_batchnorm(torchs), _BatchNorm)
    assert_type(revert_sync_batchnorm(ours), _BatchNorm)
"""


def test_conversion_keeps_the_type_of_a_model(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # From the project's folder: its cache knows torch already, and its settings are strict.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
