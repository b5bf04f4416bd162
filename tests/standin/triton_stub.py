"""Triton for the stand-in: kernels are compiled for a GPU, and a launch does nothing.

Shows that Inductor's graphs run, are recorded and replayed; their numbers mean nothing.
"""

from typing import Any

import triton.backends.nvidia.driver as nvidia

PROPERTIES = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1,
    "mem_clock_rate": 1,
    "mem_bus_width": 1,
}


class Utilities:
    """Replaces functions of a C library that is linked with the driver's."""

    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spilled bytes and threads per block."""
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties that Triton asks for."""
        return PROPERTIES


class Launcher:
    """Launches nothing."""

    global_scratch_size = 0

    def __init__(self, *_: Any) -> None:
        self.launch = self

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def install() -> None:
    """Replace Triton's driver, before the first compilation."""
    nvidia.CudaUtils, nvidia.CudaLauncher = Utilities, Launcher
    import torch._inductor.config as config

    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):  # of either torch
        if hasattr(config, name):
            setattr(config, name, False)
    config.force_disable_caches = True
