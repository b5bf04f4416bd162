"""A warning where another package's converter replaces our layers by torch's."""

import sys
import warnings
from typing import Any

__all__ = ["WarnOnForeignConversion"]


class WarnOnForeignConversion:
    """The class attribute ``qconfig`` of a layer, which behaves as if it did not exist.

    The functions ``convert_sync_batchnorm`` of torch, timm and MMEngine make torch's layer of any
    ``_BatchNorm``, ours among them. They call nothing of the layer; that each asks whether it has
    a ``qconfig`` is the only thing to notice them by. Quantization asks for it too, so the name of
    the function that asks decides.
    """

    def __get__(self, layer: object, owner: type) -> Any:
        """Raise AttributeError, after a warning if a converter asks."""
        asking = caller = sys._getframe(1)
        converters = 0
        while caller.f_code.co_name == "convert_sync_batchnorm" and caller.f_back is not None:
            caller = caller.f_back
            converters += 1
        if converters:
            warnings.warn(
                f"convert_sync_batchnorm of {asking.f_globals['__name__']} replaces syncbn's "
                "layers by torch.nn.SyncBatchNorm, without the activation of those that have one. "
                "Leave out this call, or your framework's switch that makes it; "
                "docs/integrations.md of syncbn says what to write instead. If you want torch's "
                "layers, call syncbn.revert_sync_batchnorm first",
                stacklevel=converters + 2,
            )
        raise AttributeError("qconfig")
