import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated
import pytest
import works
from ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--works",
        type=Path,
        metavar="FOLDER",
        help="write what became of the tests marked 'works' to FOLDER/<torch version>.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("works")
    if folder is not None:
        config.pluginmanager.register(works.Recorder(folder))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(world_size)``: processes that live as long as the session."""
    pools: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in pools:
            pools[world_size] = Ranks(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.__exit__()


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"world{n}")
def any_world(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Ranks:
    return ranks(request.param)


@pytest.fixture
def two_ranks(ranks: Callable[[int], Ranks]) -> Ranks:
    return ranks(2)


@pytest.fixture
def three_ranks(ranks: Callable[[int], Ranks]) -> Ranks:
    return ranks(3)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA kernels on emulated threads."""
    return emulated.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def compiling_ranks() -> Iterator[Ranks]:
    """Two ranks with the time that compilers take, for themselves and while the other one waits."""
    # One thread: inductor otherwise keeps a process for each processor.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with Ranks(2, env, case_seconds=240, collective_seconds=120) as pool:
        yield pool
