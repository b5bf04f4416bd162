"""Compiled code of the layer that torch keeps on disk for later processes."""

import copy
import shutil

import torch
from support.cases import make_input
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from syncbn import SyncBatchNorm
from syncbn.graph import inductor


def step(layer):
    torch._dynamo.reset()
    counters.clear()
    x = make_input((4, 3, 5), "contiguous", torch.float32).requires_grad_()
    torch.compile(layer, fullgraph=True)(x).square().sum().backward()
    return counters["aot_autograd"], [x.grad, layer.weight.grad, *layer.buffers()]


def test_code_is_found_again_and_computes_the_same():
    layer = SyncBatchNorm(3)  # has the same name and number in a program's next run
    # Compiling the headers before the code takes ten seconds.
    with fresh_cache(), config.patch(cpp_cache_precompile_headers=False):
        made, results = step(copy.deepcopy(layer))
        found, results_again = step(layer)
    assert made["autograd_cache_saved"] == found["autograd_cache_hit"] == 1
    for a, b in zip(results, results_again, strict=True):
        assert torch.equal(a, b)


def test_other_code_of_the_package_is_compiled_again(tmp_path, monkeypatch):
    """Torch finds compiled code by the name of the operator, which holds a digest of our code."""
    digest = inductor._digest()
    assert digest in str(inductor._compiled_train)
    shutil.copytree(inductor.PACKAGE, tmp_path / "syncbn")
    monkeypatch.setattr(inductor, "PACKAGE", tmp_path / "syncbn")
    assert inductor._digest() == digest
    with (tmp_path / "syncbn/ops/formulas.py").open("a") as file:
        file.write("# another version\n")
    assert inductor._digest() != digest
