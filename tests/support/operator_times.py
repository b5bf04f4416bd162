"""A program that prints the time of each CPU operator, in seconds, on values that caches hold."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from syncbn import ops

SILU = 3
NUM_ACTIVATIONS = 4
REPEATS = 30


def calls(x: Tensor, activation: int, with_residual: bool) -> Iterator[tuple[str, Callable]]:
    """The operators of one forward and backward pass, by name."""
    own = torch.ops.syncbn
    channels = x.size(1)
    constants = x.new_empty(2 * channels, dtype=torch.float64) if activation else None
    following = {"activation": activation, "negative_slope": 0.0}
    if not activation and not with_residual:
        yield "stats", lambda: ops.usual.batch_norm_stats(x)
    normalization = (x, ops.usual.batch_norm_stats(x), None, None, None, None, None, 0.1, 1e-5)
    residual = x if with_residual else None

    def apply() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return own.batch_norm_apply(
            *normalization, residual=residual, constants=constants, **following
        )

    yield "apply", apply
    output, mean, invstd, count = apply()
    reduction = (x, x, mean, invstd, x.dtype, x.dtype, None)
    if activation and with_residual:
        sources = (constants, x, None) if activation == SILU else (None, None, output)
        arguments = (*reduction, sources[0], activation, 0.0, *sources[1:])
        yield "backward_reduce", lambda: own.batch_norm_backward_reduce_dz(*arguments)
    elif not with_residual:
        passed = {"constants": constants, **following}
        sums = own.batch_norm_backward_reduce(*reduction, **passed)[0]
        yield "backward_reduce", lambda: own.batch_norm_backward_reduce(*reduction, **passed)
        of_input = (x, x, mean, invstd, None, sums, count)
        yield "backward_apply", lambda: own.batch_norm_backward_apply(*of_input, **passed)


def shortest_time(call: Callable) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(4, 64, 28, 28).to(dtype).contiguous(memory_format=layout)
            for activation in range(NUM_ACTIVATIONS):
                for residual in (False, True):
                    for operator, call in calls(x, activation, residual):
                        case = f"{operator}, {dtype}, {layout}, {activation=}, {residual=}"
                        print(case, shortest_time(call), sep=": ")


if __name__ == "__main__":
    main()
