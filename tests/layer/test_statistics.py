"""recompute_statistics in one process, against the whole population at once in float64."""

import copy
import sys

import pytest
import torch
from support.cases import reduced_dims
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    recompute_statistics,
)

# float32 buffers: one rounding of a float64 result.
FLOAT32 = {"rtol": 1e-7, "atol": 1e-7}
# Sums over some 200 values, and means of at most some ten standard deviations (docs/numerics.md).
FLOAT64 = {"rtol": 1e-13, "atol": 1e-13}


def make_batches(sizes=(4, 1, 7, 2), shape=(3, 2, 5), dtype=torch.float64, seed=0):
    """Batches of different sizes, means and scales: the average of their variances is wrong."""
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randn(size, *shape, generator=generator, dtype=dtype, device="cpu") for size in sizes
    )
    device = torch.get_default_device()
    return [(batch * (1 + i) + 2 * i).to(device) for i, batch in enumerate(values)]


def check_statistics(layer, values, num_batches, **tolerance):
    population = values.double()
    dims = reduced_dims(population)
    for running, expected in (
        (layer.running_mean, population.mean(dims)),
        (layer.running_var, population.var(dims)),
    ):
        torch.testing.assert_close(running.double(), expected, **tolerance)
    assert layer.num_batches_tracked.item() == num_batches


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)),
        nn.Dropout(0.5),
    )
    return convert_sync_batchnorm(model.double()).eval()


def state(model):
    """All state that must stay, except running statistics, as bits."""
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "momentum": [layer.momentum for layer in ours(model)],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "attributes": [set(vars(module)) for module in model.modules()],
    }


def ours(model):
    return [module for module in model.modules() if isinstance(module, SyncBatchNorm)]


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.works("`recompute_statistics`: mean and variance of all batches")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_equals_the_whole_population(each_device, dtype, momentum):
    batches = [batch.to(each_device) for batch in make_batches(dtype=dtype)]
    buffers_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    layer = SyncBatchNorm(3, momentum=momentum, dtype=buffers_dtype)
    layer.running_mean.fill_(9.0)  # must be replaced
    recompute_statistics(layer, batches)
    tolerance = FLOAT64 if dtype == torch.float64 else FLOAT32
    check_statistics(layer, torch.cat(batches), 4, **tolerance)
    assert layer.momentum == momentum and layer.training


def test_replaces_an_average_that_a_bad_batch_has_spoiled():
    layer, batches = SyncBatchNorm(3, momentum=None).double(), make_batches()
    layer(torch.full_like(batches[0], torch.nan))
    assert layer.running_mean.isnan().all() and layer.running_var.isnan().all()
    recompute_statistics(layer, batches)
    check_statistics(layer, torch.cat(batches), 4, **FLOAT64)


def test_mean_far_from_zero():
    batches = [batch + 1e4 for batch in make_batches((8, 8, 8))]
    layer = SyncBatchNorm(3, dtype=torch.float64)
    recompute_statistics(layer, batches)
    # 1.1e-16 · (1 + mean²/variance), the variance being some 6: docs/numerics.md; eight times that
    check_statistics(layer, torch.cat(batches), 3, rtol=2e-8, atol=0)


def test_constant_channel_has_no_variance():
    layer = SyncBatchNorm(2, dtype=torch.float64)
    recompute_statistics(layer, [torch.full((n, 2, 3), 0.1).double() for n in (3, 5, 7)])
    assert not layer.running_var.any()
    assert torch.equal(layer.running_mean, torch.full((2,), 0.1).double())


