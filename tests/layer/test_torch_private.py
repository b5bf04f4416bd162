"""Private names of torch: each still works as the package needs it."""

import functools
import importlib
import inspect
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn import _compat


def recorded(function, **options):
    """The values of a function of no arguments: called by a program, and under make_fx."""
    seen = []

    def traced(x):
        seen.append(function())
        return x + 1

    traced(torch.ones(2))
    make_fx(traced, **options)(torch.ones(2))
    return seen


class Observed(torch.autograd.Function):
    """A function that calls ``observe`` in its backward pass."""

    @staticmethod
    def forward(ctx, x, observe):
        ctx.observe = observe
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.observe()
        return grad, None


def test_graph_task_id_tells_a_backward_pass():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = Observed.apply(x, lambda: seen.append(_compat.graph_task_id()))
    assert _compat.graph_task_id() == -1
    y.sum().backward()
    assert len(seen) == 1 and seen[0] >= 0


def test_transforms_are_seen():
    seen = []
    torch.func.grad(lambda x: (seen.append(_compat.are_transforms_active()), x.sum())[1])(
        torch.ones(2)
    )
    assert seen == [True] and not _compat.are_transforms_active()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_jit_tracing_state_can_be_read_and_set():
    def traced(x):
        state = _compat.jit_tracing_state()
        assert state is not None
        y = torch.zeros_like(x)
        _compat.set_jit_tracing_state(None)
        assert _compat.jit_tracing_state() is None
        z = torch.full((2,), 3.0)
        _compat.set_jit_tracing_state(state)
        return x + y + z

    assert _compat.jit_tracing_state() is None
    graph = str(torch.jit.trace(traced, torch.ones(2), check_trace=False).graph)
    assert "aten::zeros_like" in graph and "aten::full" not in graph


def test_dispatch_modes_are_counted():
    assert recorded(_compat.num_dispatch_modes)[0] == 0
    assert recorded(_compat.num_dispatch_modes)[1] > 0


def test_recording_modes_are_seen():
    assert recorded(_compat.is_mode_recording) == [False, True]


def test_recording_before_dispatch_is_seen():
    def is_included():
        return _compat.is_dispatch_key_included(_compat.PRE_DISPATCH)

    assert recorded(is_included) == [False, False]
    assert recorded(is_included, pre_dispatch=True) == [False, True]


def test_exporting_is_seen():
    class Observing(nn.Module):
        def forward(self, x):
            return x + 1 if _compat.is_exporting() else x + 2

    model, x = Observing(), torch.zeros(2)
    assert torch.equal(model(x), x + 2)
    assert torch.equal(torch.compile(model, backend="eager")(x), x + 2)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), x + 1)


def test_fake_tensors_are_known():
    with torch._subclasses.FakeTensorMode():
        assert isinstance(torch.ones(2), _compat.FakeTensor)
    assert not isinstance(torch.ones(2), _compat.FakeTensor)


def test_modes_of_fake_tensors_are_known():
    assert not _compat.is_faking()
    with torch._subclasses.FakeTensorMode():
        assert _compat.is_faking()


def test_versions_are_incremented():
    x, y = torch.ones(2), torch.ones(2)
    _compat.increment_version([x, y])
    assert (x._version, y._version) == (1, 1)


def ask_groups(rank, world_size):
    pair = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=17))
    before = _compat.count_operations(pair, torch.device("cpu"))
    dist.all_reduce(torch.ones(1), group=pair)
    after = _compat.count_operations(pair, torch.device("cpu"))
    x = torch.full((2,), rank + 1.0)
    summed = _compat.wait(_compat.all_reduce(x, pair.group_name))
    assert torch.equal(x, torch.full((2,), rank + 1.0))  # a copy was summed
    return (
        _compat.resolve_process_group(pair.group_name) is pair,
        "cpu" in _compat.device_types(pair),
        after - before,
        _compat.backend_name(pair, torch.device("cpu")),
        _compat.timeout_of(pair, torch.device("cpu")),
        summed.tolist(),
    )


def test_groups_are_found_counted_and_summed_over(two_ranks):
    expected = (True, True, 1, "gloo", timedelta(seconds=17), [3.0, 3.0])
    assert two_ranks.run(ask_groups) == [expected] * 2


