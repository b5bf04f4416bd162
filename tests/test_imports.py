"""The direction of imports: kernels and collectives know nothing of each other or of layers."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each file of the package, and what it may import of the package.
MAY_IMPORT = {
    "_extension": {"_C"},
    "arguments": set(),
    "layout": set(),
    "tracing": set(),
    "ops": {"_extension"},
    "local": {"arguments", "checks"},
    "checks": {"_extension", "arguments"},
    "collectives": set(),
    "exchange": {"arguments", "checks", "collectives", "layout"},
    "reference": {"collectives"},
    "passes": {"arguments", "collectives", "exchange", "layout", "ops", "reference"},
    "compiled": {"arguments", "checks", "collectives", "exchange", "layout", "ops", "tracing"},
    "exported": {
        "arguments",
        "collectives",
        "compiled",
        "exchange",
        "layout",
        "local",
        "passes",
        "tracing",
    },
    "functional": {
        "arguments",
        "checks",
        "collectives",
        "compiled",
        "exchange",
        "exported",
        "local",
        "passes",
        "tracing",
    },
    "foreign_converters": set(),
    "modules": {
        "arguments",
        "checks",
        "collectives",
        "exchange",
        "foreign_converters",
        "functional",
    },
    "convert": {"collectives", "modules"},
    "collect_env": {"_extension"},
    "__init__": {"_extension", "convert", "functional", "modules"},
}
# Inside a function, for the one method that torch's interface puts on the class.
LATE = {("modules", "convert")}

# Each folder of csrc, and what it may include of csrc and of torch.
MAY_INCLUDE = {
    "csrc": {"common", "cpu"},
    "csrc/common": {"common", "torch"},
    "csrc/cpu": {"common", "cpu"},
    "csrc/cuda": {"common", "cuda", "kernels"},
    "csrc/cuda/kernels": {"common", "kernels"},
}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "syncbn":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("syncbn."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("syncbn."))


def test_every_file_has_its_row():
    assert {path.stem for path in (ROOT / "syncbn").glob("*.py")} == MAY_IMPORT.keys()
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.*")}
    assert folders == MAY_INCLUDE.keys()


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_python_imports_run_one_way(name):
    found = set(imports(ast.parse((ROOT / "syncbn" / f"{name}.py").read_text())))
    assert {(name, other) for other in found - MAY_IMPORT[name]} <= LATE


def test_only_collectives_talks_to_torch_distributed():
    users = {
        path.stem
        for path in (ROOT / "syncbn").glob("*.py")
        if re.search(r"^\s*(import|from) torch\.distributed", path.read_text(), re.MULTILINE)
    }
    assert users == {"collectives", "collect_env"}  # collect_env lists the backends


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_includes_run_one_way(folder):
    for path in (ROOT / folder).glob("*.[ch]*"):
        for include in re.findall(r'#include ["<](.+)[">]', path.read_text()):
            if include.startswith("torch/"):
                assert "torch" in MAY_INCLUDE[folder] and path.name == "stable.h", (path, include)
            elif include == "emulation.h":  # of the tests, for a compiler that is not nvcc
                assert path.name == "device.h"
            elif include.endswith(".h") and not include.startswith(("pybind11/", "cuda_")):
                target = (path.parent / include).resolve()
                assert target.parent.name in MAY_INCLUDE[folder], (path, include)


def test_kernels_and_what_they_include_know_no_torch():
    files = [*(ROOT / "csrc/cuda/kernels").iterdir()]
    for path in files:  # grows by what each includes
        text = path.read_text()
        assert not re.search(r"torch/|stable\.h", text), path
        included = {(path.parent / name).resolve() for name in re.findall(r'#include "(.+)"', text)}
        files += [file for file in included if file.exists() and file not in files]
