"""PTX written by hand: kernels of a few instructions, translated, compiled and launched."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from translate_ptx import FLAGS, translate

STANDIN = Path(__file__).parents[1]

HEAD = ".version 9.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 shared[];\n"
REGISTERS = """
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<20>;
    .reg .f32 %f<9>;
    .reg .f64 %fd<9>;
"""


def kernel(name, parameters, body, directives=""):
    declared = ",\n".join(f".param .u64 {name}_param_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [{name}_param_{i}];" for i in range(parameters))
    return f".entry {name}(\n{declared}\n)\n{directives}\n{{{REGISTERS}{loads}\n{body}\n}}\n"


def load(folder: Path, kernels: str) -> Callable[..., str | None]:
    """Return ``launch(kernel, threads, arrays)``, which returns an error message or None."""
    source = folder / "samples.ptx.cpp"
    source.write_text(translate(HEAD + kernels))
    library = folder / "kernels.so"
    registry = STANDIN / "ptx" / "registry.cpp"
    command = ["c++", "-std=c++17", "-fPIC", *FLAGS, f"-I{STANDIN}", "-shared", source, registry]
    environment = {**os.environ, "LD_PRELOAD": ""}
    done = subprocess.run(
        [*command, "-o", library], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).launch_ptx
    function.restype = ctypes.c_char_p

    def launch(
        name: str,
        threads: int,
        arrays: list[np.ndarray],
        blocks: int = 1,
        shared_bytes: int = 0,
        unwritten: np.ndarray | None = None,
    ) -> str | None:
        pointers = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
        places = [ctypes.addressof(pointer) for pointer in pointers]
        arguments = (ctypes.c_void_p * len(places))(*places)
        begin = 0 if unwritten is None else unwritten.ctypes.data
        size = 0 if unwritten is None else unwritten.nbytes
        sizes = [ctypes.c_size_t(n) for n in (shared_bytes, begin, size)]
        error = function(name.encode(), blocks, threads, *sizes, arguments)
        return None if error is None else error.decode()

    return launch
