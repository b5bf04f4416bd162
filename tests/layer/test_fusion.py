"""fuse_activations: what is fused, what is left and why, and that results stay."""

import collections
import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fused_models import assert_same, fuse_a_copy
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    explain_fusion,
    fuse_activations,
    revert_sync_batchnorm,
)
from syncbn.fused import FusedActivation, FusedBlock
from syncbn.modules import BatchNorm, SyncBatchNormAct


def make_input(seed=0, shape=(4, 3, 5, 5)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(channels=3):
    return SyncBatchNorm(channels, dtype=torch.float64)


class Block(nn.Module):
    """Two layers, two convolutions and what codes below need; ``code`` is its forward."""

    def __init__(self, code=None):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 1).double(), nn.Conv2d(3, 3, 1).double()
        self.bn1, self.bn2 = norm(), norm()
        self.relu, self.identity = nn.ReLU(inplace=True), nn.Identity()
        self.leaky, self.silu = nn.LeakyReLU(0.2), nn.SiLU()
        self.down = nn.Sequential(nn.Conv2d(3, 3, 1).double(), norm())


def block(code, inputs=1):
    """A block with the code as its forward, of a class that pickles do not find."""
    if inputs == 1:
        forward = lambda self, x: code(self, x)  # noqa: E731
    else:
        forward = lambda self, x, other: code(self, x, other)  # noqa: E731
    return type("Block", (Block,), {"forward": forward})()


def names(report):
    return [(f.name, f.activation, f.residual) for f in report.fused]


def reason(model, name="bn1"):
    return dict(explain_fusion(model).left)[name]


# Sequentials.


def test_neighbours_in_a_sequential():
    activation = nn.LeakyReLU(0.2)
    model = nn.Sequential(norm(), nn.ReLU(True), norm(), activation, norm(), nn.SiLU(), norm())
    fused = fuse_a_copy(model, make_input())
    assert [type(m).__name__ for m in fused] == ["SyncBatchNorm", "FusedActivation"] * 3 + [
        "SyncBatchNorm"
    ]
    assert isinstance(fused[1], nn.Identity) and "LeakyReLU(negative_slope=0.2)" in repr(fused[3])
    assert [layer.activation for layer in fused[::2]] == ["relu", "leaky_relu", "silu", None]
    assert fused[2].negative_slope == 0.2
    report = explain_fusion(model)
    assert names(report) == [("0", "relu", False), ("2", "leaky_relu", False), ("4", "silu", False)]
    assert report.left == [("6", "is followed by nothing in its Sequential")]
    assert fuse_activations(model) is model
    reverted = revert_sync_batchnorm(model.eval())
    assert reverted is model and model[3] is activation
    assert not any(module.training for module in model.modules())


def test_sequential_that_only_constructs_itself_and_has_hooks():
    class ConvBlock(nn.Sequential):
        def __init__(self):
            super().__init__(norm(), nn.ReLU())

    model, calls = ConvBlock(), []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    assert names(explain_fusion(fuse_activations(model))) == [("0", "relu", False)]
    model(make_input())
    assert calls == ["hook"]


def test_an_activation_in_several_sequentials_is_replaced_where_a_layer_precedes_it():
    relu = nn.ReLU()
    model = nn.Sequential(norm(), relu, nn.Conv2d(3, 3, 1).double(), relu, norm(), relu)
    fused = fuse_a_copy(model, make_input())
    assert type(fused[3]) is nn.ReLU
    reverted = revert_sync_batchnorm(fused)
    assert reverted[1] is reverted[3] is reverted[5] and type(reverted[1]) is nn.ReLU


def hooked(module, register="register_forward_hook"):
    getattr(module, register)(lambda *_: None)
    return module


