"""All private names of torch that are used. If torch removes one, only this file fails.

``tests/layer/test_torch_private.py`` has a test of each.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor as FakeTensor
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import DynamicInt as DynamicInt  # an input of graphs
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Under our names.
__all__ = ["BatchNormBase", "DynamicInt", "FakeTensor", "without_dispatch_modes"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Tracers, transforms, autograd.

are_transforms_active = torch._C._are_functorch_transforms_active
graph_task_id = torch._C._current_graph_task_id  # -1 outside of backward passes
jit_tracing_state = torch._C._get_tracing_state  # of torch.jit.trace; None outside of it
set_jit_tracing_state = torch._C._set_tracing_state  # type: ignore[attr-defined]
num_dispatch_modes = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
# torch.autograd.graph.increment_version takes as long as an operator's check of its arguments.
increment_version = torch._C._increment_version
is_dispatch_key_included = torch._C._dispatch_tls_is_dispatch_key_included
# Included where a graph is recorded before autograd: torch.export's, make_fx(pre_dispatch=True)'s.
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch

# The attributes that torch.fx sets on its proxies.
PROXY_ATTRIBUTES = ("node", "tracer", "root", "attr", "_node")

_RECORDING_MODES = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)

# Within it tensors of subclasses are handled as plain ones.
without_torch_function = torch._C.DisableTorchFunctionSubclass
# Within it no ``__torch_function__`` runs, of a subclass or of a mode.
without_overrides = torch._C.DisableTorchFunction


def is_exporting() -> bool:
    """Whether torch.export traces.

    ``torch.compiler.is_exporting()`` is true on 2.11 wherever torch.compile traces.
    """
    return torch.compiler._is_exporting_flag


def is_mode_recording() -> bool:
    """Whether a dispatch mode records a graph: make_fx's or AOTAutograd's."""
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _RECORDING_MODES)


def is_faking() -> bool:
    """Whether all new tensors are FakeTensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what ``function.apply`` is where no transform of torch.func is active.

    It takes less time, and Dynamo does not know it.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def constant_in_graphs(function: FunctionT) -> FunctionT:
    """Have compilers call a function while they trace, and keep its result.

    ``torch.compiler.assume_constant_result`` takes Dynamo, whose import takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def tracer_of_graph() -> Any:
    """Return the tracer that records operators now, such as AOTAutograd's; None without one."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


@contextlib.contextmanager
def saved_in_graphs() -> Iterator[None]:
    """Mark the operators recorded here: a partition saves their results for the backward graph.

    Inside of an activation checkpoint, the checkpoint decides.
    """
    meta = fx_traceback.get_current_meta()
    is_decided = "recompute" in meta
    if not is_decided:
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        if not is_decided:
            del meta["recompute"]


def uncompiled(function: FunctionT, reason: str | None = None) -> FunctionT:
    """Have compilers run a function, and all that it calls, uncompiled after a graph break.

    As ``torch.compiler.disable``, which imports Dynamo: that takes a second and 120 MiB.
    """
    # Read where Dynamo traces a call of the function.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    # Read where the function runs while Dynamo takes the frames that the interpreter enters.
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def allows_mutation_of_saved() -> bool:
    """Whether ``torch.autograd.graph.allow_mutation_on_saved_tensors`` is active.

    Its mode clones what autograd has saved before an operator writes to it. It looks for what an
    operator of ours may write to, and raises where that is None or left out.
    """
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def handle_of(operator: Any) -> Callable[..., Any]:
    """Return the function of an operator's overload, which takes less time than the overload."""
    handle: Callable[..., Any] = operator._op
    return handle


def arguments_written(operator: Any) -> list[bool]:
    """Return for each argument of an operator whether the operator writes to it."""
    return [argument.alias_info is not None for argument in operator._schema.arguments]


def is_zero_tensor(value: object) -> bool:
    """Whether the value is a tensor of zeros without memory."""
    return isinstance(value, Tensor) and value._is_zerotensor()


def is_of_dispatch_mode(error: BaseException) -> bool:
    """Whether the code of a dispatch mode has raised the error, and no operator that it called."""
    operator = torch._ops.OpOverload.__call__.__code__
    is_of_mode = False
    for frame, _ in walk_tb(error.__traceback__):  # the last of them decides
        if frame.f_code is operator:
            is_of_mode = False
        elif frame.f_code.co_name == "__torch_dispatch__":
            is_of_mode = True
    return is_of_mode


