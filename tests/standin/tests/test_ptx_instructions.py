"""Each instruction of the PTX translator, against Python."""

import math
import operator
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from ptx_samples import kernel, load
from translate_ptx import RULES


def bits_of(kind):
    return 8 if kind == "pred" else int(kind[1:])


def register_of(kind, i):
    if kind == "pred":
        return f"%p{i}"
    names = {"f32": "f", "f64": "fd"}
    return f"%{names.get(kind, {16: 'rs', 32: 'r', 64: 'rd1'}[bits_of(kind)])}{i}"


def instruction_kernel(name, opcode):
    """Thread i applies the instruction to the values i of up to three arrays."""
    rule = RULES[opcode]
    kinds = (*rule.operands, rule.result)
    lines = ["mov.u32 %r8, %tid.x;"]
    for i, kind in enumerate(kinds):
        bytes_ = bits_of(kind) // 8
        lines.append(f"mad.lo.s32 %r7, %r8, {bytes_}, 0;\ncvt.u64.u32 %rd9, %r7;")
        lines.append(f"add.s64 %rd{i}, %rd{i}, %rd9;")
    for i, kind in enumerate(rule.operands):
        if kind == "pred":
            lines.append(f"ld.global.u8 %rs8, [%rd{i}];\nsetp.ne.s16 %p{i}, %rs8, 0;")
        else:
            load = kind if kind[0] == "f" else f"u{bits_of(kind)}"
            lines.append(f"ld.global.{load} {register_of(kind, i)}, [%rd{i}];")
    operands = [register_of(kind, i) for i, kind in enumerate(rule.operands)]
    result = register_of(rule.result, 4)
    lines.append(f"{opcode} {', '.join([result, *operands])};")
    last = len(kinds) - 1
    if rule.result == "pred":
        lines.append(f"selp.u16 %rs8, 1, 0, {result};\nst.global.u8 [%rd{last}], %rs8;")
    else:
        store = rule.result if rule.result[0] == "f" else f"u{bits_of(rule.result)}"
        lines.append(f"st.global.{store} [%rd{last}], {result};")
    return kernel(name, len(kinds), "\n".join([*lines, "ret;"]))


FLOATS = [0.0, -0.0, 1.0, -1.0, 1.5, math.inf, -math.inf, math.nan, 1e-40, 3e38, 2.0**-25, 65520.0]


def examples(kind, opcode, position):
    """Special values, then random bits."""
    generator = np.random.default_rng(position)
    if kind == "pred":
        return [False, True]
    if kind[0] == "f":
        scales = 10.0 ** generator.integers(-9, 9, 24)
        values = [*FLOATS, *(generator.standard_normal(24) * scales)]
        return [float(np.float32(v)) if kind == "f32" else v for v in values]
    if opcode.startswith(("shl", "shr")) and position == 1:
        return [0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 1000, 2**32 - 1]
    if opcode.startswith("bfe") and position > 0:
        return [0, 1, 8, 31, 32, 33, 255]
    bits = bits_of(kind)
    least = -(2 ** (bits - 1)) if kind[0] == "s" else 0
    ends = [least, least + 2**bits - 1, least + 2 ** (bits - 1) - 1]
    random = [least + int(generator.integers(0, 2**63)) * 3 % 2**bits for _ in range(9)]
    values = [*ends, *(wrapped(small, kind) for small in (-1, 0, 1, 2, 7)), *random]
    if opcode.startswith(("div", "rem")) and position == 1:
        values = [value for value in values if value != 0]
    return values


def wrapped(value, kind):
    bits = bits_of(kind)
    value %= 2**bits
    return value - 2**bits if kind[0] == "s" and value >= 2 ** (bits - 1) else value


def nearest(value, kind):
    """Round a fraction to a number of the type, ties to even."""
    if kind == "f64":
        return float(value)
    with np.errstate(over="ignore"):
        near = np.float32(float(value))
    if np.isinf(near):
        return float(near)
    below, above = np.nextafter(near, np.float32([-np.inf, np.inf]))
    candidates = [c for c in (below, near, above) if np.isfinite(c)]
    distance = min(abs(Fraction(float(c)) - value) for c in candidates)
    best = [c for c in candidates if abs(Fraction(float(c)) - value) == distance]
    return float(next((c for c in best if c.view(np.uint32) % 2 == 0), best[0]))


def truncated_quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def of_floats(function):
    def apply(kind, *values):
        dtype = np.float32 if kind == "f32" else np.float64
        with np.errstate(all="ignore"):
            return float(function(*map(dtype, values)))

    return apply


def fused(kind, a, b, c):
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            return nearest(exact, kind)
    with np.errstate(invalid="ignore"):
        return float(np.float64(a) * np.float64(b) + np.float64(c))


def fused_downward(kind, a, b, c):
    near = fused(kind, a, b, c)
    if not all(map(math.isfinite, (a, b, c))):
        return near
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:  # of opposite signs, or both negative
        signs = math.copysign(1, a) * math.copysign(1, b), math.copysign(1, c)
        return 0.0 if signs == (1, 1) else -0.0
    if math.isfinite(near) and Fraction(near) <= exact:
        return near
    if near == -math.inf:
        return near
    return float(np.nextafter(np.float32(near), np.float32(-np.inf)))