def sequentials_that_are_left():
    layer = norm()
    yield [layer, nn.ReLU(), layer], "is registered at several places"
    yield [nn.BatchNorm2d(3).double(), nn.ReLU()], "is not converted"
    yield [norm(), nn.Hardswish()], "is followed by Hardswish, which cannot be fused"
    yield [norm(), nn.LeakyReLU(-0.1)], "is followed by LeakyReLU, which cannot be fused"
    yield [norm(), type("Loud", (nn.ReLU,), {})()], "is followed by Loud, which cannot be fused"
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        yield [hooked(norm(), f"register_{register}"), nn.ReLU()], "has hooks"
        relu = hooked(nn.ReLU(), f"register_{register}")
        yield [norm(), relu], "is followed by ReLU with hooks, which cannot be fused"
    own = norm()
    own.forward = lambda x: 2 * SyncBatchNorm.forward(own, x)
    yield [own, nn.ReLU()], "has a forward of its own, or has been compiled"
    doubled = type("Doubled", (SyncBatchNorm,), {"forward": lambda self, x: x})(3)
    yield [doubled, nn.ReLU()], "is a Doubled"


@pytest.mark.parametrize(("modules", "why"), sequentials_that_are_left())
def test_sequentials_that_are_left(modules, why):
    model = nn.Sequential(*modules)
    assert reason(model, "0") == why and not explain_fusion(model).fused
    assert [*fuse_activations(model)] == modules and type(model) is nn.Sequential
    assert getattr(model[0], "activation", None) is None


def test_a_sequential_with_a_forward_of_its_own_keeps_its_modules():
    class Collected(nn.Sequential):
        def forward(self, x):
            outputs = [x]
            for module in self:
                outputs.append(module(outputs[-1]))
            return torch.cat(outputs)

    model = Collected(norm(), nn.ReLU())
    assert fuse_activations(model) is model and type(model) is Collected
    assert reason(model, "0") == "its output is used 2 times"


def collect_outputs(m, x):
    outputs = []
    for part in m.parts:
        x = part(x)
        if isinstance(part, SyncBatchNorm):
            outputs.append(x)
    return sum(outputs)


def run_in_halves(m, x):
    y = m.parts[:2](x)
    return m.parts[2:](y) + y


def run_if_positive(m, x):
    return m.parts(x) if x.sum() > 0 else m.parts[1](x)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (collect_outputs, "is run without its Sequential by the code of Block"),
        (run_in_halves, "may be run without its Sequential by the code of Block: torch.fx cannot"),
        (run_if_positive, "may be run without its Sequential by the code of Block: torch.fx can"),
    ],
)
def test_sequentials_whose_parts_are_run_by_code(code, why):
    model = block(code)
    model.parts = nn.Sequential(nn.Conv2d(3, 3, 1).double(), norm(), nn.ReLU())
    assert reason(model, "parts.1").startswith(why)
    assert fuse_activations(model) is model and type(model.parts[2]) is nn.ReLU


def test_sequentials_that_code_runs_as_a_whole():
    model = block(lambda m, x: m.groups[1](m.groups[0](x)))
    model.groups = nn.ModuleList(
        [nn.Sequential(nn.Sequential(norm(), nn.ReLU()), norm(), nn.SiLU()) for _ in range(2)]
    )
    fused = fuse_a_copy(model, make_input())
    assert len(explain_fusion(fused).fused) == 4 and not isinstance(fused, FusedBlock)


# Code.


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
    assert isinstance(fused, torch.fx.GraphModule) and isinstance(fused, Block)
    assert names(explain_fusion(model)) == [("bn1", activation, False)]
    assert "normalize_activate" in fused.code


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
    # Another shape, in place as well; another dtype, which += does not promote to, but + does.
    assert_same(model, fused, make_input(), make_input(1, (3, 1, 1)))
    larger = make_input(1, (2, 4, 3, 5, 5))
    if "+=" in fused.code:  # in place, where nothing can be larger
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
def test_a_summand_of_a_wider_dtype(in_place):
    def promoted(m, x, other):
        return m.relu(m.bn1(x) + other)

    model = block(add_in_place if in_place else promoted, inputs=2).float()
    x, other = make_input().float(), make_input(1)
    expected = model(x, other)
    assert expected.dtype == (torch.float32 if in_place else torch.float64)
    ours = fuse_activations(model)(x, other)
    assert ours.dtype == expected.dtype and torch.equal(ours, expected)


