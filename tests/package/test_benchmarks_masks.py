"""The benchmark of masks runs, and measures what it says."""

import re

import pytest
import torch
from support.benchmarking import execute

from benchmarks.masks import masks

pytestmark = pytest.mark.any_torch


@pytest.mark.parametrize("shape", [(8, 3, 5, 50), (8, 3, 50)])
def test_masks_leave_about_half_of_the_places(shape):
    for mask in masks(shape).values():
        assert mask.dtype == torch.bool and mask.shape == (shape[0], *shape[2:])
        assert 0.25 < mask.double().mean() < 0.75


def test_each_way_has_its_ratio():
    result = execute("-m", "benchmarks.masks", "--tiny")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        found = re.findall(r"(\w+(?:, filled)?) (\d+\.\d\d) \[", line)
        assert [name for name, _ in found] == ["padding", "padding, filled", "any", "any, filled"]
        # Filling runs tens of operators more, which take the time of tensors of 24 values.
        ratios = {name: float(ratio) for name, ratio in found}
        assert ratios["padding, filled"] > ratios["padding"]