def flushed(value):
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def power_of_two(_, a):
    with np.errstate(over="ignore"):
        return flushed(float(np.float32(np.exp2(np.float64(flushed(a))))))


def approximate_quotient(kind, a, b):
    if 2.0**126 < abs(b) < math.inf:
        return OF_FLOATS["mul"](kind, a, math.copysign(0.0, b))
    return of_floats(np.divide)(kind, a, b)


def smaller(_, a, b):
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min(a, b, key=lambda value: (value, math.copysign(1, value)))  # -0 before 0


def larger(_, a, b):
    return -smaller(_, -a, -b)


OF_FLOATS = {
    "mov": lambda _, a: a,
    "add": of_floats(operator.add),
    "sub": of_floats(operator.sub),
    "mul": of_floats(operator.mul),
    "div": of_floats(np.divide),
    "div.approx": approximate_quotient,
    "ex2.approx": power_of_two,
    "rcp": of_floats(lambda a: np.divide(type(a)(1), a)),
    "sqrt": of_floats(np.sqrt),
    "fma": fused,
    "fma.rm": fused_downward,
    "neg": lambda _, a: -a,
    "abs": lambda _, a: abs(a),
    "min": smaller,
    "max": larger,
    "selp": lambda _, a, b, c: a if c else b,
}
OF_INTEGERS = {
    "mov": lambda _, a: a,
    "cvta": lambda _, a: a,
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "mad": lambda _, a, b, c: a * b + c,
    "div": lambda _, a, b: truncated_quotient(a, b),
    "rem": lambda _, a, b: a - b * truncated_quotient(a, b),
    "neg": lambda _, a: -a,
    "abs": lambda _, a: abs(a),
    "min": lambda _, a, b: min(a, b),
    "max": lambda _, a, b: max(a, b),
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "shl": lambda _, a, b: a << min(b, 64),
    "shr": lambda _, a, b: a >> min(b, 64),
    "bfe": lambda _, a, b, c: a >> b & 2**c - 1,
    "popc": lambda _, a: bin(a).count("1"),
    "selp": lambda _, a, b, c: a if c else b,
}
COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def compared(how, a, b):
    unordered = a != a or b != b
    if how in ("num", "nan"):
        return unordered == (how == "nan")
    if how.endswith("u"):
        return unordered or COMPARISONS[how[:2]](a, b)
    return not unordered and COMPARISONS[how](a, b)


def converted(opcode, value):
    *modifiers, to, source = opcode.split(".")
    if "sat" in modifiers:
        return min(value, 1.0) if value > 0 else 0.0
    if source in ("f16", "bf16"):
        dtype = torch.float16 if source == "f16" else torch.bfloat16
        return torch.tensor([value], dtype=torch.uint16).view(dtype).float().item()
    if to in ("f16", "bf16"):
        dtype = torch.float16 if to == "f16" else torch.bfloat16
        rounded = torch.tensor([value]).to(dtype)
        return 0x7FFF if rounded.isnan() else rounded.view(torch.uint16).item()
    if to[0] != "f":
        return wrapped(value, to)
    if source[0] == "f":
        with np.errstate(over="ignore"):
            return float(np.float32(value)) if to == "f32" else value
    return nearest(Fraction(value), to)


def expected(opcode, values):
    name, *modifiers = opcode.split(".")
    result = RULES[opcode].result
    if name == "setp":
        return compared(modifiers[0], *values)
    if name == "cvt":
        return converted(opcode, *values)
    if result == "pred":
        return bool(wrapped(OF_INTEGERS[name](result, *values), "u8") & 1)
    if result[0] == "f":
        function = OF_FLOATS.get(f"{name}.{modifiers[0]}") or OF_FLOATS[name]
        return function(result, *values)
    return wrapped(OF_INTEGERS[name](result, *values), result)


DTYPES = {
    "pred": np.bool_,
    **{
        f"{sign}{bits}": f"{'i' if sign == 's' else 'u'}{bits // 8}"
        for sign in "bus"
        for bits in (16, 32, 64)
    },
    "f32": np.float32,
    "f64": np.float64,
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    kernels = [instruction_kernel(f"instruction_{i}", opcode) for i, opcode in enumerate(RULES)]
    return load(tmp_path_factory.mktemp("ptx"), "".join(kernels))


def same(a, b):
    if a != a or b != b:
        return a != a and b != b
    return a == b and math.copysign(1, a) == math.copysign(1, b)


@pytest.mark.parametrize("opcode", RULES)
def test_instruction(launch, opcode):
    rule = RULES[opcode]
    lists = [examples(kind, opcode, i) for i, kind in enumerate(rule.operands)]
    pairs, third = list(product(*lists[:2])), lists[2:]
    rows = [(*pair, *(values[i % len(values)] for values in third)) for i, pair in enumerate(pairs)]
    name = f"instruction_{list(RULES).index(opcode)}"
    for at in range(0, len(rows), 1024):
        part = rows[at : at + 1024]
        columns = zip(zip(*part, strict=True), rule.operands, strict=True)
        arrays = [np.array(column, dtype=DTYPES[kind]) for column, kind in columns]
        result = np.zeros(len(part), dtype=DTYPES[rule.result])
        assert launch(name, len(part), [*arrays, result]) is None
        for values, actual in zip(part, result.tolist(), strict=True):
            wanted = expected(opcode, values)
            assert same(actual, wanted), (values, actual, wanted)