def test_one_activation_at_several_places_and_a_residual_block():
    def code(m, x):
        y = m.relu(m.bn1(m.conv1(x)))
        y = m.bn2(m.conv2(y))
        identity = m.down(x)
        y += identity
        return m.relu(y)

    model = block(code)
    fused = fuse_a_copy(model, make_input())
    report = explain_fusion(model)
    assert names(report) == [("bn1", "relu", False), ("bn2", "relu", True)]
    assert report.left == [("down.1", "is added to another layer, which is fused")]
    assert "self.down(" in fused.code  # a call, as before


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


def test_a_block_at_two_places_stays_one():
    inner = block(lambda m, x: m.relu(m.bn1(x)))
    model = nn.Sequential(inner, nn.Conv2d(3, 3, 1).double(), inner)
    fused = fuse_a_copy(model, make_input())
    assert fused[0] is fused[2] and isinstance(fused[0], FusedBlock)


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


def add_to_a_summand_that_changes(m, x):
    other = x * 1
    y = F.silu(m.bn1(x * 2) + other)
    other += y
    return other


def ask(m, x):
    return m.relu(m.bn1(x)) if isinstance(x, torch.Tensor) else x


def use_and_return(m, x):
    y = m.bn1(x)
    return m.relu(y) + y


LEFT = [
    (use_and_return, "its output is used 2 times"),
    (lambda m, x: m.bn1(x), "is followed by no activation"),
    (lambda m, x: m.conv1(m.bn1(x)), "is followed by Conv2d, which cannot be fused"),
    (lambda m, x: F.gelu(m.bn1(x)), "is followed by gelu, which cannot be fused"),
    (lambda m, x: torch.add(m.bn1(x), x, alpha=2).relu(), "is followed by add, which cannot"),
    (lambda m, x: m.relu(m.bn1(x) + 1), "is followed by add, which cannot be fused"),
    (lambda m, x: F.leaky_relu(m.bn1(x), -0.5), "is followed by leaky_relu, which cannot be fused"),
    (lambda m, x: m.relu(m.bn1(m.relu(m.bn1(x)))), "is called at several places"),
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
    (checkpointed, "its code "),  # sets a mode, or calls what torch does for that
    (count_calls, "the code of Block sets attributes"),
    (collect, "the code of Block sets attributes"),
    (
        lambda m, x: m.relu(m.bn1(x)) + torch.ones(1),
        "its code calls ones, whose result its graph would keep",
    ),
    (draw_by_numpy, "the code of Block draws random numbers that its graph would keep"),
    (draw_by_a_generator, "its code calls rand, whose result its graph would keep"),
    (only_with_gradient, "the code of Block differs between training and evaluation"),
    (lambda m, x: m.relu(m.bn1(first_of(x))), "its code asks of what type a value is"),
    (lambda m, x: m.relu(m.bn1(match_type(x))), "its code asks of what type a value is"),
    (lambda m, x: m.relu(m.bn1(x)) if torch.is_tensor(x) else x, "its code asks of what type"),
    (lambda m, x: m.relu(m.bn1(x)) if type(x) is int else x, "the code of Block asks of what type"),
    (lambda m, x: x.y if hasattr(x, "y") else m.relu(m.bn1(x)), "its code asks for 'y', which a"),
    (set_on_a_child, "the code of Block sets attributes"),
    (count, "the code of Block sets attributes"),
    (require_gradient, "its code sets 'requires_grad' of a tensor"),
    (read_a_buffer_before_the_addition, "its buffers are used before the addition, in bn1.num_b"),
    (share_buffers_before_the_addition, "its buffers are used before the addition, in SyncBatchN"),
    (maybe_convolved, "its input may change before the addition, in relu_"),
    (add_to_a_summand_that_changes, "the other summand, which backward needs, changes later, in"),
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
    assert fuse_activations(model) is model and not isinstance(model, FusedBlock)
    assert {module: vars(module) for module in model.modules()} == before
    assert model.outputs == [] and not model.last and not model.counts and model.bn2.training
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]


def test_addition_in_place_to_another_value_is_left():
    model = block(add_in_place_to_other, inputs=2)
    assert reason(model) == "is added in place to another value"

    # Where it is fused otherwise, an addition in place to another value still is one.
    def code(m, x, other):
        y = add_in_place_to_other(m, x, other)
        return m.relu(m.bn2(y))

    model = block(code, inputs=2)
    fuse_a_copy(model, make_input(), make_input(1))
    assert names(explain_fusion(model)) == [("bn2", "relu", False)]


