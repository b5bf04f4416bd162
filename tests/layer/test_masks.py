"""The layer with a mask, against torch's modules on the unmasked values only."""

import copy
import pickle

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from support.cases import DTYPES, make_input, make_mask
from support.fusing import (
    ACTIVATIONS,
    FUSED,
    SLOPE,
    Operands,
    assert_error_at_most_twice,
    make_layer,
    make_operands,
    run_separately,
    sum_errors,
)
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    recompute_statistics,
    revert_sync_batchnorm,
    sync_batch_norm,
)

pytestmark = pytest.mark.usefixtures("each_device")

FOLLOWING = [(None, False), *FUSED]
following = pytest.mark.parametrize(("activation", "with_residual"), FOLLOWING)


def valid(tensor, mask):
    """Return the values that count, as rows: [n, C]."""
    return None if tensor is None else tensor.movedim(1, -1)[mask]


def spoiled(tensor, mask):
    """Return the tensor with NaN at masked places, in its layout."""
    if tensor is None:
        return None
    return torch.empty_like(tensor).copy_(torch.where(mask.unsqueeze(1), tensor, torch.nan))


def make_masked(shape, layout, dtype, *, with_residual, masks=True):
    """Return operands with NaN at masked places, the mask, and the operands' valid rows."""
    whole = make_operands(shape, layout, dtype, with_residual=with_residual)
    mask = make_mask(whole.x)
    if not masks:
        mask = torch.ones_like(mask)
    rows = Operands(*(valid(t, mask) for t in whole[:2]), *whole[2:4], valid(whole.residual, mask))
    masked = whole._replace(
        x=spoiled(whole.x, mask), dy=spoiled(whole.dy, mask), residual=spoiled(whole[4], mask)
    )
    return masked, mask, rows


def run_layer(operands, mask, activation):
    """Return output and gradients, those of places as valid rows; the others are zero."""
    layer = make_layer(operands, activation)
    y = layer(operands.x, operands.residual, mask=mask)
    y.backward(operands.dy)
    places = [y, operands.x.grad]
    if operands.residual is not None:
        places.append(operands.residual.grad)
    for tensor in places:
        assert not tensor.movedim(1, -1)[~mask].any()
    rows = [valid(t, mask) for t in places]
    return [*rows[:2], layer.weight.grad, layer.bias.grad, *rows[2:]]


@following
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(4, 16, 5, 7), (6, 70, 11, 9), (5, 3, 200), (99, 17)])
def test_error_is_at_most_twice_that_of_modules_on_valid_values(
    shape, layout, dtype, activation, with_residual
):
    if len(shape) == 2 and layout == "channels_last":
        pytest.skip("a matrix has one layout")
    masked, mask, rows = make_masked(shape, layout, dtype, with_residual=with_residual)
    exact = run_separately(rows.as_leaves(torch.float64), activation)
    theirs = run_separately(rows.as_leaves(), activation)
    ours = run_layer(masked.as_leaves(), mask, activation)
    # Torch's SiLU of rows has half the error of its SiLU of planes here; ours rounds a product and
    # a sum, the sigmoid and one more product, its derivative two products more. And torch's sums of
    # tens of values are exact by chance.
    sums, roundings = sum_errors(rows.x), 6 if activation == "silu" else 4
    assert_error_at_most_twice(ours, theirs, exact, sums, roundings)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_mean(layout):
    """float32 values that are 1000 standard deviations from zero."""
    masked, mask, rows = make_masked((8, 6, 20, 9), layout, torch.float32, with_residual=False)
    masked, rows = masked._replace(x=masked.x + 2e3), rows._replace(x=rows.x + 2e3)
    exact = run_separately(rows.as_leaves(torch.float64), None)
    theirs = run_separately(rows.as_leaves(), None)
    assert_error_at_most_twice(run_layer(masked.as_leaves(), mask, None), theirs, exact)


def test_running_statistics_are_of_valid_values():
    x = make_input((4, 3, 7), "contiguous", torch.float32)
    mask = make_mask(x)
    for momentum in (0.1, None):
        ours, theirs = SyncBatchNorm(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
        for batch in (x, 2 * x):
            ours(spoiled(batch, mask), mask=mask)
            theirs(valid(batch, mask))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_mask_of_nothing_is_an_empty_batch(momentum):
    layer = SyncBatchNorm(3, momentum=momentum, activation="silu")
    before = copy.deepcopy(layer.state_dict())
    x = torch.full((4, 3, 7), torch.nan).requires_grad_()
    y = layer(x, mask=torch.zeros(4, 7, dtype=torch.bool))
    y.backward(torch.full_like(y, torch.nan))
    assert not y.any() and not x.grad.any() and not layer.weight.grad.any()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), layer.state_dict().values()))  # noqa: B905


