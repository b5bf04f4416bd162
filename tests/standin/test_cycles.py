"""The model of a launch's cycles, on kernels of a few instructions."""

import ctypes

import pytest
from runtime_calls import take_log
from support.emulated import STANDIN, link_ptx
from support.ptx import parse, translate
from support.ptx_cycles import RecordedKernel
from support.ptx_samples import HEAD, kernel


def units(statement):
    (recorded,) = parse(HEAD + kernel("one", 1, f"{statement} ret;"), RecordedKernel)
    return [step.split(",")[0].removeprefix("{Unit::k") for step in recorded.program]


@pytest.mark.parametrize(
    ("statement", "unit"),
    [
        ("add.f32 %f1, %f2, %f3;", "Float"),
        ("fma.rn.f64 %fd1, %fd2, %fd3, %fd4;", "Double"),
        ("cvt.f64.f32 %fd1, %f1;", "ConvertDouble"),
        ("div.rn.f64 %fd1, %fd2, %fd3;", "DivideDouble"),
        ("div.approx.f32 %f1, %f2, %f3;", "Approximation"),
        ("div.u32 %r1, %r2, %r3;", "DivideInteger"),
        ("add.s64 %rd1, %rd2, %rd3;", "WideInteger"),
        ("ld.shared.v2.f32 {%f1, %f2}, [%r1];", "SharedLoad"),
        ("@%p1 st.global.u32 [%rd1], %r1;", "GlobalStore"),
        ("membar.gl;", "Signal"),
    ],
)
def test_instruction_has_its_unit(statement, unit):
    assert units(statement) == [unit, "Branch"]


def test_moves_cost_nothing():
    assert units("mov.u32 %r1, %r2;") == ["Branch"]


def test_an_access_knows_its_bytes_and_registers():
    (recorded,) = parse(
        HEAD + kernel("one", 1, "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd5]; ret;"),
        RecordedKernel,
    )
    assert recorded.program[0].startswith("{Unit::kGlobalLoad, 16, {")


START = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd0, %rd1;"
LOAD = START + "ld.global.f32 %f1, [%rd2];"
SAMPLES = {
    "start": START,
    "load": LOAD,
    "add": LOAD + 10 * "add.f32 %f1, %f1, %f1;",
    "independent": LOAD + "".join(f"add.f32 %f{i}, %f1, %f1;" for i in range(2, 9)),
    "divide": LOAD + "cvt.f64.f32 %fd1, %f1; div.rn.f64 %fd1, %fd1, %fd1;"
    "div.rn.f64 %fd1, %fd1, %fd1; add.f64 %fd1, %fd1, %fd1;",
    "again": LOAD + "ld.global.f32 %f2, [%rd2]; add.f32 %f2, %f2, %f2;",
    "conflict": START + "shl.b32 %r2, %r1, 7; st.shared.u32 [%r2], %r1; ld.shared.u32 %r3, [%r2];"
    "add.s32 %r3, %r3, %r3;",
}


@pytest.fixture(scope="module")
def cycles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cycles")
    kernels = "".join(kernel(name, 1, f"{body} ret;") for name, body in SAMPLES.items())
    (folder / "samples.ptx.cpp").write_text(translate(HEAD + kernels, RecordedKernel))
    library = link_ptx(folder, folder / "samples.ptx.cpp", STANDIN / "kernels" / "cycles.cpp")
    library.launch_ptx.restype = ctypes.c_char_p
    values = ctypes.create_string_buffer(b"\1" * 4096, 4096)

    def measure(name, threads=32, blocks=1):
        pointer = ctypes.c_uint64(ctypes.addressof(values))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        sizes = [ctypes.c_size_t(n) for n in (4096, 0, 0)]
        error = library.launch_ptx(name.encode(), blocks, threads, *sizes, arguments)
        assert error is None, error
        lines = [line.split() for line in take_log()]
        (cycles,) = [int(line[1]) for line in lines if line[0] == "cycles"]
        return cycles

    return measure


def test_dependent_instructions_wait_for_each_other(cycles):
    assert cycles("add") - cycles("load") == pytest.approx(500 + 10 * 4, abs=16)
    assert cycles("independent") - cycles("load") == pytest.approx(500 + 7, abs=16)


def test_float64_divisions_take_long(cycles):
    assert cycles("divide") - cycles("load") == pytest.approx(500 + 12 + 2 * 540 + 8, abs=32)


def test_second_access_is_to_the_l2_cache(cycles):
    assert cycles("again") - cycles("load") == pytest.approx(250, abs=16)


def test_words_of_one_bank_take_a_turn_each(cycles):
    assert cycles("conflict") - cycles("start") == pytest.approx(32 + 32 + 24, abs=16)