def test_code_that_asks_for_types_is_left():
    class Asking(Block):
        def forward(self, x):
            return self.helper(x)

        def helper(self, x):
            return ask(self, x) if isinstance(x, torch.Tensor) else x

    why = "its code asks of what type a value is"
    assert reason(Asking()) == why


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


def test_blocks_that_a_graph_module_would_hide():
    model = block(lambda m, x: m.code(m.bn1(x)))
    model.code = nn.ReLU()
    assert reason(model) == "Block has code of its own, as a GraphModule has"
    model = block(lambda m, x: m.relu(m.bn1(x)))
    model.meta = "mine"
    assert reason(model) == "Block has meta of its own, as a GraphModule has"
    model = block(lambda m, x: m.relu(m.bn1(x)))
    type(model).__deepcopy__ = lambda self, memo: self
    assert reason(model) == "Block has __deepcopy__ of its own, as a GraphModule has"
    model = block(lambda m, x: m.relu(m.bn1(x)))
    model.forward = lambda x: x
    assert reason(model) == "Block has no ordinary method forward"
    traced = torch.fx.symbolic_trace(Called())
    assert reason(traced).endswith("of its own, as a GraphModule has")


class Called(Block):
    """A block that pickles find."""

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)

    def features(self, x):
        return self.relu(self.bn1(self.conv1(x)))


# What a fused model goes on to do.


def test_fusing_again_changes_nothing():
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.ReLU()))
    report, modules = explain_fusion(model), [*model.modules()]
    cls, code = type(model[0]), model[0].code
    assert fuse_activations(model) is model and explain_fusion(model) == report
    assert [*model.modules()] == modules
    assert type(model[0]) is cls and model[0].code is code
    assert report == explain_fusion(nn.Sequential(Called(), norm(), nn.ReLU()))


def loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.deepcopy, loaded, lambda model: pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("make_copy", COPIES)
def test_copies_and_pickles(make_copy):
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.LeakyReLU(0.2)))
    model[0].register_buffer("scratch", torch.ones(1), persistent=False)
    model[0].note, model[0].nothing = "kept", None
    model[0].register_module("missing", None)
    model.eval()[0].bn1.train()
    other = make_copy(model)
    assert [*other.state_dict()] == [*model.state_dict()]
    assert isinstance(other[0], FusedBlock) and isinstance(other[0], Called)
    assert other[0].note == "kept" and other[0].missing is None
    assert not other.training and other[0].bn1.training and not other[0].training
    assert not {*map(id, other.parameters())} & {*map(id, model.parameters())}
    assert_same(model, other, make_input())
    assert explain_fusion(other) == explain_fusion(model)
    reverted = revert_sync_batchnorm(other)
    assert type(reverted[0]) is Called and type(reverted[2]) is nn.LeakyReLU
    # Where it is still an addition in place after a pickle's second trace.
    assert type(model[0]) is not type(other[0])


def test_pickled_blocks_keep_additions_in_place():
    model = fuse_activations(Added())
    x, other = make_input().float(), make_input(1)
    assert loaded(model)(x, other).dtype == model(x, other).dtype == torch.float32


class Added(Block):
    def __init__(self):
        super().__init__()
        self.float()

    def forward(self, x, other):
        x = self.relu(self.bn1(x))
        x += other
        return x


def test_shallow_copies_have_graphs_of_their_own():
    model = fuse_activations(Called())
    other = copy.copy(model)
    assert other.bn1 is model.bn1 and other.graph is not model.graph
    x = make_input()
    assert torch.equal(other(x), model(x))


