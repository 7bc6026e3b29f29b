"""Reads PTX: the one kernel of a module as a list of instructions with resolved registers and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.machine import MachineError

# Bits of a register of each type; predicates are booleans.
WIDTHS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64,
}  # fmt: skip


class PtxError(MachineError):
    """The program does what hardware does not forgive, or what is not known here."""


@dataclass(frozen=True)
class Instruction:
    """One statement.

    Attributes:
        line: Its line in the text, from 1.
        text: The statement as it stands.
        guard: Name of the predicate register that lets it run, None if it always runs.
        negated: Whether the guard must be false.
        opcode: The mnemonic with its modifiers, split at the dots.
        operands: Texts of the operands, registers by their unique names.
    """

    line: int
    text: str
    guard: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def what(self) -> str:
        """For messages."""
        return f"line {self.line}: {self.text}"


@dataclass
class Program:
    """A kernel.

    Attributes:
        name: The kernel's.
        params: (name, bytes) of the parameters in order.
        directives: Integers behind ``.reqntid``, ``.maxnreg`` and others.
        instructions: The statements.
        labels: Index of the instruction behind each label, by unique name.
        tables: Targets of indirect branches by the name of their list.
        widths: Bits of each register by unique name.
        statics: Bytes and alignment of the module's own shared variables.
    """

    name: str
    params: list[tuple[str, int]]
    directives: dict[str, int]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    statics: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Scope:
    """Names declared between a pair of braces."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: dict[str, str] = {}


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?"
                    r"([\w$]+)(?:\[(\d+)\])?")  # fmt: skip
_SHARED = re.compile(r"^\s*(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)\[(\d*)\];", re.M)
_WORD = re.compile(r"%?[A-Za-z_$][\w$.]*")


def parse(text: str) -> Program:
    """The kernel of a module.

    Raises:
        PtxError: There is not exactly one, or it holds what is not understood.
    """
    text = re.sub(r"//[^\n]*", "", text)
    found = list(_ENTRY.finditer(text))
    if len(found) != 1:
        raise PtxError(f"{len(found)} kernels in one module")
    entry = found[0]
    params = [
        (match[2], int(match[3]) * (WIDTHS[match[1]] // 8) if match[3] else WIDTHS[match[1]] // 8)
        for match in _PARAM.finditer(entry[2])
    ]
    directives = {name: int(n) for name, n in re.findall(r"\.(\w+)\s+(\d+)", entry[3])}
    program = Program(entry[1], params, directives)
    for align, kind, name, count in _SHARED.findall(text[: entry.start()]):
        program.statics[name] = (int(count or 0) * WIDTHS[kind] // 8, int(align))
    _Reader(program).read(text, entry.end())
    return program


class _Reader:
    """Goes through a kernel's body once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes = [_Scope("")]
        self.count = 0
        self.raw: list[tuple[int, str, tuple[_Scope, ...]]] = []

    def read(self, text: str, start: int) -> None:
        """Everything between the kernel's braces."""
        for line, kind, words in _statements(text, start):
            if kind == "{":
                self.count += 1
                self.scopes.append(_Scope(f"{self.count}:"))
            elif kind == "}":
                if len(self.scopes) == 1:
                    break
                self.scopes.pop()
            elif kind == "label":
                self._label(words)
            elif words.startswith("."):
                self._directive(line, words)
            else:
                self.raw.append((line, words, tuple(self.scopes)))
        # Labels may stand behind their branches: names are resolved when all of them are known.
        self.program.instructions = [self._instruction(*each) for each in self.raw]

    def _label(self, words: str) -> None:
        name, _, rest = words.partition(":")
        scope = self.scopes[-1]
        if rest.strip().startswith(".branchtargets"):
            names = [each.strip() for each in rest.strip()[len(".branchtargets") :].split(",")]
            self.program.tables[name] = names
            return
        scope.names[name] = scope.prefix + name
        self.program.labels[scope.prefix + name] = len(self.raw)

    def _directive(self, line: int, words: str) -> None:
        kind, _, rest = words.partition(" ")
        if kind in (".loc", ".pragma", ".file"):
            return
        if kind != ".reg":
            raise PtxError(f"line {line}: {words}")
        width, names = rest.strip().split(None, 1)
        scope = self.scopes[-1]
        for name in names.split(","):
            name = name.strip()
            ranged = re.fullmatch(r"(\S+)<(\d+)>", name)
            for each in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]:
                scope.names[each] = scope.prefix + each
                self.program.widths[scope.prefix + each] = WIDTHS[width[1:]]

    def _instruction(self, line: int, words: str, scopes: tuple[_Scope, ...]) -> Instruction:
        match = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", words, re.S)
        if match is None:
            raise PtxError(f"line {line}: {words}")

        def resolve(found: re.Match[str]) -> str:
            name = found[0]
            for scope in reversed(scopes):
                if name in scope.names:
                    return scope.names[name]
            return name

        operands = tuple(_WORD.sub(resolve, each) for each in split(match[4]))
        guard = _WORD.sub(resolve, match[2]) if match[2] else None
        return Instruction(line, words, guard, match[1] == "!", tuple(match[3].split(".")), operands)


def split(operands: str) -> list[str]:
    """Operands at the commas outside brackets and braces, without spaces."""
    parts, depth, part = [], 0, ""
    for char in operands:
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        elif not char.isspace():
            part += char
    return [*parts, part] if part else parts


def _statements(text: str, start: int) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text): braces that open or close a scope, labels, and all that ends with a semicolon."""
    position, line = start, text.count("\n", 0, start) + 1
    while position < len(text):
        char = text[position]
        if char == "\n":
            line += 1
        if char.isspace() or char == ";":
            position += 1
        elif char in "{}":
            yield line, char, ""
            position += 1
        else:
            label = re.compile(r"[A-Za-z_$][\w$]*:(?!:)(\s*\.branchtargets[^;]*;)?").match(text, position)
            end = label.end() if label else text.index(";", position)
            words = text[position:end].rstrip(";")
            if words.startswith(".loc"):
                end = text.index("\n", position)
                words = ".loc"
            yield line, "label" if label else "statement", " ".join(words.split())
            line += text.count("\n", position, end)
            position = end
