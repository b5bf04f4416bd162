"""The direction of imports, in Python and in csrc, and where private names of torch are used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "syncbn"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Each folder of csrc, and its permitted includes of csrc and of torch.
MAY_INCLUDE = {
    "csrc": {"common", "cpu"},
    "csrc/common": {"common", "torch"},
    "csrc/cpu": {"common", "cpu"},
    "csrc/cuda": {"common", "cuda", "kernels"},
    "csrc/cuda/kernels": {"common", "kernels"},
}


def test_packages_import_one_way():
    """The contract is in pyproject.toml."""
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


# Underscored names that are not torch's: namedtuple's, and our own.
OWN_NAMES = {
    "_C",
    "_check_input_dim",  # of torch's layers, _compat.INPUT_CHECK
    "_compat",
    "_cuda",
    "_fields",
    "_reconstruct",
    "_replace",
    "_replicate_for_data_parallel",  # of torch's modules
    "_slotnames",  # of copyreg, by which pickle finds the slots of a class
    "_syncbn",
    "_syncbn_activate",
    "_syncbn_converter",
    "_syncbn_code",
    "_syncbn_failed",
    "_syncbn_forward",
    "_syncbn_original",
    "_syncbn_takes_activation",
    "_syncbn_torchs_check",
    "_syncbn_undo",
    "_tail",
}


@pytest.mark.parametrize("name", [name for name in FILES if name != "_compat.py"])
def test_private_names_of_torch_are_in_one_file(name):
    tree = ast.parse((PACKAGE / name).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Constant):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "sys")
            found |= set() if of_self else {node.attr}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value}  # as getattr() takes it
    private = {word for word in found if re.fullmatch(r"_[a-z]\w*|_[A-Z]\w*", word)}
    assert not private - OWN_NAMES


# torch's functions that make a tensor on the default device, which the program chooses.
FACTORIES = re.compile(
    r"torch\.(arange|as_?tensor|as_?array|empty(_strided)?|eye|full|(lin|log)space|ones|rand(int|n|perm)?"
    r"|scalar_tensor|tensor|zeros|Generator)"
)


@pytest.mark.parametrize("name", FILES)
def test_new_tensors_name_their_device(name):
    for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
        if isinstance(node, ast.Call) and FACTORIES.fullmatch(ast.unparse(node.func)):
            assert "device" in [keyword.arg for keyword in node.keywords], ast.unparse(node)


def test_few_files_import_torch_distributed():
    users = {
        name
        for name in FILES
        if re.search(r"^\s*(import|from) torch\.distributed", (PACKAGE / name).read_text(), re.M)
    }
    # __main__ lists the backends, _compat needs the type of a group.
    assert users == {
        "__main__.py",
        "_compat.py",
        "distributed/collectives.py",
        "distributed/groups.py",
        "distributed/state.py",
        "distributed/sums.py",
    }


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_includes_run_one_way(folder):
    for path in (ROOT / folder).glob("*.[ch]*"):
        for quote, include in re.findall(r'#include (["<])(.+)[">]', path.read_text()):
            if include.startswith("torch/"):
                assert "torch" in MAY_INCLUDE[folder] and path.name == "stable.h", (path, include)
            elif include == "emulation.h":  # of the tests, for a compiler that is not nvcc
                assert path.name == "device.h"
            elif quote == '"':
                target = (path.parent / include).resolve()
                assert target.parent.name in MAY_INCLUDE[folder], (path, include)


def test_kernels_and_their_includes_need_no_torch():
    files = [*(ROOT / "csrc/cuda/kernels").iterdir()]
    for path in files:  # grows by each file's includes
        text = path.read_text()
        assert not re.search(r"torch/|stable\.h", text), path
        included = {(path.parent / name).resolve() for name in re.findall(r'#include "(.+)"', text)}
        files += [file for file in included if file.exists() and file not in files]
