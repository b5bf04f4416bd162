"""SyncBatchNorm as a module: torch's constructor, state and repr, copies and pickles."""

import copy
import inspect
import io
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from support.cases import DTYPES, make_input
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import syncbn
from syncbn import SyncBatchNorm, convert_sync_batchnorm
from syncbn.ops import epilogue, masks

OPTIONS = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"eps": 1e-3, "momentum": 0.3},
    {"dtype": torch.float64},
]


def test_signature_is_torchs():
    ours = list(inspect.signature(SyncBatchNorm.__init__).parameters.values())
    theirs = list(inspect.signature(nn.SyncBatchNorm.__init__).parameters.values())
    only_ours = ["bias", "activation", "negative_slope"]  # torch 2.15 has a bias
    assert [(p.name, p.default) for p in ours[: -len(only_ours)]] == [
        (p.name, p.default) for p in theirs if p.name != "bias"
    ]
    assert [p.name for p in ours if p.kind is inspect.Parameter.KEYWORD_ONLY] == only_ours


def test_base_class():
    assert issubclass(SyncBatchNorm, _BatchNorm)
    assert not issubclass(SyncBatchNorm, nn.SyncBatchNorm)


@pytest.mark.works("checkpoints of `torch.nn.SyncBatchNorm`, both ways")
@pytest.mark.parametrize("options", OPTIONS)
def test_state_dict_moves_both_ways(options):
    ours, theirs = SyncBatchNorm(4, **options), nn.SyncBatchNorm(4, **options)
    for a, b in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for value in a.state_dict().values():
                value.copy_(torch.rand(value.shape) * 9)
        b.load_state_dict(a.state_dict())
        for key, value in a.state_dict().items():
            assert torch.equal(b.state_dict()[key], value)
            assert b.state_dict()[key].dtype == value.dtype
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.state_dict()._metadata == theirs.state_dict()._metadata


@pytest.mark.parametrize("options", OPTIONS)
def test_repr_and_attributes_are_torchs(options):
    ours, theirs = SyncBatchNorm(4, **options), nn.SyncBatchNorm(4, **options)
    assert repr(ours) == repr(theirs)
    names = ["num_features", "eps", "momentum", "affine", "track_running_stats", "process_group"]
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"affine": False}])
def test_reset_parameters(options):
    layer = SyncBatchNorm(3, **options)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.fill_(7)
    layer.reset_parameters()
    fresh = SyncBatchNorm(3, **options).state_dict()
    assert all(torch.equal(value, fresh[key]) for key, value in layer.state_dict().items())


class Doubled(SyncBatchNorm):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.works("`torch.fx.symbolic_trace`: a node that follows train() and eval()")
@pytest.mark.parametrize("layer", [SyncBatchNorm, Doubled])
@pytest.mark.parametrize("training", [True, False])
def test_symbolic_tracing(training, layer):
    """A subclass with a forward of its own is traced through, as torch's are."""
    model = nn.Sequential(nn.Linear(3, 3), layer(3), nn.ReLU()).train(training)
    x = make_input((4, 3), "contiguous", torch.float32)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert torch.equal(traced(x), model(x))
    if layer is SyncBatchNorm:
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"][1] == "1"
        assert torch.equal(traced.train(not training)(x), model.train(not training)(x))
        for a, b in zip(traced.buffers(), model.buffers(), strict=True):
            assert torch.equal(a, b)


def doubled_by_hook(layer):
    layer.register_forward_hook(lambda module, args, output: 2 * output)


def doubled_by_pre_hook(layer):
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))


def doubled_by_patch(layer):
    original = layer.forward
    layer.forward = lambda input: 2 * original(input)


@pytest.mark.parametrize("change", [doubled_by_hook, doubled_by_pre_hook, doubled_by_patch])
def test_symbolic_tracing_runs_hooks_and_patches_once(change):
    model = nn.Sequential(SyncBatchNorm(3))
    x = make_input((4, 3), "contiguous", torch.float32)
    model(x)
    model.eval()
    change(model[0])
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_symbolic_tracing_of_the_layer_itself():
    layer = SyncBatchNorm(3)
    x = make_input((4, 3), "contiguous", torch.float32)
    assert torch.equal(torch.fx.symbolic_trace(copy.deepcopy(layer))(x), layer(x))
    evaluated = torch.fx.symbolic_trace(layer.eval())
    assert torch.equal(evaluated(x), layer(x))
    functions = [node.target for node in evaluated.graph.nodes if node.op == "call_function"]
    # And some of ours, because the traced module may get a residual and a mask.
    assert functions == [
        *(masks.clear_given, masks.clear_given, nn.functional.batch_norm),
        *(epilogue.add_residual, masks.clear_given),
    ]
    evaluated, layer = evaluated.double(), layer.double()
    x = x.double()
    assert torch.equal(evaluated(x, x), layer(x, x))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("training", [True, False])
