"""torchvision's ResNet-18 under torchrun: syncbn with torch.compile, mixed precision and resume.

    pip install torchvision tqdm
    torchrun --nproc-per-node 2 examples/resnet18.py
    torchrun --nproc-per-node 8 examples/resnet18.py --data IMAGENET --epochs 90

IMAGENET is a folder of train/CLASS/IMAGE and val/CLASS/IMAGE. Without it the images are synthetic:
a picture per class, with noise. Trains on GPUs if there are any (NCCL, float16 with loss scaling),
else on CPUs (gloo, bfloat16). torch.compile takes minutes before the first step;
TORCH_COMPILE_DISABLE=1 skips it. After each epoch rank 0 writes a checkpoint. The same command
resumes from it, with the results of an uninterrupted run.

A comment marks the line that syncbn needs.
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
SYNTHETIC_CLASSES = 10
LOSS_EVERY = 10  # steps; printing the loss waits for the GPU


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """Noisy pictures of classes; one index always gives the same image."""

    def __init__(self, indices: range, size: int, transform: v2.Transform | None) -> None:
        """Create the images of these indices, with ``size`` x ``size`` pixels."""
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(SYNTHETIC_CLASSES, 3, 4, 4, generator=generator)
        self.pictures = F.interpolate(coarse, (size, size), mode="bicubic")
        self.indices, self.transform = indices, transform

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Return an image and its class."""
        index = self.indices[number]
        label = index % SYNTHETIC_CLASSES
        noise = torch.Generator().manual_seed(index)
        image = self.pictures[label] + torch.randn(self.pictures[0].shape, generator=noise)
        return (image if self.transform is None else self.transform(image)), label


def make_data(args: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Return the training and test images, and the number of classes."""
    size = args.image_size
    if args.data is None:
        vary = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])
        train = SyntheticImages(range(args.images), size, vary)
        test = SyntheticImages(range(args.images, args.images + args.images // 4), size, None)
        return train, test, SYNTHETIC_CLASSES
    as_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    vary = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *as_tensor])
    cut = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *as_tensor])
    folder = ImageFolder(args.data / "train", vary)
    return folder, ImageFolder(args.data / "val", cut), len(folder.classes)


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Return the accuracy on the test images of all ranks."""
    net.eval()
    right = torch.zeros(2, device=device)  # correct images, all images
    for images, labels in loader:
        # Ranks may have different numbers of batches: no rank waits for another here. In evaluation
        # syncbn does not communicate, and this net is not wrapped in DistributedDataParallel.
        found = net(images.to(device)).argmax(1).cpu()
        right += torch.tensor([(found == labels).sum(), len(labels)], device=device)
    dist.all_reduce(right)
    net.train()
    return (right[0] / right[1]).item()


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint; an interrupted write leaves the old one."""
    beside = path.with_name(f"{path.name}.new")
    torch.save(checkpoint, beside)
    os.replace(beside, path)


def batches(loader: DataLoader[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches on the device, in channels-last layout for fast convolutions."""
    for images, labels in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        yield images, labels.to(device, non_blocking=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train; resume from the checkpoint if there is one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, test_data, classes = make_data(args)
    count = len(data)  # type: ignore[arg-type]
    if count < ranks * args.batch_size:
        raise SystemExit(
            f"expected a batch of {args.batch_size} images for each of {ranks} ranks, but got "
            f"{count} images; set --images higher or --batch-size lower"
        )
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
    model = torch.compile(DistributedDataParallel(net))

    lr = args.lr * args.batch_size * ranks / 256
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)  # x 0.1 every 30 epochs
    # float16 needs scaled gradients; a step that overflows is skipped. bfloat16 needs neither.
    dtype = torch.float16 if on_cuda else torch.bfloat16
    scaler = GradScaler(device.type, enabled=on_cuda)

    done = 0
    parts: dict[str, Any]
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    if args.checkpoint.exists():
        try:
            checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            done = checkpoint["epochs"]
        except Exception as error:  # depends on the file's contents
            raise SystemExit(
                f"--checkpoint: {args.checkpoint} is no checkpoint of this training "
                f"({type(error).__name__}); move it away or name another file"
            ) from error
        if rank == 0:
            print(f"resuming from {args.checkpoint}, after epoch {done}", flush=True)

    for epoch in range(done + 1, args.epochs + 1):
        # Epoch and rank determine the images and their augmentation, so a checkpoint needs no state
        # of a generator.
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

        accuracy = evaluate(net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: {accuracy:.1%} of the test images are correct", flush=True)
            states = {name: part.state_dict() for name, part in parts.items()}
            save(args.checkpoint, {"epochs": epoch, **states})


def main() -> None:
    """Read the options, and train on this rank's device."""
    parser = argparse.ArgumentParser(
        description="Trains ResNet-18 under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder of train/ and val/, or synthetic")
    parser.add_argument("--images", type=int, default=2048, help="synthetic training images")
    parser.add_argument("--image-size", type=int, default=224, help="in pixels")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--epochs", type=int, default=3, help="including those in the checkpoint")
    parser.add_argument("--lr", type=float, default=0.1, help="for 256 images a step, is scaled")
    parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("resnet18.pt"), help="to resume from and to write"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node 2 examples/resnet18.py")
    folder = args.checkpoint.parent
    if not folder.is_dir():
        parser.error(f"--checkpoint: there is no folder {folder}; create it or name another")

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # A separate function: DistributedDataParallel must be freed before its group is destroyed, or
    # the process can hang at exit (pytorch issue 56297).
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
