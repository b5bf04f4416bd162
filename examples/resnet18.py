"""torchvision's ResNet-18 under torchrun: syncbn with torch.compile, mixed precision and resume.

    pip install torchvision tqdm
    torchrun --nproc-per-node 2 examples/resnet18.py
    torchrun --nproc-per-node 8 examples/resnet18.py --data IMAGENET --epochs 90

IMAGENET is a folder that holds train/CLASS/IMAGE and val/CLASS/IMAGE. Without it the images are
made up, a picture for each class under noise. Trains on GPUs if there are some (NCCL, float16 with
loss scaling), else on CPUs (gloo, bfloat16). torch.compile takes minutes before the first step;
TORCH_COMPILE_DISABLE=1 leaves it out. After each epoch rank 0 writes a checkpoint, and the same
command goes on from it as if it had not been interrupted.

The line that it takes to train with syncbn is marked.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

import syncbn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
MADE_UP_CLASSES = 10
LOSS_EVERY = 10  # steps; to print it is to wait for the GPU


class MadeUpImages(Dataset[tuple[Tensor, int]]):
    """Images that are the picture of their class under noise, the same for the same index."""

    def __init__(self, indices: range, size: int, transform: v2.Transform | None) -> None:
        """Take the images of these indices, squares of ``size`` pixels."""
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(MADE_UP_CLASSES, 3, 4, 4, generator=generator)
        self.pictures = F.interpolate(coarse, (size, size), mode="bicubic")
        self.indices, self.transform = indices, transform

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Return an image and its class."""
        index = self.indices[number]
        label = index % MADE_UP_CLASSES
        noise = torch.Generator().manual_seed(index)
        image = self.pictures[label] + torch.randn(self.pictures[0].shape, generator=noise)
        return (image if self.transform is None else self.transform(image)), label


def make_data(args: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Return the images for training and for testing, and the number of classes."""
    size = args.image_size
    if args.data is None:
        vary = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])
        train = MadeUpImages(range(args.images), size, vary)
        test = MadeUpImages(range(args.images, args.images + args.images // 4), size, None)
        return train, test, MADE_UP_CLASSES
    as_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    vary = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *as_tensor])
    cut = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *as_tensor])
    folder = ImageFolder(args.data / "train", vary)
    return folder, ImageFolder(args.data / "val", cut), len(folder.classes)


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Return the share of test images, of all ranks, that are recognized."""
    net.eval()
    right = torch.zeros(2, device=device)  # recognized, all
    for images, labels in loader:
        # No rank waits for another here, and they may have different numbers of batches: in
        # evaluation syncbn sends nothing, and this is the net without DistributedDataParallel.
        found = net(images.to(device)).argmax(1).cpu()
        right += torch.tensor([(found == labels).sum(), len(labels)], device=device)
    dist.all_reduce(right)
    net.train()
    return (right[0] / right[1]).item()


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint so that whoever ends this process leaves the old one or the new one."""
    beside = path.with_name(f"{path.name}.new")
    torch.save(checkpoint, beside)
    os.replace(beside, path)


def batches(loader: DataLoader[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the batches on the device, in the memory format that convolutions like."""
    for images, labels in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        yield images, labels.to(device, non_blocking=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train, from the checkpoint on if there is one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, test_data, classes = make_data(args)
    sampler: DistributedSampler[Any] = DistributedSampler(data, drop_last=True)
    how = {"batch_size": args.batch_size, "num_workers": args.workers}
    on_cuda = device.type == "cuda"
    loader = DataLoader(data, sampler=sampler, drop_last=True, pin_memory=on_cuda, **how)
    shard = Subset(test_data, range(rank, len(test_data), ranks))  # type: ignore[arg-type]
    test_loader = DataLoader(shard, **how)

    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=classes)
    net = syncbn.convert_sync_batchnorm(net)  # syncbn
    net.to(device=device, memory_format=torch.channels_last)
    # All ranks hold the same statistics: no need to broadcast those of rank 0 before each step.
    model = torch.compile(DistributedDataParallel(net, broadcast_buffers=False))

    lr = args.lr * args.batch_size * ranks / 256
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)  # a tenth, every 30 epochs
    # float16 has small gradients scaled; a step that overflows is left out. bfloat16 needs neither.
    dtype = torch.float16 if on_cuda else torch.bfloat16
    scaler = GradScaler(device.type, enabled=on_cuda)

    done = 0
    parts: dict[str, Any]
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    if args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        done = checkpoint["epochs"]
        if rank == 0:
            print(f"goes on after epoch {done} of {args.checkpoint}", flush=True)

    for epoch in range(done + 1, args.epochs + 1):
        # Which images, and how they are varied, follows from epoch and rank: no generator's state
        # has to be in a checkpoint.
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * ranks + rank)
        bar = tqdm(batches(loader, device), f"epoch {epoch}", len(loader), disable=rank != 0)
        for step, (images, labels) in enumerate(bar):
            with torch.autocast(device.type, dtype):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % LOSS_EVERY == 0:
                bar.set_postfix_str(f"loss {loss.item():.3f}")
        schedule.step()

        recognized = evaluate(net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: {recognized:.1%} of the test images recognized", flush=True)
            states = {name: part.state_dict() for name, part in parts.items()}
            save(args.checkpoint, {"epochs": epoch, **states})


def main() -> None:
    """Read the options, and train on this rank's device."""
    parser = argparse.ArgumentParser(description="Trains ResNet-18 under torchrun.")
    parser.add_argument("--data", type=Path, help="folder of train/ and val/; else made-up images")
    parser.add_argument("--images", type=int, default=2048, help="made-up ones for training")
    parser.add_argument("--image-size", type=int, default=224, help="in pixels")
    parser.add_argument("--batch-size", type=int, default=32, help="on each rank")
    parser.add_argument("--epochs", type=int, default=3, help="in all, with those of a checkpoint")
    parser.add_argument("--lr", type=float, default=0.1, help="for 256 images a step; is scaled")
    parser.add_argument("--workers", type=int, default=2, help="that load images, on each rank")
    parser.add_argument("--checkpoint", type=Path, default=Path("resnet18.pt"))
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # In a function of its own: DistributedDataParallel must be gone before its group, or a process
    # can hang when it ends (pytorch issue 56297).
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