def ask_join(rank, world_size):
    class Asking(nn.Linear):
        def forward(self, x):
            join = _compat.join_config()
            seen.append(join and (join.enable, join.throw_on_early_termination))
            return super().forward(x)

    seen = []
    model = DistributedDataParallel(Asking(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    for throw in (False, True):
        with model.join(throw_on_early_termination=throw):
            model(torch.ones(1, 2)).sum().backward()
    model.module(torch.ones(1, 2))
    return seen


def test_join_is_seen(two_ranks):
    expected = [(False, False), (True, False), (True, True), None]
    assert two_ranks.run(ask_join) == [expected] * 2


def destroy(rank, world_size):
    pair = dist.new_group(list(range(world_size)))
    before = _compat.is_registered(pair), _compat.is_registered(dist.group.WORLD)
    dist.barrier()  # a rank that is still connecting would find the connection closed
    dist.destroy_process_group(pair)
    return (*before, _compat.is_registered(pair))


def test_destroyed_groups_are_known(two_ranks):
    assert two_ranks.run(destroy) == [(True, True, False)] * 2


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.neg.default:
            raise RuntimeError("the mode's own")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_own", [True, False])
def test_errors_of_dispatch_modes_are_told_from_those_of_operators(is_own):
    with Refusing(), pytest.raises(RuntimeError) as caught:
        torch.rand(2).neg() if is_own else torch.rand(2).view(3)
    assert _compat.is_of_dispatch_mode(caught.value) == is_own


def test_dispatch_modes_can_be_left():
    with torch._subclasses.FakeTensorMode():
        with _compat.without_dispatch_modes():
            assert _compat.num_dispatch_modes() == 0
            assert type(torch.ones(2)) is torch.Tensor
        assert _compat.num_dispatch_modes() == 1


def test_unknown_group_is_a_runtime_error():
    with pytest.raises(RuntimeError):
        _compat.resolve_process_group("no such group")


def test_data_parallel_makes_replicas_by_the_method_of_this_name():
    source = inspect.getsource(torch.nn.parallel.replicate)
    assert "._replicate_for_data_parallel()" in source


def test_children_are_those_of_the_module():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert list(_compat.children(model)) == ["0", "1"]
    _compat.children(model)["1"] = other = nn.Tanh()
    assert model[1] is other


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks_are_seen(register):
    layer = nn.Linear(1, 1)
    layer.register_full_backward_hook(lambda *_: None)
    assert not _compat.has_forward_hooks(layer)
    getattr(layer, register)(lambda *_: None)
    assert _compat.has_forward_hooks(layer)


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_seen(kind):
    layer = nn.Linear(1, 1)
    assert not _compat.has_hooks(layer) and _compat.does_as_its_class(layer)
    getattr(layer, f"register_{kind}")(lambda *_: None)
    assert _compat.has_hooks(layer) and not _compat.does_as_its_class(layer)


def test_a_forward_of_the_instance_is_seen():
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x
    assert not _compat.does_as_its_class(layer)


def test_hooks_of_saved_tensors_are_seen():
    assert _compat.saved_tensors_hooks() is None
    with torch.autograd.graph.save_on_cpu():
        assert _compat.saved_tensors_hooks() is not None
    assert _compat.saved_tensors_hooks() is None


def test_allowed_mutation_of_saved_tensors_is_seen():
    assert not _compat.allows_mutation_of_saved()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert _compat.allows_mutation_of_saved()


def test_steps_with_cuda_graphs_of_inductor_are_seen(monkeypatch):
    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not _compat.is_in_cuda_graph(tensor)  # there is no manager
    assert {"NONE", "WARMUP", "RECORDING", "EXECUTION"} == {*trees.ExecutionState.__members__}
    for state in trees.ExecutionState:
        manager = SimpleNamespace(path_state=state)
        monkeypatch.setattr(trees, "get_manager", lambda *_, manager=manager, **__: manager)
        assert _compat.is_in_cuda_graph(tensor) == (state is not trees.ExecutionState.NONE)


def test_compiled_modules_are_known():
    layer = nn.Linear(1, 1)
    assert _compat.compiled_original(torch.compile(layer, backend="eager")) is layer
    assert _compat.compiled_original(layer) is None
    assert not _compat.is_compiled(layer)
    layer.compile(backend="eager")
    assert _compat.is_compiled(layer)


def test_code_of_torchs_layers_is_known():
    assert _compat.is_code_of_batch_norm(nn.BatchNorm2d.forward)
    for other in (lambda input: input, torch.relu, functools.partial(nn.BatchNorm2d.forward)):
        assert not _compat.is_code_of_batch_norm(other)


def test_base_class_is_that_of_torchs_layers():
    assert issubclass(nn.BatchNorm2d, _compat.BatchNormBase)
    assert issubclass(nn.SyncBatchNorm, _compat.BatchNormBase)
    assert not issubclass(nn.InstanceNorm2d, _compat.BatchNormBase)


def test_layers_check_their_input_by_the_method_of_this_name():
    layer, calls = nn.BatchNorm2d(3), []
    setattr(layer, _compat.INPUT_CHECK, calls.append)
    layer(torch.rand(2, 3, 4, 4))
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["_current_graph_task_id", "_len_torch_dispatch_stack"])
def test_torch_without_a_private_name_fails_the_import_with_a_message(name):
    code = f"import torch; del torch._C.{name}; import syncbn"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = result.stderr.splitlines()[-1]
    assert f"this version of syncbn does not know torch {torch.__version__}" in last
    assert name in last and last.endswith("Upgrade syncbn, or install an earlier torch")


def test_compiled_code_runs_as_it_is():
    calls = []

    def backend(graph, inputs):
        calls.append("compiled")
        return lambda *args: (calls.append("graph"), graph(*args))[1]

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    with _compat.without_compiled_code():
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == ["compiled", "graph"]
    compiled(torch.ones(2))
    assert calls == ["compiled", "graph", "graph"]


def test_dynamo_is_not_imported_for_code_that_is_not_compiled(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with _compat.without_compiled_code():
        assert "torch._dynamo" not in sys.modules


def test_function_is_applied_as_by_its_apply():
    x = torch.ones(2, requires_grad=True)
    calls = []
    y = _compat.apply_of(Observed)(x, lambda: calls.append(1))
    assert torch.equal(y, x) and type(y.grad_fn) is type(Observed.apply(x, None).grad_fn)
    y.sum().backward()
    assert calls == [1] and torch.equal(x.grad, torch.ones(2))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("change", ["none", "parametrized", "plain tensor"])
def test_parameters_and_buffers_are_those_of_the_attributes(change):
    layer = nn.BatchNorm1d(3)
    if change == "parametrized":
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    elif change == "plain tensor":  # as under FSDP
        del layer.weight
        layer.weight = torch.zeros(3)
    held = {**getattr(layer, _compat.PARAMETERS), **getattr(layer, _compat.BUFFERS)}
    assert ("weight" in held) == (change == "none")
    for name, tensor in held.items():
        assert tensor is getattr(layer, name)


def test_handle_of_an_operator_equals_the_overload():
    x = torch.ones(2)
    assert torch.equal(_compat.handle_of(torch.ops.aten.add.Tensor)(x, x), x + x)


def test_arguments_that_an_operator_writes_to():
    operator = torch.ops.aten.add_.Tensor
    assert _compat.arguments_written(operator) == [True, False, False]


def test_zero_tensors_are_known():
    zeros = torch._efficientzerotensor((2,))
    assert _compat.is_zero_tensor(zeros) and not _compat.is_zero_tensor(zeros.clone())
    assert not _compat.is_zero_tensor(None)


def test_proxy_attributes():
    graph = torch.fx.Graph()
    proxy = torch.fx.Proxy(graph.placeholder("x"))
    set_by_torch = {*vars(proxy)} | {*vars(proxy.shape)}
    assert set_by_torch == {*_compat.PROXY_ATTRIBUTES}


def test_dynamic_integers_do_not_compile_a_graph_for_each_value():
    graphs = []

    class Owner:
        number = _compat.DynamicInt(5)

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(lambda x, owner: x * owner.number, backend=count, fullgraph=True)
    for number in (5, 2**50, 7):
        owner = Owner()
        owner.number = _compat.DynamicInt(number)
        assert run(torch.ones(2).double(), owner).tolist() == [number] * 2
    assert len(graphs) == 1


def test_profiler():
    assert not _compat.is_profiling()
    with torch.autograd.profiler.profile(use_kineto=False):
        assert _compat.is_profiling()


def test_tracer_of_a_graph():
    outside, inside = recorded(_compat.tracer_of_graph)
    assert outside is None and inside is not None


def test_what_is_recorded_as_saved():
    def twice(x):
        with _compat.saved_in_graphs():
            y = x + 1
        return y * 2

    with torch.fx.traceback.preserve_node_meta():
        graph = make_fx(twice)(torch.ones(2)).graph
    saved = {n.name: n.meta.get("recompute") for n in graph.nodes if n.op == "call_function"}
    assert saved == {"add": torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE, "mul": None}
