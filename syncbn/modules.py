"""The layers: torch.nn.SyncBatchNorm's constructor, state and behavior over our operators."""

import functools
import warnings
from collections.abc import Callable
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d

from syncbn import _compat, functional
from syncbn._compat import INPUT_CHECK, BatchNormBase
from syncbn.distributed import collectives, errors, sync
from syncbn.distributed.collectives import DeviceMesh, ProcessGroup
from syncbn.distributed.layer_id import Layer
from syncbn.layer_state import LayerState
from syncbn.ops import checks, epilogue, masks
from syncbn.ops.arguments import Arguments, plain_number
from syncbn.pickles import RECONSTRUCTIONS, _reconstruct

if TYPE_CHECKING:
    from typing_extensions import Self


ModuleT = TypeVar("ModuleT", bound=nn.Module)
ForwardT = TypeVar("ForwardT", bound=Callable[..., Any])

is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


def _has_begun(layer: Any, error: Exception) -> bool:
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    return "_syncbn_forward" in names or "_syncbn_activate" in names


def entry(forward: ForwardT, has_begun: Callable[[Any, Exception], bool] = _has_begun) -> ForwardT:
    """Return the ``forward`` of a layer, at which its calls arrive.

    A layer is a leaf module of symbolic tracing: its call is one node, as with torch's layers. The
    traced model then follows train() and eval(), and conversion finds its layers. The tracer enters
    the layer in three cases: the layer is the root of the traced model, its ``forward`` is another
    function, or it has hooks, which the tracer runs and the node would run again.

    An exception aborts the layer's pass, unless ``has_begun(layer, exception)`` tells that the code
    of the pass was reached, which does so itself.
    """
    proxy = torch.fx.Proxy

    @functools.wraps(forward)
    def leaf_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, proxy):
            tracer: Any = (*args, *kwargs.values())[0].tracer
            runs_this = type(layer).forward is leaf_forward and "forward" not in vars(layer)
            if runs_this and tracer.root is not layer and not _compat.has_forward_hooks(layer):
                name = tracer.path_of_module(layer)
                return tracer.create_proxy("call_module", name, args, kwargs)
        try:
            return forward(layer, *args, **kwargs)
        except Exception as error:
            if torch.compiler.is_compiling() or has_begun(layer, error):
                raise
            raise layer._syncbn_failed(error, first) from error.__cause__

    return leaf_forward  # type: ignore[return-value]