def test_many_batches():
    layer = SyncBatchNorm(2, dtype=torch.float64)
    batches = [torch.randn(2, 2, generator=torch.Generator().manual_seed(i)) for i in range(1000)]
    batches = [batch.double() for batch in batches]
    recompute_statistics(layer, iter(batches))
    # As many merges as batches, each rounding once.
    check_statistics(layer, torch.cat(batches), 1000, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("training", [True, False])
def test_layers_use_batch_statistics_and_other_state_stays(training):
    model, batches = make_model(), make_batches()
    model.train(training)
    model[4].eval()
    model[1].eval()  # by the program
    model(batches[0]).sum().backward()
    before, seen = state(model), {layer: [] for layer in ours(model)}
    for layer in ours(model):
        layer.register_forward_hook(lambda layer, inputs, output: seen[layer].append(inputs[0]))
    before["attributes"] = state(model)["attributes"]
    recompute_statistics(model, batches)
    for layer in ours(model):
        check_statistics(layer, torch.cat(seen[layer]), 4, **FLOAT64)
        assert not any(x.requires_grad for x in seen[layer])
    # The second layer's input is the first one's output in training.
    first, inner = seen[model[1]][2], seen[model[3][1]][2]
    normalized = nn.BatchNorm2d(4).double().train()(first)
    torch.testing.assert_close(inner, model[3][0](normalized.relu()), **FLOAT64)
    after = state(model)
    assert all(a is b for a, b in zip(after.pop("gradients"), before.pop("gradients"), strict=True))
    assert after == before


class Counting(nn.Module):
    """A module with a buffer that each call replaces, and one that each call changes."""

    def __init__(self):
        super().__init__()
        self.norm, self.others = SyncBatchNorm(3, dtype=torch.float64), nn.BatchNorm2d(3).double()
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("changed", torch.full((2,), torch.nan))
        self.register_buffer("sparse", torch.eye(2).to_sparse())

    def forward(self, x):
        self.replaced = self.replaced + 1
        self.changed.fill_(self.replaced[0])
        return self.others(self.norm(x))


def test_other_buffers_stay():
    model = Counting()
    objects = dict(model.named_buffers())
    before = buffers(model.others)
    recompute_statistics(model, make_batches())
    assert_same(buffers(model.others), before)
    assert torch.equal(model.replaced, torch.zeros(2)) and model.changed.isnan().all()
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())
    assert model.norm.num_batches_tracked == 4


class OwnError(Exception):
    def __init__(self, number, word):
        super().__init__(f"{number} {word}")


def failing(batches, after):
    yield from batches[:after]
    raise OwnError(after, "batches")


@pytest.mark.parametrize("where", ["batches", "model", "forward"])
def test_an_error_leaves_the_model_unchanged(where):
    model, batches = make_model().train(), make_batches()
    before, statistics = state(model), buffers(model)
    calls = []

    def fail(*_):
        calls.append(0)
        if len(calls) == 3:
            raise OwnError(2, where)

    with pytest.raises(OwnError, match=f"^2 {where}$"):
        if where == "batches":
            recompute_statistics(model, failing(batches, 2))
        elif where == "forward":
            recompute_statistics(model, batches, fail)
        else:
            handle = model[3][0].register_forward_pre_hook(fail)
            recompute_statistics(model, batches)
    if where == "model":
        handle.remove()
    assert_same(buffers(model), statistics)
    assert state(model) == before
    # A following run is not mixed with this one.
    recompute_statistics(model, batches)
    seen = torch.cat([model[0](batch) for batch in batches])
    check_statistics(model[1], seen.detach(), 4, **FLOAT64)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x, id="tensor"),
        pytest.param(lambda x: (x, "label"), id="tuple"),
        pytest.param(lambda x: [x], id="list"),
    ],
)
def test_batches_as_update_bn_takes_them(make):
    layer, batches = SyncBatchNorm(3, dtype=torch.float64), make_batches()
    recompute_statistics(layer, (make(batch) for batch in batches))
    check_statistics(layer, torch.cat(batches), 4, **FLOAT64)


def test_forward_says_how():
    layer, batches = SyncBatchNorm(3, dtype=torch.float64), make_batches()
    recompute_statistics(layer, [{"x": x} for x in batches], lambda model, b: model(b["x"]))
    check_statistics(layer, torch.cat(batches), 4, **FLOAT64)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [({"x": 1}, "a dict;"), ([], "a list;"), (("a", 1), "a tuple that begins with str;")],
)
def test_batches_without_a_tensor(batch, kind):
    with pytest.raises(TypeError, match=f"list or tuple that begins with one, but got {kind}"):
        recompute_statistics(SyncBatchNorm(3), [batch])


def test_no_batches():
    layer = SyncBatchNorm(3)
    with pytest.raises(
        ValueError, match="at least one batch, but there was none; batches are read"
    ):
        recompute_statistics(layer, iter([]))
    assert_same(buffers(layer), buffers(SyncBatchNorm(3)))


def test_models_with_nothing_to_recompute():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, but got str"):
        recompute_statistics("model", [])
    with pytest.raises(ValueError, match="this BatchNorm1d has none; call syncbn.convert_sync"):
        recompute_statistics(nn.BatchNorm1d(3), [])
    model = nn.Sequential(SyncBatchNorm(3), SyncBatchNorm(3, track_running_stats=False))
    freeze_statistics(model)
    with pytest.raises(
        ValueError, match="each of the 2 of this Sequential is frozen or has track_"
    ):
        recompute_statistics(model, make_batches())