def test_the_block_stays_the_object_that_it_was():
    model, calls = Called(), []
    model.register_forward_hook(lambda module, *_: calls.append(module))
    model.note = "kept"
    assert fuse_activations(model) is model
    assert isinstance(model, Called) and isinstance(model, torch.fx.GraphModule)
    assert type(model).__name__ == "FusedCalled" and model.note == "kept"
    x = make_input()
    model(x)
    assert calls == [model]
    # Methods call layers that have no activation of their own.
    assert torch.equal(model.features(x), F.relu(copy.deepcopy(model.bn1)(model.conv1(x))))
    assert not model.eval().bn1.training and model.train().bn1.training


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_that_come_later_run_and_see_what_they_saw(register):
    model, seen = fuse_activations(Called()), []
    model.relu.inplace = False  # it would write to what the hook sees

    def hook(module, inputs, outputs):
        seen.append((module, outputs))

    getattr(model.bn1, register)(hook)
    x = make_input().requires_grad_()
    model(x).sum().backward()
    assert [module for module, _ in seen] == [model.bn1]
    if register == "register_forward_hook":
        assert (seen[0][1] < 0).any()  # before the activation
    assert reason(model) == "has hooks"


def test_a_layer_that_is_replaced_later_is_called():
    model = Called()
    x = make_input()
    expected = model(x)
    fuse_activations(model).bn1 = nn.BatchNorm2d(3).double()
    torch.testing.assert_close(model(x), expected)  # float64, by its default tolerances
    model.bn2.activation = "silu"  # which then comes before the addition
    other = Called()
    other.bn2.activation = "silu"
    torch.testing.assert_close(model(x), other(x))


def test_results_are_what_the_layers_own_fusion_gives(monkeypatch):
    """The fused places reach the layer's own passes, and those of other shapes do not."""
    model, seen = fuse_activations(Called()), []

    def spy(layer, input, residual, *what):
        seen.append((residual is not None, *what))
        return original(layer, input, residual, *what)

    original = SyncBatchNorm.forward_through
    monkeypatch.setattr(SyncBatchNorm, "forward_through", spy)
    model(make_input())
    plain = (False, None, 0.01)
    assert seen == [(False, "relu", 0.01), plain, (True, "relu", 0.01)]


def test_an_activation_that_changes_later_is_called():
    model = fuse_activations(block(lambda m, x: m.leaky(m.bn1(x) + m.silu(m.bn2(x)))))
    x = make_input()
    model.leaky.negative_slope = 0.7
    model.silu = nn.GELU()
    other = block(lambda m, x: m.leaky(m.bn1(x) + m.silu(m.bn2(x))))
    other.leaky.negative_slope = 0.7
    other.silu = nn.GELU()
    torch.testing.assert_close(model(x), other(x))  # float64, by its default tolerances
    seen = []
    model.leaky.register_forward_hook(lambda *_: seen.append("leaky"))
    model(x)
    assert seen == ["leaky"]


@pytest.mark.parametrize("is_first", [False, True])
def test_the_output_lies_in_memory_as_the_first_summand(is_first):
    def code(m, x, other):
        y = m.bn1(x)
        return m.relu(other + y if is_first else y + other)

    model = block(code, inputs=2)
    x = make_input().contiguous(memory_format=torch.channels_last)
    fused = fuse_a_copy(model, x, make_input(1))
    assert isinstance(fused, FusedBlock)
    assert fused(x, make_input(1)).stride() == model(x, make_input(1)).stride()


class Summand:
    """Adds itself, in its own order."""

    def __radd__(self, other):
        return other * 2

    def __add__(self, other):
        return other * 3


@pytest.mark.parametrize("is_first", [False, True])
def test_the_order_of_summands_stays(is_first):
    model = block(lambda m, x, other: m.relu(other + m.bn1(x) if is_first else m.bn1(x) + other), 2)
    fused = fuse_activations(copy.deepcopy(model))
    assert isinstance(fused, FusedBlock)
    assert torch.equal(fused(make_input(), Summand()), model(make_input(), Summand()))


def test_the_report_is_of_what_is_fused():
    """Once the Sequential is called as a whole, what it does to its input is unknown."""

    def code(m, x):
        y = m.bn1(m.parts(x))
        return m.relu(y + m.conv2(x))

    model = block(code)
    model.parts = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1).double())
    report = explain_fusion(model)
    fused = fuse_a_copy(model, make_input())
    assert isinstance(fused, FusedBlock) == bool(report.fused)
    assert ("normalize" in getattr(fused, "code", "")) == bool(report.fused)


def test_a_block_that_asks_for_its_subclasses_is_left():
    class Registered(Block):
        def __init_subclass__(cls, **options):
            raise TypeError("no more of them")

        def forward(self, x):
            return self.relu(self.bn1(x))

    assert reason(Registered()) == "Registered wants to know of the classes that derive from it"


