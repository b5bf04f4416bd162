"""The parts of the GPU benchmarks that run without one. Their figures are not judged here."""

import itertools
from collections import Counter

import pytest
import torch
from support.benchmarking import (
    COPIES,
    OPERATORS,
    VARIANTS,
    cells,
    execute,
    found,
    run,
    select,
    variants,
)

from benchmarks import cuda, layer, report
from benchmarks import results as files
from benchmarks.cases import CUDA_SUITES
from benchmarks.collectives import collective_rows
from benchmarks.layer import Setting
from benchmarks.measure import Launches, host_clock, read_launches
from benchmarks.traffic import RESNET50

pytestmark = pytest.mark.any_torch

CPU = torch.device("cpu")


class Ordinary(torch.nn.modules.batchnorm._BatchNorm):
    """Replaces torch's layer, which refuses CPUs."""

    def _check_input_dim(self, input):
        pass


def made_up_launches(call):
    call()
    return Launches(["kernel"] * 3, ["copy"] * 2, ["wait"])


@pytest.fixture(scope="module")
def on_cpu():
    """The same rows from the CPU: each clock is the host's, and no profiler sees launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "TorchLayer", Ordinary)
        patch.setattr(cuda, "record_launches", made_up_launches)
        patch.setattr(cuda, "launch_clock", host_clock)
        setting = Setting(CUDA_SUITES["tiny"], CPU, 1, "tuned", make_theirs=cuda.make_theirs)
        yield setting._replace(num_buffers=lambda case: 2)


@pytest.fixture(scope="module")
def results(on_cpu, tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "gpu.csv"
    collectives = collective_rows(on_cpu.suite.worlds, "gloo", "cpu")
    of_kernels = cuda.timing_rows(on_cpu, cuda.IN_ONE_PROCESS)
    measured = itertools.chain(cuda.setting_rows(on_cpu), of_kernels, collectives)
    files.write(path, files.stamp(measured, "cpu"))
    return path


@pytest.fixture(scope="module")
def rows(results):
    return files.read(results)


def test_rows_of_every_kind(rows):
    layer = VARIANTS | COPIES | {"copy/torch"}
    directions = ("forward", "forward+backward")
    expected = {("overhead", direction): VARIANTS for direction in directions}
    for suffix in ("", " of a net"):
        expected |= {(f"layer{suffix}", direction): layer for direction in directions}
        expected |= {(f"operators{suffix}", name): COPIES | {"syncbn"} for name in OPERATORS}
        theirs = {"cuDNN", "native", "cuDNN/syncbn", "native/syncbn"}
        kernels = COPIES | {"syncbn"} | theirs
        expected |= {(f"kernels{suffix}", direction): kernels for direction in directions}
    expected["fused", "forward+backward"] = layer | {"separate", "separate/syncbn"}
    expected |= {
        ("launches", f"{direction}, {kind}"): {"syncbn", "torch"}
        for direction in directions
        for kind in ("kernels", "copies", "waits")
    }
    expected["collectives", "forward collective"] = {"syncbn", "all-gather"}
    assert variants(rows) == expected
    assert found(select(rows, benchmark="layer"), "case", "shape") == {
        ("tiny net", "2x3x9x9"),
        ("tiny 2-D", "4x5"),
    }
    parts = select(rows, benchmark="layer of a net")
    assert found(parts, "case", "shape") == {("tiny net", "2x4x9x9"), ("tiny net", "2x5x4x4")}
    assert found(select(rows, benchmark="collectives"), "case", "shape") == {
        (f"world {world}", channels) for world in (1, 2) for channels in ("64", "256", "2048")
    }


def test_launches_are_counted(rows):
    counts = {row.quantity.split(", ")[1]: row.median for row in select(rows, unit="calls")}
    assert counts == {"kernels": 3, "copies": 2, "waits": 1}


def test_a_net_is_the_sum_of_its_layers_round_by_round(on_cpu, monkeypatch):
    # Three for each case.
    rounds = itertools.cycle(3 * [[1.0, 2.0, 4.0]] + 3 * [[5.0, 1.0, 1.0]])
    samples = lambda variants, *rest: dict.fromkeys(variants, next(rounds))  # noqa: E731
    monkeypatch.setattr(layer, "interleave", samples)
    sums = [
        (row.benchmark, row.case, row.quantity, row.variant, row.median / 1e6)
        for row in cuda.timing_rows(on_cpu, cuda.IN_A_GROUP)
        if row.quantity in ("batch_norm_stats", "forward")
        and row.variant in ("syncbn", "copy")
        and not row.benchmark.endswith(" of a net")
    ]
    # One layer of a shape and three of another: 16, 5 and 7 s. A copy is two passes; a forward is
    # three of them and the statistics are one.
    assert sums == [
        ("layer", "tiny net", "forward", "syncbn", 7.0),
        ("layer", "tiny net", "forward", "copy", 10.5),
        ("operators", "tiny net", "batch_norm_stats", "syncbn", 7.0),
        ("operators", "tiny net", "batch_norm_stats", "copy", 3.5),
        ("layer", "tiny 2-D", "forward", "syncbn", 2.0),
        ("layer", "tiny 2-D", "forward", "copy", 3.0),
        ("operators", "tiny 2-D", "batch_norm_stats", "syncbn", 2.0),
        ("operators", "tiny 2-D", "batch_norm_stats", "copy", 1.0),
    ]


def test_layers_and_operators_are_timed_by_clocks_of_their_own(on_cpu, monkeypatch):
    used = set()

    def record(variants, clocks, *rest):
        used.update((name, clocks[name]) for name in variants)
        return {name: [1.0] for name in variants}

    monkeypatch.setattr(layer, "interleave", record)
    clocks = on_cpu._replace(layer_clock="layer", kernel_clock="kernel")
    list(cuda.timing_rows(clocks, cuda.IN_A_GROUP))
    layers = {(name, "layer") for name in ("syncbn", "torch", "syncbn again")}
    operators = [f"{name}, syncbn" for name in OPERATORS]
    assert used == layers | {(name, "kernel") for name in ("copy", *operators)}
    used.clear()
    list(cuda.timing_rows(clocks, cuda.IN_ONE_PROCESS))
    assert used == {(name, "kernel") for name in ("copy", "syncbn", "cuDNN", "native")}


def test_layers_that_are_timed_send_their_messages():
    code = """