@pytest.mark.parametrize("compile", [False, True])
def test_a_mask_of_one_place_is_an_error_on_cpus(compile):
    """On CUDA the host does not know how many places it has."""
    layer = SyncBatchNorm(3, device="cpu")
    before = copy.deepcopy(layer.state_dict())
    x = torch.rand(2, 3, 4, device="cpu")
    mask = torch.zeros(2, 4, dtype=torch.bool, device="cpu")
    mask[1, 2] = True
    torch._dynamo.reset()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compile else layer
    words = "Expected more than 1 value per channel when training, got 1 in the whole batch"
    with pytest.raises(ValueError, match=words):
        call(x, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), layer.state_dict().values()))  # noqa: B905


SHAPES_OF_MASKS = [(4, 6, 5), (4, 1, 6, 5), (4, 1, 1), (1, 6, 5), (4, 6, 1), (1, 1, 1, 5)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES_OF_MASKS)
def test_mask_is_broadcast(shape, training):
    x = make_input((4, 3, 6, 5), "contiguous", torch.float32)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu") < 0.6
    mask = mask.to(x.device)
    full = (mask if mask.dim() == 3 else mask[:, 0]).expand(4, 6, 5).contiguous()
    layer = SyncBatchNorm(3).train(training)
    assert torch.equal(layer(x, mask=mask), layer(x, mask=full))


@pytest.mark.parametrize("mask", [None, "all"])
def test_a_full_mask_equals_no_mask(mask):
    x = make_input((4, 3, 6, 5), "contiguous", torch.float32)
    given = {} if mask is None else {"mask": torch.ones(4, 6, 5, dtype=torch.bool)}
    expected = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(sync_batch_norm(x, None, None, training=True, **given), expected)


BAD_MASKS = [
    (lambda x: [True], TypeError, "mask to be a torch.Tensor or None, but got list"),
    (lambda x: torch.ones(4, 5), TypeError, "dtype bool, but got float32; compare it .* mask > 0"),
    (lambda x: torch.ones(4, 5).bool().to_sparse(), TypeError, "dense mask, but got layout"),
    (
        lambda x: torch.ones(4, 3, 5).bool(),
        ValueError,
        r"shape \[4, 5\] or \[4, 1, 5\], .* got \[4, 3, 5\]",
    ),
    (lambda x: torch.ones(5).bool(), ValueError, r"or sizes of 1 there, but got \[5\]"),
    (lambda x: torch.ones(3, 5).bool(), ValueError, r"but got \[3, 5\]"),
    (lambda x: torch.ones(4, 5, device="meta").bool(), ValueError, "to be on .* got meta"),
]


@pytest.mark.parametrize(("make", "kind", "words"), BAD_MASKS)
@pytest.mark.parametrize("training", [True, False])
def test_bad_mask_is_an_error(training, make, kind, words):
    x = torch.rand(4, 3, 5)
    layer = SyncBatchNorm(3).train(training)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(kind, match=f"a layer: .*{words}|{words}"):
        layer(x, mask=make(x))
    torch.testing.assert_close(layer.state_dict(), before)


@following
@pytest.mark.parametrize("tracked", [True, False])
def test_evaluation(tracked, activation, with_residual):
    masked, mask, rows = make_masked(
        (4, 3, 6), "contiguous", torch.float32, with_residual=with_residual
    )
    layer = SyncBatchNorm(
        3, track_running_stats=tracked, activation=activation, negative_slope=SLOPE
    )
    layer.eval()
    operands = masked.as_leaves()
    y = layer(operands.x, operands.residual, mask=mask)
    y.backward(operands.dy)
    leaves = rows.as_leaves()
    z = F.batch_norm(leaves.x, layer.running_mean, layer.running_var, training=not tracked)
    z = z if leaves.residual is None else z + leaves.residual
    expected = ACTIVATIONS[activation](z)
    expected.backward(leaves.dy)
    pairs = [(y, expected), (operands.x.grad, leaves.x.grad)]
    if with_residual:
        pairs.append((operands.residual.grad, leaves.residual.grad))
    for actual, right in pairs:
        assert not actual.movedim(1, -1)[~mask].any()
        torch.testing.assert_close(valid(actual, mask), right)
    assert not layer.weight.grad.isnan().any()


@following
@pytest.mark.parametrize("masks", [True, False])
def test_second_derivatives(activation, with_residual, masks):
    masked, mask, rows = make_masked(
        (3, 4, 5), "contiguous", torch.float64, with_residual=with_residual, masks=masks
    )
    seeds = [make_input(t.shape, "contiguous", t.dtype, seed=9) for t in masked if t is not None]

    def gradients(leaves, function, pick):
        inputs = [
            t for t in (leaves.x, leaves.weight, leaves.bias, leaves.residual) if t is not None
        ]
        first = torch.autograd.grad(function(leaves), inputs, leaves.dy, create_graph=True)
        chosen = [pick(s) if s.dim() > 1 else s for s in (seeds[0], *seeds[2:])]
        total = sum((g * s).sum() for g, s in zip(first, chosen, strict=True))
        second = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
        return [*first, *second]

    def ours(o):
        return make_function(o, mask if masks else None, activation)

    def theirs(o):
        z = F.batch_norm(o.x, None, None, o.weight, o.bias, training=True)
        return ACTIVATIONS[activation](z if o.residual is None else z + o.residual)

    actual = gradients(masked.as_leaves(), ours, lambda s: s)
    expected = gradients(rows.as_leaves(), theirs, lambda s: valid(s, mask))
    for our, their in zip(actual, expected, strict=True):
        if our.dim() > 1:
            assert not our.movedim(1, -1)[~mask].any()
            our = valid(our, mask)
        torch.testing.assert_close(our, their)  # float64, by its default tolerances


