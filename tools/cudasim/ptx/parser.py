"""PTX text -> kernels whose instructions have resolved operands.

Every name is resolved here (registers to slots, labels to instruction numbers, scoped names of
inline assembly to their scope), so that the machine only looks up arrays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from .ptxtypes import SimError, size_of


@dataclass(frozen=True)
class Register:
    slot: int
    type: str  # as declared: pred, b16, b32, b64, f32, ...


@dataclass(frozen=True)
class Immediate:
    bits: int  # of an integer, or of a float where is_float
    is_float: bool = False


@dataclass(frozen=True)
class Special:
    name: str  # tid, ntid, ctaid, nctaid, laneid, warpid
    axis: int


@dataclass(frozen=True)
class Symbol:
    """A variable's address: space is param, local, shared, global or call (of a call)."""

    name: str
    space: str
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``d|p``: a value and a predicate written by one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    base: Register | Symbol | Immediate
    offset: int
    coordinates: Vector | None = None  # of a tensor copy: ``[map, {x, y, z}]``


@dataclass(frozen=True)
class Discard:
    """``_``: a destination that is dropped."""


Operand = Register | Immediate | Special | Symbol | Vector | Pair | Address | Discard


@dataclass
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str
    guard: Register | None = None
    negated: bool = False
    target: int = -1  # of a branch
    callee: str = ""  # of a call

    @cached_property
    def type(self) -> str:
        return self.modifiers[-1]


@dataclass(frozen=True)
class Variable:
    name: str
    offset: int  # in its space; of a global: 0
    size: int
    align: int
    init: bytes = b""


@dataclass
class Kernel:
    name: str
    parameters: list[Variable] = field(default_factory=list)
    parameter_bytes: int = 0
    local_bytes: int = 0
    shared_bytes: int = 0  # static; the dynamic part follows it
    instructions: list[Instruction] = field(default_factory=list)
    register_types: list[str] = field(default_factory=list)
    max_threads: int | None = None
    #: Registers of a thread at the start, where the kernel's launch bounds or .maxnreg say it.
    registers: int | None = None

    @cached_property
    def product_registers(self) -> dict[int, int]:
        """Registers that a wgmma names, by slot, with numbers of their own from 0 on."""
        slots: dict[int, int] = {}
        for instruction in self.instructions:
            if instruction.opcode == "wgmma" and instruction.operands:
                for operand in instruction.operands[:2]:
                    for item in operand.items if isinstance(operand, Vector) else ():
                        if isinstance(item, Register):
                            slots.setdefault(item.slot, len(slots))
        return slots

    @cached_property
    def waits_for_blocks(self) -> bool:
        """Whether blocks wait for each other, or count for others."""
        ordered = {("ld", "acquire"), ("red", "release")}
        return any((i.opcode, m) in ordered for i in self.instructions for m in i.modifiers)

    @cached_property
    def has_barriers(self) -> bool:
        """Whether threads wait for each other other than all at once."""
        return any(i.opcode == "mbarrier" for i in self.instructions)


@dataclass
class Module:
    target: str  # sm_80, sm_90a
    kernels: dict[str, Kernel]
    globals: dict[str, Variable]


_SPECIALS = ("tid", "ntid", "ctaid", "nctaid", "laneid", "warpid")
_NAME = r"[\w$%]+"
_VARIABLE = re.compile(
    rf"\.(?:param|local|shared|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})(?:\[(\d+)\])?"
    r"\s*(?:=\s*\{([^}]*)\})?"
)


