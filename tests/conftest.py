import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import emulated, hidden
from support import paths as paths  # finds benchmarks and tools
from support.ranks import Ranks
from support.recorder import Recorder

from syncbn.ops import _extension


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cuda",
        action="store_true",
        help="an error where a test marked cuda would be skipped for want of a GPU or of operators",
    )
    parser.addoption(
        "--works",
        type=Path,
        metavar="FOLDER",
        help="write the outcomes of tests marked 'works' to FOLDER/<torch version>.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Programs started by tests must not import syncbn from the current folder, the project's.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Inductor otherwise keeps a process for each processor, here and in each rank.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    hidden.hide()
    if hidden.is_asked_for():
        config.addinivalue_line("filterwarnings", "ignore:syncbn has no operators for 'cpu'")
    folder = config.getoption("works")
    if folder is not None:
        config.pluginmanager.register(Recorder(folder))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hidden.is_asked_for():
        return
    left_out = [item for item in items if item.nodeid.split("[")[0].startswith((*hidden.NOT_RUN,))]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def why_no_cuda() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a driver that is too old
        if not torch.cuda.is_available():
            return "no CUDA device is here"
    if _extension.cuda_missing:
        return f"no CUDA operators: {_extension.cuda_missing}"
    return None


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may start processes
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or (reason := why_no_cuda()) is None:
        return
    if item.config.getoption("--require-cuda"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def each_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The default device, for tests that name none."""
    if request.param != "cpu":
        torch.set_default_device(request.param)
    yield torch.device(request.param)
    torch.set_default_device(None)


@pytest.fixture
def on_cuda() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """``ranks(world_size, backend, device)``: processes that live as long as the session."""
    pools: dict[tuple[int, str, str], Ranks] = {}

    def get(world_size: int, backend: str = "gloo", device: str = "cpu") -> Ranks:
        key = (world_size, backend, device)
        if key not in pools:
            pools[key] = Ranks(world_size, backend=backend, device=device)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.__exit__()


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"world{n}")
def any_world(request: pytest.FixtureRequest, ranks: Callable[..., Ranks]) -> Ranks:
    return ranks(request.param)


def anywhere(*world_sizes: int) -> list[object]:
    """Arguments of ``ranks``: over gloo on the CPU, and over gloo and NCCL on CUDA."""
    worlds = [(n, "gloo", "cpu") for n in world_sizes]
    worlds += [(n, "gloo", "cuda") for n in world_sizes if n > 1]  # one rank sends nothing
    worlds += [(n, "nccl", "cuda") for n in world_sizes]
    return [
        pytest.param(
            world,
            id="world{}-{}-{}".format(*world),
            marks=pytest.mark.cuda if "cuda" in world else (),
        )
        for world in worlds
    ]


@pytest.fixture(params=anywhere(1, 2, 3))
def world_anywhere(request: pytest.FixtureRequest, ranks: Callable[..., Ranks]) -> Ranks:
    return ranks(*request.param)


@pytest.fixture(params=anywhere(2))
def pair_anywhere(request: pytest.FixtureRequest, ranks: Callable[..., Ranks]) -> Ranks:
    return ranks(*request.param)


@pytest.fixture
def two_ranks(ranks: Callable[..., Ranks]) -> Ranks:
    return ranks(2)


@pytest.fixture
def three_ranks(ranks: Callable[..., Ranks]) -> Ranks:
    return ranks(3)


@pytest.fixture(scope="session", params=[pytest.param("source", marks=pytest.mark.any_torch)])
def library(tmp_path_factory: pytest.TempPathFactory) -> emulated.Library:
    """The CUDA kernels on emulated threads, as a host compiler builds them."""
    return emulated.Library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def compiling_ranks() -> Iterator[Ranks]:
    """Two ranks with longer time limits: one compiles while the other one waits."""
    with Ranks(2, case_seconds=240, collective_seconds=120) as pool:
        yield pool
