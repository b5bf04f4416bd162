"""PTX as C++ that records each executed instruction, for the model in standin/kernels/cycles.h."""

import re

from support.ptx import Kernel

# Some kernels: recording all of them would take g++ minutes.
MODELED = re.compile(r"bfloat16Li[81]E(?!.*(Silu|Piecewise))")

UNITS = [  # the first that matches an opcode; machine code has no such moves and parameters
    (r"mov\.|cvta\.|ld\.param|cvt\.[su]\d+\.[su]\d+$", None),
    (r"ld\.shared", "SharedLoad"),
    (r"st\.shared", "SharedStore"),
    (r"ld\.global", "GlobalLoad"),
    (r"st\.global", "GlobalStore"),
    (r"bar\.|barrier\.", "Barrier"),
    (r"membar|fence|atom", "Signal"),
    (r"bra|ret", "Branch"),
    (r"cvt.*f64", "ConvertDouble"),
    (r"(div|rcp|sqrt)\.rn\.f64", "DivideDouble"),
    (r"(div|rcp|sqrt)\.rn\.f32", "DivideFloat"),
    (r"(div|rem)\.[su]", "DivideInteger"),
    (r".*approx|popc|cvt\.\w+\.f32\.[su]\d+", "Approximation"),
    (r".*f64$", "Double"),
    (r".*f32$", "Float"),
    (r".*[bsu]64$", "WideInteger"),
    (r"", "Integer"),
]
WITHOUT_RESULT = ("st", "bra", "ret", "bar", "barrier", "membar", "fence")


class RecordedKernel(Kernel):
    """A kernel that calls ``step()`` before each instruction."""

    HEADERS = (*Kernel.HEADERS, "kernels/cycles.h")

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.program: list[str] = []
        self.numbers: dict[str, int] = {}  # of registers

    def add_instruction(self, guard: str | None, opcode: str, operands: list[str]) -> None:
        unit = next(unit for pattern, unit in UNITS if re.match(pattern, opcode))
        has_result = opcode.split(".")[0] not in WITHOUT_RESULT
        results = self._registers(operands[:1] if has_result else [])
        inputs = self._registers([*operands[has_result:], guard or ""])
        address, num_bytes = "", 0
        if found := re.match(r"(ld|st)\.(shared|global).*?(?:\.v(\d))?\.[busf](\d+)$", opcode):
            what, space, length, bits = found.groups()
            num_bytes = int(length or 1) * int(bits) // 8
            # Shared memory begins at 0, which is no address here.
            address = f"(1ull << 40) + {self.address(operands[what == 'ld'], space)}"
            if guard:
                condition = f"{'!' * guard.count('!')}{self.register(guard.lstrip('!'))}"
                address = f"{condition} ? {address} : 0"
            address = f", {address}"
        if unit is not None:
            self.lines.append(f"  step({len(self.program)}{address});")
            self.program.append(f"{{Unit::k{unit}, {num_bytes}, {{{inputs}}}, {{{results}}}}}")
        super().add_instruction(guard, opcode, operands)

    def _registers(self, operands: list[str]) -> str:
        names = re.findall(r"%\w+", " ".join(operands))
        known = [name for name in names if name in self.registers]
        return ", ".join(str(self.numbers.setdefault(name, len(self.numbers))) for name in known)

    def registration(self, function: str) -> str:
        program = f'("{self.name}", {{{", ".join(self.program)}}})'
        return (
            super().registration(function)
            + f"\nconst ProgramRegistration program_of_{function}{program};"
        )
