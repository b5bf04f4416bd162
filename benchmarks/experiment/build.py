"""Builds a library of each variant of the CUDA kernels, and one of memory patterns, into build/.

A variant is csrc/ with diffs of the folder variants/, or csrc/ of a commit. Needs nvcc and no GPU;
for a dry run a host compiler builds the variants on the emulated threads of tests/emulation/.
"""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks import ROOT
from benchmarks.experiment.patterns import instances

HERE = Path(__file__).parent
DIFFS = HERE / "variants"
SOURCES = ("common", "cuda/kernels")  # of csrc/, which operators.cpp needs
KERNELS = (
    "batch_norm_stats",
    "batch_norm_apply",
    "batch_norm_backward_reduce",
    "batch_norm_backward_apply",
)
COMPILERS = 2  # at once


class Variant(NamedTuple):
    """Sources of the kernels."""

    diffs: tuple[str, ...] = ()  # in their order, after measured_only.diff
    commit: str = ""  # whose csrc/ is taken; empty for the present one


PRESENT = "present"
VARIANTS = {
    PRESENT: Variant(),
    # Each block has a segment of a tensor.
    "segments": Variant(commit="537971b"),
    # Blocks take chunks in turn, and reductions of small planes take two waves.
    "two_waves": Variant(commit="f5a57fe"),
    "plain_loads": Variant(("load_policy.diff",)),
    "evict_first_stores": Variant(("store_policy.diff",)),
    "vectors_of_reductions": Variant(("vectors_of_reductions.diff",)),
    "whole_lines": Variant(("whole_lines.diff",)),
    "dependent_launch": Variant(("dependent_launch.diff",)),
    "spare_multiprocessors": Variant(("spare_multiprocessors.diff",)),
}
MEASURED_ONLY = "measured_only.diff"
MEMORY = "memory"

NVCC = ["-O3", "-std=c++17", "-gencode=arch=compute_90,code=sm_90", "-cudart=static", "-shared"]
# Libraries of the same names in one process keep their own functions and variables.
NVCC += ["-Xcompiler=-fPIC,-fno-gnu-unique", "-Xlinker=-Bsymbolic"]
# As in tests/support/emulated.py; the emulation has no __stcs.
EMULATED = ["-O1", "-std=c++17", "-fPIC", "-fno-gnu-unique", "-fno-strict-aliasing", "-shared"]
EMULATION = (ROOT / "tests" / "emulation", ROOT / "tests" / "standin" / "threads")
EMULATED += ["-Wno-unknown-pragmas", "-D__stcs(pointer, value)=(*(pointer) = (value))", "-xc++"]


def make_sources(folder: Path, variant: Variant) -> None:
    """Copy csrc/ into the folder and apply diffs to it.

    Raises:
        ValueError: A diff does not apply, or the history of this clone lacks the commit.
    """
    shutil.rmtree(folder / "csrc", ignore_errors=True)
    if variant.commit:
        _extract(variant.commit, folder)
    else:
        for name in SOURCES:
            shutil.copytree(ROOT / "csrc" / name, folder / "csrc" / name)
    options = ["--strip=1", "--fuzz=0", "--batch", "--forward", "--no-backup-if-mismatch"]
    for diff in (MEASURED_ONLY, *variant.diffs):
        command = ["patch", *options, f"--input={DIFFS / diff}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"benchmarks/experiment/variants/{diff} does not apply to csrc/; make it anew:\n"
                f"{done.stdout}{done.stderr}"
            )


def _extract(commit: str, folder: Path) -> None:
    """Write csrc/ of a commit into the folder."""
    paths = [f"csrc/{name}" for name in SOURCES]
    command = ["git", "-C", str(ROOT), "archive", commit, *paths]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


class Library(NamedTuple):
    """The library of a variant or of the memory patterns."""

    name: str
    emulated: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the sources and of the library."""
        return ROOT / "build" / "experiment" / ("emulated" if self.emulated else "") / self.name

    def is_built(self) -> bool:
        """Return whether there is a library of the present sources."""
        digest = self.folder / "digest.txt"
        return digest.exists() and digest.read_text() == self._digest()

    def built(self) -> Path:
        """Return the library.

        Raises:
            FileNotFoundError: It is not built, or of other sources.
        """
        if not self.is_built():
            raise FileNotFoundError(
                f"{self.folder}: expected a library of the present sources; run "
                "`python -m benchmarks.experiment build`"
            )
        return self.folder / "library.so"

    def build(self) -> None:
        """Compile the library if it is not built.

        Raises:
            RuntimeError: The compiler failed.
        """
        if self.is_built():
            return
        digest = self._digest()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "digest.txt").unlink(missing_ok=True)
        sources = self._make_sources()
        command = [*self._compiler(), *self._flags(), *map(str, sources), "-o", "library.so"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}\n{done.stdout}{done.stderr}")
        (self.folder / "digest.txt").write_text(digest)

    def _digest(self) -> str:
        """Return a number that depends on the sources and the flags, and not on the machine."""
        texts = [" ".join(self._flags()).encode()]
        if self.name == MEMORY:
            texts += [instances().encode(), (HERE / "memory.cu").read_bytes()]
        else:
            variant = VARIANTS[self.name]
            texts.append(variant.commit.encode())
            files = [DIFFS / diff for diff in (MEASURED_ONLY, *variant.diffs)]
            files.append(HERE / "operators.cpp")
            for folder in (ROOT / "csrc" / name for name in SOURCES if not variant.commit):
                files += sorted(folder.iterdir())
            if self.emulated:
                files += [file for folder in EMULATION for file in sorted(folder.glob("*.h"))]
            texts += [file.read_bytes() for file in files]
        return hashlib.blake2b(b"\0".join(texts), digest_size=8).hexdigest()

    def _make_sources(self) -> list[Path]:
        if self.name == MEMORY:
            (self.folder / "instances.inc").write_text(instances())
            return [HERE / "memory.cu"]
        make_sources(self.folder, VARIANTS[self.name])
        kernels = [self.folder / f"csrc/cuda/kernels/{kernel}.cu" for kernel in KERNELS]
        return [HERE / "operators.cpp", *kernels]

    def _flags(self) -> list[str]:
        return [*(EMULATED if self.emulated else NVCC), "-I.", "-Icsrc"]

    def _compiler(self) -> list[str]:
        if not self.emulated:
            return [str(find_nvcc())]
        return [os.environ.get("CXX", "c++"), *(f"-I{folder}" for folder in EMULATION)]


def find_nvcc() -> Path:
    """Return nvcc.

    Raises:
        FileNotFoundError: There is none.
    """
    from tools import cuda  # needs torch

    nvcc = cuda.find("bin/nvcc")
    if nvcc is None:
        raise FileNotFoundError("no nvcc was found: set CUDA_HOME to the CUDA toolkit")
    return nvcc


def build(libraries: Iterable[Library]) -> None:
    """Compile the libraries that are not built; raise the first error."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(Library.build, libraries))
