"""PTX, the assembly that nvcc writes, as C++: a kernel is a function, an instruction a statement.

A register is a union of its width, whose bits each instruction reads as its own type; control flow
is goto. Nothing is rewritten. An unknown instruction is an error: it is never skipped.

The C++ includes ``ptx/``: ``instructions.h`` for instructions that take more than an expression,
``memory.h`` for loads and stores and their checks.
"""

import re
from itertools import product
from typing import NamedTuple

# Of the C++ compiler: integers wrap around as in PTX, only PTX's own instructions are fused, and
# two libraries of kernels in one process have variables of the same names.
FLAGS = ["-O1", "-fwrapv", "-ffp-contract=off", "-fno-gnu-unique"]

CXX_TYPES = {
    "pred": "bool",
    "f32": "float",
    "f64": "double",
    **{f"{sign}{bits}": f"uint{bits}_t" for sign in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
}
REGISTER_TYPES = {"pred": "bool"} | {
    f"{kind}{bits}": f"Register{bits}" for kind in "bfsu" for bits in (16, 32, 64)
}
SPECIAL_REGISTERS = {
    f"%{name}.{axis}": f"{variable}.{axis}"
    for name, variable in [
        ("tid", "threadIdx"),
        ("ctaid", "blockIdx"),
        ("ntid", "blockDim"),
        ("nctaid", "gridDim"),
    ]
    for axis in "xyz"
}


class Rule(NamedTuple):
    """An instruction that computes its first operand from the others, which are a, b and c."""

    result: str
    operands: tuple[str, ...]
    expression: str


def alternatives(pattern: str) -> list[str]:
    """Return "x{1,2}" as "x1" and "x2"."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in product(*parts)]


INTEGERS = "{s16,u16,s32,u32,s64,u64}"
WIDE = "{s32,u32,s64,u64}"
BITS = "{b16,b32,b64}"
FLOATS = "{f32,f64}"
NUMBERS = "{s16,u16,s32,u32,s64,u64,f32,f64}"
ANY = "{b16,b32,b64,s16,u16,s32,u32,s64,u64,f32,f64}"

# Opcode; types of the result and of the operands, T being the opcode's last type; expression in
# C++, compiled with FLAGS.
TABLE = [
    (f"mov.{ANY}", "T = T", "a"),
    ("mov.pred", "T = T", "a"),
    ("cvta.to.global.u64", "T = T", "a"),
    (f"add.{NUMBERS}", "T = T T", "a + b"),
    (f"sub.{NUMBERS}", "T = T T", "a - b"),
    (f"mul.{FLOATS}", "T = T T", "a * b"),
    (f"add.rn.{FLOATS}", "T = T T", "a + b"),
    (f"mul.rn.{FLOATS}", "T = T T", "a * b"),
    (f"mul.lo.{WIDE}", "T = T T", "a * b"),
    ("mul.wide.s16", "s32 = T T", "int32_t(a) * b"),
    ("mul.wide.u16", "u32 = T T", "uint32_t(a) * b"),
    ("mul.wide.s32", "s64 = T T", "int64_t(a) * b"),
    ("mul.wide.u32", "u64 = T T", "uint64_t(a) * b"),
    (f"mad.lo.{WIDE}", "T = T T T", "a * b + c"),
    (f"fma.rn.{FLOATS}", "T = T T T", "std::fma(a, b, c)"),
    ("fma.rm.f32", "T = T T T", "fma_downward(a, b, c)"),
    (f"div.rn.{FLOATS}", "T = T T", "a / b"),
    ("div.approx.f32", "T = T T", "approximate_quotient(a, b)"),
    (f"rcp.rn.{FLOATS}", "T = T", "1 / a"),
    (f"sqrt.rn.{FLOATS}", "T = T", "std::sqrt(a)"),
    ("ex2.approx.f32", "T = T", "std::exp2(a)"),
    ("ex2.approx.ftz.f32", "T = T", "flush(std::exp2(flush(a)))"),
    (f"div.{WIDE}", "T = T T", "quotient(a, b)"),
    (f"rem.{WIDE}", "T = T T", "remainder(a, b)"),
    ("neg.{s16,s32,s64,f32,f64}", "T = T", "-a"),
    ("abs.{s32,s64,f32,f64}", "T = T", "std::abs(a)"),
    (f"min.{INTEGERS}", "T = T T", "std::min(a, b)"),
    (f"max.{INTEGERS}", "T = T T", "std::max(a, b)"),
    (f"min.{FLOATS}", "T = T T", "minimum(a, b)"),
    (f"max.{FLOATS}", "T = T T", "maximum(a, b)"),
    (f"and.{BITS}", "T = T T", "a & b"),
    (f"or.{BITS}", "T = T T", "a | b"),
    (f"xor.{BITS}", "T = T T", "a ^ b"),
    (f"not.{BITS}", "T = T", "~a"),
    ("and.pred", "T = T T", "a && b"),
    ("or.pred", "T = T T", "a || b"),
    ("xor.pred", "T = T T", "a != b"),
    ("not.pred", "T = T", "!a"),
    (f"shl.{BITS}", "T = T u32", "shift_left(a, b)"),
    ("shr.{b16,b32,b64,s16,u16,s32,u32,s64,u64}", "T = T u32", "shift_right(a, b)"),
    ("popc.b32", "u32 = T", "__builtin_popcount(a)"),
    ("bfe.u32", "T = T u32 u32", "extract_bits(a, b, c)"),
    (f"selp.{ANY}", "T = T T pred", "c ? a : b"),
    (f"setp.eq.{ANY}", "pred = T T", "a == b"),
    ("setp.ne.{b16,b32,b64,s16,u16,s32,u32,s64,u64}", "pred = T T", "a != b"),
    (f"setp.lt.{NUMBERS}", "pred = T T", "a < b"),
    (f"setp.le.{NUMBERS}", "pred = T T", "a <= b"),
    (f"setp.gt.{NUMBERS}", "pred = T T", "a > b"),
    (f"setp.ge.{NUMBERS}", "pred = T T", "a >= b"),
    # Of floating-point numbers: ordered, and true where one is NaN.
    (f"setp.ne.{FLOATS}", "pred = T T", "a < b || a > b"),
    (f"setp.equ.{FLOATS}", "pred = T T", "!(a < b || a > b)"),
    (f"setp.neu.{FLOATS}", "pred = T T", "a != b"),
    (f"setp.ltu.{FLOATS}", "pred = T T", "!(a >= b)"),
    (f"setp.leu.{FLOATS}", "pred = T T", "!(a > b)"),
    (f"setp.gtu.{FLOATS}", "pred = T T", "!(a <= b)"),
    (f"setp.geu.{FLOATS}", "pred = T T", "!(a < b)"),
    (f"setp.num.{FLOATS}", "pred = T T", "a == a && b == b"),
    (f"setp.nan.{FLOATS}", "pred = T T", "a != a || b != b"),
    *(
        (f"cvt.{to}.{source}", f"{to} = {source}", "a")
        for to, source in product(alternatives(INTEGERS), alternatives(INTEGERS))
    ),
    *(
        (f"cvt.rn.{to}.{source}", f"{to} = {source}", f"{CXX_TYPES[to]}(a)")
        for to, source in product(("f32", "f64"), alternatives(INTEGERS))
    ),
    ("cvt.sat.f32.f32", "f32 = f32", "saturate(a)"),
    ("cvt.f64.f32", "f64 = f32", "double(a)"),
    ("cvt.rn.f32.f64", "f32 = f64", "float(a)"),
    ("cvt.f32.f16", "f32 = b16", "half_to_float(a)"),
    ("cvt.f32.bf16", "f32 = b16", "bfloat16_to_float(a)"),
    ("cvt.rn.f16.f32", "b16 = f32", "float_to_half(a)"),
    ("cvt.rn.bf16.f32", "b16 = f32", "float_to_bfloat16(a)"),
]


def make_rules() -> dict[str, Rule]:
    rules = {}
    for pattern, signature, expression in TABLE:
        for opcode in alternatives(pattern):
            kind = opcode.rsplit(".", 1)[1]
            result, operands = re.sub(r"\bT\b", kind, signature).split(" = ")
            assert opcode not in rules, opcode
            rules[opcode] = Rule(result, tuple(operands.split()), expression)
    return rules


RULES = make_rules()


class UnknownPtxError(ValueError):
    """PTX that this translator does not know."""


class Parameter(NamedTuple):
    offset: int
    num_bytes: int


class Kernel:
    """An ``.entry`` of PTX, translated."""

    def __init__(self, name: str, parameters: str, directives: str, shared: set[str]) -> None:
        self.name = name
        self.shared = shared  # names of the dynamic shared memory, which begins at 0
        self.registers: dict[str, str] = {}  # the declared type of each
        self.parameters: dict[str, Parameter] = {}
        self.lines: list[str] = []
        self.opcodes: list[str] = []
        declared = re.search(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?", directives)
        self.max_threads = 1024
        if declared:
            x, y, z = (int(n or 1) for n in declared.groups())
            self.max_threads = x * y * z
        for declaration in re.findall(r"\.param\s[^,]*", parameters):
            self._add_parameter(declaration)

    def _add_parameter(self, declaration: str) -> None:
        known = (
            r"\.param(?: \.align (\d+))? \.[ubf](\d+)(?: \.ptr \.align \d+)? (\w+)(?:\[(\d+)\])?"
        )
        found = re.fullmatch(known, " ".join(declaration.split()))
        if found is None:
            raise UnknownPtxError(f"parameter {declaration!r} of {self.name}")
        align, bits, name, length = found.groups()
        size = int(bits) // 8
        alignment = int(align or size)
        end = max((p.offset + p.num_bytes for p in self.parameters.values()), default=0)
        offset = (end + alignment - 1) // alignment * alignment
        self.parameters[name] = Parameter(offset, size * int(length or 1))

    def operand(self, text: str, kind: str) -> str:
        """Return an operand as a C++ expression of the type of ``kind``."""
        cxx = CXX_TYPES[kind]
        if text in SPECIAL_REGISTERS:
            return f"{cxx}({SPECIAL_REGISTERS[text]})"
        if re.fullmatch(r"0[fd][0-9a-fA-F]+", text):
            width = {"f": 32, "d": 64}[text[1]]
            return f"Register{width}{{0x{text[2:]}}}.{member(kind)}"
        if re.fullmatch(r"-?\d+", text) and not kind.startswith("f"):
            bits = int(text) % 2**64
            return f"({cxx})0x{bits:x}u" if kind != "pred" else f"bool({bits})"
        if text in self.parameters:
            return f"{cxx}(parameters + {self.parameters[text].offset})"
        if text in self.shared:
            return f"{cxx}(0)"
        return self.register(text, kind)

    def register(self, name: str, kind: str) -> str:
        """Return the lowest bits of a register as ``kind``, for C++ that reads them."""
        if name not in self.registers:
            raise UnknownPtxError(f"operand {name!r} in {self.name}")
        return cxx_name(name) if kind == "pred" else f"{cxx_name(name)}.{member(kind)}"

    def target(self, name: str, kind: str) -> str:
        """Return a register for C++ that assigns a value: a narrower integer is extended."""
        declared = self.registers.get(name, kind)
        if kind[0] in "bsu" and declared != "pred":
            kind = member(kind)[0] + declared[1:]
        return self.register(name, kind)

    def declare(self, kind: str, names: list[str]) -> None:
        self.registers.update(dict.fromkeys(names, kind))
        unset = " = true" if kind == "pred" else ""
        declared = ", ".join(f"{cxx_name(name)}{unset}" for name in names)
        self.lines.append(f"  {REGISTER_TYPES[kind]} {declared};")

    def address(self, text: str, space: str) -> str:
        found = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", text)
        if found is None:
            raise UnknownPtxError(f"address {text!r} in {self.name}")
        base = self.operand(found[1], "u32" if space == "shared" else "u64")
        return f"{base} + ({found[2] or 0})"

    def add_instruction(self, guard: str | None, opcode: str, operands: list[str]) -> None:
        statement = self._statement(opcode, operands)
        if guard:
            condition = self.register(guard.lstrip("!"), "pred")
            statement = f"if ({'!' * guard.count('!')}{condition}) {{ {statement} }}"
        self.lines.append(f"  {statement}")
        self.opcodes.append(opcode)

    def _statement(self, opcode: str, operands: list[str]) -> str:
        name = opcode.split(".")[0]
        statement = None
        if name in ("ld", "st"):
            statement = self._access(opcode, operands)
        elif name == "mov" and "{" in "".join(operands):
            statement = self._halves(opcode, operands)
        elif opcode in RULES:
            statement = self._computation(RULES[opcode], operands)
        elif opcode in ("bra", "bra.uni"):
            statement = f"goto {label(operands[0])};"
        elif opcode == "ret":
            statement = "return;"
        elif opcode in ("bar.sync", "barrier.sync") and operands == ["0"]:
            statement = "barrier();"
        elif opcode in ("shfl.sync.bfly.b32", "shfl.sync.down.b32", "shfl.sync.idx.b32"):
            statement = self._shuffle(opcode.split(".")[2], operands)
        elif opcode in ("membar.gl", "fence.acq_rel.gpu"):
            statement = "fence();"
        elif opcode in ("atom.global.inc.u32", "atom.relaxed.gpu.global.inc.u32"):
            result, place, limit = operands
            call = f"atomic_inc({self.address(place, 'global')}, {self.operand(limit, 'u32')})"
            statement = f"{self.target(result, 'u32')} = {call};"
        if statement is None:
            raise UnknownPtxError(f"instruction {opcode} {', '.join(operands)} in {self.name}")
        return statement

    def _computation(self, rule: Rule, operands: list[str]) -> str | None:
        result, *inputs = operands
        if len(inputs) != len(rule.operands):
            return None
        pairs = zip(inputs, rule.operands, strict=True)
        values = {name: self.operand(*pair) for name, pair in zip("abc", pairs, strict=False)}
        expression = re.sub(r"\b[abc]\b", lambda found: values[found[0]], rule.expression)
        return f"{self.target(result, rule.result)} = {CXX_TYPES[rule.result]}({expression});"

    def _access(self, opcode: str, operands: list[str]) -> str | None:
        known = r"(ld|st)\.(param|shared|global)(\.nc|\.cs)?(?:\.v([24]))?\.([busf]\d+)"
        found = re.fullmatch(known, opcode)
        if found is None or len(operands) != 2:
            return None
        what, space, cache, length, kind = found.groups()
        place, values = operands if what == "st" else reversed(operands)
        address, names = self.address(place, space), list_of(values)
        if len(names) != int(length or 1) or (cache == ".nc" and (what, space) != ("ld", "global")):
            return None
        function = f"{space}<{CXX_TYPES[kind]}, {len(names)}>"
        if what == "st":
            stored = ", ".join(self.operand(name, kind) for name in names)
            return f"store_{function}({address}, {{{{{stored}}}}});"
        puts = [f"{self.target(name, kind)} = v.values[{i}];" for i, name in enumerate(names)]
        coherence = "_noncoherent" if cache == ".nc" else ""
        return f"{{ const auto v = load{coherence}_{function}({address}); {' '.join(puts)} }}"

    def _shuffle(self, mode: str, operands: list[str]) -> str | None:
        results, *inputs = operands
        if "|" not in results or len(inputs) != 4:
            return None
        value, valid = results.split("|")
        values = ", ".join(self.operand(name, "u32") for name in inputs)
        call = f"const auto s = shuffle_{mode}({values});"
        puts = f"{self.target(value, 'u32')} = s.bits; {self.target(valid, 'pred')} = s.valid;"
        return f"{{ {call} {puts} }}"

    def _halves(self, opcode: str, operands: list[str]) -> str | None:
        """Return the statement of a move between a register and two of half its width."""
        kinds = {"mov.b32": ("u32", "u16", 16), "mov.b64": ("u64", "u32", 32)}
        if opcode not in kinds or len(operands) != 2:
            return None
        whole, half, width = kinds[opcode]
        target, source = operands
        if target.startswith("{"):
            low, high = (self.target(name, half) for name in list_of(target))
            cxx = CXX_TYPES[half]
            puts = f"{low} = {cxx}(v); {high} = {cxx}(v >> {width});"
            return f"{{ const auto v = {self.operand(source, whole)}; {puts} }}"
        low, high = (self.operand(name, half) for name in list_of(source))
        return f"{self.target(target, whole)} = {CXX_TYPES[whole]}({high}) << {width} | {low};"

    def cxx(self, function: str) -> str:
        return "\n".join([f"void {function}(const unsigned char* parameters) {{", *self.lines, "}"])


def member(kind: str) -> str:
    """Return the name of a type in C++'s registers, where bits are unsigned numbers."""
    return kind.replace("b", "u")


def cxx_name(register: str) -> str:
    return f"r_{register.removeprefix('%')}"


def label(name: str) -> str:
    return name.replace("$", "label_")


def list_of(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


def split_operands(text: str) -> list[str]:
    """Split at the commas outside of braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,{])+", text)]


def parse(text: str) -> list[Kernel]:
    """Return the kernels of a PTX file."""
    text = re.sub(r"//[^\n]*", "", text)
    shared = set(re.findall(r"\.extern \.shared [^;]*?(\w+)\[\];", text))
    entry = r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{(.*?)\n\}"
    kernels = []
    for name, parameters, directives, body in re.findall(entry, text, re.DOTALL):
        kernel = Kernel(name, parameters, directives, shared)
        parse_body(kernel, body)
        kernels.append(kernel)
    if len(kernels) != len(re.findall(r"\.entry\b", text)) or ".func" in text:
        raise UnknownPtxError("a function, or a kernel without a body")
    return kernels


def parse_body(kernel: Kernel, body: str) -> None:
    rest = body.strip()
    while rest:
        if rest[0] in "{}":  # a block with registers of its own
            kernel.lines.append(f"  {rest[0]}")
            rest = rest[1:].strip()
        elif found := re.match(r"(\$?\w+):", rest):
            kernel.lines.append(f"{label(found[1])}:;")
            rest = rest[found.end() :].strip()
        else:
            statement, end, rest = rest.partition(";")
            if not end:
                raise UnknownPtxError(f"{statement!r} in {kernel.name}")
            parse_statement(kernel, " ".join(statement.split()))
            rest = rest.strip()


def parse_statement(kernel: Kernel, statement: str) -> None:
    if statement.startswith(".pragma"):
        return
    if statement.startswith(".reg"):
        found = re.fullmatch(r"\.reg \.(\w+) (%?\w+)(?:<(\d+)>)?", statement)
        if found is None or found[1] not in REGISTER_TYPES:
            raise UnknownPtxError(f"{statement!r} in {kernel.name}")
        kind, name, count = found.groups()
        names = [name] if count is None else [f"{name}{i}" for i in range(int(count))]
        kernel.declare(kind, names)
        return
    found = re.fullmatch(r"(?:@(!?%\w+) )?([\w.:]+)(?: (.*))?", statement)
    if found is None:
        raise UnknownPtxError(f"{statement!r} in {kernel.name}")
    guard, opcode, operands = found.groups()
    kernel.add_instruction(guard, opcode, split_operands(operands or ""))


def translate(text: str) -> str:
    """Return a C++ file with the kernels of a PTX file, which registers them by their names.

    Raises:
        UnknownPtxError: The file has PTX that this translator does not know.
    """
    kernels = parse(text)
    functions = [kernel.cxx(f"kernel_{i}") for i, kernel in enumerate(kernels)]
    registrations = []
    for i, kernel in enumerate(kernels):
        sizes = ", ".join(f"{{{p.offset}, {p.num_bytes}}}" for p in kernel.parameters.values())
        registrations.append(
            f'const Registration registration_{i}("{kernel.name}", '
            f"{{kernel_{i}, {{{sizes}}}, {kernel.max_threads}}});"
        )
    return "\n\n".join(
        [
            '#include "ptx/instructions.h"\n#include "ptx/memory.h"\n#include "ptx/registry.h"',
            # Optimizing a kernel doubles g++'s time; the included functions stay optimized.
            '#pragma GCC optimize("O0")',
            "namespace emulation::ptx {\nnamespace {",
            *functions,
            "\n".join(registrations),
            "}  // namespace\n}  // namespace emulation::ptx\n",
        ]
    )
