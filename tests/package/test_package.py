"""The package: its binaries, and errors of importing and building."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import setup_py
from support.paths import ROOT

import syncbn

PACKAGE = Path(syncbn.__file__).parent


def test_libraries_are_abi_stable_from_torch_2_11():
    libraries = sorted({*PACKAGE.glob("*.so")} - {*PACKAGE.glob("_pass_torch_*.so")})
    assert libraries
    audit = Path(sys.executable).parent / "torch-abi-audit"
    for library in libraries:
        result = subprocess.run(
            [str(audit), "--check", "torch", str(library)],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_binary_tells_what_it_was_built_for():
    from syncbn.ops._extension import build_info

    assert build_info["version"] == syncbn.__version__
    assert build_info["oldest_torch"] == "2.11"
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def test_typed():
    assert (PACKAGE / "py.typed").exists()


def import_error(tmp_path, prepare):
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{prepare}\nimport syncbn"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    return result.stderr


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "syncbn", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


@pytest.mark.trouble(
    "“compiled operators cannot be loaded” at import",
    "Python runs in a clone that was not built, or the package was built for another Python",
    "`pip install --no-build-isolation .` in the clone",
)
def test_missing_binary_is_an_error_with_the_way_out(sources):
    error = import_error(sources, "sys.modules['syncbn._C'] = None")
    assert "compiled operators cannot be loaded" in error
    assert "pip install --no-build-isolation ." in error


def test_clone_uses_the_operators_of_the_installed_package(sources):
    script = f"""if True:
        import sys, torch
        sys.path.insert(0, {str(sources)!r})
        import syncbn
        syncbn.SyncBatchNorm(3)(torch.rand(2, 3, 4, 4)).sum().backward()
        print(syncbn.__file__)
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == f"{sources / 'syncbn/__init__.py'}\n", result.stderr


@pytest.mark.trouble(
    "“needs torch 2.11 or later”",
    "The installed torch is older",
    "`pip install --upgrade torch`",
)
def test_too_old_torch_is_an_error_with_the_way_out(sources):
    error = import_error(sources, "import torch; torch.__version__ = '2.10.1'")
    assert "needs torch 2.11 or later, but found torch 2.10.1" in error
    assert "pip install --upgrade torch" in error


def build(tmp_path, *command, prepare="", **environment):
    """Run setup.py without CUDA, by default to build; nothing is left in the checkout."""
    if not command:
        command = ("build_ext", f"--build-temp={tmp_path}/temp", f"--build-lib={tmp_path}/lib")
    return setup_py.run(*command, prepare=prepare, **{"SYNCBN_CUDA": "0", **environment})


@pytest.mark.any_torch
@pytest.mark.parametrize("name", ["/nonexistent", "g++-of-nobody --option", ""])
def test_missing_compiler_is_an_error_that_says_what_to_do(tmp_path, name):
    result = build(tmp_path, CXX=name)
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert f"needs a C++ compiler, but CXX={name} names no program" in last_line
    assert "apt install g++" in last_line and "Errno" not in result.stderr


@pytest.mark.any_torch
def test_compiler_command_of_several_words_is_found(tmp_path):
    result = build(tmp_path, CXX="false g++")
    assert result.returncode == 1 and "needs a C++ compiler" not in result.stderr


@pytest.mark.any_torch
@pytest.mark.parametrize("there", ["nothing", "ninja"])
@pytest.mark.trouble(
    "“needs a C++ compiler” in the build",
    "No `g++` or `clang++` is on `PATH`",
    "`apt install g++`, or set `CXX`",
)
def test_no_compiler_on_path_is_an_error_with_the_way_out(tmp_path, monkeypatch, there):
    """Ninja compiles with the compiler that torch names, else setuptools with Python's own."""
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "bin").mkdir()
    if there == "ninja":
        (tmp_path / "bin/ninja").symlink_to(Path(sys.executable).parent / "ninja")
    result = build(tmp_path, PATH=str(tmp_path / "bin"))
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert re.search(r"needs a C\+\+ compiler, but PATH has no \S*\+\+", last_line)
    assert there != "ninja" or "no c++" in last_line


