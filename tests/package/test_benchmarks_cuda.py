"""The benchmarks of GPUs, as far as they run without one. Their figures are not judged here."""

import csv
import importlib.util
import os
import sys
from collections import Counter

import pytest
import torch
from benchmarking import BENCHMARKS, execute, found, run, select

# The same rows from the CPU: each clock is the host's, torch's layer is the ordinary one, and what
# the profiler would see is made up.
ON_CPU = """
import sys
from pathlib import Path
import cuda_timings, torch
from cases import CUDA_SUITES
from collective_times import collective_rows
from launches import Launches
from layer import Setting
from rows import write
from stamp import stamp
from timer import host_clock

class Ordinary(torch.nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input):
        pass

def record_launches(call):
    call()
    return Launches(["kernel"] * 3, ["copy"] * 2, ["wait"])

cpu = torch.device("cpu")
cuda_timings.TorchLayer = Ordinary
cuda_timings.num_buffers = lambda case: 2
cuda_timings.record_launches = record_launches
cuda_timings.eager_clock = cuda_timings.gpu_clock = cuda_timings.launch_clock = host_clock
setting = Setting(CUDA_SUITES["tiny"], cpu, 1, "tuned")
if __name__ == "__main__":
    path = Path(sys.argv[1])
    for rows in (cuda_timings.overhead_rows, cuda_timings.launch_rows, cuda_timings.timing_rows):
        write(path, (stamp(row, cpu) for row in rows(setting)))
    collectives = collective_rows(setting.suite.worlds, "gloo", "cpu")
    write(path, (stamp(row, cpu) for row in collectives))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A folder with the results and the program that wrote them."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "on_cpu.py").write_text(ON_CPU)
    result = execute_beside(folder, folder / "on_cpu.py", folder / "gpu.csv")
    assert result.returncode == 0, result.stderr
    return folder


def execute_beside(folder, *command):
    """Run Python where the benchmarks and the modules of the folder can be imported."""
    paths = [BENCHMARKS, folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return execute(*command, PYTHONPATH=os.pathsep.join(map(str, paths)))


@pytest.fixture(scope="module")
def rows(output):
    with (output / "gpu.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_every_kind(rows):
    variants = {}
    for benchmark, quantity, variant in found(rows, "benchmark", "quantity", "variant"):
        variants.setdefault((benchmark, quantity), set()).add(variant)
    times = {"syncbn", "torch", "syncbn again"}
    ratios = {"torch/syncbn", "syncbn again/syncbn"}
    copies = {"copy", "copy/syncbn"}
    layer = times | ratios | copies | {"copy/torch"}
    directions = ("forward", "forward+backward")
    operators = [
        f"batch_norm_{name}" for name in ("stats", "apply", "backward_reduce", "backward_apply")
    ]
    kinds = ("kernels", "copies", "waits")
    expected = {("overhead", direction): times | ratios for direction in directions}
    for suffix in ("", " of a net"):
        expected |= {(f"layer{suffix}", direction): layer for direction in directions}
        expected |= {(f"operators{suffix}", name): copies | {"syncbn"} for name in operators}
    expected |= {
        ("launches", f"{direction}, {kind}"): {"syncbn", "torch"}
        for direction in directions
        for kind in kinds
    }
    expected["collectives", "forward collective"] = {"syncbn", "all-gather"}
    assert variants == expected
    assert found(select(rows, benchmark="layer"), "case", "shape") == {
        ("tiny net", "2x3x9x9"),
        ("tiny 2-D", "4x5"),
    }
    parts = select(rows, benchmark="layer of a net")
    assert found(parts, "case", "shape") == {("tiny net", "2x4x9x9"), ("tiny net", "2x5x4x4")}
    assert found(select(rows, benchmark="collectives"), "case", "shape") == {
        (f"world {world}", channels) for world in (1, 2) for channels in ("64", "256", "2048")
    }


def test_units_are_sane(rows):
    limits = {"us": (0.05, 1e7), "ratio": (1e-5, 1e5), "calls": (1, 3)}
    assert {row["unit"] for row in rows} == limits.keys()
    for row in rows:
        low, high = limits[row["unit"]]
        q1, median, q3 = (float(row[name]) for name in ("q1", "median", "q3"))
        assert low <= q1 <= median <= q3 <= high, row
    counts = {
        row["quantity"].split(", ")[1]: row["median"] for row in rows if "," in row["quantity"]
    }
    assert counts == {"kernels": "3", "copies": "2", "waits": "1"}


def test_a_net_is_the_sum_of_its_layers_round_by_round(output):
    code = """
