"""A small training program on each rank. One rank differs in its third step.

`faults.py` defines the step. Tensors are float64, and so small that steps take no time.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from syncbn import convert_sync_batchnorm

FEATURES = 5
CHANNELS = (6, 8, 4, 10)
SAME_CHANNELS = (4, 4, 4, 4)
FIRST_HALF = "linear1 norm1 linear2 norm2 point"


class Point(nn.Module):
    """A user's layer that runs an action once, in its forward, backward or recomputation."""

    def __init__(self):
        super().__init__()
        self.actions = {}

    def forward(self, x):
        in_backward = torch._C._current_graph_task_id() != -1
        self.act("recomputation" if in_backward else "forward")
        return _Identity.apply(x, self)

    def act(self, where):
        self.actions.pop(where, lambda: None)()


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, point):
        ctx.point = point
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.point.act("backward")
        return grad, None


def network(channels):
    """Return an unconverted model; the point is between its second and third layer."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for number, (before, after) in enumerate(
        zip((FEATURES, *channels), channels, strict=False), start=1
    ):
        model.add_module(f"linear{number}", nn.Linear(before, after))
        model.add_module(f"norm{number}", nn.BatchNorm1d(after))
        if number == 2:
            model.add_module("point", Point())
    return model.double()


def batch(rank, step):
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    x = torch.rand(7, FEATURES, dtype=torch.float64, generator=generator, device="cpu")
    device = torch.get_default_device()
    # Only pinned memory is copied without a wait of the host.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Training:
    """The program of a rank; ``mode`` is eager, compiled or checkpointed.

    The layers before the point and those after it are compiled, each as one graph.
    """

    def __init__(self, rank, mode, channels=CHANNELS):
        self.rank, self.mode, self.steps = rank, mode, 0
        self.use(convert_sync_batchnorm(network(channels)))

    def use(self, model):
        self.model, parts = model, list(model)
        middle = [isinstance(part, Point) for part in parts].index(True)
        halves = [nn.Sequential(*parts[:middle]), nn.Sequential(*parts[middle + 1 :])]
        if self.mode == "compiled":
            halves = [torch.compile(half, backend="aot_eager") for half in halves]
        self.run = nn.Sequential(halves[0], parts[middle], halves[1])
        self.before = self.buffers()

    def arrange(self, names):
        """Run the layers of these names in this order."""
        parts = [(name, self.model.get_submodule(name)) for name in names.split()]
        self.use(nn.Sequential(*(part for _, part in parts)))

    def buffers(self):
        """Return running_mean, running_var and num_batches_tracked of each layer by its name."""
        layers = [m for m in self.model.modules() if hasattr(m, "running_mean")]
        return {
            layer._syncbn.identity.name: (
                layer.running_mean.tolist(),
                layer.running_var.tolist(),
                int(tracked),
            )
            for layer in layers
            if (tracked := layer.num_batches_tracked) is not None
        }

    def forward(self):
        self.steps += 1
        x = batch(self.rank, self.steps).requires_grad_()
        if self.mode == "checkpointed":
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def step(self):
        self.output = self.forward()  # kept until the next step, with its graph, as in most loops
        self.output.square().sum().backward()

    def steps_at(self, where, action):
        """Run a step in which the point runs ``action``."""
        self.model.point.actions[where] = action
        self.step()


def run(rank, world_size, fault, where, mode, folder):
    """Run two ordinary steps and the step of a fault; return this rank's outcome."""
    folder = Path(folder)
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    training = Training(rank, mode, fault.channels)
    fault.prepare(training)
    training.step()
    training.step()
    training.before = training.buffers()
    if not is_late():  # there torch's watchdog would end the process at the timeout
        # Only now: compilers take seconds, more on one rank than on the other.
        set_timeout(training, fault.timeout)
    last = world_size - 1
    error = ""
    begin = time.monotonic()
    try:
        if rank == last:
            fault.differs(training, where)
        else:
            fault.others_do(training, where)
        if is_late():
            must_hear = fault.others.late.pattern.startswith("RuntimeError")
            continues = rank != last or not fault.stops
            hear(training, continues, HEAR_SECONDS if must_hear else 0)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - begin
    survivors = range(last if fault.leaves else world_size)
    renewed = renew(rank, survivors, folder) if rank in survivors else ""
    if rank == 0 and fault.resume is not None:
        fault.resume(folder / f"process-{last}")
    return {
        "error": error,
        "seconds": seconds,
        "before": training.before,
        "after": training.buffers(),  # read last: a device that waits for others has no values
        "renewed": renewed,
    }


