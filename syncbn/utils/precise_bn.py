"""recompute_statistics(): running statistics of the whole population, as precise BN has them."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import _compat, ops
from syncbn.distributed import collectives, failures
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.state import STEP, group_state
from syncbn.distributed.sums import all_reduce, verify_on_host
from syncbn.modules import SyncBatchNorm
from syncbn.utils.freeze import layers_of


class Population:
    """Count, mean and sum of squared deviations of all that a layer has normalized.

    In float64 on the CPU, the same on all ranks of the layer's group. Merged by the formula of
    Chan, Golub and LeVeque (csrc/common/moments.h).
    """

    def __init__(self, layer: SyncBatchNorm) -> None:
        assert layer.running_mean is not None and layer.running_var is not None
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.channels = self.running_mean.numel()
        self.count = self.count_before = 0.0
        self.mean = torch.zeros(self.channels, dtype=torch.float64, device="cpu")
        self.m2 = torch.zeros_like(self.mean)
        self.num_batches = 0

    def add(self, totals: Tensor) -> None:
        """Merge a pass, by its sums over all ranks: of x, of x², and the count."""
        totals = totals[: 2 * self.channels + 1]
        count = totals[-1].item()
        if count == 0:
            return
        # By the operator, which subtracts with little loss and gives a constant channel 0.
        no_input = totals.new_empty((0, self.channels))
        mean, var = totals.new_zeros((2, self.channels))
        ops.around(None).batch_norm_apply(no_input, totals, None, None, mean, var, None, 1.0, 1.0)
        is_finite = totals[:-1].view(2, -1).isfinite().all(0)
        delta = torch.where(is_finite, mean, torch.nan) - self.mean
        share = count / (self.count + count)
        self.mean += delta * share
        self.m2 += var * max(count - 1, 1) + delta.square() * self.count * share
        self.count += count

    def end_batch(self) -> None:
        """Count a batch in which the layer has got values."""
        self.num_batches += self.count > self.count_before
        self.count_before = self.count

    def write(self) -> str:
        """Write the layer's running statistics; return the reason why some were not, or nothing.

        A channel keeps its statistics if the new ones are not finite in the dtype of the buffers.
        """
        if self.count == 0:
            return "no values"
        with torch.no_grad():
            var = self.m2 / max(self.count - 1, 1)
            # First the dtype: the device may have no float64.
            mean = self.mean.to(self.running_mean.dtype).to(self.running_mean.device)
            var = var.to(self.running_var.dtype).to(self.running_var.device)
            is_finite = mean.isfinite() & var.isfinite()
            self.running_mean.copy_(torch.where(is_finite, mean, self.running_mean))
            self.running_var.copy_(torch.where(is_finite, var, self.running_var))
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.fill_(self.num_batches)
        num_left = int((~is_finite).sum())
        return f"{num_left} of {self.channels} channels, not finite" if num_left else ""


Forward = Callable[[Any, Any], object]

_END = object()


def recompute_statistics(
    model: nn.Module, batches: Iterable[Any], forward: Forward | None = None
) -> None:
    """Compute running statistics of all values of all batches of all ranks ("precise BN").

    Each :class:`syncbn.SyncBatchNorm` layer gets the mean and the unbiased variance of the values
    that its group's ranks give it in one run over ``batches``, as if they were one batch: counts,
    means and squared deviations of the batches are merged in float64. During the run the layers
    normalize by the batch, as in training, and make the forward pass's all-reduce.
    ``num_batches_tracked`` becomes the number of batches of the rank with the most.
    ``torch.optim.swa_utils.update_bn``, in its place, averages the batches' variances.

    The ranks of the layers' group all call this; if the layers have several groups, all ranks of
    torch.distributed do. A rank that has fewer batches than others continues with empty ones.

    Only layers with running statistics that are not frozen and whose group has this rank take part.
    A layer that gets no values keeps its statistics, and so does a channel with a NaN or infinity
    in it; a warning names the layer. Momentum, modes, gradients and other buffers do not change. If
    this rank raises an error, its running statistics do not change, and the other ranks raise too.

    Args:
        model: The model, the same on all ranks. Layers of other classes keep their mode: call
            ``model.eval()`` first to switch dropout off.
        batches: Read once. Each batch is a tensor on the model's device or, as a loader with labels
            gives it, a list or tuple that begins with one. The model is called with the tensor.
        forward: Called as ``forward(model, batch)`` in place of that, with batches of any type.
            All ranks then need the same number of batches.

    Raises:
        TypeError: ``model`` is not a module, or a batch holds no tensor and there is no
            ``forward``.
        ValueError: No layer takes part, though its group has this rank; a rank has no batches;
            with ``forward``, ranks have different numbers of batches; layers have several groups
            and torch.distributed is not initialized.
        RuntimeError: Another rank raised an error, which is quoted, or runs other layers.

    Errors of ``batches``, ``forward`` and ``model`` are not changed.

    Example:
        >>> import torch
        >>> from syncbn import SyncBatchNorm, recompute_statistics
        >>> layer = SyncBatchNorm(1)
        >>> batches = [torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [7.0]])]
        >>> recompute_statistics(layer, batches)
        >>> layer.running_mean, layer.running_var
        (tensor([2.5000]), tensor([9.6667]))
    """
    layers = _layers_to_recompute(model)
    if not layers:
        return
    groups = _groups_of(layers.values())
    for group in groups:
        group_state(group).num_comparisons = 0
    # To find the groups in which a failure of this rank is known already.
    states = [group_state(group) for group in groups]
    numbers = [state.num_failures for state in states]
    try:
        populations = {name: Population(layer) for name, layer in layers.items()}
        with _kept_buffers(model), _observed(layers, populations), _eager(model):
            _run(model, batches, forward, list(populations.values()), groups)
    except Exception as error:
        unaware = [s.num_failures == number for s, number in zip(states, numbers, strict=True)]
        failures.abort_next_pass(error, itertools.compress(groups, unaware))
        raise
    incomplete = [
        f"{name!r} ({reason})"
        for name, population in populations.items()
        if (reason := population.write())
    ]
    if incomplete:
        warnings.warn(
            "recompute_statistics left running statistics as they were, of the layers "
            + ", ".join(incomplete),
            stacklevel=2,
        )


def _layers_to_recompute(model: nn.Module) -> dict[str, SyncBatchNorm]:
    """Return the layers that take part, by name; none if their groups are all other ranks'.

    Raises:
        ValueError: There are none; the other ranks raise too.
    """
    try:
        named = layers_of(model)
        layers = {
            name: layer
            for name, layer in named.items()
            if layer._syncbn.frozen is None
            and layer.track_running_stats
            and layer.running_mean is not None
            and layer.running_var is not None
        }
        if not layers:
            raise ValueError(
                "expected a SyncBatchNorm layer whose running statistics can be recomputed, but "
                f"each of the {len(named)} of this {type(model).__name__} is frozen or has "
                "track_running_stats=False; call syncbn.unfreeze_statistics first"
            )
    except ValueError as error:
        default = collectives.resolve_group(None)
        failures.abort_next_pass(error, [] if default is None else [default])
        raise
    return {
        name: layer for name, layer in layers.items() if collectives.is_member(layer.process_group)
    }


def _groups_of(layers: Iterable[SyncBatchNorm]) -> list[ProcessGroup]:
    """Return the groups that the layers synchronize with; first the one that meets at each step."""
    resolved = [collectives.resolve_group(layer.process_group) for layer in layers]
    groups = list(dict.fromkeys(group for group in resolved if group is not None))
    if len(groups) < 2:
        return groups
    default = collectives.resolve_group(None)
    if default is None:
        raise ValueError(
            "expected the layers of the model to have one process group, or torch.distributed to "
            f"be initialized, but they have {len(groups)} groups and it is not"
        )
    return [default, *(group for group in groups if group is not default)]


def _run(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None,
    populations: list[Population],
    groups: list[ProcessGroup],
) -> None:
    """Run the model over the batches of all ranks, step by step together."""
    meeting = groups[0] if groups else None
    device = populations[0].running_mean.device
    # New for this run: passes of another size follow the steps of another model, and after several
    # sizes nothing is expected.
    identity = Identity("")
    iterator = iter(_with_progress(batches, meeting))
    empty: Tensor | None = None
    for step in itertools.count():
        batch = next(iterator, _END)
        has_batch = [batch is not _END]
        if meeting is not None:
            has_batch = _each_rank(has_batch[0], meeting, identity, device)
        if not all(has_batch):
            _check_missing(has_batch, step, forward, meeting)
            if not any(has_batch):
                return
        if batch is not _END and forward is not None:
            forward(model, batch)
        elif batch is not _END:
            input = _input_of(batch)
            empty = input[:0].clone()
            model(input)
        else:
            model(empty)
        for population in populations:
            population.end_batch()


def _each_rank(
    flag: bool, group: ProcessGroup, layer: Identity, device: torch.device
) -> list[bool]:
    """Return the flag of each rank of the group: a step between passes of layers.

    Raises:
        RuntimeError: As :func:`syncbn.distributed.sums.all_reduce`; the ranks do not all make this
            step, or another rank has aborted it.
    """
    record = group_state(group).record(layer, STEP)
    failures.check_before(record)
    try:
        assert record.tail is not None
        flags = [0.0] * group.size()
        flags[group.rank()] = float(flag)
        values = [*flags, 0.0, *record.tail.tolist()]
        message = torch.tensor(values, dtype=torch.float64, device=device)
    except Exception as error:
        raise failures.abort(error, record) from None
    totals = verify_on_host(all_reduce(message, record), record)
    return [value != 0 for value in totals[:-1].tolist()]


def _check_missing(
    has_batch: list[bool], step: int, forward: Forward | None, meeting: ProcessGroup | None
) -> None:
    """Raise ValueError, on all ranks, where those without a batch cannot go on with empty ones."""
    if step > 0 and (forward is None or not any(has_batch)):
        return
    missing = [rank for rank, has in enumerate(has_batch) if not has]
    ranks = "there was none"
    if meeting is not None:
        names = ", ".join(str(collectives.global_rank(meeting, rank)) for rank in missing)
        ranks = f"rank {names} had none" if len(missing) == 1 else f"ranks {names} had none"
    if step == 0:
        raise ValueError(
            "recompute_statistics: expected at least one batch"
            f"{'' if meeting is None else ' on each rank'}, but {ranks}; batches are read once: "
            "give a list or a loader, or a new iterator"
        )
    raise ValueError(
        "recompute_statistics: expected the same number of batches on all ranks, because forward "
        f"is given and no empty batch can be made for it, but at batch {step + 1} {ranks}; give "
        "each rank as many, or leave forward out"
    )


def _input_of(batch: object) -> Tensor:
    """Return the tensor in a batch, for the call of the model; TypeError if there is none."""
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if isinstance(first, Tensor):
        return first
    kind = type(batch).__name__ if first is batch else f"{type(batch).__name__} that begins with "
    raise TypeError(
        "recompute_statistics: expected each batch to be a tensor, or a list or tuple that begins "
        f"with one, but got a {kind}{'' if first is batch else type(first).__name__}; give "
        "forward=, a function that is called with the model and the batch"
    )


def _with_progress(batches: Iterable[Any], meeting: ProcessGroup | None) -> Iterable[Any]:
    """Show progress in the first rank's terminal, where tqdm is installed."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return batches
    is_first = meeting is None or meeting.rank() == 0
    # None: only in a terminal.
    bar: Iterable[Any] = tqdm(batches, "recompute_statistics", disable=None if is_first else True)
    return bar


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Give the modules the buffers and the values that they had."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
                if buffer.layout != torch.strided or not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextlib.contextmanager
def _observed(
    layers: dict[str, SyncBatchNorm], populations: dict[str, Population]
) -> Iterator[None]:
    """Put the layers, and no module inside of them, in training; populations get their sums."""
    modes = {name: layer.training for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.__dict__["_syncbn"] = layer._syncbn.replaced(observe=populations[name].add)
            layer.training = True
        yield
    finally:
        for name, layer in layers.items():
            layer.__dict__["_syncbn"] = layer._syncbn.replaced(observe=None)
            layer.training = modes[name]


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Run the model without gradients, compiled graphs or DistributedDataParallel's broadcasts.

    A broadcast would wait for a rank that has raised before it.
    """
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    broadcasts = [wrapper.require_forward_param_sync for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.require_forward_param_sync = False
        with torch.no_grad(), _compat.without_compiled_code():
            yield
    finally:
        for wrapper, broadcast in zip(wrappers, broadcasts, strict=True):
            wrapper.require_forward_param_sync = broadcast
