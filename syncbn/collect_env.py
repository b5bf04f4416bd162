"""Prints the facts for a bug report: ``python -m syncbn.collect_env``."""

import platform
import sys

import torch
import torch.distributed as dist

from syncbn.ops._extension import build_info, cuda_missing, device_types


def collect_env() -> dict[str, str]:
    """Return versions, the operators that were built and the backends, as printed."""
    backends = ["gloo", "nccl", "mpi", "ucc", "xccl"] if dist.is_available() else []
    return {
        "syncbn": build_info["version"],
        "built with": f"torch {build_info['built_with_torch']}, {build_info['compiler']}",
        "torch ABI": f"stable, {build_info['oldest_torch']} and later",
        "built for": build_info["instruction_sets"],
        "CUDA operators": f"none: {cuda_missing}"
        if cuda_missing
        else build_info["cuda_architectures"],
        "devices": ", ".join(device_types),
        "torch": torch.__version__,
        "torch's CUDA": str(torch.version.cuda),
        "GPUs": str(torch.cuda.device_count()),
        "distributed": ", ".join(b for b in backends if dist.is_backend_available(b)) or "none",
        "threads": str(torch.get_num_threads()),
        "CPU": f"{platform.machine()}, {build_info['instruction_set']}",
        "Python": sys.version.split()[0],
        "system": platform.platform(),
    }


if __name__ == "__main__":
    for name, value in collect_env().items():
        print(f"{name + ':':<16}{value}")
