"""All faults: those of a rank's program, and of a rank that fails, ends, or loses its group.

Each fault is a row of docs/failures.md and is tested by tests/ranks/test_faults.py. The last rank
differs, in the third step of the program in ``trial.py``.
"""

import contextlib
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from support import ops, program_faults
from support.fault_case import (
    CHECKPOINTED,
    COMPILED,
    EAGER,
    EVERYWHERE,
    ONCE,
    SELDOM,
    Fate,
    Fault,
    aborted,
    communication,
    disagreement_or_channels,
    goes_on,
    gone,
    interrupt,
    loss_of_connection,
    out_of_memory,
    user_error,
)
from support.trial import hold

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


def hold_group_of_all(training):
    hold(training, dist.new_group())


def catch_and_go_on(training, where):
    try:
        training.steps_at(where, fail)
    except ValueError:
        training.step()


def refuse(*args):
    raise RuntimeError("CUDA out of memory. syncbn tried to allocate 8 bytes on device 0")


def run_out(training, where, *operators):
    """Let operators find no memory for the rest of the step."""
    with contextlib.ExitStack() as step:
        replaced = ops.replaced(**dict.fromkeys(operators, refuse))
        training.steps_at(where, lambda: step.enter_context(replaced))


def run_out_before(training, where):
    operator = "batch_norm_backward_reduce" if where == "backward" else "batch_norm_stats"
    run_out(training, where, operator)


def run_out_and_end(training, where):
    try:
        run_out_before(training, where)
    except torch.OutOfMemoryError:
        os._exit(1)  # as an uncaught error does


def run_out_after(training, where):
    operator = "batch_norm_backward_apply" if where == "backward" else "batch_norm_apply"
    run_out(training, where, operator, "verify_sums")  # the last one: compiled


def interrupt_while_waiting(training, where):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    training.steps_at(where, timer.start)


def come_late(training, where):
    training.steps_at(where, lambda: time.sleep(1))


AFTER_MEMORY = "the same; the others wait in the next layer"

# A graph that torch 2.15 has compiled holds its group, and so the connections.
UNCOMPILED = EAGER + CHECKPOINTED

FAULTS = list(program_faults.FAULTS)
FAULTS += [
    Fault(
        "user-error",
        "raises in another layer",
        raise_in_another_layer,
        user_error,
        communication,
        "end a failing rank, or destroy its group: the others then raise at once",
        where=ANYWHERE,
        ways=SELDOM,
        waits=True,
    ),
    *(
        Fault(
            name,
            "raises in another layer and calls `destroy_process_group()`",
            raise_and_destroy_the_group,
            user_error,
            loss_of_connection,
            "continue in a new group",
            where=ANYWHERE,
            ways=UNCOMPILED,
            prepare=prepare,
        )
        for name, prepare in (
            ("user-error-destroys", lambda training: None),
            ("user-error-destroys-given", hold_group_of_all),
        )
    ),
    Fault(
        "user-error-caught",
        "raises in another layer, catches the error and runs the next step",
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
        aborted,
        "catch the errors on all ranks, and continue in a new group",
        where=ANYWHERE,
    ),
    Fault(
        "memory-before-exits",
        "runs out of memory in the layer, before its collective, and ends by that error",
        run_out_and_end,
        gone,
        aborted,
        "read the error of the rank that ended; restart from a checkpoint",
        where=("forward", "backward"),
        ways=EAGER,
        leaves=True,
        ends="exit code 1",
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
        ways=ONCE,  # compiled, the gradient is made of operators of torch's
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


# The others see one thing, a connection that is lost: two ends are tried anywhere.
ENDS = [
    ("exit code 0", lambda: os._exit(0), (*ANYWHERE, "between"), EAGER),
    ("exit code 3", lambda: os._exit(3), ("forward",), EAGER[:1]),
    ("SIGABRT", os.abort, ("forward",), EAGER[:1]),
    ("SIGKILL", signalled(signal.SIGKILL), (*ANYWHERE, "between"), EVERYWHERE),
    ("SIGTERM", signalled(signal.SIGTERM), ("forward",), EAGER[:1]),
]


def resume(process):
    os.kill(int(process.read_text()), signal.SIGCONT)


FAULTS += [
    Fault(
        name.replace(" ", "-"),
        "ends by `exit(0)` or another code, abort, SIGKILL or SIGTERM",
        ends_by(end),
        gone,
        loss_of_connection,
        "read the error of the rank that ended; restart from a checkpoint",
        where=where,
        ways=ways,
        leaves=True,
        ends=name,
    )
    for name, end, where, ways in ENDS
]
FAULTS += [
    Fault(
        "SIGSTOP",
        "is stopped (SIGSTOP) for longer than the group's timeout",
        ends_by(signalled(signal.SIGSTOP)),
        Fate(communication.pattern, "the same, after it resumes"),
        communication,
        "give the group a timeout above the longest pause",
        where=("forward", "backward"),
        ways=ONCE,
        waits=True,
        leaves=True,
        resume=resume,
    ),
]


# Groups.


def destroy_group(training, where):
    dist.destroy_process_group(training.model.norm1.process_group)
    training.step()


def hold_group_of_others(training, where):
    hold(training, dist.new_group(range(dist.get_world_size() - 1)))
    training.step()


was_destroyed = Fate(
    "ValueError: .* was destroyed|RuntimeError: .* torch.distributed does not know",
    "an error naming the layer and the group",
)

FAULTS += [
    *(
        Fault(
            name,
            what,
            destroy_group,
            was_destroyed,
            others,
            "destroy a group after the last step",
            ways=ways,
            prepare=hold_group_of_all,
            waits=others is not loss_of_connection,
        )
        for name, what, ways, others in (
            (
                "destroyed-group",
                "has destroyed its layers' group",
                UNCOMPILED,
                loss_of_connection,
            ),
            (
                "destroyed-group-compiled",
                "has destroyed its compiled layers' group",
                COMPILED,
                Fate(
                    communication.pattern,
                    f"{loss_of_connection.words}; torch 2.15: at the group's timeout",
                ),
            ),
        )
    ),
    Fault(
        "not-a-member",
        "is not a member of its layers' group",
        hold_group_of_others,
        Fate(
            r"ValueError: rank \d is not a member of this layer's process_group",
            "“rank 2 is not a member of this layer's process_group”",
        ),
        goes_on,
        "give each rank a group that contains it",
        others_do=hold_group_of_others,
    ),
]