def make_function(o, mask, activation):
    return sync_batch_norm(
        *(o.x, None, None, o.weight, o.bias),
        training=True,
        residual=o.residual,
        activation=activation,
        negative_slope=SLOPE,
        mask=mask,
    )


def test_mask_that_changes_before_backward_is_an_error():
    x = torch.rand(4, 3, 5, requires_grad=True)
    mask = torch.ones(4, 5, dtype=torch.bool)
    y = SyncBatchNorm(3)(x, mask=mask)
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpoint_recomputes_with_the_mask():
    from torch.utils.checkpoint import checkpoint

    x = make_input((4, 3, 7), "contiguous", torch.float64)
    mask, layers = make_mask(x), [SyncBatchNorm(3, dtype=torch.float64) for _ in range(2)]
    leaves = [spoiled(x, mask).requires_grad_() for _ in layers]
    layers[0](leaves[0], mask=mask).square().sum().backward()
    y = checkpoint(lambda x: layers[1](x, mask=mask), leaves[1], use_reentrant=False)
    y.square().sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
    torch.testing.assert_close(layers[1].state_dict(), layers[0].state_dict())


class Net(nn.Module):
    """A net that passes a mask on."""

    def __init__(self, norm=nn.BatchNorm1d, **keywords):
        super().__init__()
        self.norm, self.activation = norm(3, **keywords), nn.ReLU()

    def forward(self, x, mask):
        return self.activation(self.norm(x, mask=mask))


def test_converted_frozen_and_fused_layers_take_a_mask():
    x = make_input((4, 3, 7), "contiguous", torch.float32)
    mask = make_mask(x)
    net = convert_sync_batchnorm(Net())
    expected = F.relu(F.batch_norm(valid(x, mask), None, None, training=True))
    y = net(spoiled(x, mask), mask)
    torch.testing.assert_close(valid(y, mask), expected)
    fused = fuse_activations(copy.deepcopy(net))  # leaves the layer unfused
    torch.testing.assert_close(fused(spoiled(x, mask), mask), y)
    frozen = copy.deepcopy(net)
    freeze_statistics(frozen)
    assert not frozen(spoiled(x, mask), mask).isnan().any()
    pickle.loads(pickle.dumps(net))(x, mask)


@pytest.mark.parametrize("training", [True, False])
def test_reverted_layers_take_a_mask(training):
    masked, mask, _ = make_masked((4, 3, 6), "contiguous", torch.float32, with_residual=True)
    layer = SyncBatchNorm(3, activation="relu")
    reverted = revert_sync_batchnorm(copy.deepcopy(layer)).train(training)
    layer.train(training)
    for given in (mask, mask.unsqueeze(1), torch.zeros_like(mask)):
        expected = layer(masked.x, masked.residual, mask=given)
        torch.testing.assert_close(reverted(masked.x, masked.residual, mask=given), expected)
    torch.testing.assert_close(reverted.state_dict(), layer.state_dict())


def test_recomputed_statistics_are_of_valid_values():
    x = make_input((6, 3, 9), "contiguous", torch.float32)
    mask = make_mask(x)
    net = Net(SyncBatchNorm)
    batches = [(spoiled(a, m), m) for a, m in zip(x.split(2), mask.split(2), strict=True)]
    recompute_statistics(net, batches, lambda net, batch: net(*batch))
    rows = valid(x, mask).double()
    torch.testing.assert_close(net.norm.running_mean.double(), rows.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(net.norm.running_var.double(), rows.var(0), rtol=1e-6, atol=1e-6)


def test_symbolic_tracing_keeps_the_mask():
    x = make_input((4, 3, 7), "contiguous", torch.float32)
    mask = make_mask(x)
    net = Net(SyncBatchNorm)
    traced = torch.fx.symbolic_trace(net)
    for training in (True, False):
        net.train(training)
        traced.train(training)
        assert torch.equal(traced(x, mask), net(x, mask))

    def function(x, mean, var, mask):
        return sync_batch_norm(x, mean, var, mask=mask)

    args = (x, torch.zeros(3), torch.ones(3), mask)
    assert torch.equal(torch.fx.symbolic_trace(function)(*args), function(*args))
