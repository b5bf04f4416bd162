"""Masks on several ranks, against the valid values of the whole batch in float64."""

import pytest
import torch
from support.cases import DTYPES, assert_normalized_close, make_mask, to_layout
from support.fusing import FUSED, make_layer, make_operands, run_separately
from support.groups import messages_sent

from syncbn import SyncBatchNorm, sync_batch_norm

# Rows of the whole batch that each rank gets, by world size; 0 is an empty rank.
SPLITS = {1: [(6,)], 2: [(3, 3), (1, 5), (0, 6)], 3: [(1, 2, 3), (0, 0, 6)]}
SHAPE = (6, 5, 3, 7)


def make_masks(x, kind, split):
    """Return the whole batch's mask: of places, also of a whole rank, or only of the last rank."""
    mask = make_mask(x)
    rows = list(mask.split(split))
    if kind == "a rank is all masked":
        rows[0] = torch.zeros_like(rows[0])
    if kind == "ranks without a mask":
        rows[:-1] = [torch.ones_like(row) for row in rows[:-1]]
    return torch.cat(rows)


def one_place(rank, world_size, activation):
    layer = SyncBatchNorm(3, activation=activation)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1, 2] = rank == 1
    layer(torch.rand(2, 3, 4), mask=mask)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_one_valid_place_in_the_whole_group_is_an_error_on_all_ranks(two_ranks, activation):
    for rank, outcome in enumerate(two_ranks.outcomes(one_place, activation)):
        assert outcome.kind == "ValueError"
        assert "Expected more than 1 value per channel when training, got 1" in outcome.message
        assert f"[rank {rank} of 2]" in outcome.message


KINDS = ["places", "a rank is all masked", "ranks without a mask"]


def run_masked(rank, world_size, activation, with_residual, dtype, layout, split, kind):
    whole = make_operands(SHAPE, "contiguous", dtype, with_residual=with_residual)
    mask = make_masks(whole.x, kind, split).split(split)[rank]
    x, dy, residual = (
        None if t is None else t.split(split)[rank] for t in (whole.x, whole.dy, whole.residual)
    )
    x, dy, residual = (
        None if t is None else to_layout(torch.where(mask.unsqueeze(1), t, torch.nan), layout)
        for t in (x, dy, residual)
    )
    x.requires_grad_()
    layer = make_layer(whole, activation)
    given = None if kind == "ranks without a mask" and rank < world_size - 1 else mask
    with messages_sent() as messages:
        y = layer(x, None if residual is None else residual.requires_grad_(), mask=given)
        y.backward(dy)
    # As many and as large as without a mask: one each way, or none in one process.
    assert [message.nbytes for message in messages] == (
        [] if world_size == 1 else [8 * (2 * SHAPE[1] + 4)] * 2
    )
    places = [y, x.grad, *([residual.grad] if with_residual else [])]
    for tensor in places:
        assert not tensor.movedim(1, -1)[~mask].any()
    rows = [t.detach().movedim(1, -1)[mask] for t in places]
    return [*rows[:2], layer.weight.grad, layer.bias.grad, *rows[2:]], layer.state_dict()


# All dtypes with the plain and the longest pass, all passes in float32.
CASES = [(*case, dtype) for dtype in DTYPES for case in ((None, False), ("silu", True))]
CASES += [(*case, torch.float32) for case in FUSED if case != ("silu", True)]


def run_all(rank, world_size, layout, split, kind):
    return [run_masked(rank, world_size, *case, layout, split, kind) for case in CASES]


def worlds():
    for world_size, splits in SPLITS.items():
        for split in splits:
            # A batch without any values is in tests/layer/test_masks.py.
            for kind in KINDS if world_size > 1 else KINDS[:1]:
                yield pytest.param((world_size,), split, kind, id=f"{world_size}-{split}-{kind}")
    for backend in ("gloo", "nccl"):  # there the Python layer fills masked positions
        world = (2, backend, "cuda")
        yield pytest.param(world, (1, 5), KINDS[0], id=f"{backend}-cuda", marks=pytest.mark.cuda)


@pytest.mark.works("`layer(x, mask=mask)`: statistics of the unmasked positions")
@pytest.mark.parametrize(("world", "split", "kind"), [*worlds()])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_matches_the_valid_values_of_the_whole_batch(world, split, layout, kind, ranks):
    of_ranks = ranks(*world).run(run_all, layout, split, kind)
    for (activation, with_residual, dtype), *outcomes in zip(CASES, *of_ranks, strict=True):
        whole = make_operands(SHAPE, "contiguous", dtype, with_residual=with_residual)
        mask = make_masks(whole.x, kind, split)
        rows = whole._replace(
            **{
                name: None if t is None else t.movedim(1, -1)[mask]
                for name, t in whole._asdict().items()
                if name in ("x", "dy", "residual")
            }
        )
        exact = run_separately(rows.as_leaves(torch.float64), activation)
        results = [outcome for outcome, _ in outcomes]
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        for i, right in enumerate(exact):
            parts = [result[i] for result in results]
            if i in (2, 3):  # sums over each rank, together those of the whole batch
                # At most 126 terms of 8 roundings each.
                bound = 126 * 8 * eps
                torch.testing.assert_close(sum(parts).double(), right, rtol=0.0, atol=bound)
                continue
            extra = 8 * eps  # a few products, and the derivative of SiLU
            is_stored = with_residual or activation == "silu"  # the activation's gradient
            if dtype.itemsize == 2 and i == 1 and is_stored and activation is not None:
                extra = 4 * torch.finfo(dtype).eps  # of its rounding
            assert_normalized_close(torch.cat(parts), right, dtype, extra)
        states = [state for _, state in outcomes]
        for state in states[1:]:
            assert all(torch.equal(value, states[0][name]) for name, value in state.items())


def run_second_derivatives(rank, world_size):
    x = torch.arange(60.0, dtype=torch.float64).view(4, 3, 5).sin()
    mask = make_mask(x)
    own = torch.where(mask.unsqueeze(1), x, torch.nan).chunk(world_size)[rank].requires_grad_()
    y = sync_batch_norm(own, None, None, training=True, mask=mask.chunk(world_size)[rank])
    (grad,) = torch.autograd.grad((y**3).sum(), own, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum(), own)
    return second


def test_second_derivatives(two_ranks):
    parts = two_ranks.run(run_second_derivatives)
    torch.testing.assert_close(torch.cat(parts), run_second_derivatives(0, 1))


def mask_badly(rank, world_size):
    layer = SyncBatchNorm(3)
    layer(torch.rand(4, 3, 5), mask=torch.ones(4, 5 - rank, dtype=torch.bool))


def test_a_bad_mask_fails_all_ranks(two_ranks):
    waiting, failed = two_ranks.outcomes(mask_badly)
    assert failed.kind == "ValueError" and "expected mask to have shape" in failed.message
    assert "another rank of the process group aborted" in waiting.message
    assert "expected mask to have shape" in waiting.message