def test_lazy_layers_whose_num_features_torch_leaves_at_zero(training):
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    loaded = nn.Sequential(nn.LazyBatchNorm1d())
    loaded.load_state_dict(nn.Sequential(nn.BatchNorm1d(3)).state_dict())
    loaded(x)
    without_vectors = nn.LazyBatchNorm1d(affine=False, track_running_stats=False)
    without_vectors(x)
    for model in (loaded, without_vectors):
        model.train(training)
        converted = convert_sync_batchnorm(copy.deepcopy(model))
        for _ in range(2):
            # Float32 in another order, of values of order one.
            torch.testing.assert_close(converted(x), model(x), rtol=1e-5, atol=1e-5)


def test_old_checkpoint_without_batch_counter_loads():
    state = SyncBatchNorm(3).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    layer = SyncBatchNorm(3)
    layer.load_state_dict(state)
    assert layer.num_batches_tracked.item() == 0


@pytest.mark.works("one process, without `torch.distributed`")
@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("training", [True, False])
def test_one_process_equals_batch_norm(options, training):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, **options}
    ours = SyncBatchNorm(5, **options).train(training)
    theirs = nn.BatchNorm2d(5, **options).train(training)
    for step in range(3):
        x = make_input((4, 5, 3, 2), "contiguous", torch.float64, seed=step)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ya, yb = ours(a), theirs(b)
        ya.square().sum().backward()
        yb.square().sum().backward()
        torch.testing.assert_close(ya, yb)  # float64 rounding
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-11)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def test_statistics_are_left_alone_when_tracking_is_switched_off():
    layer = SyncBatchNorm(3)
    layer.track_running_stats = False
    layer(make_input((4, 3), "contiguous", torch.float32))
    assert layer.num_batches_tracked.item() == 0 and not layer.running_mean.any()


@pytest.mark.works(
    "float16 to float64; parameters and buffers in the same dtype, float32 or float64"
)
@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("buffers", [torch.float32, torch.float64, "input"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, "input"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes(dtype, parameters, buffers, training):
    x = make_input((8, 3, 4), "contiguous", dtype)
    layer = SyncBatchNorm(3).train(training)
    parameters = dtype if parameters == "input" else parameters
    buffers = dtype if buffers == "input" else buffers
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(parameters)
    layer.running_mean = layer.running_mean.to(buffers)
    layer.running_var = layer.running_var.to(buffers)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == dtype and layer.weight.grad.dtype == parameters
    assert layer.running_mean.dtype == buffers
    expected = nn.BatchNorm1d(3).double().train(training)(x.double())
    # one rounding of the output, and in evaluation possibly of 16-bit statistics
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=2 * eps, atol=4 * eps)


@pytest.mark.usefixtures("each_device")
def test_half_module_counts_past_65504():
    x = torch.randn(2, 2, 190, 190).half()  # 72,200 values per channel
    layer = SyncBatchNorm(2).half()
    y = layer(x).double()
    assert y.mean().abs() < 1e-3 and (y.var() - 1).abs() < 1e-3  # half's rounding


def share_group(rank, world_size):
    group = dist.new_group([0, 1])
    layer = SyncBatchNorm(3, process_group=group)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    deep = copy.deepcopy(model)
    shallow = copy.copy(layer)
    stream = io.BytesIO()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save(model, stream)
        loaded = pickle.loads(pickle.dumps(layer))
    x = make_input((2, 3), "contiguous", torch.float32, seed=rank)
    return {
        "deep shares": deep[0].process_group is group and deep[0] is deep[2],
        "deep is a copy": deep[0].weight is not layer.weight,
        "shallow shares": shallow.process_group is group and shallow.weight is layer.weight,
        "pickle drops": loaded.process_group is None and layer.process_group is group,
        "pickle says so": any("cannot be pickled" in str(w.message) for w in caught),
        "copy works": torch.equal(deep[0](x), layer(x)),
    }


@pytest.mark.works("`copy.deepcopy` and pickling of layers with a process group")
@pytest.mark.trouble(
    "“cannot be pickled”, a warning of a process group",
    "A saved module cannot hold a group of processes",
    "Save the `state_dict`, or set the layers' `process_group` again after loading",
)
def test_copies_share_the_group_and_pickles_drop_it(two_ranks):
    for facts in two_ranks.run(share_group):
        assert all(facts.values()), facts


def test_loaded_layer_is_another_layer():
    """A process may hold it beside the pickled layer, or beside other layers of its number."""
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded._syncbn.identity.key != layer._syncbn.identity.key
    assert loaded._syncbn.identity.number == layer._syncbn.identity.number
    assert loaded._syncbn.identity.name == "body.bn1"


def test_public_names():
    assert set(dir(syncbn)) == {*syncbn.__all__, "__version__"}
    assert set(syncbn.__all__) <= set(re.findall(r"\w+", syncbn.__doc__))
    assert syncbn.__version__


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_eps_of_zero(track, training):
    layer = SyncBatchNorm(3, eps=0.0, track_running_stats=track).train(training)
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    expected = torch.batch_norm(
        x, None, None, layer.running_mean, layer.running_var, training or not track, 0.1, 0.0, False
    )
    # float32 roundings of values below 4
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("when", [0, 1])
def test_cumulative_average_with_a_bad_batch_is_torchs(when, compile):
    ours, theirs = SyncBatchNorm(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    torch._dynamo.reset()
    model = torch.compile(ours, backend="aot_eager", fullgraph=True) if compile else ours
    for number in range(3):
        x = make_input((4, 3, 5), "contiguous", torch.float32, seed=number)
        if number == when:
            x[0, 1, 0] = torch.nan
        model(x)
        theirs(x)
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)  # float32 rounding
    ours.reset_running_stats()
    assert ours.running_mean.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_tensors_are_taken_as_numbers_as_by_torchs_layer(training):
    eps, momentum, slope = torch.tensor(1e-3), torch.tensor(0.25), torch.tensor(0.5)
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    theirs = torch.nn.BatchNorm1d(3, eps=eps, momentum=momentum).train(training)
    options = {"activation": "leaky_relu", "negative_slope": slope}
    ours = SyncBatchNorm(3, eps=eps, momentum=momentum, **options).train(training)
    expected = torch.nn.functional.leaky_relu(theirs(x), 0.5)
    torch.testing.assert_close(ours(x), expected)  # float32 rounding
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    with pytest.raises(TypeError, match="expected momentum to be a number, but got Tensor"):
        SyncBatchNorm(3, momentum=torch.ones(1))


def test_bad_group_is_refused_after_a_pass_in_one_process():
    layer = SyncBatchNorm(3)
    layer(torch.rand(4, 3))
    layer.process_group = "nccl"
    with pytest.raises(TypeError, match="expected process_group to be a torch.distributed"):
        layer(torch.rand(4, 3))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.float32])