class BatchNorm(BatchNormBase):
    """Batch normalization with the statistics of this process, for 2 or more dimensions.

    :func:`syncbn.revert_sync_batchnorm` makes it of a layer that was built as a SyncBatchNorm or
    has an activation of its own, which it keeps. TorchScript compiles its ``forward``.
    """

    # No defaults of the class, which would hide a module that is set in their place.
    activation: str | None
    negative_slope: float

    def extra_repr(self) -> str:
        """Return the arguments: those of torch's layer, the activation and its slope."""
        text: str = super().extra_repr()
        return text + epilogue.describe(self.activation, self.negative_slope)

    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Normalize ``input``, add ``residual`` and apply the activation.

        Values where the bool ``mask``, (N, ...) or (N, 1, ...), is false count in no statistics;
        the output is 0 there.
        """
        # As torch's forward, which TorchScript cannot call from here.
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1 if mask is None else int(mask.any()))
            if self.momentum is None:  # the counter is 0 if no value has been valid yet
                momentum = 1.0 / max(float(self.num_batches_tracked), 1.0)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        positions = mask
        if positions is not None:
            positions = positions if positions.dim() == input.dim() else positions.unsqueeze(1)
            input = torch.where(positions, input, 0.0)
            residual = residual if residual is None else torch.where(positions, residual, 0.0)
        if positions is not None and by_batch:
            output = self._normalize_valid(input, positions, momentum)
        else:
            output = self._normalize(input, by_batch, momentum)
        if residual is not None:
            output = output + residual
        output = epilogue.activate(output, self.activation, self.negative_slope)
        return output if positions is None else torch.where(positions, output, 0.0)

    def _normalize(self, input: Tensor, by_batch: bool, momentum: float) -> Tensor:
        has_running = self.track_running_stats or not self.training
        mean = self.running_mean if has_running else None
        var = self.running_var if has_running else None
        weight, bias, eps = self.weight, self.bias, self.eps
        return F.batch_norm(input, mean, var, weight, bias, by_batch, momentum, eps)

    def _normalize_valid(self, input: Tensor, positions: Tensor, momentum: float) -> Tensor:
        """Normalize the valid values by their own statistics; the others become 0."""
        rows = input.movedim(1, -1)
        valid = positions.movedim(1, -1).expand_as(rows[..., :1]).squeeze(-1)
        output = torch.zeros_like(rows)
        values = rows[valid]
        if values.size(0) > 0:
            output[valid] = self._normalize(values, True, momentum)
        return output.movedim(-1, 1)

    def _check_input_dim(self, input: Tensor) -> None:
        # TorchScript does not look into this block, as it would with one condition for both.
        if not is_scripting():  # noqa: SIM102
            if isinstance(input, torch.fx.Proxy):  # symbolic tracing has no values to check
                return
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _reconstruct, ("reverted",), *reduced[2:]


RECONSTRUCTIONS["reverted"] = lambda: BatchNorm.__new__(BatchNorm)

# The numbers of dimensions that a check accepts; None for two or more. A check that a program has
# put in the place of torch's is not among them.
_DIMS: dict[Callable[..., None], tuple[int, ...] | None] = {
    BatchNorm._check_input_dim: None,
    **{
        getattr(torchs, INPUT_CHECK): dims
        for torchs, dims in (
            (BatchNormBase, None),
            (BatchNorm1d, (2, 3)),
            (BatchNorm2d, (4,)),
            (BatchNorm3d, (5,)),
        )
        if _compat.is_code_of_batch_norm(getattr(torchs, INPUT_CHECK))
    },
}


class InputCheck(property):
    """A layer's method that torch's ``forward`` calls, where a program bound it before conversion.

    As a property it comes before an attribute of the instance.
    """

    def __init__(self) -> None:
        super().__init__(lambda layer: functools.partial(_called_check, layer), self.set, self.drop)

    def __call__(self, layer: Any, input: Tensor) -> None:
        """Do as the method of a class, called with a layer."""
        _called_check(layer, input)

    @staticmethod
    def set(layer: Any, check: Any) -> None:
        """Set the attribute of the instance; this method, which a program gives back, is none."""
        vars(layer).pop(INPUT_CHECK, None)
        if getattr(check, "func", None) is not _called_check:
            vars(layer)[INPUT_CHECK] = check

    @staticmethod
    def drop(layer: Any) -> None:
        """Delete the attribute of the instance."""
        if vars(layer).pop(INPUT_CHECK, None) is None:
            raise AttributeError(INPUT_CHECK)


def _called_check(layer: "SyncBatchNorm", input: Tensor) -> None:
    """Check where torch's ``forward`` runs, or where a program's own check calls this one."""
    state = layer._syncbn
    if state.inner_check is not None:
        state.inner_check(layer, input)
        return
    if layer.training and state.reached is None:
        warnings.warn(
            f"torch's forward of {state.identity} was called, by its name or by a method that "
            "was bound before conversion, and normalizes this rank's values by themselves; "
            "call the layer",
            stacklevel=3,
        )
    _own_check(layer, input)


def _own_check(layer: "SyncBatchNorm", input: Tensor) -> None:
    """Make the check that torch's layer would make: of the instance or of its class."""
    own = vars(layer).get(INPUT_CHECK)
    if own is None:
        _class_check(layer, input)
    else:
        _run_check(layer, own, input, inner=_class_check)


def _class_check(layer: "SyncBatchNorm", input: Tensor) -> None:
    check: Any = type(layer)._check_input_dim
    if check is CALLED_BY_TORCH:
        check = layer._syncbn_original._check_input_dim
    _run_check(layer, functools.partial(check, layer), input, inner=torchs_check)


def _run_check(layer: "SyncBatchNorm", check: Any, input: Tensor, inner: Any) -> None:
    state = layer._syncbn
    before, state.inner_check = state.inner_check, inner
    try:
        check(input)
    finally:
        state.inner_check = before


def torchs_check(layer: "SyncBatchNorm", input: Tensor) -> None:
    """Make the check of the torch's class that the layer's class derives from."""
    inherited: Any = super(SyncBatchNorm, layer)._check_input_dim
    if inherited.__func__ is not BatchNormBase._check_input_dim:  # which only raises
        inherited(input)
    else:
        BatchNorm._check_input_dim(layer, input)  # type: ignore[arg-type]


