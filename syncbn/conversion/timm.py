"""timm's layers of batch normalization and activation in one."""

import sys

from torch import Tensor, nn

from syncbn import _compat
from syncbn.entry import entry
from syncbn.modules import SyncBatchNorm
from syncbn.ops import epilogue, masks


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


def is_timms(cls: type[nn.Module]) -> bool:
    """Whether the class is timm's ``BatchNormAct2d``."""
    return cls.__module__.startswith("timm.") and cls.__name__ == "BatchNormAct2d"


def timms_class(layer: nn.Module) -> type[nn.Module] | None:
    """Return timm's ``BatchNormAct2d`` if the layer is one or was one before timm's converter."""
    cls: type[nn.Module] = type(layer)
    if cls.__module__.startswith("timm.") and cls.__name__ == "SyncBatchNormAct":
        cls = getattr(sys.modules[cls.__module__], "BatchNormAct2d", cls)
    is_whole = {"drop", "act"} <= _compat.children(layer).keys()
    return cls if is_whole and is_timms(cls) else None
