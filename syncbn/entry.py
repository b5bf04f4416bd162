"""The entry of a layer's forward: symbolic tracing ends there, and an error aborts the pass."""

import functools
from collections.abc import Callable
from traceback import walk_tb
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor

from syncbn import _compat

ForwardT = TypeVar("ForwardT", bound=Callable[..., Any])


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
        if type(first) is not Tensor and isinstance(first, proxy):
            tracer: Any = first.tracer
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