import itertools, on_cpu
rounds = itertools.cycle(3 * [[1.0, 2.0, 4.0]] + 3 * [[5.0, 1.0, 1.0]])  # three for each case
on_cpu.cuda_timings.interleave = lambda variants, *rest: dict.fromkeys(variants, next(rounds))
for row in on_cpu.cuda_timings.timing_rows(on_cpu.setting):
    if row.quantity in ("batch_norm_stats", "forward") and row.variant in ("syncbn", "copy"):
        print(row.benchmark, row.case, row.quantity, row.variant, row.median / 1e6, sep=",")
"""
    result = execute_beside(output, "-c", code)
    lines = [line for line in result.stdout.splitlines() if " of a net" not in line]
    # One layer of a shape and three of another: 16, 5 and 7 s. A copy is two passes; a forward is
    # three of them and the statistics are one.
    assert lines == [
        "layer,tiny net,forward,syncbn,7.0",
        "layer,tiny net,forward,copy,10.5",
        "operators,tiny net,batch_norm_stats,syncbn,7.0",
        "operators,tiny net,batch_norm_stats,copy,3.5",
        "layer,tiny 2-D,forward,syncbn,2.0",
        "layer,tiny 2-D,forward,copy,3.0",
        "operators,tiny 2-D,batch_norm_stats,syncbn,2.0",
        "operators,tiny 2-D,batch_norm_stats,copy,1.0",
    ], result.stderr


def load(name):
    """Import a benchmark's module that imports no other one."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layers_that_are_timed_send_their_messages():
    code = """
import cuda_timings, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sizes, original = [], dist.all_reduce
dist.all_reduce = lambda tensor, **rest: (sizes.append(tensor.numel()), original(tensor, **rest))
layer = cuda_timings.syncbn.SyncBatchNorm(4)
with cuda_timings.sending_alone():
    layer(torch.rand(3, 4)).sum().backward()
layer(torch.rand(3, 4)).sum().backward()
print(sizes)
"""
    result = execute("-c", code, GLOO_SOCKET_IFNAME="lo")
    assert result.stdout == "[9, 8]\n", result.stderr


@pytest.mark.parametrize(("suite", "nets"), [("full", 12), ("quick", 4)])
def test_nets_are_complete(suite, nets):
    layers = {}
    for case in load("cases").CUDA_SUITES[suite].cases:
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
    assert {(c, s): n for n, c, s in load("cases").RESNET50} == shapes


def launch_events():
    """A trace as torch's profiler writes it, cut down to what is read."""
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
    """What waits before or after the call is not the call's."""
    assert load("launches").read_launches(launch_events()) == (
        ["stats_kernel"],
        ["Memcpy DtoH", "Memset"],
        ["cudaStreamSynchronize"],
    )


def test_trace_without_the_call_is_an_error():
    with pytest.raises(ValueError, match="expected one range .* but got 0"):
        load("launches").read_launches(launch_events()[1:])


def test_table_is_of_nets_and_single_cases(output, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmark table -->\n<!-- end of benchmark table -->\n")
    result = run("table.py", "--readme", readme, "--results", output)
    assert result.returncode == 0, result.stderr
    text = readme.read_text()
    assert "over torch's SyncBatchNorm" in " ".join(text.split())
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert [row[:2] for row in cells[2:4]] == [["tiny net", "2x3x9x9"], ["tiny 2-D", "4x5"]]
    assert [bool(cell) for cell in cells[2][2:]] == [True, False, False, False]
    assert [row[0] for row in cells[6:]] == ["tiny net"] * 4
    assert all(row[2].endswith("%") for row in cells[6:])


def test_plots_are_drawn(output):
    result = run("plot.py", output / "gpu.csv")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in output.glob("*.png")) == ["gpu-copy.png", "gpu-torch.png"]


def test_without_a_gpu_it_says_so():
    result = execute(BENCHMARKS / "run.py", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "no CUDA operators" in result.stderr or "no CUDA device" in result.stderr
