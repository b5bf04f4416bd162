"""The commands ``python -m syncbn info`` and ``python -m syncbn explain MODEL``."""

import argparse
import importlib
import inspect
import pkgutil
import platform
import re
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from syncbn import convert_sync_batchnorm, explain_fusion
from syncbn.distributed.passes import library_missing
from syncbn.modules import SyncBatchNorm
from syncbn.ops._extension import build_info, cuda_missing, device_types


def info() -> dict[str, str]:
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
        "training pass": f"Python: {library_missing}" if library_missing else "C++",
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


def make_model(name: str) -> nn.Module:
    """Return the model that a dotted path makes, or torchvision's of this name, untrained."""
    if "." in name:
        make = pkgutil.resolve_name(name)
    else:
        try:
            models = importlib.import_module("torchvision.models")
        except ImportError as error:
            raise ImportError(
                "a name without a dot is a model of torchvision, which cannot be imported "
                f"({error}); pip install torchvision, or give a dotted path"
            ) from None
        make = models.get_model_builder(name)
    parameters = inspect.signature(make).parameters
    needed = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"it needs arguments ({', '.join(needed)}); write a function that calls it with them, "
            "and give the path of the function"
        )
    # By default torchvision's detectors download these.
    downloads = {"weights_backbone"} & parameters.keys()
    model = make(**dict.fromkeys(downloads))
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected it to return a torch.nn.Module, but got {type(model).__name__}")
    return model


def explain(model: nn.Module) -> str:
    """Convert a model, and return a table of its batch normalization layers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_sync_batchnorm(model)
    report = explain_fusion(model)
    fused = {layer.name: f"{'+ ' * layer.residual}{layer.activation}" for layer in report.fused}
    reasons = {layer.name: layer.reason for layer in report.left}
    for warning in caught:  # of the layers that stay
        found = re.fullmatch(r"the \w+ '(.*?)' (.*)", str(warning.message))
        if found:
            reasons[found[1]] = found[2]
        else:
            warnings.warn(warning.message, stacklevel=2)
    rows = [("layer", "converted to", "fused with", "why not")]
    converted = 0
    for name, layer in model.named_modules():
        if name in fused or name in reasons:
            is_converted = isinstance(layer, SyncBatchNorm)
            converted += is_converted
            cls = type(layer).__name__ if is_converted else ""
            rows.append((name, cls, fused.get(name, ""), reasons.get(name, "")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)] + [0]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    total = f"{converted} of {len(rows) - 1} layers converted, {len(fused)} fused"
    return "\n".join([*lines, total])


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m syncbn", description="Describe this build, or a model's layers."
    )
    parser.add_argument("--version", action="version", version=f"syncbn {build_info['version']}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("info", help="print the facts for a bug report")
    about = "print which layers of a model convert and fuse, and the reason why others stay"
    explainer = commands.add_parser("explain", help=about, description=about)
    explainer.add_argument(
        "model",
        metavar="MODEL",
        help="the name of a torchvision model, such as resnet18, or the dotted path of a class or "
        "function that makes a model without arguments, such as package.module.Model",
    )
    args = parser.parse_args()
    if args.command is None:
        parser.print_help()
        return
    if args.command == "info":
        for name, value in info().items():
            print(f"{name + ':':<16}{value}")
        return
    try:
        print(explain(make_model(args.model)))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        explainer.error(f"cannot explain {args.model!r}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
