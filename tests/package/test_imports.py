"""The direction of imports: kernels and collectives know nothing of each other or of layers."""

import ast
import re

import pytest
from paths import ROOT

# Each file of the package, in CONTRIBUTING's order, and what it may import of those above it.
MAY_IMPORT = {
    "_torch_private": set(),
    "_extension": {"_C", "_torch_private"},
    "devices": {"_extension", "_torch_private"},
    "arguments": set(),
    "activations": {"_torch_private", "arguments"},
    "layout": set(),
    "tracing": {"_torch_private"},
    "masks": {"devices", "layout"},
    "plain": {"_extension", "devices", "layout"},
    "fakes": {"_extension", "devices"},
    "ops": {"_extension", "_torch_private", "devices", "fakes", "masks", "plain"},
    "checks": {"_extension", "_torch_private", "activations", "arguments", "masks"},
    "local": {"arguments", "checks", "devices"},
    "identity": set(),
    "collectives": {"_torch_private", "devices"},
    "groups": {"_torch_private", "collectives"},
    "agreement": {"_torch_private", "collectives", "identity", "ops"},
    "reports": {"agreement", "collectives"},
    "errors": {"agreement", "collectives", "identity", "ops", "reports"},
    "withdrawals": {
        "_torch_private",
        "agreement",
        "arguments",
        "collectives",
        "devices",
        "errors",
        "identity",
        "reports",
    },
    "exchange": {
        "_torch_private",
        "activations",
        "agreement",
        "arguments",
        "checks",
        "collectives",
        "devices",
        "errors",
        "identity",
        "layout",
        "masks",
        "ops",
        "reports",
        "tracing",
        "withdrawals",
    },
    "reference": {"collectives", "devices", "exchange", "identity", "layout", "masks", "plain"},
    "passes": {
        "activations",
        "agreement",
        "arguments",
        "checks",
        "collectives",
        "devices",
        "errors",
        "exchange",
        "identity",
        "layout",
        "masks",
        "ops",
        "reference",
        "tracing",
    },
    "compiled": {
        "_torch_private",
        "activations",
        "agreement",
        "arguments",
        "checks",
        "collectives",
        "errors",
        "exchange",
        "identity",
        "layout",
        "masks",
        "ops",
        "passes",
        "tracing",
    },
    "exported": {
        "activations",
        "arguments",
        "collectives",
        "compiled",
        "devices",
        "errors",
        "exchange",
        "identity",
        "layout",
        "local",
        "masks",
        "passes",
        "tracing",
    },
    "functional": {
        "_torch_private",
        "activations",
        "agreement",
        "arguments",
        "checks",
        "collectives",
        "compiled",
        "devices",
        "errors",
        "exchange",
        "exported",
        "identity",
        "layout",
        "local",
        "masks",
        "passes",
        "reference",
        "tracing",
    },
    "foreign_converters": set(),
    "modules": {
        "_torch_private",
        "activations",
        "arguments",
        "checks",
        "collectives",
        "errors",
        "exchange",
        "foreign_converters",
        "functional",
        "identity",
        "masks",
    },
    "block_tracer": {"_torch_private"},
    "fused": {"_torch_private", "activations", "block_tracer", "modules"},
    "reverted": {"_torch_private", "activations"},
    "subclasses": {"_torch_private", "modules", "reverted"},
    "convert": {
        "_torch_private",
        "collectives",
        "fused",
        "groups",
        "modules",
        "reverted",
        "subclasses",
    },
    "frozen": {"convert", "modules"},
    "synchrony": {"collectives", "convert", "frozen", "modules"},
    "population": {"modules", "ops"},
    "statistics": {
        "_torch_private",
        "agreement",
        "collectives",
        "convert",
        "exchange",
        "frozen",
        "identity",
        "modules",
        "population",
        "withdrawals",
    },
    "block_class": {"_torch_private", "block_tracer", "fused"},
    "blocks": {"_torch_private", "block_class", "block_tracer", "fused"},
    "places": {"_torch_private", "activations", "block_tracer", "fused"},
    "fusion": {
        "_torch_private",
        "activations",
        "block_tracer",
        "blocks",
        "convert",
        "fused",
        "modules",
        "places",
    },
    "collect_env": {"_extension"},
    "__init__": {
        "_extension",
        "convert",
        "frozen",
        "functional",
        "fusion",
        "modules",
        "statistics",
        "synchrony",
    },
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


def test_each_file_imports_what_stands_above_it():
    names = [*MAY_IMPORT]
    for index, name in enumerate(names):
        assert MAY_IMPORT[name] <= {"_C", *names[:index]}, name
    listed = re.findall(r"^syncbn/(\w+) ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert listed == [name for name in names if name != "__init__"]


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_python_imports_run_one_way(name):
    found = set(imports(ast.parse((ROOT / "syncbn" / f"{name}.py").read_text())))
    assert {(name, other) for other in found - MAY_IMPORT[name]} <= LATE


# Underscored names of others than torch: namedtuple's method, and our own.
OWN_NAMES = {
    "_C",
    "_check_input_dim",  # of torch's layers, _torch_private.INPUT_CHECK
    "_cuda",
    "_replace",
    "_syncbn",
    "_syncbn_dims",
    "_syncbn_forward",
    "_syncbn_original",
    "_syncbn_takes_activation",
}


@pytest.mark.parametrize("name", MAY_IMPORT.keys() - {"_torch_private"})
def test_private_names_of_torch_stand_in_one_file(name):
    tree = ast.parse((ROOT / "syncbn" / f"{name}.py").read_text())
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


# torch's functions that make a tensor on the default device, which is a program's to choose.
FACTORIES = re.compile(
    r"torch\.(arange|as_?tensor|as_?array|empty(_strided)?|eye|full|(lin|log)space|ones|rand(int|n|perm)?"
    r"|scalar_tensor|tensor|zeros|Generator)"
)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_new_tensors_name_their_device(name):
    for node in ast.walk(ast.parse((ROOT / "syncbn" / f"{name}.py").read_text())):
        if isinstance(node, ast.Call) and FACTORIES.fullmatch(ast.unparse(node.func)):
            assert "device" in [keyword.arg for keyword in node.keywords], ast.unparse(node)


def test_only_collectives_talks_to_torch_distributed():
    users = {
        path.stem
        for path in (ROOT / "syncbn").glob("*.py")
        if re.search(r"^\s*(import|from) torch\.distributed", path.read_text(), re.MULTILINE)
    }
    # collect_env lists the backends, _torch_private needs the type of a group.
    assert users == {"_torch_private", "collect_env", "collectives"}


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