def test_batch_counter_of_any_dtype(dtype, momentum):
    """Code that casts every buffer casts the counter too."""
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    layer, expected = SyncBatchNorm(3, momentum=momentum), SyncBatchNorm(3, momentum=momentum)
    layer.num_batches_tracked = counter = layer.num_batches_tracked.to(dtype)
    for steps in (1, 2):
        assert torch.equal(layer(x), expected(x))
        assert layer.num_batches_tracked is counter
        assert counter.dtype == dtype and counter.item() == steps
    assert torch.equal(layer.running_var, expected.running_var)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_batch_counter_with_a_fraction_keeps_it(dtype, momentum):
    x = make_input((4, 3, 5), "contiguous", torch.float64)
    theirs = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    theirs.num_batches_tracked = torch.tensor(3.5, dtype=dtype)
    ours = convert_sync_batchnorm(copy.deepcopy(theirs))
    for layer in (ours, theirs):
        layer(x)
    assert ours.num_batches_tracked == 4.5 and ours.num_batches_tracked.dtype == dtype
    # float64, by its default tolerances
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("compile", [False, True])
def test_gradients_of_weight_and_bias_have_their_own_dtypes(compile):
    """A sum of 70,000, which float16 does not hold, in a float32 bias beside a float16 weight."""
    layer = SyncBatchNorm(2).half()
    layer.bias = nn.Parameter(layer.bias.detach().float())
    run = layer
    if compile:
        torch._dynamo.reset()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = make_input((7, 2, 10000), "contiguous", torch.float16)
    run(x).backward(torch.ones_like(x))
    assert layer.weight.grad.dtype == torch.float16 and layer.bias.grad.dtype == torch.float32
    assert layer.bias.grad.tolist() == [70000, 70000]


def test_eps_of_zero_needs_more_than_one_value_and_can_be_traced():
    layer = SyncBatchNorm(3, eps=0.0, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(torch.rand(1, 3))
    layer = SyncBatchNorm(3, eps=0.0).eval()
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))


def test_cumulative_average_without_a_counter_leaves_the_statistics_as_in_torch():
    layer, theirs = SyncBatchNorm(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    layer.num_batches_tracked = theirs.num_batches_tracked = None
    x = make_input((4, 3), "contiguous", torch.float32)
    torch.testing.assert_close(layer(x), theirs(x))  # two implementations
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(layer, name), getattr(theirs, name))