def _variable(text: str, offset: int) -> Variable:
    match = _VARIABLE.match(text)
    if match is None:
        raise SimError(f"cannot parse the declaration: {text}")
    align, type_name, name, count, init = match.groups()
    size = size_of(type_name) * int(count or 1)
    alignment = int(align or size_of(type_name))
    offset = -(-offset // alignment) * alignment
    data = b""
    if init is not None:
        if size_of(type_name) != 1:
            raise SimError(f"only byte arrays may have an initial value: {text}")
        data = bytes(int(value) for value in init.split(",")).ljust(size, b"\0")
    return Variable(name, offset, size, alignment, data)


def split_operands(text: str) -> list[str]:
    """Splits at commas outside brackets: ``{a, b}, [c+4]`` -> ``{a, b}`` and ``[c+4]``."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,{\[(])+", text)
    return [part.strip() for part in parts if part.strip()]


class _Scope:
    """Names declared between two braces."""

    def __init__(self, outer: _Scope | None) -> None:
        self.outer = outer
        self.registers: dict[str, Register] = {}
        self.families: dict[str, str] = {}  # %r<9> declares a family: prefix -> type
        self.symbols: dict[str, Symbol] = {}
        self.labels: dict[str, int] = {}


class _Body:
    """Parses the statements between the braces of one kernel."""

    def __init__(self, kernel: Kernel, globals_: dict[str, Variable], dynamic: list[str]) -> None:
        self.kernel = kernel
        self.scope = _Scope(None)
        self.branches: list[tuple[Instruction, str, _Scope]] = []
        for name in globals_:
            self.scope.symbols[name] = Symbol(name, "global")
        for name in dynamic:  # extern __shared__ arrays all begin where the static ones end
            self.scope.symbols[name] = Symbol(name, "shared", 0)
        for parameter in kernel.parameters:
            self.scope.symbols[parameter.name] = Symbol(parameter.name, "param", parameter.offset)

    def parse(self, text: str, at: int) -> int:
        """Parses from just after the opening brace; returns the place after the closing one."""
        token = re.compile(r"\s*(?:([{}])|([$\w]+):(?!:)|([^;{}][^;]*);)")
        depth = 1
        while depth:
            match = token.match(text, at)
            if match is None:
                raise SimError(f"cannot parse near: {text[at : at + 60]!r}")
            at = match.end()
            brace, label, statement = match.groups()
            if brace == "{":
                depth += 1
                self.scope = _Scope(self.scope)
            elif brace == "}":
                depth -= 1
                self.scope = self.scope.outer or self.scope
            elif label:
                self.scope.labels[label] = len(self.kernel.instructions)
            else:
                self.statement(" ".join(statement.split()))
        for instruction, label, scope in self.branches:
            instruction.target = self.label(label, scope)
        return at

    def label(self, name: str, scope: _Scope | None) -> int:
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.outer
        raise SimError(f"label {name} is not declared")

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text)
            assert match is not None
            for name in split_operands(match.group(2)):
                family = re.fullmatch(r"(%?[\w$]+?)<\d+>", name)
                if family:
                    self.scope.families[family.group(1)] = match.group(1)
                else:
                    self.scope.registers[name] = self.new_register(match.group(1))
        elif text.startswith(".local"):
            variable = _variable(text, self.kernel.local_bytes)
            self.kernel.local_bytes = variable.offset + variable.size
            self.scope.symbols[variable.name] = Symbol(variable.name, "local", variable.offset)
        elif text.startswith(".shared"):
            variable = _variable(text, self.kernel.shared_bytes)
            self.kernel.shared_bytes = variable.offset + variable.size
            self.scope.symbols[variable.name] = Symbol(variable.name, "shared", variable.offset)
        elif text.startswith(".param"):
            variable = _variable(text, 0)
            self.scope.symbols[variable.name] = Symbol(variable.name, "call")
        elif text.startswith(".pragma"):
            pass
        elif text.startswith("."):
            raise SimError(f"directive is not interpreted: {text}")
        else:
            self.instruction(text)

    def new_register(self, type_name: str) -> Register:
        self.kernel.register_types.append(type_name)
        return Register(len(self.kernel.register_types) - 1, type_name)

    def instruction(self, text: str) -> None:
        match = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", text)
        if match is None:
            raise SimError(f"cannot parse the instruction: {text}")
        negated, guard, operation, rest = match.groups()
        opcode, *modifiers = operation.replace("::", "@").split(".")
        instruction = Instruction(opcode, tuple(m.replace("@", "::") for m in modifiers), (), text)
        if guard:
            register = self.operand(guard)
            assert isinstance(register, Register)
            instruction.guard, instruction.negated = register, bool(negated)
        if opcode == "bra":
            self.branches.append((instruction, rest.strip(), self.scope))
        elif opcode == "call":
            called = re.fullmatch(r"(?:\(([^)]*)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?", rest)
            if called is None:
                raise SimError(f"cannot parse the call: {text}")
            results, instruction.callee, arguments = called.groups()
            instruction.operands = (
                Vector(tuple(self.operand(a) for a in split_operands(results or ""))),
                Vector(tuple(self.operand(a) for a in split_operands(arguments or ""))),
            )
        else:
            instruction.operands = tuple(self.operand(part) for part in split_operands(rest))
        self.kernel.instructions.append(instruction)

    def operand(self, text: str) -> Operand:
        if text == "_":
            return Discard()
        if text.startswith("{"):
            return Vector(tuple(self.operand(item) for item in split_operands(text[1:-1])))
        if text.startswith("["):
            inner = re.fullmatch(
                r"\[\s*([^+,\]]+?)\s*(?:\+\s*(-?\w+))?\s*(?:,\s*(\{[^}]*\}))?\s*\]", text
            )
            if inner is None:
                raise SimError(f"cannot parse the address: {text}")
            base = self.operand(inner.group(1))
            if not isinstance(base, Register | Symbol | Immediate):
                raise SimError(f"cannot parse the address: {text}")
            where = self.operand(inner.group(3)) if inner.group(3) else None
            assert where is None or isinstance(where, Vector)
            return Address(base, int(inner.group(2) or "0", 0), where)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first), self.operand(second))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(int(text[2:], 16), is_float=True)
        if re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        special = re.fullmatch(r"%(\w+?)(?:\.([xyz]))?", text)
        if special and special.group(1) in _SPECIALS:
            return Special(special.group(1), "xyz".index(special.group(2) or "x"))
        return self.named(text)

    def named(self, name: str) -> Register | Symbol:
        scope: _Scope | None = self.scope
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            if name in scope.symbols:
                return scope.symbols[name]
            prefix = name.rstrip("0123456789")
            if prefix != name and prefix in scope.families:
                scope.registers[name] = self.new_register(scope.families[prefix])
                return scope.registers[name]
            scope = scope.outer
        raise SimError(f"operand {name} is not declared")


def _registers(directives: str, threads: int | None) -> int | None:
    """.maxnreg, or what .maxntid and .minnctapersm leave of the 64 K registers."""
    if given := re.search(r"\.maxnreg\s+(\d+)", directives):
        return int(given.group(1))
    if threads is None:
        return None
    blocks = re.search(r"\.minnctapersm\s+(\d+)", directives)
    return min(65536 // (threads * int(blocks.group(1) if blocks else 1)) // 8 * 8, 256)


def parse_ptx(text: str) -> Module:
    """Parses a whole PTX file; raises SimError on what it does not understand."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    # Source lines, the one kind of statement without a semicolon.
    text = re.sub(r"^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.M)
    target = re.search(r"^\.target\s+(\w+)", text, flags=re.M)
    if target is None:
        raise SimError("the text has no .target line: is it PTX?")
    module = Module(target.group(1), {}, {})
    for declaration in re.findall(r"^(?:\.visible\s+)?(\.global\s[^;]*);", text, flags=re.M):
        variable = _variable(" ".join(declaration.split()), 0)
        module.globals[variable.name] = variable
    dynamic = re.findall(r"^\.extern\s+\.shared[^;]*?([\w$]+)\[\];", text, flags=re.M)
    entry = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*([^{]*)\{", flags=re.S)
    at = 0
    while match := entry.search(text, at):
        kernel = Kernel(match.group(1))
        for declaration in split_operands(match.group(2)):
            if declaration:
                variable = _variable(re.sub(r"\.ptr\b.*?(?=\s[\w$]+$)", "", declaration), 0)
                offset = -(-kernel.parameter_bytes // variable.align) * variable.align
                kernel.parameters.append(
                    Variable(variable.name, offset, variable.size, variable.align)
                )
                kernel.parameter_bytes = offset + variable.size
        limit = re.search(r"\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", match.group(3))
        if limit:
            x, y, z = (int(n or 1) for n in limit.groups())
            kernel.max_threads = x * y * z
        kernel.registers = _registers(match.group(3), kernel.max_threads)
        at = _Body(kernel, module.globals, dynamic).parse(text, match.end())
        if dynamic and kernel.shared_bytes:
            raise SimError("static and dynamic shared memory in one kernel are not interpreted")
        module.kernels[kernel.name] = kernel
    return module
