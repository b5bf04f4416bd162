"""The built library of CUDA operators, and builds and torches without it."""

import os
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
from syncbn.ops import Operators, _extension, fallback

PACKAGE = Path(syncbn.__file__).parent

built = pytest.mark.skipif(
    not _extension.build_info["cuda_architectures"], reason=f"no nvcc: {_extension.cuda_missing}"
)


def run(command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def cuobjdump():
    on_path = shutil.which("cuobjdump")
    if on_path:
        return on_path
    triton = pytest.importorskip("triton", reason="cuobjdump comes with CUDA or with triton")
    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def cuda_library():
    operators = Path(_extension._C.__file__)
    return operators.with_name(operators.name.replace("_C", "_cuda", 1))


@built
def test_kernels_use_no_local_memory_on_any_architecture():
    library = cuda_library()
    report = run([cuobjdump(), "-res-usage", library]).stdout
    kernels = {}
    for part in report.split("arch = sm_")[1:]:
        architecture = part.split(None, 1)[0]
        for stack, local in re.findall(r"STACK:(\d+) .*?LOCAL:(\d+)", part):
            assert (stack, local) == ("0", "0"), f"spills on sm_{architecture}: {part}"
            kernels[architecture] = kernels.get(architecture, 0) + 1
    listed = re.findall(r"(\d+)\.(\d+)", _extension.build_info["cuda_architectures"])
    assert {major + minor for major, minor in listed} == kernels.keys()
    # 4 dtypes: matrices have 3 widths in 16 bits and 2 in others, planes have 3. Formulas of four
    # operators: statistics; apply without and with two activations, with a residual or not; both
    # backward operators without and with two activations, reduce also with a residual. And two
    # kernels of their own: the count's, and verify_sums.
    formulas = 1 + (1 + 2 * 2) + (1 + 2 * 2) + (1 + 2)
    assert set(kernels.values()) == {formulas * (2 * 3 + 2 * 2 + 4 * 3) + 2}


@built
@pytest.mark.skipif(
    "7.5" not in _extension.build_info["cuda_architectures"], reason="built for some GPUs only"
)
@pytest.mark.parametrize(
    "gpu", ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
)
def test_every_gpu_has_code(gpu):
    """Code of the GPU's generation that is not newer, or PTX of any that is not newer."""
    report = run([cuobjdump(), "--list-elf", "--list-ptx", cuda_library()]).stdout
    images = {tuple(map(int, found)) for found in re.findall(r"\.sm_(\d+)(\d)\.cubin", report)}
    ptx = {tuple(map(int, found)) for found in re.findall(r"\.sm_(\d+)(\d)\.ptx", report)}
    assert images and ptx
    major, minor = map(int, gpu.split("."))
    has_image = any(image[0] == major and image[1] <= minor for image in images)
    assert has_image or any(version <= (major, minor) for version in ptx)


@built
def test_all_operators_are_registered_for_cuda():
    assert "cuda" in _extension.device_types
    for name in Operators._fields:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"syncbn::{name}", "CUDA")


def test_cpu_library_needs_no_cuda_library():
    (library,) = PACKAGE.glob("_C.*.so")
    needed = re.findall(r"NEEDED.*\[(.+)\]", run(["readelf", "-d", library]).stdout)
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if re.search("cuda|nvidia", name)]


@built
def test_cuda_library_brings_its_runtime():
    library = cuda_library()
    needed = re.findall(r"NEEDED.*\[(.+)\]", run(["readelf", "-d", library]).stdout)
    assert "libtorch_cuda.so" in needed
    assert not [name for name in needed if name.startswith(("libcudart", "libc10", "libpython"))]


def test_no_visible_gpu_leaves_the_cpu():
    script = (
        "import torch, syncbn\n"
        "layer = syncbn.SyncBatchNorm(3)\n"
        "print(layer(torch.randn(4, 3)).sum().item())"
    )
    result = run([sys.executable, "-W", "error", "-c", script], CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "prepare, words",
    [
        ("torch.version.cuda = None", r"torch .* is built without CUDA"),
        (
            "def fail(path): raise OSError('libtorch_cuda.so: cannot open')\n"
            "torch.ops.load_library = fail",
            "cannot be loaded: libtorch_cuda.so: cannot open",
        ),
    ],
)
@built
def test_torch_without_cuda_loads_the_cpu_operators_and_reports_it(prepare, words):
    script = (
        f"import torch\n{prepare}\n"
        "import syncbn\n"
        "from syncbn.ops import _extension\n"
        "print(_extension.device_types, _extension.cuda_missing)\n"
        "print(syncbn.SyncBatchNorm(3)(torch.randn(4, 3)).shape)\n"
    )
    result = run([sys.executable, "-W", "error", "-c", script], PYTHONPATH=str(PACKAGE.parent))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("('cpu', 'meta')")
    assert re.search(words, result.stdout)


@pytest.mark.trouble(
    "Training on a GPU is slow, with the warning “no operators for 'cuda'”",
    "The build has no CUDA operators; `python -m syncbn info` gives the reason",
    "Build again with `SYNCBN_CUDA=1`: [Install](install.md#cuda)",
)
def test_warning_of_cuda_tensors_without_operators_gives_the_reason(monkeypatch):
    monkeypatch.setattr(_extension, "cuda_missing", "it was built without them")
    monkeypatch.setattr(_extension, "device_types", ("cpu", "meta"))
    with pytest.warns(UserWarning, match="no operators for 'cuda'.*built without them"):
        fallback.check_device.__wrapped__(torch.device("cuda"))  # without its cache


