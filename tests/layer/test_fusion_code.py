"""fuse_activations in the code of modules: the layers that are fused, and why others are left."""

import collections
import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.fused_models import (
    Block,
    Called,
    assert_same,
    block,
    fuse_a_copy,
    make_input,
    names,
    norm,
    reason,
)
from torch import nn

from syncbn import explain_fusion, fuse_activations
from syncbn.fusion.graph_module import FusedModule


@pytest.mark.parametrize(
    ("code", "activation"),
    [
        (lambda m, x: F.relu(m.bn1(x)), "relu"),
        (lambda m, x: F.relu(m.bn1(x), inplace=True), "relu"),
        (lambda m, x: F.relu_(m.bn1(x)), "relu"),
        (lambda m, x: torch.relu(m.bn1(x)), "relu"),
        (lambda m, x: torch.relu_(m.bn1(x)), "relu"),
        (lambda m, x: m.bn1(x).relu(), "relu"),
        (lambda m, x: m.bn1(x).relu_(), "relu"),
        (lambda m, x: m.relu(m.bn1(x)), "relu"),
        (lambda m, x: m.relu(m.identity(m.bn1(x))), "relu"),
        (lambda m, x: m.leaky(m.bn1(x)), "leaky_relu"),
        (lambda m, x: F.leaky_relu(m.bn1(x), 0.3), "leaky_relu"),
        (lambda m, x: F.leaky_relu(m.bn1(x), negative_slope=0.3, inplace=True), "leaky_relu"),
        (lambda m, x: F.leaky_relu(m.bn1(x)), "leaky_relu"),
        (lambda m, x: F.silu(m.bn1(x)), "silu"),
        (lambda m, x: m.silu(m.bn1(x)), "silu"),
    ],
)
def test_activations_in_code(code, activation):
    model = block(code)
    fused = fuse_a_copy(model, make_input())
    assert isinstance(fused, FusedModule) and isinstance(fused, Block)
    assert names(explain_fusion(model)) == [("bn1", activation, False)]
    assert "normalize_activate" in fused._syncbn_code


def add_in_place(m, x, other):
    x = m.bn1(x)
    x += other
    return m.relu(x)


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x, other: m.relu(m.bn1(x) + other),
        lambda m, x, other: m.relu(other + m.bn1(x)),
        lambda m, x, other: m.relu(torch.add(m.bn1(x), other)),
        lambda m, x, other: m.relu(m.bn1(x).add(other)),
        lambda m, x, other: m.relu(m.bn1(x).add_(other)),
        lambda m, x, other: m.relu(m.identity(m.identity(m.bn1(x)) + other)),
        add_in_place,
    ],
)
def test_additions_in_code(code):
    model = block(code, inputs=2)
    fused = fuse_a_copy(model, make_input(), make_input(1))
    assert names(explain_fusion(model)) == [("bn1", "relu", True)]
    # Another shape, also in place; other dtypes, to which + promotes but += does not.
    assert_same(model, fused, make_input(), make_input(1, (3, 1, 1)))
    larger = make_input(1, (2, 4, 3, 5, 5))
    if "+=" in fused._syncbn_code:  # an in-place result cannot be larger
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            copy.deepcopy(fused)(make_input(), larger)
    else:
        assert_same(model, fused, make_input(), larger)
    for dtype in (torch.float32, torch.int64):
        assert_same(model, fused, make_input(), make_input(1).mul(9).to(dtype))
    x = make_input()
    for number in (0.5, 2, torch.tensor(0.5)):
        assert torch.equal(fused(x, number), model(x, number))
    with pytest.raises(TypeError):
        fused(x, None)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_addend_of_a_wider_dtype(in_place):
    def promoted(m, x, other):
        return m.relu(m.bn1(x) + other)

    model = block(add_in_place if in_place else promoted, inputs=2).float()
    x, other = make_input().float(), make_input(1)
    expected = model(x, other)
    assert expected.dtype == (torch.float32 if in_place else torch.float64)
    ours = fuse_activations(model)(x, other)
    assert ours.dtype == expected.dtype and torch.equal(ours, expected)


def test_of_two_layers_that_are_added_one_is_fused():
    model = block(lambda m, x: m.relu(m.bn1(x) + m.bn2(x)))
    fuse_a_copy(model, make_input())
    assert names(explain_fusion(model)) == [("bn2", "relu", True)]
    assert reason(model) == "is added to another layer, which is fused"


def test_a_layer_at_the_end_of_a_sequential():
    model = block(lambda m, x: m.relu(m.down(x) + x))
    fused = fuse_a_copy(model, make_input())
    assert ("down.1", "relu", True) in names(explain_fusion(model))
    assert fused.down is not model.down and type(fused.down) is nn.Sequential


def test_a_module_at_two_positions_stays_one():
    inner = block(lambda m, x: m.relu(m.bn1(x)))
    model = nn.Sequential(inner, nn.Conv2d(3, 3, 1).double(), inner)
    fused = fuse_a_copy(model, make_input())
    assert fused[0] is fused[2] and isinstance(fused[0], FusedModule)