def test_revert_gives_back_the_slope_that_the_layer_had():
    model = nn.Sequential(SyncBatchNorm(3, negative_slope=0.3), nn.LeakyReLU(0.2))
    fuse_activations(model)
    assert model[0].negative_slope == 0.2
    layer = model[0]
    revert_sync_batchnorm(model)
    assert layer.negative_slope == 0.3


def test_conversion_after_fusion_keeps_it():
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.ReLU()))
    report = explain_fusion(model)
    assert convert_sync_batchnorm(model) is model and explain_fusion(model) == report
    assert model[0].bn1._name == "0.bn1"


def test_a_symbolic_trace_of_a_fused_model():
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.ReLU()))
    traced = torch.fx.symbolic_trace(model)
    assert str(traced.code).count("normalize_add_activate(") == 1
    assert_same(model, traced, make_input())


# The way back.


def test_revert_takes_everything_back():
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU(), convert_and_revert(Called())
    ).double()
    text, keys, attributes = str(model), [*model.state_dict()], {*vars(model[3])}
    modules = [*model.modules()]
    fused = fuse_activations(convert_sync_batchnorm(model))
    assert len(explain_fusion(fused).fused) == 3
    converted = copy.deepcopy(fused)
    reverted = revert_sync_batchnorm(fused)
    assert reverted is model and str(model) == text and [*model.state_dict()] == keys
    assert type(model[3]) is Called and {*vars(model[3])} == attributes
    others = [m for m in modules if not isinstance(m, nn.BatchNorm2d)]
    kept = [m for m in model.modules() if not isinstance(m, nn.BatchNorm2d)]
    assert kept == others and type(model[1]) is nn.BatchNorm2d
    assert not {"activation", "negative_slope"} & {*vars(model[1])}
    assert_same(converted, model, make_input())
    again = fuse_activations(convert_sync_batchnorm(model))
    assert explain_fusion(again) == explain_fusion(converted)