def saved_tensors_hooks() -> Any:
    """Return the hooks that pack what autograd saves, such as a checkpoint's; None without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_in_cuda_graph(tensor: Tensor) -> bool:
    """Whether a tensor may have memory of a CUDA graph's pool.

    Inductor lets nobody keep such a tensor, also when it runs a graph before it records it.
    """
    if not tensor.is_cuda:
        return False
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")  # its import takes a second
    # In other threads torch 2.11 has no manager, and an assertion fails.
    name = "tree_manager_containers"
    if trees is not None and (hasattr(trees.local, name) or torch._C._is_key_in_tls(name)):
        manager = trees.get_manager(tensor.device.index, create_if_none_exists=False)
        if manager is not None and manager.path_state is not trees.ExecutionState.NONE:
            return True
    return torch.cuda.is_current_stream_capturing()


# Process groups.


def resolve_process_group(name: str) -> "ProcessGroup":
    """Return the group of a name; RuntimeError if there is none."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_registered(group: "ProcessGroup") -> bool:
    """Whether torch.distributed has made the group and not destroyed it."""
    return group in torch.distributed.distributed_c10d._world.pg_map


def device_types(group: "ProcessGroup") -> set[str]:
    """Return the types of the devices that the group has a backend for."""
    return {device.type for device in group._device_types}


def is_initialized(device_type: str) -> bool:
    """Whether this process has begun to use devices of the type."""
    module = getattr(torch, device_type, None)
    return bool(getattr(module, "is_initialized", lambda: False)())


def backend_name(group: "ProcessGroup", device: torch.device) -> str:
    """Return the name of the backend for tensors on the device; RuntimeError if there is none."""
    return group._get_backend(device).name()


def count_operations(group: "ProcessGroup", device: torch.device) -> int:
    """Return the number of operations that the backend has counted; RuntimeError if it does not."""
    backend: Any = group._get_backend(device)
    number: int = backend._get_sequence_number_for_group()
    return number


def timeout_of(group: "ProcessGroup", device: torch.device) -> timedelta:
    """Return the timeout of the group's collectives on this device; torch's default if unknown."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend in Python; one that compares collectives
        return torch.distributed.constants.default_pg_timeout


def all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    """Start to sum a copy of a tensor over a group, by an operator that graphs keep."""
    started: Tensor = torch.ops._c10d_functional.all_reduce.default(tensor, "sum", group_name)
    return started


def wait(started: Tensor) -> Tensor:
    """Wait for the sum that :func:`all_reduce` has started, by an operator that graphs keep."""
    summed: Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return summed


def has_started(error: BaseException) -> bool:
    """Whether the error was raised after :func:`all_reduce`, in :func:`wait`."""
    return any(frame.f_code is wait.__code__ for frame, _ in walk_tb(error.__traceback__))


# The DistributedDataParallel model in its forward pass; None without one.
active_ddp_model = functools.partial(getattr, DistributedDataParallel, "_active_ddp_module")


def join_config() -> Any:
    """Return the ``join()`` of the DistributedDataParallel model in its forward pass, or None."""
    model: Any = active_ddp_model()
    return None if model is None else model._join_config


# Modules.


def check_module(module: object) -> None:
    """Raise TypeError unless it is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}")


INPUT_CHECK = "_check_input_dim"  # a method of batch norm layers


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary that holds the module's children."""
    return module._modules


# The attributes of modules that are dictionaries of their parameters and buffers.
PARAMETERS, BUFFERS = "_parameters", "_buffers"


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module's forward, or in its backward pass."""
    return has_forward_hooks(module) or bool(
        module._backward_hooks or module._backward_pre_hooks  # type: ignore[has-type]
    )


def does_as_its_class(module: nn.Module) -> bool:
    """Whether a call of the module is its class's ``forward`` and nothing more."""
    return "forward" not in module.__dict__ and not is_compiled(module) and not has_hooks(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def compiled_original(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` has wrapped; None if this is no wrapper."""
    return getattr(module, "_orig_mod", None)


def is_code_of_batch_norm(function: Callable[..., Any]) -> bool:
    """Whether a function is torch's own, of the file of its batch normalization layers."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules[BatchNormBase.__module__].__file__


def without_compiled_code() -> contextlib.AbstractContextManager[Any]:
    """Run the code from which torch.compile has made graphs in their place.

    Setting a stance takes Dynamo, whose import takes seconds; without it nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def is_recorded() -> bool:
    """Whether a tracer records this call; not to be asked where torch.compile traces.

    That is torch.export, make_fx or AOTAutograd by itself, or a tool that is built on them, such as
    pipelines and quantization-aware training. The user of the graph may differentiate it.
    """
    return (
        is_exporting()
        or is_dispatch_key_included(PRE_DISPATCH)
        or (num_dispatch_modes() > 0 and is_mode_recording())
    )


def is_recomputation() -> bool:
    """Whether this forward pass runs inside a backward pass: activation checkpointing's second run.

    The first run has updated the running statistics.
    """
    return graph_task_id() != -1


def forward_direction() -> str:
    """Return the direction of this forward pass in messages between ranks."""
    return "forward" if graph_task_id() == -1 else "recomputation"
