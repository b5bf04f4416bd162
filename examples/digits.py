"""Small batches on several ranks: BatchNorm per rank, syncbn, and one process with all images.

    pip install matplotlib scikit-learn tqdm
    torchrun --nproc-per-node 2 examples/digits.py

Trains one small net on scikit-learn's digits three times, from the same parameters, with the same
images in the same order:

(a) BatchNorm under DistributedDataParallel: each rank normalizes by its own 3 images.
(b) syncbn under DistributedDataParallel: each rank normalizes by the images of all ranks.
(c) BatchNorm in one process that gets the images of all ranks at once.

Prints each training's test accuracy and loss and its difference from (c), and draws the curves. (a)
is worse: its last BatchNorm, over maps of one pixel, has 3 values per channel. (b) equals (c) up to
rounding; if the first step differs by more, the exit status is 1. At the end (b) and (c) are still
close, except with one rank: training on batches of 3 amplifies any rounding.

Comments mark the three lines that syncbn needs.
"""

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

import syncbn

PER_RANK = 3
EPOCHS = 3
TRAIN = 1200  # images of the 1797; the others are for testing
EVALUATE_EVERY = 25

# The compared values are around 1 and differ by the order of additions: after the first step by at
# most 1 epsilon in our measurements. BatchNorm per rank differs by 10,000 epsilons or more.
TOLERANCE = 8 * torch.finfo(torch.float32).eps


class Run(NamedTuple):
    """The results of a training."""

    name: str
    states: list[Tensor]  # parameters and statistics after the first step, the same at the end
    points: list[tuple[int, float, float]]  # step, test accuracy, test loss


def make_net(seed: int) -> nn.Module:
    """Return a net with ordinary BatchNorm; equal seeds give equal nets."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU()),
        *(nn.Conv2d(32, 64, 4, bias=False), nn.BatchNorm2d(64), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return accuracy and loss, with the running statistics."""
    output = net.eval()(images)
    net.train()
    accuracy = (output.argmax(1) == labels).float().mean().item()
    return accuracy, F.cross_entropy(output, labels).item()


def train(name: str, model: nn.Module, images: Tensor, labels: Tensor, batches: Tensor) -> Run:
    """Train ``model``; each row of ``batches`` has the indices of one step's images."""
    # Only rank 0 evaluates: DistributedDataParallel would wait for the other ranks.
    net = model.module if isinstance(model, DistributedDataParallel) else model
    quiet = dist.is_initialized() and dist.get_rank() != 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    run = Run(name, [], [])
    bar = tqdm(batches, name, disable=quiet)
    for step, batch in enumerate(bar, 1):
        # DistributedDataParallel averages the gradients of the ranks. All ranks have equally many
        # images, so the average is the gradient of the mean over the whole batch.
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, len(batches)):
            for tensors in (net.parameters(), net.buffers()):
                run.states.append(torch.cat([tensor.detach().flatten() for tensor in tensors]))
        if not quiet and (step % EVALUATE_EVERY == 0 or step == len(batches)):
            run.points.append((step, *evaluate(net, images[TRAIN:], labels[TRAIN:])))
            bar.set_postfix_str(f"test accuracy {run.points[-1][1]:.1%}")
    return run


def differences(run: Run, other: Run) -> list[float]:
    """Return the largest difference of each state."""
    return [(a - b).abs().max().item() for a, b in zip(run.states, other.states, strict=True)]


def draw(runs: list[Run], path: str) -> None:
    """Draw test accuracy and loss over the steps."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for column, axes in enumerate(figure.subplots(1, 2), 1):
        for run, style in zip(runs, ("-", "-", "k:"), strict=True):
            x, y = [point[0] for point in run.points], [point[column] for point in run.points]
            axes.plot(x, y, style, label=run.name)
        axes.set(xlabel="step", ylabel=("", "test accuracy", "test loss")[column])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train in three ways, and compare."""
    parser = argparse.ArgumentParser(
        description="Trains digits in three ways and draws the curves.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", default="digits.png", help="where to draw the curves")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node 2 examples/digits.py")
    folder = Path(args.output).parent
    if not folder.is_dir():
        parser.error(f"--output: there is no folder {folder}; create it or name another")

    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")  # syncbn, 1 of 3
    rank, ranks = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    torch.manual_seed(args.seed)
    order = torch.randperm(len(digits.images))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    steps = EPOCHS * TRAIN // (ranks * PER_RANK)
    order = torch.cat([torch.randperm(TRAIN) for _ in range(EPOCHS)])
    batches = order[: steps * ranks * PER_RANK].view(steps, ranks, PER_RANK)

    each = f"{ranks} x {PER_RANK} images"
    model = DistributedDataParallel(make_net(args.seed))
    local = train(f"(a) BatchNorm, {each}", model, images, labels, batches[:, rank])

    net = syncbn.convert_sync_batchnorm(make_net(args.seed))  # syncbn, 2 of 3
    model = DistributedDataParallel(net)  # syncbn, 3 of 3
    synced = train(f"(b) syncbn, {each}", model, images, labels, batches[:, rank])

    dist.destroy_process_group()
    if rank != 0:
        return
    name = f"(c) BatchNorm, 1 x {ranks * PER_RANK} images"
    whole = train(name, make_net(args.seed), images, labels, batches.flatten(1))

    print("\n                                  test            largest difference from (c)")
    print("                                               after the first step        at the end")
    print("                            accuracy    loss" + "  parameters  statistics" * 2)
    for run in (local, synced, whole):
        _, accuracy, loss = run.points[-1]
        numbers = "".join(f"{difference:12.1e}" for difference in differences(run, whole))
        print(f"{run.name:28}{accuracy:8.1%}{loss:8.3f}{numbers}")
    draw([local, synced, whole], args.output)
    print(f"\nThe curves are in {args.output}.")

    after_first_step = differences(synced, whole)[:2]
    if not all(difference <= TOLERANCE for difference in after_first_step):
        raise SystemExit(f"(b) and (c) differ by more than {TOLERANCE:.1e} after the first step")


if __name__ == "__main__":
    main()