def add_in_place_to_other(m, x, other):
    y = m.bn1(x)
    other = other * 1
    z = other
    other += y
    return m.relu(other) + z


def change_the_input_before_the_addition(m, x):
    x = x * 1
    y = m.bn1(x)
    other = F.relu_(x)
    return m.relu(y + other)


def change_the_output_of_a_convolution(m, x):
    x = m.conv1(x)
    y = m.bn1(x)
    return m.relu(y + F.relu_(x))


def change_it_through_a_module(m, x):
    x = x * 1
    y = m.bn1(x)
    return m.relu(y + m.relu(x))


def ordered(m, x):
    return collections.OrderedDict(out=m.relu(m.bn1(x)))


def without_gradient(m, x):
    with torch.no_grad():
        x = m.bn1(x)
    return m.relu(x)


def under_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.relu(m.bn1(m.conv1(x)))


def checkpointed(m, x):
    return torch.utils.checkpoint.checkpoint(lambda x: m.relu(m.bn1(x)), x, use_reentrant=False)


def count_calls(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.relu(m.bn1(x))


def collect(m, x):
    m.outputs.append(m.bn1(x))
    return m.relu(m.outputs[-1])


def draw(m, x):
    scale = 1.0 if random.random() < 2 else 0.0
    return m.relu(m.bn1(x)) * scale


def draw_by_numpy(m, x):
    return m.relu(m.bn1(x)) * (1.0 if np.random.rand() < 2 else 0.0)


def draw_by_a_generator(m, x):
    return m.relu(m.bn1(x)) * torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


def only_with_gradient(m, x):
    return m.relu(m.bn1(x)) if torch.is_grad_enabled() else x


def first_of(x):
    return x if isinstance(x, torch.Tensor) else x[0]


def match_type(x):
    match x:
        case torch.Tensor():
            return x
    return 0


def set_on_a_child(m, x):
    m.conv1.last = x
    return m.relu(m.bn1(x))


def count(m, x):
    m.counts["calls"] += 1
    m.last.append(x)
    return m.relu(m.bn1(x))


def require_gradient(m, x):
    z = m.conv1(x)
    z.requires_grad = True
    return m.relu(m.bn1(z))


def read_a_buffer_before_the_addition(m, x):
    y = m.bn1(m.conv1(x))
    return m.relu(y + x * m.bn1.num_batches_tracked)


def share_buffers_before_the_addition(m, x):
    y = m.bn1(m.conv1(x))
    return m.relu(y + m.conv2(m.shared(x)))


def maybe_convolved(m, x):
    x = m.maybe(x)
    y = m.bn1(x)
    return m.relu(y + F.relu_(x))


def change_the_addend_by_an_argument(m, x):
    x = x * 1
    y = m.silu(m.bn1(x) + x)
    return y + F.relu(x, inplace=True)


def add_to_an_addend_that_changes(m, x):
    other = x * 1
    y = F.silu(m.bn1(x * 2) + other)
    other += y
    return other


def use_and_return(m, x):
    y = m.bn1(x)
    return m.relu(y) + y


TYPE = "its code asks for the type of a value, in <lambda>"


def factor_of_type(x):
    return 2 if type(x) is torch.Tensor else 3


ASKS = "its code asks for the type of a value, or keeps the value in a module"

LEFT = [
    (use_and_return, "its output is used 2 times"),
    (lambda m, x: m.bn1(x), "is followed by no activation"),
    (lambda m, x: m.conv1(m.bn1(x)), "is followed by Conv2d, which cannot be fused"),
    (lambda m, x: F.relu6(m.bn1(x)), "is followed by relu6, which cannot be fused"),
    (lambda m, x: torch.add(m.bn1(x), x, alpha=2).relu(), "is followed by add, which cannot"),
    (lambda m, x: m.relu(m.bn1(x) + 1), "is followed by add, which cannot be fused"),
    (lambda m, x: F.leaky_relu(m.bn1(x), -0.5), "is followed by leaky_relu, which cannot be fused"),
    (lambda m, x: m.relu(m.bn1(m.relu(m.bn1(x)))), "is called at several positions"),
    (lambda m, x: m.relu(m.bn1(x, x)), "is given other arguments than one input"),
    (lambda m, x: (lambda y: m.relu(y + y))(m.bn1(x)), "its output is used 2 times"),
    (change_the_input_before_the_addition, "its input may change before the addition, in relu_"),
    (change_the_output_of_a_convolution, "its input may change before the addition, in relu_"),
    (change_it_through_a_module, "its input may change before the addition, in ReLU"),
    (lambda m, x: m.conv1(x), "is not called by the code of its module"),
    (lambda m, x: m.relu(m.bn1(x)) if x.sum() > 0 else x, "torch.fx cannot trace Block: symbolica"),
    (ordered, "its code makes a OrderedDict, of which torch.fx keeps less"),
    (without_gradient, "its code calls _set_grad_enabled, whose result its graph would keep"),
    (under_autocast, "its code sets a mode"),
    (checkpointed, "its code "),  # sets a mode, or calls torch's function for that
    (count_calls, "the code of Block sets attributes"),
    (collect, "the code of Block sets attributes"),
    (
        lambda m, x: m.relu(m.bn1(x)) + torch.ones(1),
        "its code calls ones, whose result its graph would keep",
    ),
    (draw_by_numpy, "the code of Block draws random numbers that its graph would keep"),
    (draw_by_a_generator, "its code calls rand, whose result its graph would keep"),
    (only_with_gradient, "the code of Block differs between training and evaluation"),
    (lambda m, x: m.relu(m.bn1(first_of(x))), ASKS),
    (lambda m, x: m.relu(m.bn1(match_type(x))), ASKS),
    (lambda m, x: m.relu(m.bn1(x)) if torch.is_tensor(x) else x, ASKS),
    (lambda m, x: m.relu(m.bn1(x)) if type(x) is int else x, TYPE),
    (lambda m, x: m.relu(m.bn1(x)) * (2 if type(x) is torch.Tensor else 3), TYPE),
    (
        lambda m, x: m.relu(m.bn1(x)) * factor_of_type(x),
        "its code asks for the type of a value, in f",
    ),
    (lambda m, x: x.y if hasattr(x, "y") else m.relu(m.bn1(x)), "its code asks for 'y', which a"),
    (set_on_a_child, ASKS),
    (count, "the code of Block sets attributes"),
    (require_gradient, "its code sets 'requires_grad' of a tensor"),
    (read_a_buffer_before_the_addition, "its buffers are used before the addition, in bn1.num_b"),
    (share_buffers_before_the_addition, "its buffers are used before the addition, in SyncBatchN"),
    (maybe_convolved, "its input may change before the addition, in relu_"),
    (lambda m, x: m.leaky(m.bn1(x) + x), "is followed by an addition and a leaky ReLU that is"),
    (change_the_addend_by_an_argument, "the other addend, which backward needs, changes later, in"),
    (add_to_an_addend_that_changes, "the other addend, which backward needs, changes later, in"),
    (draw, "the code of Block draws random numbers that its graph would keep"),
    (
        lambda m, x: F.dropout(m.relu(m.bn1(x)), training=m.training),
        "the code of Block differs between training and evaluation",
    ),
    (
        lambda m, x: m.relu(m.bn1(x)) if m.bn2.training else x,
        "the code of Block differs between training and evaluation",
    ),
]


class MaybeConvolved(nn.Conv2d):
    def forward(self, x):
        return x


@pytest.mark.parametrize(("code", "why"), LEFT)
def test_code_that_is_left(code, why):
    model = block(code)
    model.outputs, model.last, model.counts = [], collections.deque(), collections.Counter()
    model.shared = norm()
    model.shared.running_mean = model.bn1.running_mean
    model.maybe = MaybeConvolved(3, 3, 1).double()
    model.eval().bn2.train()
    before = {module: dict(vars(module)) for module in model.modules()}
    state = torch.get_rng_state(), random.getstate()
    assert reason(model).startswith(why) and not explain_fusion(model).fused
    assert fuse_activations(model) is model and not isinstance(model, FusedModule)
    assert {module: vars(module) for module in model.modules()} == before
    assert model.outputs == [] and not model.last and not model.counts and model.bn2.training
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]


