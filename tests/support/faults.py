"""What one rank may do differently in a training step, and what then becomes of all ranks.

Each :class:`Fault` is a row of docs/failures.md and is tested by tests/ranks/test_faults.py. The
last rank differs, in the third step of the program in ``trial.py``.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from trial import CHANNELS, FIRST_HALF, SAME_CHANNELS, Training, hold, network

from syncbn import convert_sync_batchnorm, ops


@dataclass(frozen=True)
class Fate:
    """What a rank gets: a pattern of its error's class and words, and words for the document.

    ``{where}`` in the pattern is forward, backward or recomputation, ``{pass}`` the same as a noun.
    """

    pattern: str
    words: str
    own: bool = False  # not of the library: without its layer and rank


CHANNELS_DIFFER = r"ValueError: expected the same channels on all ranks"
WITHDRAWN = r"RuntimeError: another rank of the process group withdrew from this {pass}"
PASSES_DIFFER = r"RuntimeError: the ranks run different passes: this rank runs .*rank \d"

goes_on = Fate("", "goes on")
withdrawn = Fate(
    rf"{WITHDRAWN}.*rank \d: OutOfMemoryError: CUDA out of memory",
    "at once: “another rank of the process group withdrew”, with the words of its error",
)
disagreement = Fate(PASSES_DIFFER, "at once: “the ranks run different passes”, and which two")
other_channels = Fate(
    f"{CHANNELS_DIFFER}|{WITHDRAWN}",
    "at once: “expected the same channels on all ranks”, and both numbers",
)
# Two layers of other sizes: which of both is found first is the library's choice.
disagreement_or_channels = Fate(
    f"{PASSES_DIFFER}|{CHANNELS_DIFFER}|{WITHDRAWN}",
    "at once: “the ranks run different passes” or “expected the same channels”",
)
communication = Fate(
    r"RuntimeError: the {where} all-reduce of a SyncBatchNorm layer failed: another rank has "
    r"failed, left, did not come in time or runs another layer",
    "at the group's timeout: “the all-reduce of a SyncBatchNorm layer failed”",
)
loss_of_connection = Fate(
    communication.pattern, "at once: “the all-reduce of a SyncBatchNorm layer failed”"
)
user_error = Fate(r"ValueError: the words of a user's layer$", "its own error", own=True)
out_of_memory = Fate(
    r"OutOfMemoryError: CUDA out of memory\. syncbn tried to allocate", "its own error"
)
interrupt = Fate(r"KeyboardInterrupt: $", "KeyboardInterrupt, once the collective ends", own=True)
gone = Fate("", "is gone")

EAGER = ((2, "eager"), (3, "eager"))
COMPILED = ((2, "compiled"),)
CHECKPOINTED = ((3, "checkpointed"),)
EVERYWHERE = EAGER + COMPILED + CHECKPOINTED
SELDOM = ((3, "eager"), *COMPILED)  # of what waits for seconds

WAITING_SECONDS = 5  # of a group's timeout


def train(training: Training, where: str) -> None:
    training.step()


@dataclass(frozen=True)
class Fault:
    """``differs`` and ``others_do`` are the step of the rank that differs and of the others."""

    name: str
    what: str
    differs: Callable[[Training, str], None]
    that_rank: Fate
    others: Fate
    advice: str
    where: tuple[str, ...] = ("forward",)
    ways: tuple[tuple[int, str], ...] = EVERYWHERE  # ranks and mode
    others_do: Callable[[Training, str], None] = train
    prepare: Callable[[Training], None] = lambda training: None
    channels: tuple[int, ...] = CHANNELS
    waits: bool = False  # for the group's timeout: nobody can know before
    leaves: bool = False  # is no member of the group that is made afterwards
    ends: str = ""  # how its process does
    resume: Callable[..., None] | None = None
    # By ``where``: what the others run and what that rank runs, which errors say in eager mode.
    passes: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def timeout(self) -> int:
        """Seconds, of the group."""
        return WAITING_SECONDS if self.waits else 20

    def cases(self) -> list[tuple[str, int, str]]:
        """Return where, number of ranks and mode of each case."""
        return [
            (where, world_size, mode)
            for where in self.where
            for world_size, mode in (CHECKPOINTED if where == "recomputation" else self.ways)
        ]


# Other layers.

SAME_MODEL = "build and run the same layers in the same order on all ranks"


def use_other_channels(training, where):
    training.use(convert_sync_batchnorm(network((6, 8, 6, 10))))
    training.step()


def run_layers(names):
    def step(training, where):
        training.arrange(names)
        training.step()

    return step


TWICE = f"{FIRST_HALF} linear3 norm3 norm3 linear4 norm4"
EXCHANGED = f"{FIRST_HALF} linear3 norm4 linear4 norm3"
SKIPPED = f"{FIRST_HALF} linear3 linear4 norm4"

FAULTS = [
    Fault(
        "channels",
        "has 6 channels in a layer that has 4 elsewhere",
        use_other_channels,
        other_channels,
        other_channels,
        SAME_MODEL,
    ),
    Fault(
        "fewer",
        "has fewer layers",
        run_layers(FIRST_HALF),
        disagreement,
        disagreement,
        SAME_MODEL,
        passes={
            "forward": ("the forward pass of layer 'norm3'", "the backward pass of layer 'norm2'")
        },
    ),
    Fault(
        "more",
        "has more layers",
        train,
        disagreement,
        disagreement,
        SAME_MODEL,
        others_do=run_layers(FIRST_HALF),
        passes={
            "forward": ("the backward pass of layer 'norm2'", "the forward pass of layer 'norm3'")
        },
    ),
    Fault(
        "order",
        "runs two layers of one size in another order",
        run_layers(EXCHANGED),
        disagreement,
        disagreement,
        SAME_MODEL,
        channels=SAME_CHANNELS,
        passes={
            "forward": ("the forward pass of layer 'norm3'", "the forward pass of layer 'norm4'")
        },
    ),
    Fault(
        "twice",
        "runs a layer twice; the next one has the same size",
        run_layers(TWICE),
        disagreement,
        disagreement,
        SAME_MODEL,
        channels=SAME_CHANNELS,
        passes={
            "forward": ("the forward pass of layer 'norm4'", "the forward pass of layer 'norm3'")
        },
    ),
    Fault(
        "twice-sizes",
        "runs a layer twice; the next one has another size",
        run_layers(TWICE),
        disagreement_or_channels,
        disagreement_or_channels,
        SAME_MODEL,
    ),
    Fault(
        "skip",
        "skips a layer; the next one has the same size",
        run_layers(SKIPPED),
        disagreement,
        disagreement,
        SAME_MODEL,
        channels=SAME_CHANNELS,
        passes={
            "forward": ("the forward pass of layer 'norm3'", "the forward pass of layer 'norm4'")
        },
    ),
    Fault(
        "skip-sizes",
        "skips a layer; the next one has another size",
        run_layers(SKIPPED),
        disagreement_or_channels,
        disagreement_or_channels,
        SAME_MODEL,
    ),
]


# Passes that one rank does not make.

AFTERWARDS = ("the backward pass of layer 'norm4'", "the forward pass of layer 'norm1'")


def evaluate(training, where):
    training.model.eval()
    training.step()
    training.model.train()


def stay_without_gradients(training, where):
    with torch.no_grad():
        training.forward()


def go_on_without_gradients(training, where):
    stay_without_gradients(training, where)
    training.step()


def go_on_with_detached_output(training, where):
    training.forward().detach().requires_grad_().square().sum().backward()
    training.step()


def toggle_checkpointing(training, where):
    training.mode = "eager" if training.mode == "checkpointed" else "checkpointed"
    training.step()


FAULTS += [
    Fault(
        "eval",
        "runs its model in `eval()`",
        evaluate,
        goes_on,
        communication,
        "call `train()` and `eval()` on all ranks alike",
        ways=SELDOM,
        waits=True,
    ),
    Fault(
        "no-grad",
        "runs its model under `no_grad()`, then the next step",
        go_on_without_gradients,
        disagreement,
        disagreement,
        "differentiate on all ranks or on none",
        passes={"forward": AFTERWARDS},
    ),
    Fault(
        "no-grad-at-the-end",
        "runs its model under `no_grad()` in its last step",
        stay_without_gradients,
        goes_on,
        communication,
        "differentiate on all ranks or on none",
        where=("backward",),
        ways=SELDOM,
        waits=True,
    ),
    Fault(
        "detached",
        "detaches the output, then runs the next step",
        go_on_with_detached_output,
        disagreement,
        disagreement,
        "multiply a loss that must not count by 0",
        passes={"forward": AFTERWARDS},
    ),
    Fault(
        "checkpoint",
        "alone uses activation checkpointing, or alone does not",
        toggle_checkpointing,
        disagreement,
        disagreement,
        "checkpoint the same layers on all ranks",
        ways=EVERYWHERE,
        passes={
            "forward": ("the backward pass of layer 'norm4'", "the recomputation of layer 'norm1'")
        },
    ),
]


# Errors on one rank.

ANYWHERE = ("forward", "backward", "recomputation")


def fail():
    raise ValueError("the words of a user's layer")


def raise_in_another_layer(training, where):
    training.steps_at(where, fail)


def raise_and_destroy_the_group(training, where):
    try:
        training.steps_at(where, fail)
    finally:
        dist.destroy_process_group()


def catch_and_go_on(training, where):
    try:
        training.steps_at(where, fail)
    except ValueError:
        training.step()


def run_out(stage):
    """Let the next call of an operator find no memory."""
    name = f"_batch_norm_{stage}"
    original = getattr(ops, name)

    def refuse(*args):
        setattr(ops, name, original)
        raise RuntimeError("CUDA out of memory. syncbn tried to allocate 8 bytes on device 0")

    setattr(ops, name, refuse)


def run_out_before(training, where):
    stage = "backward_reduce" if where == "backward" else "stats"
    training.steps_at(where, lambda: run_out(stage))


def run_out_after(training, where):
    stage = "backward_apply" if where == "backward" else "apply"
    training.steps_at(where, lambda: run_out(stage))


def interrupt_while_waiting(training, where):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    training.steps_at(where, timer.start)


def come_late(training, where):
    training.steps_at(where, lambda: time.sleep(1))


AFTER_MEMORY = "as above; the others wait for it in the next layer"

FAULTS += [
    Fault(
        "user-error",
        "raises in another layer",
        raise_in_another_layer,
        user_error,
        communication,
        "let a rank that fails end, or destroy its group: the others then know at once",
        where=ANYWHERE,
        ways=SELDOM,
        waits=True,
    ),
    Fault(
        "user-error-destroys",
        "raises in another layer and calls `destroy_process_group()`",
        raise_and_destroy_the_group,
        user_error,
        loss_of_connection,
        "go on in a new group",
        where=ANYWHERE,
        ways=EAGER
        + CHECKPOINTED,  # a graph compiled by torch 2.15 holds its group, and connections
    ),
    Fault(
        "user-error-caught",
        "raises in another layer, catches that and runs the next step",
        catch_and_go_on,
        disagreement_or_channels,
        disagreement_or_channels,
        "let all ranks skip a step together",
        where=ANYWHERE,
        passes={
            "backward": ("the backward pass of layer 'norm2'", "the forward pass of layer 'norm1'")
        },
    ),
    Fault(
        "memory-before",
        "runs out of memory in the layer, before its collective",
        run_out_before,
        out_of_memory,
        withdrawn,
        "catch the errors on all ranks, and go on in a new group",
        where=ANYWHERE,
    ),
    Fault(
        "memory-after",
        "runs out of memory in the layer, after its collective",
        run_out_after,
        out_of_memory,
        communication,
        AFTER_MEMORY,
        where=("forward", "recomputation"),
        ways=SELDOM,
        waits=True,
    ),
    Fault(
        "memory-after-backward",
        "runs out of memory in the layer, after its collective",
        run_out_after,
        out_of_memory,
        communication,
        AFTER_MEMORY,
        where=("backward",),
        ways=((3, "eager"),),  # compiled, the gradient is made of operators of torch's
        waits=True,
    ),
    Fault(
        "interrupt",
        "is interrupted (SIGINT) while it waits in the layer",
        interrupt_while_waiting,
        interrupt,
        communication,
        "interrupt all ranks",
        where=("forward", "backward"),
        ways=SELDOM,
        others_do=come_late,
        waits=True,
    ),
]


# Ends of a process.


def ends_by(end):
    def differs(training, where):
        if where == "between":
            training.forward()
            end()
        training.steps_at(where, end)

    return differs


def signalled(number):
    return lambda: os.kill(os.getpid(), number)


ENDS = {
    "exit code 0": lambda: os._exit(0),
    "exit code 3": lambda: os._exit(3),
    "SIGABRT": os.abort,
    "SIGKILL": signalled(signal.SIGKILL),
    "SIGTERM": signalled(signal.SIGTERM),
}


def resume(process):
    os.kill(int(process.read_text()), signal.SIGCONT)


FAULTS += [
    Fault(
        name.replace(" ", "-"),
        "ends: by `exit(0)` or another code, abort, SIGKILL or SIGTERM",
        ends_by(end),
        gone,
        loss_of_connection,
        "read the words of the rank that ended; start again from a checkpoint",
        where=(*ANYWHERE, "between"),
        ways=EVERYWHERE if name == "SIGKILL" else EAGER,
        leaves=True,
        ends=name,
    )
    for name, end in ENDS.items()
]
FAULTS += [
    Fault(
        "SIGSTOP",
        "is stopped (SIGSTOP) for longer than the group's timeout",
        ends_by(signalled(signal.SIGSTOP)),
        Fate(communication.pattern, "when it goes on: the same"),
        communication,
        "give the group a timeout above the longest pause",
        where=("forward", "backward"),
        ways=((3, "eager"),),
        waits=True,
        leaves=True,
        resume=resume,
    ),
]


# Groups.


def hold_group_of_all(training):
    hold(training, dist.new_group())


def destroy_group(training, where):
    dist.destroy_process_group(training.model.norm1.process_group)
    training.step()


def hold_group_of_others(training, where):
    hold(training, dist.new_group(range(dist.get_world_size() - 1)))
    training.step()


FAULTS += [
    Fault(
        "destroyed-group",
        "has destroyed the group that its layers hold",
        destroy_group,
        Fate(r"(Value|Runtime)Error: .*group", "an error that names the layer and the group"),
        communication,
        "destroy a group after the last step",
        ways=SELDOM,
        prepare=hold_group_of_all,
        waits=True,
    ),
    Fault(
        "not-a-member",
        "is no member of the group that its layers hold",
        hold_group_of_others,
        Fate(
            r"ValueError: rank \d is not a member of this layer's process_group",
            "“rank 2 is not a member of this layer's process_group”",
        ),
        goes_on,
        "give each rank a group that it is in",
        others_do=hold_group_of_others,
    ),
]