# One for all classes: conversion puts it before the check of a user's class, too.
CALLED_BY_TORCH: Any = InputCheck()


class SyncBatchNorm(BatchNormBase):
    r"""Batch normalization with the statistics of the whole batch of a process group.

    A drop-in for :class:`torch.nn.SyncBatchNorm`: same arguments, attributes, state_dict and
    results, on CPUs as well. It derives from ``_BatchNorm`` and not from torch's class, which
    DistributedDataParallel refuses on CPUs. See :func:`syncbn.sync_batch_norm` for the formula,
    dtypes and errors.

    Training synchronizes if torch.distributed is initialized and the group has more than one
    rank: one all-reduce of 2C+4 float64 values forward, and one backward. Evaluation never
    communicates. A rank may have an empty batch; if all have, nothing is updated. A channel with
    a NaN or infinity in it comes out as NaN and leaves its running statistics as they were; with
    ``momentum=None`` they become NaN, as torch's do. One value per channel in the whole batch is a
    ValueError, but not on CUDA in a group or with a mask: there nothing waits for the device.

    ``layer(x, mask=mask)`` leaves out the positions, such as padding, where a bool mask of shape
    (N, ...) or (N, 1, ...) is false: no statistics count them; output and gradient are 0 there.

    Args:
        num_features: C, the size of dimension 1 of the input.
        eps: Added to the variance, in units of the input squared.
        momentum: Weight of each batch in the running statistics; None for the cumulative average.
        affine: Learn a weight and a bias per channel.
        track_running_stats: Keep running statistics and evaluate with them; otherwise the
            statistics of the (local) batch serve in evaluation too.
        process_group: The ranks that share a batch, or a DeviceMesh of one dimension; None is all
            ranks.
        device: Of the parameters and buffers.
        dtype: Of the parameters and running statistics.
        bias: With ``affine``, whether to learn a bias; keyword-only.
        activation: None, "relu", "leaky_relu" or "silu": applied to the output, when
            training in the same passes over memory; keyword-only.
        negative_slope: Of leaky ReLU, without a unit; keyword-only.

    Shape:
        (N, C, ...), two or more dimensions, to the same. A residual of the same shape and dtype,
        given as second argument, is added before the activation.

    Raises:
        TypeError: ``process_group``, ``eps`` or ``momentum`` of the wrong type.
        ValueError: ``eps`` negative or not finite, ``momentum`` not finite; an unknown
            ``activation``; ``negative_slope`` negative or not finite; a mesh of more dimensions.

    Example:
        >>> import torch
        >>> from syncbn import SyncBatchNorm
        >>> layer = SyncBatchNorm(2)
        >>> layer(torch.arange(6.0).view(3, 2)).shape
        torch.Size([3, 2])
        >>> layer.running_mean
        tensor([0.2000, 0.3000])
    """

    # The layer's state under one name, which no program takes by chance. It is set in ``__dict__``,
    # by which no class's own __setattr__ or __delattr__ is called.
    _syncbn: LayerState
    _check_input_dim = CALLED_BY_TORCH
    # The class that revert restores.
    _syncbn_original: type[BatchNormBase] = BatchNorm
    # Whether ``activation`` and ``negative_slope`` are our attributes, and not a user's class's.
    _syncbn_takes_activation = True
    # No defaults of the class, which would hide a module that is set in their place.
    activation: str | None
    negative_slope: float

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        epilogue.check_activation(activation)
        epilogue.check_negative_slope(negative_slope)
        checks.check_eps(eps)
        if momentum is not None:
            checks.check_momentum(momentum)
        process_group = collectives.checked_group(process_group)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if affine and not bias:
            self.register_parameter("bias", None)
        self.activation, self.negative_slope = activation, negative_slope
        self._syncbn = LayerState().with_group(process_group)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that share a batch; None is all of them; ValueError for a destroyed group."""
        state = self._syncbn
        return None if state.group is None else sync.group_held(state.group, state.identity)

    @process_group.setter
    def process_group(self, given: ProcessGroup | DeviceMesh | None) -> None:
        self.__dict__["_syncbn"] = self._syncbn.with_group(collectives.group_of_mesh(given))

    def reset_parameters(self) -> None:
        """Set weight and bias to 1 and 0, and reset the running statistics."""
        if self.affine and self.bias is None:  # which torch before 2.12 does not know
            self.reset_running_stats()
            nn.init.ones_(self.weight)
        else:
            super().reset_parameters()

    def train(self, mode: bool = True) -> "Self":
        """Set the mode; a frozen layer stays in evaluation, see :func:`syncbn.freeze_statistics`.

        Returns:
            The layer itself.
        """
        super().train(mode)
        frozen = self._syncbn.frozen
        if frozen is not None:
            self.__dict__["_syncbn"] = self._syncbn.replaced(frozen={**frozen, "training": mode})
            self.training = False
        return self

    def extra_repr(self) -> str:
        """Return the arguments: those of torch's layer, the activation and its slope."""
        text: str = super().extra_repr()
        if not self._syncbn_takes_activation:
            return text
        return text + epilogue.describe(self.activation, self.negative_slope)

    @entry
    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Normalize ``input``, add ``residual`` and apply the activation; see the class."""
        if not self._syncbn_takes_activation:
            return self._syncbn_forward(input, residual, None, 0.0, mask)
        return self._syncbn_forward(input, residual, self.activation, self.negative_slope, mask)

    def _syncbn_forward(
        self,
        input: Tensor,
        residual: Tensor | None,
        activation: str | None,
        negative_slope: float,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Do as :meth:`forward`, with an activation in the place of the layer's own."""
        state, training = self._syncbn, self.training
        layer: Layer = self
        if isinstance(input, torch.fx.Proxy):
            layer = state.identity.name
        elif (
            training
            and not state.fits_graph
            and torch.compiler.is_compiling()
            and not _compat.is_exporting()
        ):
            return _run_uncompiled(  # type: ignore[no-any-return]
                self, input, residual, activation, negative_slope, mask
            )
        try:
            weight, bias, running_mean, running_var, counter = _compat.vectors_of(self)
            if not training:
                counter = None
            elif not self.track_running_stats:
                running_mean = running_var = counter = None
            momentum, eps = self.momentum, self.eps
            if (
                type(momentum) is not float
                or type(eps) is not float
                or type(negative_slope) is not float
            ):
                momentum, eps, negative_slope = map(plain_number, (momentum, eps, negative_slope))
            check = self._syncbn_original._check_input_dim
            has_own_check = (
                check not in _DIMS
                or INPUT_CHECK in self.__dict__
                or type(self)._check_input_dim is not CALLED_BY_TORCH
            )
            arguments = Arguments(
                weight,
                bias,
                running_mean,
                running_var,
                counter,
                # Without a counter there is no cumulative average; torch leaves the statistics.
                0.0 if momentum is None and counter is None else momentum,
                eps,
                self.num_features,
                residual,
                activation,
                negative_slope,
                None if has_own_check else _DIMS[check],
                mask,
            )
        except Exception as error:  # an attribute was deleted, or a parametrization raises
            if torch.compiler.is_compiling():
                raise
            raise self._syncbn_failed(error, input) from error.__cause__
        group = None if state.group is None or not training else self.process_group
        if has_own_check:
            check = functools.partial(_own_check, self)
            functional.check_input(check, input, arguments, group, layer, training=training)
        if not training:
            return functional.evaluate(input, arguments, layer)
        return functional.train(input, arguments, group, layer, state.observe)

    def _replicate_for_data_parallel(self) -> "Self":
        """Make a replica, for torch.nn.DataParallel, which calls this for each layer and device."""
        if self.training:
            _warn_of_replicas()
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call, no-any-return]

    def _syncbn_failed(self, error: Exception, input: object) -> Exception:
        """Abort the pass that the layer would begin; return the error with the layer and rank."""
        state = self._syncbn
        if not self.training or isinstance(input, torch.fx.Proxy):
            return error
        try:
            group = None if state.group is None else state.group.get()
            group = collectives.resolve_group(group)
        except (TypeError, ValueError):  # this rank has no group that could wait for it
            return error
        if group is None:
            return error
        if state.reached is False:
            state.reached = True  # and has failed
        step = sync.Pass(group, state.identity, _compat.forward_direction(), input)
        step.channels = vars(self).get("num_features")
        return step.abort(error)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError: torch.jit.script calls this of every layer of its model."""
        words = "TorchScript cannot hold a SyncBatchNorm layer; call syncbn.revert_sync_batchnorm"
        raise errors.with_layer_and_rank(
            NotImplementedError(f"{words} first"), self._syncbn.identity, None
        )

    @overload
    @classmethod
    def convert_sync_batchnorm(
        cls, module: BatchNormBase, process_group: ProcessGroup | DeviceMesh | None = None
    ) -> BatchNormBase: ...

    @overload
    @classmethod
    def convert_sync_batchnorm(
        cls, module: ModuleT, process_group: ProcessGroup | DeviceMesh | None = None
    ) -> ModuleT: ...

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | DeviceMesh | None = None
    ) -> nn.Module:
        """Call :func:`syncbn.convert_sync_batchnorm`, for code that calls torch's class."""
        from syncbn.convert import convert_sync_batchnorm  # it builds on this module

        return convert_sync_batchnorm(module, process_group)