# Writes an empty file in place of each object and of the library.
COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""


@pytest.mark.any_torch
@pytest.mark.trouble(
    "“needs the C++ library of torch” in the build",
    "The compiler links libstdc++ statically, so that torch would not catch syncbn's errors",
    "Set `CXX` to another compiler, such as `CXX=/usr/bin/g++`",
)
def test_library_without_torchs_libstdcxx_is_not_built(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    result = build(tmp_path, CXX=str(compiler), TORCH_DONT_CHECK_COMPILER_ABI="1")
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert "needs the C++ library of torch, libstdc++.so" in last_line
    assert not [*tmp_path.rglob("*.so")]


# Does the same, but fails on the training pass in C++. The libraries name the library of torch.
COMPILER_OF_OPERATORS = """#!/bin/sh
case "$*" in *csrc/pass*) exit 1;; esac
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then echo libstdc++.so > "$2"; fi
    shift
done
"""


@pytest.mark.any_torch
def test_a_training_pass_that_does_not_compile_is_left_out(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER_OF_OPERATORS)
    compiler.chmod(0o755)
    result = build(tmp_path, CXX=str(compiler), TORCH_DONT_CHECK_COMPILER_ABI="1")
    assert result.returncode == 0, result.stderr
    assert "syncbn: Python makes the training passes: syncbn._pass_torch_" in result.stderr
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("*.so")] == ["_C"]


@pytest.mark.any_torch
def test_metadata_needs_no_compiler(tmp_path):
    result = build(tmp_path, "egg_info", f"--egg-base={tmp_path}", CXX="/nonexistent")
    assert result.returncode == 0, result.stderr


NVCC_OF_13 = "#!/bin/sh\n[ $1 = --version ] && echo release 13.0\n"


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("program", "mode", "words"),
    [
        ("#!/bin/sh\nexit 1\n", 0o755, "exit status 1"),
        (NVCC_OF_13, 0o755, "exit status 1"),  # it cannot list its GPUs
        ("#!/bin/sh\n", 0o644, "Permission denied"),
        ("\x7fELF of another machine", 0o755, "Exec format error"),
    ],
)
def test_nvcc_that_does_not_run_is_a_reason_for_no_cuda_operators(tmp_path, program, mode, words):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(program)
    nvcc.chmod(mode)
    command = ("egg_info", f"--egg-base={tmp_path}")
    setting = {"prepare": "import torch; torch.version.cuda = '13.0'", "CUDA_HOME": str(tmp_path)}
    result = build(tmp_path, *command, SYNCBN_CUDA="auto", **setting)
    assert result.returncode == 0, result.stderr
    (reason,) = re.findall(r"no CUDA operators: (.*); built with", result.stderr)
    assert reason.startswith(f"{nvcc} does not run: ") and words in reason
    result = build(tmp_path, *command, SYNCBN_CUDA="1", **setting)
    assert result.returncode == 1
    assert "SYNCBN_CUDA=1, but the CUDA operators cannot be built" in result.stderr.splitlines()[-1]


def test_install_page_names_the_standard_that_torch_asks_for(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\nexit 1\n')
    compiler.chmod(0o755)
    # Else torch asks the compiler for its version.
    result = build(tmp_path, CXX=str(compiler), TORCH_DONT_CHECK_COMPILER_ABI="1")
    assert result.returncode == 1
    (standard,) = set(re.findall(r"-std=c\+\+(\d+)", (tmp_path / "arguments").read_text()))
    assert f"C++{standard}" in (ROOT / "docs/install.md").read_text()


IMPORT = """
import sys, torch
before = set(sys.modules)
from torch import nn
import syncbn
model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
model(torch.rand(2, 3, 4, 4)).sum().backward()
print(len(set(sys.modules) - before), "torch._dynamo" in sys.modules)
"""


@pytest.mark.any_torch
def test_import_and_eager_training_import_no_compiler():
    """Dynamo's import is 900 modules, 120 MiB and a second of processor time."""
    output = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    ).stdout
    num_modules, has_dynamo = output.split()
    assert has_dynamo == "False"
    assert int(num_modules) < 100  # half of them ours; a library more would be seen
