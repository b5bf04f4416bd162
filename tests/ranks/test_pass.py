"""The training pass in C++ and in Python, in a group: who makes a pass, and the same bits."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, training
from syncbn.distributed import passes
from syncbn.distributed.state import group_state

pytestmark = pytest.mark.skipif(
    passes.library is None, reason=f"Python makes the passes: {passes.library_missing}"
)


def is_made_in_cpp(output):
    return "CppNode" in output.grad_fn.name()


ACTIVATIONS = (None, None, "relu", "leaky_relu", None)


def train(rank, steps):
    """Return all that the steps compute, and whether C++ has made the passes of each step.

    The last two layers add the output of the first.
    """
    layers = [SyncBatchNorm(4, activation=activation) for activation in ACTIVATIONS]
    generator = torch.Generator().manual_seed(rank)
    computed, made = [], []
    for _ in range(steps):
        x = torch.randn(3 + rank, 4, 5, 2, generator=generator, requires_grad=True)
        outputs = [layers[0](x)]
        for number, layer in enumerate(layers[1:]):
            outputs.append(layer(outputs[-1], outputs[0]) if number > 1 else layer(outputs[-1]))
        outputs[-1].pow(3).sum().backward()
        made.append([is_made_in_cpp(output) for output in outputs])
        computed += [outputs[-1].detach(), x.grad]
    for layer in layers:
        computed += [*layer.buffers(), *(parameter.grad for parameter in layer.parameters())]
    return computed, made


def compare(rank, world_size):
    computed, made = train(rank, 4)
    with mock.patch.object(training, "library", None):
        expected, others = train(rank, 4)
    for a, b in zip(computed, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return made, others


def test_same_bits_from_the_third_step_on(two_ranks):
    """In the steps before the ranks agree on the sizes of their messages, in Python."""
    for made, others in two_ranks.run(compare):
        assert made[0] == [False] * 5 and made[2:] == [[True] * 5] * 2
        assert others == [[False] * 5] * 4


def alternate(rank, world_size):
    """Passes of both kinds, one after the other, share the state of the group."""
    layer, state = SyncBatchNorm(4), group_state(dist.group.WORLD)
    state.sizes_sent.clear()
    before, made, in_row = state.num_passes, [], []
    for number in range(8):
        library = None if number % 2 else passes.library
        with mock.patch.object(training, "library", library):
            output = layer(torch.randn(4, 4, requires_grad=True))
            output.sum().backward()
        made.append(is_made_in_cpp(output))
    num_passes, sizes = state.num_passes - before, [*state.sizes_sent]
    for library in (passes.library, None, passes.library):
        with mock.patch.object(training, "library", library):
            layer(torch.randn(4, 4))
        in_row.append(state.num_in_row)
    return made[4:], num_passes, sizes, in_row


def test_both_kinds_share_the_state_of_the_group(two_ranks):
    for made, num_passes, sizes, in_row in two_ranks.run(alternate):
        assert made == [True, False] * 2
        assert num_passes == 16 and sizes == [12] * 16
        assert in_row == [1, 2, 3]  # forward passes after a backward one


def fail_in_cpp(rank, world_size, wrong):
    layer = SyncBatchNorm(4)
    for _ in range(2):
        layer(torch.randn(4, 4, requires_grad=True)).sum().backward()
    if rank == 1 and wrong == "weight":
        layer.weight.data = torch.ones(5)

    def load(saved):
        if rank == 1 and wrong == "statistics" and saved.dtype == torch.float64:
            return saved[:3]
        if rank == 1 and wrong == "input" and saved.dim() == 2:
            return saved.flatten()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, load):
        output = layer(torch.randn(4, 4, requires_grad=True))
    assert is_made_in_cpp(output)
    output.sum().backward()


@pytest.mark.parametrize(
    ("wrong", "direction"),
    [("weight", "forward"), ("statistics", "backward"), ("input", "backward")],
)
def test_an_error_of_an_operator_fails_the_others(wrong, direction, two_ranks):
    other, failed = two_ranks.outcomes(fail_in_cpp, wrong)
    assert failed.kind == "ValueError" and failed.message.endswith("[rank 1 of 2]"), failed.message
    assert other.kind == "RuntimeError" and "rank 1" in other.message, other.message
    assert f"aborted this {direction} pass" in other.message


class Recorded:
    """The library, and whether it has made the sums that graphs have asked it for."""

    def __init__(self, library):
        self.library, self.made = library, []

    def __getattr__(self, name):
        def call(*operands):
            result = getattr(self.library, name)(*operands)
            self.made.append((name, result is not None))
            return result

        return call


def train_compiled(rank, world_size, kind):
    torch.manual_seed(0)
    converted = convert_sync_batchnorm(nn.BatchNorm1d(4))
    layer = converted if kind == "converted" else SyncBatchNorm(4, activation="relu")
    model = nn.Sequential(nn.Linear(3, 4), layer).double()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for _ in range(4):
        x = torch.randn(4 + rank, 3, dtype=torch.float64)
        with mock.patch.object(passes, "library", Recorded(passes.library)) as recorded:
            compiled(x).pow(3).sum().backward()
        model(x).pow(3).sum().backward()
    for a, b in zip(compiled.parameters(), model.parameters(), strict=True):
        # Other expressions of the same formulas, of a few values of float64.
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    return recorded.made


@pytest.mark.parametrize("kind", ["converted", "with ReLU"])
def test_graphs_get_their_sums_from_cpp(kind, two_ranks):
    made = [("sum_statistics", True), ("sum_gradients", True)]
    assert two_ranks.run(train_compiled, kind) == [made] * 2


class Own(dist.ProcessGroup):
    """A group of two ranks with the same values, which is written in Python."""

    def __init__(self):
        super().__init__(0, 2)
        self.is_interrupted = False

    def allreduce(self, tensors, options=None):
        if self.is_interrupted:
            raise KeyboardInterrupt
        tensors[0] *= 2
        return None  # as of a collective that is done

    def getBackendName(self):
        return "own"


def train_in_own_group(rank, world_size):
    group = Own()
    layer, made = SyncBatchNorm(4, process_group=group), []
    for _ in range(4):
        output = layer(torch.randn(4, 4, requires_grad=True))
        output.sum().backward()
        made.append(is_made_in_cpp(output))
    group.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        layer(torch.randn(4, 4))
    return made


def test_python_makes_the_passes_of_a_group_in_python(two_ranks):
    assert two_ranks.run(train_in_own_group) == [[False] * 4] * 2