@functools.cache
def _warn_of_replicas() -> None:
    warnings.warn(
        "SyncBatchNorm synchronizes processes, not the replicas of torch.nn.DataParallel: each "
        "normalizes its part of the batch by itself, and the running statistics are the first "
        "replica's; train with DistributedDataParallel, one process for each GPU",
        stacklevel=3,
    )


def _run(layer: SyncBatchNorm, *arguments: Any) -> Tensor:
    warnings.warn(f"a SyncBatchNorm layer runs uncompiled: {_NO_NAME}", stacklevel=2)
    return layer._syncbn_forward(*arguments)


_NO_NAME = "its process group has no name, which a graph would hold"
_run_uncompiled = _compat.uncompiled(_run, _NO_NAME)


class SyncBatchNorm1d(SyncBatchNorm, BatchNorm1d):
    """:class:`SyncBatchNorm` that is a ``torch.nn.BatchNorm1d`` and takes 2 or 3 dimensions.

    Conversion makes it of a batch norm layer of torch; arguments as SyncBatchNorm.

    Example:
        >>> import torch
        >>> from syncbn import SyncBatchNorm1d
        >>> layer = SyncBatchNorm1d(3)
        >>> isinstance(layer, torch.nn.BatchNorm1d), layer(torch.rand(4, 3)).shape
        (True, torch.Size([4, 3]))
    """

    _syncbn_original = BatchNorm1d


