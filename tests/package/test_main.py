"""The commands of `python -m syncbn`."""

import subprocess
import sys

import pytest
import torch

import syncbn
from syncbn.__main__ import main

MODELS = """
from torch import nn

class Split(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(4)
        self.half = nn.BatchNorm2d(2)

def net():
    return nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), Split(), nn.BatchNorm2d(4), nn.GELU())

def lazy(): return nn.LazyBatchNorm2d()
def number(): return 3
def wide(width): return nn.BatchNorm2d(width)
"""

TABLE = """\
layer   converted to     fused with  why not
0       SyncBatchNorm2d  relu
2                                    is a Split, which is not plain batch normalization: it has \
methods of its own, is left as it is and does not synchronize
2.half                               is not converted
3       SyncBatchNorm2d              is followed by GELU, which cannot be fused
2 of 4 layers converted, 1 fused
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["syncbn", *arguments])
        main()
        return capsys.readouterr().out

    yield run
    sys.modules.pop("models", None)


def test_info_has_the_facts_that_a_bug_report_needs(tmp_path):
    command = [sys.executable, "-m", "syncbn", "info"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert printed["syncbn"].strip() == syncbn.__version__
    assert printed["torch"].strip() == torch.__version__
    assert "2.11" in printed["torch ABI"] and "gloo" in printed["distributed"]


def test_explain_shows_each_layer_in_the_order_of_the_model(run):
    assert run("explain", "models.net") == TABLE


def test_explain_downloads_no_weights(run, monkeypatch):
    """torchvision's detectors load those of their backbone by default."""
    monkeypatch.setenv("TORCH_HOME", "/dev/null/nowhere")
    assert "\nbackbone.body.0.1 " in run("explain", "fasterrcnn_mobilenet_v3_large_fpn")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("resnet", "Unknown model resnet"),
        ("models.missing", "has no attribute 'missing'"),
        ("nowhere.model", "No module named 'nowhere'"),
        ("models.number", "expected it to return a torch.nn.Module, but got int"),
        ("models.wide", "it needs arguments (width); write a function that calls it with them"),
        ("models.lazy", "does not know its number of channels"),
    ],
)
def test_model_that_cannot_be_explained_is_reported_in_one_line(run, capsys, model, words):
    with pytest.raises(SystemExit, match="2"):
        run("explain", model)
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_explain_says_that_a_name_is_torchvisions(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(SystemExit, match="2"):
        run("explain", "resnet18")
    assert "pip install torchvision, or give a dotted path" in capsys.readouterr().err


def test_version_and_help_without_a_command(run, capsys):
    assert "info" in run() and "explain" in run()
    with pytest.raises(SystemExit, match="0"):
        run("--version")
    assert capsys.readouterr().out == f"syncbn {syncbn.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], ["info", "explain"]), (["explain", "--help"], ["MODEL", "package.module.Model"])],
)
def test_help_names(run, capsys, arguments, words):
    with pytest.raises(SystemExit, match="0"):
        run(*arguments)
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
