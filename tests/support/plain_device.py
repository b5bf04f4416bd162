"""A stand-in for devices that have no operators: the type "plain".

``install()`` makes it a device of this process. Its memory is the host's and torch's CPU operators
compute (plain_device.cpp); otherwise it is a device of its own, which refuses tensors of the CPU
and, ``without_float64()``, float64. ``init_process_group("plain")`` gives it a backend.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.emulated import compile_cxx
from support.paths import ROOT
from syncbn.ops import fallback

SUPPORT = ROOT / "tests" / "support"
SOURCES = [SUPPORT / "plain_device.cpp", SUPPORT / "plain_backend.cpp"]


def build() -> Path:
    """Compile the device for this torch, if that has not been done, and return the library."""
    texts = [path.read_bytes() for path in (*SOURCES, SUPPORT / "plain_device.h")]
    digest = hashlib.blake2b(b"".join([torch.__version__.encode(), *texts]), digest_size=8)
    folder = ROOT / "build" / f"plain-device-{digest.hexdigest()}"
    library = folder / "plain_device.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(torch.__file__).parent
    includes = [f"-isystem{package / 'include'}", f"-isystem{sysconfig.get_path('include')}"]
    part = folder / f"{os.getpid()}.so"
    libraries = [f"-L{package / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    # As one file: torch's headers take most of the time. They are of C++20 in torch 2.15.
    first, last = SOURCES
    compile_cxx("-std=c++20", *includes, "-include", first, "-shared", last, *libraries, "-o", part)
    part.replace(library)  # atomically, for other processes
    return library


@functools.cache
def install() -> None:
    """Make the device one of this process."""
    torch.utils.rename_privateuse1_backend("plain")
    spec = importlib.util.spec_from_file_location("plain_device", build())
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    torch.ops.plain_device.register()
    torch._register_device_module("plain", _module())

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return library.backend(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("plain", create, devices=["plain"])


def _module() -> Any:
    """Return the module torch.plain: the functions that checkpoints, autocast and seeds call."""
    module: Any = types.ModuleType("torch.plain")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = contextlib.nullcontext
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # the CPU's generator draws
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 on the device."""
    torch.ops.plain_device.set_float64(False)
    fallback.check_device.cache_clear()
    try:
        yield
    finally:
        torch.ops.plain_device.set_float64(True)
        fallback.check_device.cache_clear()
