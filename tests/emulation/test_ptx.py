"""The translator of PTX: each instruction against Python, and what is found while one runs."""

import ctypes
import math
import operator
import re
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from emulated import link_ptx
from ptx import RULES, UnknownPtxError, translate

HEAD = ".version 9.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 shared[];\n"
REGISTERS = """
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<20>;
    .reg .f32 %f<9>;
    .reg .f64 %fd<9>;
"""


def kernel(name, parameters, body, directives=""):
    declared = ",\n".join(f".param .u64 {name}_param_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [{name}_param_{i}];" for i in range(parameters))
    return f".entry {name}(\n{declared}\n)\n{directives}\n{{{REGISTERS}{loads}\n{body}\n}}\n"


# --- Instructions that compute


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
    """Special values, then random ones, which include all bits."""
    generator = np.random.default_rng(position)
    if kind == "pred":
        return [False, True]
    if kind[0] == "f":
        scales = 10.0 ** generator.integers(-9, 9, 24)
        values = [*FLOATS, *(generator.standard_normal(24) * scales)]
        return [float(np.float32(v)) if kind == "f32" else v for v in values]
    if opcode.startswith(("shl", "shr")) and position == 1:
        return [0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 1000, 2**32 - 1]
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
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(invalid="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    return nearest(Fraction(a) * Fraction(b) + Fraction(c), kind)


def smaller(_, a, b):
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def larger(_, a, b):
    return -smaller(_, -a, -b)


OF_FLOATS = {
    "mov": lambda _, a: a,
    "add": of_floats(operator.add),
    "sub": of_floats(operator.sub),
    "mul": of_floats(operator.mul),
    "div": of_floats(np.divide),
    "rcp": of_floats(lambda a: np.divide(type(a)(1), a)),
    "sqrt": of_floats(np.sqrt),
    "fma": fused,
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
    *_, to, source = opcode.split(".")
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
        return OF_FLOATS[name](result, *values)
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
    """``launch(kernel, threads, arrays)`` on the instructions and on the kernels below."""
    folder = tmp_path_factory.mktemp("ptx")
    text = [instruction_kernel(f"instruction_{i}", opcode) for i, opcode in enumerate(RULES)]
    text += [kernel(name, *rest) for name, rest in SOUND.items()]
    text += [kernel(f"fault_{i}", *rest) for i, rest in enumerate(FAULTS.values())]
    source = folder / "samples.ptx.cpp"
    source.write_text(translate(HEAD + "".join(text)))
    function = link_ptx(folder, [source], []).launch_ptx
    function.restype = ctypes.c_char_p

    def call(name, threads, arrays, blocks=1, shared_bytes=0, unwritten=None):
        pointers = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
        places = [ctypes.addressof(pointer) for pointer in pointers]
        arguments = (ctypes.c_void_p * len(places))(*places)
        begin = 0 if unwritten is None else unwritten.ctypes.data
        size = 0 if unwritten is None else unwritten.nbytes
        sizes = [ctypes.c_size_t(n) for n in (shared_bytes, begin, size)]
        error = function(name.encode(), blocks, threads, *sizes, arguments)
        return None if error is None else error.decode()

    return call


def same(a, b):
    return a == b or (a != a and b != b)


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


# --- Control flow, memory, and what is found

FIRST_IN_BLOCK = "mov.u32 %r0, %tid.x;\nshl.b32 %r1, %r0, 3;\n"  # r1: its place in shared memory
OWN_PLACE = """
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r0;
    mul.wide.u32 %rd9, %r4, 8;
    add.s64 %rd10, %rd0, %rd9;
"""

SOUND = {
    # Each thread stores the number of its turns, which is its own.
    "loop": (
        1,
        FIRST_IN_BLOCK
        + OWN_PLACE
        + """
        mov.u64 %rd11, 0;
    $L__BB0_1:
        cvt.u32.u64 %r5, %rd11;
        setp.ge.u32 %p1, %r5, %r0;
        @%p1 bra $L__BB0_2;
        add.s64 %rd11, %rd11, 1;
        bra.uni $L__BB0_1;
    $L__BB0_2:
        not.pred %p2, %p1;
        @!%p2 st.global.u64 [%rd10], %rd11;
        @%p2 st.global.u64 [%rd10], %rd0;
        ret;""",
    ),
    # The neighbor's number, through shared memory.
    "neighbor": (
        1,
        FIRST_IN_BLOCK
        + OWN_PLACE
        + """
        cvt.u64.u32 %rd11, %r4;
        mov.u32 %r6, shared;
        add.s32 %r5, %r6, %r1;
        st.shared.u64 [%r5], %rd11;
        bar.sync 0;
        xor.b32 %r5, %r5, 8;
        ld.shared.u64 %rd12, [%r5];
        st.global.u64 [%rd10], %rd12;
        ret;""",
    ),
    # Halves of a register exchanged, in a block with a register of its own.
    "pack": (
        1,
        FIRST_IN_BLOCK
        + OWN_PLACE
        + """
        mov.b64 %rd11, 0x;
        { .reg .b32 tmp; mov.b64 {tmp, %r5}, %rd11; mov.b64 %rd12, {%r5, tmp}; }
        mov.b32 {%rs1, %rs2}, %r0;
        mov.b32 %r6, {%rs2, %rs1};
        cvt.u64.u32 %rd13, %r6;
        add.s64 %rd12, %rd12, %rd13;
        st.global.u64 [%rd10], %rd12;
        ret;""".replace("0x", str(2**32 * 5 + 7)),
    ),
    "read_own": (
        1,
        FIRST_IN_BLOCK
        + OWN_PLACE
        + """
        cvt.u64.u32 %rd11, %r4;
        st.global.u64 [%rd10], %rd11;
        ld.global.u64 %rd12, [%rd10];
        ret;""",
    ),
    # 16 bytes through all of a vector's places.
    "vectors": (
        2,
        """
        ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
        ld.global.v2.f64 {%fd1, %fd2}, [%rd1+16];
        st.global.v4.u32 [%rd0], {%r4, %r3, %r2, %r1};
        st.global.v2.f64 [%rd0+16], {%fd2, %fd1};
        ret;""",
    ),
}

STORE_OWN = """
    mov.u32 %r6, shared;
    add.s32 %r5, %r6, %r1;
    cvt.u64.u32 %rd11, %r0;
    st.shared.u64 [%r5], %rd11;
"""

# What ends a launch of two blocks of two threads, and the kernel.
FAULTS = {
    "reads shared memory that its block has not written": (1, "ld.shared.u64 %rd1, [shared]; ret;"),
    "reads shared memory that another thread writes before a barrier": (
        1,
        FIRST_IN_BLOCK + STORE_OWN + "ld.shared.u64 %rd12, [shared]; ret;",
    ),
    "writes shared memory that another thread reads or writes before a barrier": (
        1,
        "mov.u32 %r0, 0; st.shared.u32 [shared+4], %r0; ret;",
    ),
    "writes shared memory that another thread reads or writes before a barrier ": (
        1,
        FIRST_IN_BLOCK
        + STORE_OWN
        + """
        bar.sync 0;
        ld.shared.u64 %rd12, [shared];
        setp.eq.s32 %p1, %r0, 1;
        @%p1 st.shared.u64 [shared], %rd12;
        ret;""",
    ),
    "writes memory that the launch has written already": (1, "st.global.u64 [%rd0], %rd0; ret;"),
    "reads by a non-coherent load what the launch has written": (
        1,
        FIRST_IN_BLOCK
        + OWN_PLACE
        + "st.global.u64 [%rd10], %rd0; ld.global.nc.u16 %rs1, [%rd10+6]; ret;",
    ),
    "reads memory that the launch has yet to write": (1, "ld.global.u64 %rd1, [%rd0+8]; ret;"),
    "signals other blocks without a fence": (
        1,
        "membar.gl; atom.global.inc.u32 %r1, [%rd0], 9; atom.global.inc.u32 %r1, [%rd0], 9; ret;",
    ),
    "reads 8 bytes at an address that is not aligned to them": (
        1,
        "ld.global.nc.v2.f32 {%f1, %f2}, [%rd0+4]; ret;",
    ),
    "uses 24 bytes of shared memory, but the launch has 16": (
        1,
        "st.shared.u64 [shared+16], %rd0; ret;",
    ),
    "divides an integer by zero": (1, "mov.u32 %r1, 0; div.u32 %r2, %r1, %r1; ret;"),
    r"waits at __syncthreads, but thread \(1, 0, 0\) has exited": (
        1,
        FIRST_IN_BLOCK + "setp.eq.s32 %p1, %r0, 1; @%p1 ret; bar.sync 0; ret;",
    ),
    "launch: 2 threads of a kernel for at most 1": (0, "ret;", ".maxntid 1, 1, 1"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_fault_ends_the_launch_with_words(launch, words):
    memory = np.zeros(8, dtype=np.uint64)
    unwritten = memory[1:2] if "yet to write" in words else None
    name = f"fault_{list(FAULTS).index(words)}"
    arrays = [memory] * FAULTS[words][0]
    said = launch(name, 2, arrays, blocks=2, shared_bytes=16, unwritten=unwritten)
    assert re.search(words.strip(), said or "nothing")


def test_memory_that_the_launch_has_written_may_be_read(launch):
    memory = np.zeros(4, dtype=np.uint64)
    assert launch("read_own", 2, [memory], blocks=2, unwritten=memory) is None
    assert memory.tolist() == [0, 1, 2, 3]


def test_control_flow(launch):
    memory = np.full(6, 99, dtype=np.uint64)
    assert launch("loop", 3, [memory], blocks=2) is None
    assert memory.tolist() == [0, 1, 2, 0, 1, 2]


def test_shared_memory_and_barriers(launch):
    memory = np.full(128, 999, dtype=np.uint64)
    assert launch("neighbor", 64, [memory], blocks=2, shared_bytes=512) is None
    assert memory.tolist() == [i ^ 1 for i in range(128)]


def test_halves_of_a_register(launch):
    memory = np.zeros(3, dtype=np.uint64)
    assert launch("pack", 3, [memory]) is None
    assert memory.tolist() == [7 * 2**32 + 5 + (i << 16) for i in range(3)]


def test_vectors(launch):
    source = np.zeros(8, dtype=np.uint32)
    source[:4] = [1, 2, 3, 4]
    source[4:].view(np.float64)[:] = [0.5, -2.0]
    result = np.zeros(8, dtype=np.uint32)
    assert launch("vectors", 1, [result, source]) is None
    assert result[:4].tolist() == [4, 3, 2, 1]
    assert result[4:].view(np.float64).tolist() == [-2.0, 0.5]


UNKNOWN = [
    "add.sat.s32 %r1, %r1, %r1;",
    "add.s32 %r1, %r1;",
    "fma.rz.f32 %f1, %f1, %f1, %f1;",
    "setp.lt.and.s32 %p1, %r1, %r1, %p2;",
    "atom.global.add.u32 %r1, [%rd0], 1;",
    "bar.sync 1;",
    "ld.local.u32 %r1, [%rd0];",
    "ld.global.v2.u32 {%r1}, [%rd0];",
    "ld.shared.nc.u32 %r1, [shared];",
    "ld.global.u32 %r1, [%rd0+%rd1];",
    "mov.u32 %r1, %laneid;",
    "mov.f32 %f1, 1;",
    "mov.b16 {%rs1, %rs2}, %r1;",
    "shfl.sync.down.b32 %r1, %r1, 1, 31, -1;",
    "call stranger;",
    ".local .b8 depot[4];",
    "ret",
]


@pytest.mark.parametrize("statement", UNKNOWN)
def test_what_is_not_known_is_an_error(statement):
    assert "goto" not in translate(HEAD + kernel("known", 1, "ret;"))
    with pytest.raises(UnknownPtxError):
        translate(HEAD + kernel("unknown", 1, statement))


def test_functions_and_parameters_of_other_types_are_an_error():
    text = HEAD + kernel("one", 1, "ret;")
    for unknown in (
        text + ".func stranger() {\n}\n",
        text.replace(".param .u64", ".param .texref"),
    ):
        with pytest.raises(UnknownPtxError):
            translate(unknown)