def test_addition_in_place_to_another_value_is_left():
    model = block(add_in_place_to_other, inputs=2)
    assert reason(model) == "is added in place to another value"

    # In a module with another fused layer, the in-place addition stays in place.
    def code(m, x, other):
        y = add_in_place_to_other(m, x, other)
        return m.relu(m.bn2(y))

    model = block(code, inputs=2)
    fuse_a_copy(model, make_input(), make_input(1))
    assert names(explain_fusion(model)) == [("bn2", "relu", False)]


def optional(self, x, other=None):
    return self.relu(self.bn1(x))


def several(self, *x):
    return self.relu(self.bn1(*x))


def keyword(self, x, *, other):
    return self.relu(self.bn1(x))


@pytest.mark.parametrize("forward", [optional, several, keyword])
def test_code_with_other_than_plain_arguments_is_left(forward):
    model = type("Block", (Block,), {"forward": forward})()
    assert "Block.forward has an optional argument" in reason(model)


def test_names_of_a_graph_module_stay():
    model = block(lambda m, x: m.code(m.bn1(x)))
    model.code, model.graph = nn.ReLU(), "mine"
    fused = fuse_a_copy(model, make_input())
    assert isinstance(fused, FusedModule)
    assert type(fused.code) is nn.ReLU and fused.graph == "mine"


def test_a_class_keeps_its_own_deepcopy():
    model = block(lambda m, x: m.relu(m.bn1(x)))
    type(model).__deepcopy__ = lambda self, memo: self
    fused = fuse_activations(model)
    assert isinstance(fused, FusedModule) and copy.deepcopy(fused) is fused


def test_a_forward_that_is_no_method_is_left():
    model = block(lambda m, x: m.relu(m.bn1(x)))
    model.forward = lambda x: x
    assert reason(model) == "Block has no ordinary method forward"
    traced = torch.fx.symbolic_trace(Called())
    assert reason(traced) == "Called has no ordinary method forward"
