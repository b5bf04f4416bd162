"""The layers: torch.nn.SyncBatchNorm's constructor, state and behavior over our operators."""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, overload

import torch
import torch.fx
from torch import Tensor, nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d

from syncbn import _compat, functional
from syncbn._compat import BUFFERS, INPUT_CHECK, PARAMETERS, BatchNormBase
from syncbn.batch_norm import BatchNorm
from syncbn.distributed import collectives, errors, failures
from syncbn.distributed.collectives import DeviceMesh, ProcessGroup
from syncbn.distributed.layer_id import Layer
from syncbn.distributed.state import record_of
from syncbn.entry import entry
from syncbn.input_check import CALLED_BY_TORCH, own_check
from syncbn.layer_state import LayerState
from syncbn.ops import checks, epilogue
from syncbn.ops.arguments import Arguments

if TYPE_CHECKING:
    from typing_extensions import Self


ModuleT = TypeVar("ModuleT", bound=nn.Module)

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
_UNKNOWN = (0,)


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
    # syncbn.convert_sync_batchnorm, which builds on this module and sets itself here.
    _syncbn_converter: ClassVar[Callable[..., nn.Module]]
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
        try:
            return None if state.group is None else state.group.get()
        except ValueError as error:
            raise errors.with_layer_and_rank(error, state.identity, None) from None

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

    def reset_running_stats(self) -> None:
        """Reset the running statistics; a frozen layer keeps them, and warns."""
        state = vars(self).get("_syncbn")  # torch's constructor calls this before there is one
        if state is None or state.frozen is None:
            super().reset_running_stats()
            return
        warnings.warn(
            f"the running statistics of the layer {state.identity.name!r} are frozen and were not "
            "reset; call syncbn.unfreeze_statistics first",
            stacklevel=2,
        )

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

    def __repr__(self) -> str:
        # A SyncBatchNorm that a program constructs prints as torch's, a converted one does not.
        is_shown = type(self) is not SyncBatchNorm or self._syncbn.identity.name
        is_ours = type(self).__module__ == "syncbn"
        return ("syncbn." if is_shown and is_ours else "") + super().__repr__()

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
        layer: Layer = state
        if type(input) is not Tensor and isinstance(input, torch.fx.Proxy):
            layer = state.identity.name
        elif (
            not state.fits_graph
            and training
            and torch.compiler.is_compiling()
            and not _compat.is_exporting()
        ):
            return _run_uncompiled(self, input, residual, activation, negative_slope, mask)
        try:
            parameters, buffers = getattr(self, PARAMETERS), getattr(self, BUFFERS)
            try:  # takes less time than to ask the module for each
                weight, bias = parameters["weight"], parameters["bias"]
                running_mean, running_var = buffers["running_mean"], buffers["running_var"]
                counter = buffers["num_batches_tracked"]
            except KeyError:  # a parametrization, or another kind of tensor, has taken the place
                weight, bias = self.weight, self.bias
                running_mean, running_var = self.running_mean, self.running_var
                counter = self.num_batches_tracked
            if not training:
                counter = None
            elif not self.track_running_stats:
                running_mean = running_var = counter = None
            momentum = self.momentum
            dims = _DIMS.get(self._syncbn_original._check_input_dim, _UNKNOWN)
            has_own_check = (
                dims == _UNKNOWN
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
                self.eps,
                self.num_features,
                activation,
                negative_slope,
                None if has_own_check else dims,
                residual,
                mask,
            )
        except Exception as error:  # an attribute was deleted, or a parametrization raises
            if torch.compiler.is_compiling():
                raise
            raise self._syncbn_failed(error, input) from error.__cause__
        group = None if state.group is None or not training else self.process_group
        if has_own_check:
            check = functools.partial(own_check, self)
            functional.check_input(check, input, arguments, group, layer, training=training)
        if not training:
            return functional.evaluate(input, arguments, layer)
        return functional.train(input, arguments, group, layer, state.observe)

    def _syncbn_torchs_check(self, input: Tensor) -> None:
        """Make the check of the torch's class that the layer's class derives from."""
        inherited: Any = super()._check_input_dim
        if inherited.__func__ is not BatchNormBase._check_input_dim:  # which only raises
            inherited(input)
        else:
            BatchNorm._check_input_dim(self, input)  # type: ignore[arg-type]

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
            record = record_of(group, state.identity, _compat.forward_direction())
        except (TypeError, ValueError):  # this rank has no group that could wait for it
            return error
        if record.state is None:
            return error
        if state.reached is False:
            state.reached = True  # and has failed
        return failures.abort(error, record, input, channels=vars(self).get("num_features"))

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
        return cls._syncbn_converter(module, process_group)


@functools.cache
def _warn_of_replicas() -> None:
    warnings.warn(
        "SyncBatchNorm synchronizes processes, not the replicas of torch.nn.DataParallel: each "
        "normalizes its part of the batch by itself, and the running statistics are the first "
        "replica's; train with DistributedDataParallel, one process for each GPU",
        stacklevel=3,
    )


_NO_NAME = "its process group has no name, which a graph would hold"


@functools.partial(_compat.uncompiled, reason=_NO_NAME)
def _run_uncompiled(layer: SyncBatchNorm, *arguments: Any) -> Tensor:
    warnings.warn(f"a SyncBatchNorm layer runs uncompiled: {_NO_NAME}", stacklevel=2)
    return layer._syncbn_forward(*arguments)


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