def test_frozen_and_untracked_layers_are_left_alone():
    model = nn.Sequential(*(SyncBatchNorm(3).double() for _ in range(3)))
    model[2] = SyncBatchNorm(3, track_running_stats=False).double()
    freeze_statistics(model[0])
    frozen = buffers(model[0])
    seen = []
    model[1].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    recompute_statistics(model, make_batches())
    assert_same(buffers(model[0]), frozen)
    check_statistics(model[1], torch.cat(seen), 4, **FLOAT64)
    # the frozen layer in front is in evaluation
    torch.testing.assert_close(seen[0], model[0](make_batches()[0]), rtol=0, atol=0)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.rare, self.never = (SyncBatchNorm(3).double() for _ in range(3))

    def forward(self, x):
        y = self.twice(self.twice(x) * 2 + 1)
        return self.rare(y) if len(x) > 3 else y


def test_layers_called_several_times_sometimes_and_never():
    model, batches, seen = Branches(), make_batches(), {}
    model.never.running_mean.fill_(5.0)
    for name, layer in model.named_children():
        seen[name] = []
        layer.register_forward_pre_hook(lambda _, inputs, to=seen[name]: to.append(inputs[0]))
    before = buffers(model.never)
    with pytest.warns(UserWarning, match=r"as they were, of the layers 'never' \(no values\)$"):
        recompute_statistics(model, batches)
    assert len(seen["twice"]) == 8 and len(seen["rare"]) == 2
    check_statistics(model.twice, torch.cat(seen["twice"]), 4, **FLOAT64)
    check_statistics(model.rare, torch.cat(seen["rare"]), 2, **FLOAT64)
    assert_same(buffers(model.never), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_channel_that_is_not_finite_stays(value):
    model, batches = nn.Sequential(SyncBatchNorm(3).double()), make_batches()
    batches[1][0, 1, 0, 0] = value
    with pytest.warns(UserWarning, match=r"'0' \(1 of 3 channels, not finite\)"):
        recompute_statistics(model, batches)
    x, fresh = torch.cat(batches), SyncBatchNorm(3).double()
    for name, of in (("running_mean", torch.mean), ("running_var", torch.var)):
        expected = of(x, reduced_dims(x))
        expected[1] = getattr(fresh, name)[1]
        torch.testing.assert_close(getattr(model[0], name), expected, **FLOAT64)


def test_statistics_that_the_buffers_cannot_hold_stay():
    layer = SyncBatchNorm(2, dtype=torch.float16)
    batches = [torch.randn(5, 2, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for batch in batches:
        batch[:, 1] *= 1e3  # a variance of 1e6, beyond float16
    with pytest.warns(UserWarning, match=r"'' \(1 of 2 channels, not finite\)"):
        recompute_statistics(layer, [batch.half() for batch in batches])
    assert layer.running_var[1] == 1 and layer.running_mean[1] == 0
    assert layer.running_var[0] != 1


def test_empty_batches_have_no_effect():
    layer, batches = SyncBatchNorm(3).double(), make_batches()
    recompute_statistics(layer, [batches[0][:0], *batches])
    check_statistics(layer, torch.cat(batches), 4, **FLOAT64)
    with pytest.warns(UserWarning, match="no values"):
        recompute_statistics(layer, [batches[0][:0]])
    check_statistics(layer, torch.cat(batches), 4, **FLOAT64)


def assert_as(model, expected):
    for layer, reference in zip(ours(model), ours(expected), strict=True):
        # The second layer's input comes out of other operators.
        for name in ("running_mean", "running_var"):
            actual = getattr(layer, name)
            torch.testing.assert_close(actual, getattr(reference, name), rtol=1e-12, atol=1e-12)
        assert layer.num_batches_tracked == reference.num_batches_tracked


def test_fused_models():
    model, batches = make_model(), make_batches()
    fused = fuse_activations(copy.deepcopy(model))
    recompute_statistics(fused, batches)
    recompute_statistics(model, batches)
    assert_as(fused, model)


def test_compiled_models():
    model, batches = make_model(), make_batches()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    for mode in (True, False):  # compiles a graph of each
        compiled.train(mode)(batches[0])
    recompute_statistics(compiled, batches)
    recompute_statistics(model, batches)
    assert_as(compiled, model)


def test_needs_no_tqdm_and_shows_progress_with_it(monkeypatch):
    shown = []

    class Bar:
        def __init__(self, iterable, desc, disable):
            shown.append((desc, disable))
            self.iterable = iterable

        def __iter__(self):
            return iter(self.iterable)

    batches = make_batches()
    for module in (None, type(sys)("tqdm")):
        monkeypatch.setitem(sys.modules, "tqdm", module)
        if module is not None:
            module.tqdm = Bar
        layer = SyncBatchNorm(3).double()
        recompute_statistics(layer, batches)
        check_statistics(layer, torch.cat(batches), 4, **FLOAT64)
    assert shown == [("recompute_statistics", None)]