class SyncBatchNorm2d(SyncBatchNorm, BatchNorm2d):
    """:class:`SyncBatchNorm` that is a ``torch.nn.BatchNorm2d`` and takes 4 dimensions.

    Conversion makes it of a batch norm layer of torch; arguments as SyncBatchNorm.

    Example:
        >>> import torch
        >>> from syncbn import SyncBatchNorm2d
        >>> layer = SyncBatchNorm2d(3)
        >>> isinstance(layer, torch.nn.BatchNorm2d), layer(torch.rand(4, 3, 2, 2)).shape
        (True, torch.Size([4, 3, 2, 2]))
    """

    _syncbn_original = BatchNorm2d


class SyncBatchNorm3d(SyncBatchNorm, BatchNorm3d):
    """:class:`SyncBatchNorm` that is a ``torch.nn.BatchNorm3d`` and takes 5 dimensions.

    Conversion makes it of a batch norm layer of torch; arguments as SyncBatchNorm.

    Example:
        >>> import torch
        >>> from syncbn import SyncBatchNorm3d
        >>> layer = SyncBatchNorm3d(3)
        >>> isinstance(layer, torch.nn.BatchNorm3d), layer(torch.rand(4, 3, 2, 2, 2)).shape
        (True, torch.Size([4, 3, 2, 2, 2]))
    """

    _syncbn_original = BatchNorm3d


class SyncBatchNormAct(SyncBatchNorm):
    """Synchronized batch normalization, then ``drop`` and ``act``: timm's ``BatchNormAct2d``."""

    drop: nn.Module
    act: nn.Module

    @entry
    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Normalize, drop, activate: in one, where ``drop`` does nothing and ``act`` is known."""
        fused = self.fused_activation()
        if fused is not None:
            return self._syncbn_forward(input, residual, *fused, mask)
        return self._syncbn_activate(super().forward(input, residual, mask=mask), mask)

    def _syncbn_activate(self, output: Tensor, mask: Tensor | None) -> Tensor:
        output = self.act(self.drop(output))
        # An activation may change zeros.
        return output if mask is None else masks.clear(output, masks.as_positions(mask, output))

    def fused_activation(self) -> tuple[str, float] | None:
        """Return the activation and slope that ``act`` is for the layer; None if it runs itself."""
        is_dropping = type(self.drop) is not nn.Identity or _compat.has_hooks(self.drop)
        return None if is_dropping or self.activation else epilogue.of_module(self.act)
