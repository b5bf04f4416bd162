"""Faults of a rank whose program is another: its layers, or the passes that it makes of them."""

import torch

from support.fault_case import (
    EVERYWHERE,
    ONCE,
    Fault,
    communication,
    disagreement,
    disagreement_or_channels,
    goes_on,
    other_channels,
    train,
)
from support.trial import FIRST_HALF, SAME_CHANNELS, network
from syncbn import convert_sync_batchnorm

# Other layers.


def differ(name, what, differs, fate, ways=ONCE, **options):
    """Return the fault of another program, of which all ranks hear the same."""
    advice = "build and run the same layers in the same order on all ranks"
    return Fault(name, what, differs, fate, fate, advice, ways=ways, **options)


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
    differ(
        "channels",
        "has 6 channels in a layer that has 4 on the others",
        use_other_channels,
        other_channels,
        EVERYWHERE,
    ),
    differ(
        "fewer",
        "has fewer layers",
        run_layers(FIRST_HALF),
        disagreement,
        passes={
            "forward": ("the forward pass of layer 'norm3'", "the backward pass of layer 'norm2'")
        },
    ),
    differ(
        "more",
        "has more layers",
        train,
        disagreement,
        others_do=run_layers(FIRST_HALF),
        passes={
            "forward": ("the backward pass of layer 'norm2'", "the forward pass of layer 'norm3'")
        },
    ),
    differ(
        "order",
        "runs two layers of one size in another order",
        run_layers(EXCHANGED),
        disagreement,
        EVERYWHERE,
        channels=SAME_CHANNELS,
        passes={
            "forward": ("the forward pass of layer 'norm3'", "the forward pass of layer 'norm4'")
        },
    ),
    differ(
        "twice",
        "runs a layer twice; the next one has the same size",
        run_layers(TWICE),
        disagreement,
        channels=SAME_CHANNELS,
        passes={
            "forward": ("the forward pass of layer 'norm4'", "the forward pass of layer 'norm3'")
        },
    ),
    differ(
        "twice-sizes",
        "runs a layer twice; the next one has another size",
        run_layers(TWICE),
        disagreement_or_channels,
    ),
    differ(
        "skip",
        "skips a layer; the next one has the same size",
        run_layers(SKIPPED),
        disagreement,
        channels=SAME_CHANNELS,
        passes={
            "forward": ("the forward pass of layer 'norm3'", "the forward pass of layer 'norm4'")
        },
    ),
    differ(
        "skip-sizes",
        "skips a layer; the next one has another size",
        run_layers(SKIPPED),
        disagreement_or_channels,
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
        ways=ONCE,
        waits=True,
    ),
    Fault(
        "no-grad",
        "runs its model under `no_grad()`, then the next step",
        go_on_without_gradients,
        disagreement,
        disagreement,
        "differentiate on all ranks or on none",
        ways=ONCE,
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
        ways=ONCE,
        waits=True,
        stops=True,
    ),
    Fault(
        "detached",
        "detaches the output, then runs the next step",
        go_on_with_detached_output,
        disagreement,
        disagreement,
        "multiply the loss by 0 instead",
        passes={"forward": AFTERWARDS},
    ),
    Fault(
        "checkpoint",
        "uses activation checkpointing and the others do not, or the reverse",
        toggle_checkpointing,
        disagreement,
        disagreement,
        "checkpoint the same layers on all ranks",
        passes={
            "forward": ("the backward pass of layer 'norm4'", "the recomputation of layer 'norm1'")
        },
    ),
]