# Over NCCL, where a host learns of a failure in a later pass.

LATE_STEPS = 8  # after the step of a fault
DEVICE_SECONDS = 0.5  # by far more than a step takes
HEAR_SECONDS = 20  # by far more than ranks take to agree, and torch to import its compiler


def is_late():
    return dist.is_initialized() and dist.get_backend() == "nccl"


def has_device_arrived():
    """Whether the device has done all its work in time. The host never waits without a bound."""
    event = torch.cuda.current_stream().record_event()
    deadline = time.monotonic() + DEVICE_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def hear(training, continues, seconds):
    """Run further steps. In one of them the host may learn of a failure.

    The host polls its device after each step and does not wait for it, like a program that reads
    its loss only when the device has computed it. It continues for ``seconds`` while the device
    waits: another rank may be slow.
    """
    arrived, begin, num_steps = has_device_arrived(), time.monotonic(), 0
    while continues and (
        num_steps < LATE_STEPS or (not arrived and time.monotonic() < begin + seconds)
    ):
        training.step()
        num_steps += 1
        arrived = has_device_arrived()
    if not arrived:
        raise TimeoutError("the device waits for another rank")


def leave_group():
    """Destroy the group; over NCCL abort it if its collectives cannot end, or have failed."""
    if not is_late() or has_device_arrived():
        try:
            dist.destroy_process_group()
            return
        except dist.DistBackendError:  # raised by every call on a failed communicator
            pass
    dist.distributed_c10d._abort_process_group()


def set_timeout(training, seconds):
    # It has a public name in later versions of torch, which warn of the old one.
    set_one = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in {dist.group.WORLD, training.model.norm1.process_group or dist.group.WORLD}:
        set_one(timedelta(seconds=seconds), group)


def renew(rank, survivors, folder):
    """Train in a new group; return an error message, or nothing."""
    wait_for_each_other(rank, survivors, folder)
    try:
        training = train_in_new_group(rank, len(survivors), folder, "eager")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if is_of_whole_batch(training, [survivors]) else "other results"


def train_in_new_group(rank, world_size, folder, mode):
    backend = "nccl" if torch.get_default_device().type == "cuda" else "gloo"
    if dist.is_initialized():
        leave_group()
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "renewed"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10),
    )
    training = Training(rank, mode)
    training.step()
    return training


def wait_for_each_other(rank, survivors, folder):
    """Wait until all have left the step: the others notice a rank that destroys its group."""
    (folder / f"left-{rank}").touch()
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        if all((folder / f"left-{other}").exists() for other in survivors):
            return
        time.sleep(0.05)


def is_of_whole_batch(training, ranks_of_steps):
    """Whether the running statistics are those of one process with the batches of all ranks."""
    alone = network(CHANNELS)
    for step, ranks in enumerate(ranks_of_steps, start=1):
        alone(torch.cat([batch(rank, step) for rank in ranks]))
    return all(
        # float64 in another order
        torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        for ours, theirs in zip(training.model.buffers(), alone.buffers(), strict=True)
    )


def hold(training, group):
    """Give all layers this group."""
    for module in training.model.modules():
        if hasattr(module, "process_group"):
            module.process_group = group
