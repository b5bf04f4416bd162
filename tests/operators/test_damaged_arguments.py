"""Operators called with damaged arguments: an error or a right result, never a crash.

hypothesis draws the damages in a separate process, which writes each example to a file before it
runs it, so that the example of a crash is known. A right result equals, to the bit, the result of
plain tensors of the same values, or has no values, like its arguments.
"""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from support.cases import DTYPES, MASKED_OPS, OPS, arguments, make_input, operator
from support.fuzzing import fuzz, st
from support.paths import ROOT
from torch import Tensor


class Subclass(torch.Tensor):
    pass


def misaligned(x: Tensor) -> Tensor:
    memory = torch.zeros(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    y = torch.frombuffer(memory.numpy(), dtype=x.dtype, offset=1)
    return y.as_strided(x.shape, x.stride()).copy_(x)


def with_storage_of(x: Tensor, num_bytes: int) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(num_bytes)
    return x


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.clone().fill_(value)


def as_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


# Functions that damage a tensor; they raise if the tensor cannot have the damage. No fake tensors:
# once FakeTensorMode has failed on a freed tensor, zeros without memory end the process in any
# library's operators on torch 2.15.
DAMAGES: dict[str, Callable[[Tensor], object]] = {
    "none": lambda x: None,
    "a number": lambda x: 1.5,
    "a list": lambda x: x.tolist(),
    "a word": lambda x: "x",
    "0-dim": lambda x: x.flatten()[0],
    "flat": lambda x: x.flatten(),
    "another dimension in front": lambda x: x[None],
    "another dimension behind": lambda x: x[..., None],
    "one shorter": lambda x: x[:-1],
    "one longer": lambda x: torch.cat([x, x[:1]]),
    "empty": lambda x: x[:0],
    "no channels": lambda x: x[:, :0],
    "reversed dimensions": lambda x: x.permute(*range(x.dim())[::-1]),
    "gaps": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded to 2**40": lambda x: x[:1].expand(2**40, *x.shape[1:]),
    "channels expanded to 2**40": lambda x: x[:, :1].expand(x.size(0), 2**40, *x.shape[2:]),
    "huge strides of one sample": lambda x: x[:1].as_strided(
        (1, *x.shape[1:]), (2**62, *x.stride()[1:])
    ),
    "huge strides of nothing": lambda x: x[:0].as_strided((0, *x.shape[1:]), (2**62,) * x.dim()),
    "a diagonal": lambda x: torch.diag_embed(x).diagonal(dim1=-2, dim2=-1),
    "overlapping": lambda x: x.clone().as_strided(x.shape, (1,) * x.dim()),
    "misaligned": misaligned,
    "freed": lambda x: with_storage_of(x, 0),
    "half freed": lambda x: with_storage_of(x, x.nbytes // 2),
    "one byte freed": lambda x: with_storage_of(x, x.nbytes - 1),
    "on meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "for oneDNN": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "negated": lambda x: torch.complex(x, -x).conj().imag,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "copied on write": torch._lazy_clone,
    "of inference": as_inference,
    "leaf": lambda x: x.detach().requires_grad_(),
    "with a history": lambda x: x.detach().requires_grad_() * 1,
    "parameter": lambda x: torch.nn.Parameter(x),
    "uninitialized parameter": lambda x: torch.nn.UninitializedParameter(),
    "subclass": lambda x: x.as_subclass(Subclass),
    "functional": torch._to_functional_tensor,
    "nan": filled(torch.nan),
    "infinite": filled(torch.inf),
    "huge": lambda x: x.clone().fill_(torch.finfo(x.dtype).max),
    "negative": filled(-1),
    "zero": filled(0),
}
OTHER_DTYPES = ["bool", "uint8", "int16", "int32", "int64", "uint16", "uint64", "float16"]
OTHER_DTYPES += ["bfloat16", "float32", "float64", "complex32", "complex64", "complex128"]
OTHER_DTYPES += ["float8_e4m3fn", "float8_e8m0fnu", "bits8", "qint8", "float4_e2m1fn_x2"]
DAMAGES |= {
    f"of {name}": lambda x, name=name: (
        x.to(getattr(torch, name)) if x.dtype != getattr(torch, name) else x
    )
    for name in OTHER_DTYPES
}
# Replacements of a number and of a dtype. No integers past the dtypes: with a jagged tensor torch
# 2.11 reads past the end of its table.
NUMBERS = [None, 0.0, -1.0, 2.5, 1e308, -1e308, torch.nan, torch.inf, -torch.inf, 1, True, 10**400]
NUMBERS += ["x", 1j, torch.tensor(0.1)]
SCALAR_TYPES = [*DTYPES, torch.int64, torch.complex64, torch.bool, torch.float8_e5m2, torch.qint8]
SCALAR_TYPES += [torch.bits8, None, 6, "float32", 1.5]
OTHERS = {repr(value): value for value in NUMBERS + SCALAR_TYPES}


class Example(NamedTuple):
    name: str
    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    damages: dict[int, str]  # position of an argument: key of DAMAGES or OTHERS


@st.composite
def examples(draw: st.DrawFn) -> Example:
    name = draw(st.sampled_from(OPS + MASKED_OPS))
    shapes = [(2, 3), (3, 4, 5), (2, 1, 3), (1, 3, 2, 2), (2, 3, 4, 5), (4, 40, 3), (2, 2, 200)]
    shapes += [(0, 3, 2), (1, 3)]
    shape = draw(st.sampled_from(shapes))
    layout = draw(st.sampled_from(["contiguous", "channels_last"]))
    dtype = draw(st.sampled_from(DTYPES))
    valid = arguments(name, make_input(shape, layout, dtype))
    indexes = st.lists(st.integers(0, len(valid) - 1), min_size=1, max_size=2, unique=True)
    damages = {}
    for index in draw(indexes):
        others = SCALAR_TYPES if isinstance(valid[index], torch.dtype) else NUMBERS
        kinds = DAMAGES if isinstance(valid[index], Tensor) else map(repr, others)
        damages[index] = draw(st.sampled_from([*kinds]))
    return Example(name, shape, layout, dtype, damages)


class Unreadable(Exception):
    pass


def plain(value: object) -> object:
    """Return an ordinary tensor of the same values."""
    if not isinstance(value, Tensor):
        return value
    if torch._is_functional_tensor(value):
        value = torch._from_functional_tensor(value)
    try:
        value = value.detach().as_subclass(Tensor)
        end = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        end = (value.storage_offset() + end) * value.element_size()
        if value.numel() and not (  # a copy would end the process, or need all memory
            value._is_zerotensor() or end <= min(value.untyped_storage().nbytes(), 2**20)
        ):
            raise Unreadable
        return torch.empty_like(value).copy_(value)
    except Exception:
        raise Unreadable from None


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(plain(a).nan_to_num(nan=0.125), plain(b).nan_to_num(nan=0.125))


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def run(example: Example) -> bool:
    """Return whether the operator accepted the arguments; raise if its result is wrong."""
    valid = arguments(example.name, make_input(example.shape, example.layout, example.dtype))
    before = [a.clone() if isinstance(a, Tensor) else a for a in valid]
    args = list(valid)
    for index, damage in example.damages.items():
        try:
            is_tensor = isinstance(valid[index], Tensor)
            args[index] = DAMAGES[damage](valid[index]) if is_tensor else OTHERS[damage]
        except Exception:
            return False
    copies: list[object] | None
    try:
        copies = [plain(a) for a in args]
    except Unreadable:
        copies = None
    try:
        results = as_tuple(operator(example.name)(*args))
    except Exception:
        return False
    tensors = [t for t in (*args, *results) if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        assert all(t.is_meta for t in tensors), "results of some values and no others"
        return True
    assert copies is not None, "took what has no values"
    expected = as_tuple(operator(example.name)(*copies))
    for actual, right in [*zip(results, expected, strict=True), *zip(args, copies, strict=True)]:
        assert not isinstance(right, Tensor) or same(actual, right), f"{actual} instead of {right}"
    for index, damage in example.damages.items():
        if damage == "copied on write":
            assert same(valid[index], before[index]), "the copied tensor has changed"
    return True


def draw_and_run(file: Path) -> None:
    warnings.simplefilter("ignore")  # of torch, that nested and quantized tensors may change
    outcomes = set()

    @fuzz(examples=1000, example=examples())
    def test(example: Example) -> None:
        file.write_text(repr(example))
        outcomes.add(run(example))

    test()
    assert outcomes == {True, False}, "no example was taken, or none refused"


def test_errors_or_right_results(tmp_path):
    file = tmp_path / "example"
    folders = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, __file__, file],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
    )
    died = signal.Signals(-result.returncode).name if result.returncode < 0 else ""
    example = file.read_text() if file.exists() else ""
    repeat = f'from test_damaged_arguments import *; run({example})"'
    assert result.returncode == 0, (
        f'{result.stderr[-5000:]}\n{died}\nIn tests/operators: PYTHONPATH=.. python -c "{repeat}'
    )


if __name__ == "__main__":
    draw_and_run(Path(sys.argv[1]))