def convert_and_revert(model):
    """A copy with layers of torch's."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, SyncBatchNorm):
                setattr(parent, name, nn.BatchNorm2d(3))
    return model


def test_an_activation_of_the_layers_own_stays_in_the_reverted_layer():
    layer = SyncBatchNorm(3, activation="leaky_relu", negative_slope=0.2, dtype=torch.float64)
    x, residual = make_input(), make_input(1)
    expected = layer(x, residual)
    reverted = revert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)))[0]
    assert type(reverted) is BatchNorm
    assert repr(reverted).endswith("activation='leaky_relu', negative_slope=0.2)")
    reverted.reset_running_stats()
    # float64, by its default tolerances
    torch.testing.assert_close(reverted(x, residual), expected)
    torch.testing.assert_close(reverted.running_var, layer.running_var)
    again = convert_sync_batchnorm(nn.Sequential(reverted))[0]
    assert (again.activation, again.negative_slope) == ("leaky_relu", 0.2)
    assert explain_fusion(nn.Sequential(again)).fused == [("0", "leaky_relu", False)]


def test_an_activation_that_was_set_later_stays_as_well():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    model[0].activation = "relu"
    assert (revert_sync_batchnorm(model)(torch.randn(2, 3, 4, 4)) >= 0).all()
    part = fuse_activations(nn.Sequential(norm(), nn.ReLU()))[:1]
    assert type(part[0]) is SyncBatchNorm
    assert (revert_sync_batchnorm(part)(make_input()) >= 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu"])
def test_script_takes_reverted_layers(activation, momentum):
    layer = SyncBatchNorm(3, momentum=momentum, activation=activation, negative_slope=0.2)
    layer = revert_sync_batchnorm(layer)
    other, scripted = copy.deepcopy(layer), torch.jit.script(layer)
    x = make_input().float()
    for _ in range(2):
        assert torch.equal(scripted(x, x), other(x, x))
    assert torch.equal(scripted.running_mean, other.running_mean)
    assert torch.equal(scripted.eval()(x), other.eval()(x))


# timm's layer.


def timms(act_layer=nn.SiLU, **kwargs):
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    layer = timm_layers.BatchNormAct2d(3, act_layer=act_layer, **kwargs).double()
    return convert_sync_batchnorm(nn.Sequential(layer))


@pytest.mark.parametrize("act_layer", [nn.ReLU, nn.LeakyReLU, nn.SiLU])
@pytest.mark.parametrize("training", [True, False])
def test_timms_layer_runs_its_activation_itself(act_layer, training, monkeypatch):
    model = timms(act_layer).train(training)
    separate = copy.deepcopy(model)
    monkeypatch.setattr(SyncBatchNormAct, "fused_activation", lambda self: None)
    expected = separate(make_input())
    monkeypatch.undo()
    monkeypatch.setattr(act_layer, "forward", None)
    torch.testing.assert_close(model(make_input()), expected)  # float64, by its default tolerances
    assert len(explain_fusion(model).fused) == 1


def test_timms_layer_with_something_else_runs_it():
    calls = []
    model = timms(nn.ReLU)
    model[0].act.register_forward_hook(lambda *_: calls.append("act"))
    model(make_input())
    assert calls == ["act"]
    assert reason(model, "0") == "has ReLU with hooks behind it, which cannot be fused"
    model = timms(nn.ReLU, drop_layer=nn.Dropout)
    model[0].drop.p = 1.0
    assert not model(make_input()).any()
    assert reason(model, "0") == "has Dropout behind it, which cannot be fused"
    model = timms(nn.Hardswish)
    assert torch.equal(model(make_input()), F.hardswish(norm()(make_input())))
    model = timms(nn.ReLU)
    model[0].activation = "silu"  # of the layer's own, which comes first
    torch.testing.assert_close(model(make_input()), F.relu(F.silu(norm()(make_input()))))
    model[0].activation = None
    model[0].drop.register_forward_hook(lambda *_: calls.append("drop"))
    model(make_input())
    assert calls == ["act", "drop"]


# Reports and errors.


def test_report_prints_as_a_table():
    model = nn.Sequential(Called(), nn.BatchNorm2d(3), norm(), nn.LeakyReLU())
    assert str(explain_fusion(model)).splitlines() == [
        "layer     fused with  or why not",
        "0.bn1     relu",
        "0.bn2     + relu",
        "2         leaky_relu",
        "0.down.1              is added to another layer, which is fused",
        "1                     is not converted",
        "3 of 5 batch normalization layers fused",
    ]
    assert str(explain_fusion(nn.ReLU())).endswith("0 of 0 batch normalization layers fused")


def test_layers_alone():
    layer = norm()
    assert fuse_activations(layer) is layer
    assert explain_fusion(layer).left == [("", "is the model")]
    assert explain_fusion(SyncBatchNorm(3, activation="silu")).fused == [("", "silu", False)]


@pytest.mark.parametrize("function", [fuse_activations, explain_fusion])
def test_not_a_module(function):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, but got dict"):
        function({})


@pytest.mark.parametrize("whole", [False, True])
def test_what_has_been_compiled_is_an_error_and_nothing_is_changed(whole):
    model = nn.Sequential(norm(), nn.ReLU(), Called())
    if whole:
        model[2] = torch.compile(model[2], backend="eager")
    else:
        model[2].bn1.compile(backend="eager")
    words = "the module '2.*' has been compiled, .*; fuse the model first and compile after that"
    with pytest.raises(ValueError, match=words):
        fuse_activations(model)
    assert type(model[1]) is nn.ReLU and model[0].activation is None
    with pytest.raises(ValueError, match="^the model has been compiled"):
        fuse_activations(torch.compile(nn.Sequential(norm(), nn.ReLU()), backend="eager"))
    # Compiled parts without a layer do no harm.
    model = nn.Sequential(torch.compile(nn.ReLU(), backend="eager"), norm(), nn.ReLU())
    assert isinstance(fuse_activations(model)[2], FusedActivation)


def test_revert_of_a_fused_block_that_has_been_compiled_is_an_error():
    model = torch.compile(fuse_activations(Called()), backend="eager")
    with pytest.raises(ValueError, match="has been compiled by itself"):
        revert_sync_batchnorm(model)
    assert len(explain_fusion(model).fused) == 2
