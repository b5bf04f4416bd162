"""The benchmark of host time runs, and its counts are right. Its times are not judged here."""

import re

import pytest
import torch

from benchmarks import cuda_host


def counts(text):
    """The counts by kind and direction; times by part."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"(.+?) +(forward|backward|part) +\d", line):
            numbers = {what: float(n) for n, what in re.findall(r"([\d.]+) ([a-z]+)\b(?!\))", line)}
            found[match.groups()] = numbers
    return found


@pytest.mark.cuda
def test_a_layer_launches_two_kernels_each_way_and_waits_for_nothing(tmp_path, capfd):
    options = (str(tmp_path / "store"), 2, 2, "")
    torch.multiprocessing.spawn(cuda_host.run_rank, options, nprocs=2)
    found = counts(capfd.readouterr().out)
    for direction in ("forward", "backward"):
        ours, theirs = found["syncbn", direction], found["torch", direction]
        assert ours["launches"] == 2 and ours["collectives"] == 1, found
        assert ours["waits"] == 0, found
        assert ours["launches"] < theirs["launches"] and ours["tensors"] < theirs["tensors"], found
    assert found["torch", "forward"]["waits"] > 0, found
    expected = {("an all_reduce", "part"), ("+ normalization", "forward")}
    assert expected | {("+ input gradient", "backward")} <= found.keys(), found
