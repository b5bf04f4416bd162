"""Translated PTX: control flow, memory, found faults, unknown instructions."""

import re

import numpy as np
import pytest
from ptx_samples import HEAD, kernel, load
from translate_ptx import UnknownPtxError, translate

FIRST_IN_BLOCK = "mov.u32 %r0, %tid.x;\nshl.b32 %r1, %r0, 3;\n"  # r1: its offset in shared memory
OWN_OFFSET = """
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r0;
    mul.wide.u32 %rd9, %r4, 8;
    add.s64 %rd10, %rd0, %rd9;
"""
STORE_SIGNAL_READ = (
    FIRST_IN_BLOCK
    + OWN_OFFSET
    + """
    cvt.u64.u32 %rd11, %r4;
    st.global.u64 [%rd10], %rd11;
    bar.sync 0;
    membar.gl;
    atom.global.inc.u32 %r1, [%rd1], 9;
    membar.gl;
    bar.sync 0;
    ld.global.u64 %rd12, [%rd10];
    ret;"""
)

CORRECT = {
    # Each thread runs as many iterations as its own number and stores how many.
    "loop": (
        1,
        FIRST_IN_BLOCK
        + OWN_OFFSET
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
        + OWN_OFFSET
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
    # Exchanges the halves of a register, in a scope with its own register.
    "pack": (
        1,
        FIRST_IN_BLOCK
        + OWN_OFFSET
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
    # A lane of the warp, then of sections of eight lanes: 6175 is 24 in bits 8 to 12, and 31.
    "shuffles": (
        1,
        FIRST_IN_BLOCK
        + OWN_OFFSET
        + """
        shfl.sync.bfly.b32 %r5|%p1, %r0, 5, 31, -1;
        shfl.sync.down.b32 %r6|%p2, %r0, 3, 6175, -1;
        shfl.sync.idx.b32 %r7|%p3, %r0, 2, 6175, -1;
        mov.b64 %rd11, {%r5, %r6};
        mul.wide.u32 %rd12, %r7, 65536;
        add.s64 %rd11, %rd11, %rd12;
        @%p2 add.s64 %rd11, %rd11, 256;
        @!%p1 mov.u64 %rd11, 0;
        @!%p3 mov.u64 %rd11, 0;
        st.global.u64 [%rd10], %rd11;
        ret;""",
    ),
    "read_own": (2, STORE_SIGNAL_READ),
    # 16 bytes through all elements of a vector.
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

# The error of a launch of two blocks of two threads, and the kernel.
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
        + OWN_OFFSET
        + "st.global.u64 [%rd10], %rd0; ld.global.nc.u16 %rs1, [%rd10+6]; ret;",
    ),
    "reads memory that the launch has written": (
        1,
        FIRST_IN_BLOCK
        + OWN_OFFSET
        + "st.global.u64 [%rd10], %rd0; ld.global.u8 %rs1, [%rd10+7]; ret;",
    ),
    "reads memory that the launch has yet to write": (1, "ld.global.u64 %rd1, [%rd0+8]; ret;"),
    "signals other blocks without a fence": (
        1,
        "membar.gl; atom.global.inc.u32 %r1, [%rd0], 9; atom.global.inc.u32 %r1, [%rd0], 9; ret;",
    ),
    "signals other blocks without a fence behind the stores of its block": (
        2,
        STORE_SIGNAL_READ.replace("bar.sync 0;\n    membar.gl;", "membar.gl;\n    bar.sync 0;", 1),
    ),
    "reads what other blocks write without a signal and a fence": (
        2,
        STORE_SIGNAL_READ.replace("9;\n    membar.gl;", "9;"),
    ),
    "reads what other blocks write without a signal and a fence ": (
        2,
        STORE_SIGNAL_READ.replace("membar.gl;\n    bar.sync 0;", "membar.gl;"),
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


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    kernels = [kernel(name, *sample) for name, sample in CORRECT.items()]
    kernels += [kernel(f"fault_{i}", *sample) for i, sample in enumerate(FAULTS.values())]
    return load(tmp_path_factory.mktemp("ptx"), "".join(kernels))


@pytest.mark.parametrize("words", FAULTS)
def test_fault_ends_the_launch_with_a_message(launch, words):
    memory, more = np.zeros((2, 8), dtype=np.uint64)
    unwritten = memory if "write without" in words else None
    if "yet to write" in words:
        unwritten = memory[1:2]
    name = f"fault_{list(FAULTS).index(words)}"
    arrays = [memory, more][: FAULTS[words][0]]
    said = launch(name, 2, arrays, blocks=2, shared_bytes=16, unwritten=unwritten)
    assert re.search(words.strip(), said or "nothing")


def test_memory_that_the_launch_has_written_may_be_read(launch):
    memory, counter = np.zeros((2, 4), dtype=np.uint64)
    assert launch("read_own", 2, [memory, counter], blocks=2, unwritten=memory) is None
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


def test_shuffles(launch):
    memory = np.zeros(64, dtype=np.uint64)
    assert launch("shuffles", 64, [memory]) is None
    for thread, result in enumerate(memory.tolist()):
        of_section = thread // 8 * 8 + 2
        is_inside = thread % 8 + 3 < 8
        down = thread + 3 if is_inside else thread
        assert result == (down << 32) + (of_section << 16) + (is_inside << 8) + (thread ^ 5)


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
    "shfl.sync.up.b32 %r1|%p1, %r1, 1, 0, -1;",
    "call stranger;",
    ".local .b8 depot[4];",
    "ret",
]


@pytest.mark.parametrize("statement", UNKNOWN)
def test_unknown_ptx_is_an_error(statement):
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