def configure(tmp_path, setting, nvcc=None, prepare=""):
    """Output of setup.py before the build; it finds only `nvcc`, a shell script."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    if nvcc is not None:
        (home / "bin/nvcc").write_text(f"#!/bin/sh\n{nvcc}\n")
        (home / "bin/nvcc").chmod(0o755)
    environment = {"SYNCBN_CUDA": setting, "CUDA_HOME": str(home), "TORCH_CUDA_ARCH_LIST": ""}
    return setup_py.run("--version", prepare=f"import torch\n{prepare}", **environment)


needs_cuda_torch = pytest.mark.skipif(torch.version.cuda is None, reason="torch is without CUDA")


@pytest.mark.any_torch
@needs_cuda_torch
@pytest.mark.parametrize(
    "nvcc, words",
    [
        (None, "no nvcc was found; install the CUDA toolkit"),
        ("echo release 11.8", "is of CUDA 11, but torch .* has CUDA 1"),
    ],
)
@pytest.mark.trouble(
    "“SYNCBN_CUDA=1, but the CUDA operators cannot be built”",
    "There is no `nvcc`, or it is of another CUDA than torch; the message says which",
    "Install the CUDA toolkit of torch's major version, or set `CUDA_HOME`",
)
def test_cuda_that_cannot_be_built(tmp_path, nvcc, words):
    asked_for = configure(tmp_path / "1", "1", nvcc)
    assert asked_for.returncode != 0
    assert re.search(
        "SYNCBN_CUDA=1, but the CUDA operators cannot be built: .*" + words, asked_for.stderr
    )
    automatic = configure(tmp_path / "auto", "auto", nvcc)
    assert automatic.returncode == 0, automatic.stderr
    assert re.search("CPU operators and no CUDA operators: .*" + words, automatic.stderr)


@pytest.mark.any_torch
@needs_cuda_torch
@pytest.mark.parametrize(
    "here, built_for",
    [
        (
            [(9, 0), (8, 0), (9, 0)],
            "8.0+PTX 9.0, for the GPUs of this machine (TORCH_CUDA_ARCH_LIST names",
        ),
        ([(9, 0)], "9.0+PTX, for the GPUs of this machine (TORCH_CUDA_ARCH_LIST names"),
        ([(7, 5)], "7.5+PTX, for the GPUs of this machine (TORCH_CUDA_ARCH_LIST names"),
        ([], "7.5 8.0+PTX 9.0; built"),
        ([(8, 0), (12, 1)], "7.5 8.0+PTX 9.0; built"),  # this nvcc knows no 12.1
    ],
)
def test_build_is_for_this_machines_gpus(tmp_path, here, built_for):
    known = ";".join(f"echo compute_{number}" for number in (75, 80, 90))
    version = f"echo release {torch.version.cuda}; {known}"
    prepare = (
        f"here = {here}\n"
        "torch.cuda.device_count = lambda: len(here)\n"
        "torch.cuda.get_device_capability = lambda device: here[device]\n"
        "import setuptools\n"
        "setuptools.setup = (\n"
        "    lambda ext_modules, **_: print([each.extra_compile_args for each in ext_modules])\n"
        ")"
    )
    result = configure(tmp_path, "1", version, prepare)
    assert result.returncode == 0, result.stderr
    assert f"CPU operators and CUDA operators for {built_for}" in result.stderr
    options = re.findall(r"-gencode=arch=compute_(\d+),code=(\w+)", result.stdout)
    codes = [f"sm_{major}{minor}" for major, minor in re.findall(r"(\d)\.(\d)", built_for)]
    # One PTX for all architectures from 8.0 on: the output of nvcc's front end.
    ptx = "75" if codes == ["sm_75"] else "80"
    expected = [("75" if code == "sm_75" else "80", code) for code in codes]
    assert options == [*expected, (ptx, f"compute_{ptx}")]


@pytest.mark.any_torch
def test_build_is_for_all_gpus_if_cuda_does_not_start(tmp_path):
    """As under a driver that is too old: NVML counts GPUs, but each CUDA call raises."""
    version = f"echo release {torch.version.cuda}; echo compute_80; echo compute_90"
    prepare = (
        "def refuse(device): raise RuntimeError('the driver is too old\\nUpdate it')\n"
        "torch.cuda.device_count = lambda: 1\n"
        "torch.cuda.get_device_capability = refuse"
    )
    result = configure(tmp_path, "1", version, prepare)
    assert result.returncode == 0, result.stderr
    assert "for 8.0+PTX 9.0, because CUDA does not start: the driver is too old" in result.stderr


@pytest.mark.any_torch
def test_cuda_can_be_left_out(tmp_path):
    result = configure(tmp_path, "0", "echo release 13.0")
    assert result.returncode == 0, result.stderr
    assert "no CUDA operators, as SYNCBN_CUDA=0 asks" in result.stderr


@pytest.mark.any_torch
def test_empty_setting_is_auto(tmp_path):
    result = configure(tmp_path, "")
    assert result.returncode == 0, result.stderr
    assert "CPU operators and no CUDA operators: " in result.stderr


@pytest.mark.any_torch
def test_unknown_setting_is_an_error(tmp_path):
    result = configure(tmp_path, "yes")
    assert result.returncode != 0
    assert "expected SYNCBN_CUDA to be auto, 0 or 1, but got 'yes'" in result.stderr