import torch, torch.distributed as dist
from benchmarks.cuda import group_of_one
from syncbn import SyncBatchNorm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sizes, original = [], dist.all_reduce
dist.all_reduce = lambda tensor, **rest: (sizes.append(tensor.numel()), original(tensor, **rest))
layer = SyncBatchNorm(4)
with group_of_one():
    layer(torch.rand(3, 4)).sum().backward()
layer(torch.rand(3, 4)).sum().backward()
print(sizes)
"""
    result = execute("-c", code, GLOO_SOCKET_IFNAME="lo")
    assert result.stdout == "[12, 12]\n", result.stderr


@pytest.mark.parametrize(("suite", "nets"), [("full", 12), ("quick", 8)])
def test_nets_are_complete(suite, nets):
    layers = {}
    for case in CUDA_SUITES[suite].cases:
        if case.net is not None:
            layers[case.net] = layers.get(case.net, 0) + case.layers
    assert len(layers) == nets and set(layers.values()) == {53}


def test_resnet50_has_the_layers_that_are_timed():
    torchvision = pytest.importorskip("torchvision")
    shapes = Counter()
    with torch.device("meta"):
        model = torchvision.models.resnet50().eval()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.register_forward_hook(lambda *args: shapes.update([args[-1].shape[1:3]]))
        model(torch.empty(1, 3, 224, 224))
    assert {(c, s): n for n, c, s in RESNET50} == shapes


def launch_events():
    """A trace as torch's profiler writes it, reduced to the fields that are read."""
    begin = {"ph": "X", "cat": "user_annotation", "ts": 100.0, "dur": 50.0}
    return [
        {**begin, "name": "the call whose launches are counted"},
        {**begin, "cat": "gpu_user_annotation", "name": "the call whose launches are counted"},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 90.0, "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 110.0, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "stats_kernel", "ts": 160.0, "dur": 5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 120.0, "dur": 1},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 170.0, "dur": 5},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 180.0, "dur": 5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 155.0, "dur": 1},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 160.0},
    ]


def test_launches_are_read_off_a_trace():
    """Waits before or after the call do not count."""
    assert read_launches(launch_events()) == (
        ["stats_kernel"],
        ["Memcpy DtoH", "Memset"],
        ["cudaStreamSynchronize"],
    )


def test_trace_without_the_call_is_an_error():
    with pytest.raises(ValueError, match="expected one range .* but got 0"):
        read_launches(launch_events()[1:])


def test_page_shows_nets_and_single_cases(results):
    _, above, lines, below, _ = report.page([files.read(results)]).split("\n\n")
    assert " on a GPU, relative to `torch.nn.SyncBatchNorm`:" in " ".join(above.split())
    below = " ".join(below.split())
    assert " with one rank over NCCL, " in below and "53 batch norm layers" in below
    assert "does not train on CPUs" not in below and "allocator" not in below
    shown = {line[0]: (line[1], [bool(cell) for cell in line[2:]]) for line in cells(lines)[1:]}
    assert len(shown) == 3 + 6  # each activation with and without an addition
    assert shown["tiny net"] == ("2x3x9x9", [True, False, False, False])
    assert shown["tiny 2-D"] == ("4x5", [False, False, True, False])
    assert shown["small layer"] == ("8x16x4x4", [True, False, False, False])


def test_without_a_gpu_it_exits_with_a_message():
    result = run("run", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "no CUDA operators" in result.stderr or "no CUDA device" in result.stderr
