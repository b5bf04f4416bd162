"""Builds the stand-in for this Python's torch, in ``build/standin-VERSION/``.

The kernels, in ``build/standin-kernels/``, serve every torch. ``project.py`` names them.

``libcudart.so.13``, ``libcuda.so.1`` and ``libnccl.so.2`` are preloaded: torch's libraries have an
RPATH, so that LD_LIBRARY_PATH does not find ours first. In ``packages`` is the installed package
with another library of CUDA operators: the same sources, linked with this runtime, because the
installed library has NVIDIA's inside. Functions that torch needs and the stand-in lacks are
generated: they write their name and fail.
"""

import fcntl
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import project
import torch
import translate_ptx
from torch.utils import cpp_extension

STANDIN = Path(__file__).resolve().parent
PRELOADED = ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2")

TORCH = Path(torch.__file__).parent
PACKAGES = TORCH.parent
TORCH_LIBRARIES = [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
TORCH_LIBRARIES += ["-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda"]
TORCH_HEADERS = [f"-isystem{path}" for path in cpp_extension.include_paths()]
CUDA_HEADERS = [f"-isystem{path}" for path in PACKAGES.glob("nvidia/cu*/include")]
COMPILE = ["g++", "-fPIC", "-g1", "-Wall", "-fvisibility=hidden", f"-I{STANDIN}", "-c"]


def why_not() -> str:
    """Return why the stand-in cannot be built here; empty if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not (CUDA_HEADERS and torch.version.cuda.startswith("13.")):
        return f"torch {torch.__version__} does not come with the packages of CUDA 13"
    if project.NVCC is None:
        return "no nvcc is here"
    return ""


def run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def is_newer(target: Path, sources: Iterable[Path]) -> bool:
    return target.exists() and all(
        target.stat().st_mtime > source.stat().st_mtime for source in sources
    )


def dependencies(target: Path) -> list[Path]:
    """Return the files that the compiler read for a target.

    That is the target itself if they are unknown, or one of them is gone, as in a moved folder.
    """
    listed = target.with_suffix(".d")
    if not listed.exists():
        return [target]
    _, _, names = listed.read_text().replace("\\\n", " ").partition(":")
    paths = [Path(name) for name in names.split()]
    return paths if all(path.exists() for path in paths) else [target]


class Build:
    """A build in a folder. A target is rebuilt if one of its sources is newer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def compile(self, sources: Iterable[Path], *flags: str) -> list[Path]:
        """Compile each source file; return the objects."""

        def one(source: Path) -> Path:
            target = self.folder / f"{source.parent.name}-{source.name}.o"
            if not is_newer(target, [source, *dependencies(target)]):
                run(*COMPILE, "-MMD", "-MF", target.with_suffix(".d"), *flags, source, "-o", target)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(one, sources))

    def unit(self, folder: Path, *flags: str) -> list[Path]:
        """Compile the files of a folder as one: headers take most of the time."""
        unit = self.folder / f"{folder.name}.cpp"
        text = "".join(f'#include "{source}"\n' for source in sorted(folder.glob("*.cpp")))
        if not (unit.exists() and unit.read_text() == text):
            unit.write_text(text)
        return self.compile([unit], "-O1", *flags)

    def preloaded(self, name: str, part: str, symbols: str, version: str = "", *flags: str) -> None:
        """Link a library under the name that torch looks for, with all functions that it needs."""
        objects = self.unit(STANDIN / part, "-std=c++17", *flags)
        target = self.folder / name
        if is_newer(target, objects):
            return
        missing = sorted(needed(symbols) - defined(objects))
        stubs = self.folder / f"{part}-missing.cpp"
        stubs.write_text(
            "#include <cstdio>\n"
            + "".join(
                f'extern "C" __attribute__((visibility("default"))) int {function}() {{\n'
                f'  std::fprintf(stderr, "standin: {function} is missing\\n");\n  return 801;\n}}\n'
                for function in missing
            )
        )
        link = [f"-Wl,-soname,{name}", "-Wl,-z,nodelete"]
        if version:
            script = self.folder / f"{name}.map"
            script.write_text(f"{version} {{ global: *; }};\n")
            link.append(f"-Wl,--version-script={script}")
        if part != "runtime":
            link += [f"-L{self.folder}", f"-l:{PRELOADED[0]}"]
        stub_objects = self.compile([stubs], "-std=c++17")
        run("g++", "-shared", *objects, *stub_objects, *link, "-o", target, "-lpthread", "-ldl")
        print(f"  {name}: {len(missing)} functions that torch knows are missing", flush=True)

    def aten(self) -> None:
        """Link torch's operators of CUDA tensors, which the runtime loads."""
        objects = self.unit(STANDIN / "aten", "-std=c++20", *TORCH_HEADERS)
        target = self.folder / "libstandin_aten.so"
        if not is_newer(target, objects):
            runtime = [f"-L{self.folder}", f"-l:{PRELOADED[0]}"]
            run("g++", "-shared", *objects, "-o", target, *TORCH_LIBRARIES, *runtime)

    def launchers(self) -> tuple[list[Path], list[Path]]:
        """Compile the .cu files by nvcc; return its launch code and its PTX as C++ files."""
        architecture = f"compute_{os.environ.get('STANDIN_PTX_ARCH', '80')}"
        options = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        options += [f"-arch={architecture}", f"-code={architecture}"]

        def one(source: Path) -> tuple[Path, Path]:
            launch = self.folder / f"{source.stem}.{architecture}.o"
            translated = self.folder / f"{source.stem}.{architecture}.ptx.cpp"
            keep = self.folder / f"{source.stem}.{architecture}"
            generated = keep / f"{source.stem}.ptx"
            if not is_newer(launch, [source, *dependencies(launch)]):
                keep.mkdir(exist_ok=True)
                listed = ["-MMD", "-MF", launch.with_suffix(".d")]
                kept = ["--keep", "--keep-dir", keep]
                run(project.NVCC, "-c", *options, *listed, *kept, source, "-o", launch)
            if not is_newer(translated, [generated, Path(translate_ptx.__file__)]):
                text = generated.read_text()
                translated.write_text(translate_ptx.translate(text) if ".entry" in text else "")
            return launch, translated

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            pairs = list(pool.map(one, project.KERNELS))
        return [launch for launch, _ in pairs], [translated for _, translated in pairs]

    def kernels(self) -> list[Path]:
        """Compile the kernels, which need no torch: nvcc's launch code and the translated PTX."""
        launchers, translated = self.launchers()
        flags = ["-std=c++17", *translate_ptx.FLAGS]
        objects = self.compile(translated, *flags, "-w", "-g0")
        own = [STANDIN / "ptx" / "registry.cpp", STANDIN / "ptx" / "kernels.cpp"]
        return [*objects, *self.compile(own, *flags), *launchers]

    def operators(self, kernels: list[Path]) -> Path:
        """Link the package's CUDA operators: adapters and kernels."""
        flags = ["-std=c++20", *project.DEFINES, *TORCH_HEADERS]
        objects = [*self.unit(project.ADAPTERS, *flags), *kernels]
        target = self.folder / f"{project.OPERATORS}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not is_newer(target, objects):
            runtime = [f"-L{self.folder}", f"-l:{PRELOADED[0]}"]
            run("g++", "-shared", *objects, "-o", target, *TORCH_LIBRARIES, *runtime)
        return target

    def package(self, operators: Path) -> None:
        """Make links to the installed package's files and to these CUDA operators."""
        spec = find_spec(project.PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{project.PACKAGE} is not installed in this environment")
        installed = Path(spec.submodule_search_locations[0])
        package = self.folder / "packages" / project.PACKAGE
        package.mkdir(parents=True, exist_ok=True)
        others = ("__pycache__", f"{project.OPERATORS}.")
        files = [file for file in installed.iterdir() if not file.name.startswith(others)]
        links = {file.name: file for file in [*files, operators]}
        for link in package.iterdir():
            if not link.is_symlink():  # __pycache__, which Python makes
                continue
            # A correct link stays: another run may be using it.
            if links.get(link.name) == link.readlink():
                del links[link.name]
            else:
                link.unlink()
        for name, file in links.items():
            (package / name).symlink_to(file)
        for source in project.PACKAGES:
            link = package.parent / source.name
            if not link.is_symlink():
                link.symlink_to(source)


def needed(symbols: str) -> set[str]:
    """Return the functions of a pattern that torch's and NVIDIA's libraries call."""
    users = [*TORCH.glob("lib/*.so"), *PACKAGES.glob("nvidia/*/lib/*.so*")]
    names: set[str] = set()
    for user in users:
        if user.name not in PRELOADED:
            names.update(re.findall(rf" [Uw] ({symbols})\b", run("nm", "-D", user)))
    return names


def defined(objects: Iterable[Path]) -> set[str]:
    return set(re.findall(r" [TW] (\w+)", run("nm", *objects)))


def build_kernels() -> list[Path]:
    """Return the objects of the kernels, which the stand-ins of all torches share."""
    made = Build(project.BUILD / "standin-kernels")
    with (made.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return made.kernels()


def build() -> Path:
    """Build all targets that are not up to date, and return the folder."""
    made = Build(project.BUILD / f"standin-{torch.__version__}")
    made.preloaded(PRELOADED[0], "runtime", r"(?:__)?cuda[A-Z]\w+", PRELOADED[0], *CUDA_HEADERS)
    made.preloaded(PRELOADED[1], "driver", r"cu[A-Z]\w+", "", *CUDA_HEADERS)
    nccl = [f"-isystem{PACKAGES / 'nvidia' / 'nccl' / 'include'}", *CUDA_HEADERS]
    made.preloaded(PRELOADED[2], "nccl", r"nccl[A-Z]\w+", "", *nccl)
    made.aten()
    made.package(made.operators(build_kernels()))
    return made.folder
