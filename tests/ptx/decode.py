"""Turns instructions into Python functions of a warp, once."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.machine import EXIT, LANES, SHARED_BASE, YIELD, Split, Step, Warp
from tests.ptx.text import Instruction, Program, PtxError

Builder = Callable[["Decoder", Instruction], Step]
BUILDERS: dict[str, Builder] = {}
_DTYPES = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# Where parameters lie that a kernel takes the address of.
PARAM_BASE = 0x7A00_0000
PARAM_STEP = 256


def builder(*names: str) -> Callable[[Builder], Builder]:
    """Registers what decodes the instructions that start so."""

    def register(function: Builder) -> Builder:
        for name in names:
            assert name not in BUILDERS, name
            BUILDERS[name] = function
        return function

    return register


class Decoder:
    """A decoded kernel.

    Attributes:
        steps: A function for each instruction.
        threads: Threads of a block.
        max_registers: 32-bit registers that each thread has at launch.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.threads = program.directives["reqntid"]
        self.max_registers = program.directives.get("maxnreg", 0)
        self._index = {name: i for i, name in enumerate(program.widths)}
        self._initial: list[Any] = [None] * len(self._index)
        self._constants: dict[tuple[int, int], int] = {}
        self._special: dict[str, int] = {}
        self._param = {name: PARAM_BASE + PARAM_STEP * i for i, (name, _) in enumerate(program.params)}
        self._shared: dict[str, int] = {}
        for name, (size, _) in program.statics.items():
            if size:
                raise PtxError(f"shared variable {name}: only the block's dynamic memory is known here")
            self._shared[name] = SHARED_BASE
        self.steps: list[Step] = [self._step(each) for each in program.instructions]
        self.steps.append(lambda warp: EXIT)

    def where(self, pc: int) -> str:
        """An instruction, for messages."""
        instructions = self.program.instructions
        return instructions[pc].what if pc < len(instructions) else "the end"

    def initial(self, block: Any, warp: int) -> list[Any]:
        """Registers of a warp that starts."""
        values = list(self._initial)
        for name, index in self._special.items():
            values[index] = self._special_value(name, block, warp)
        return values

    def _special_value(self, name: str, block: Any, warp: int) -> NDArray[np.uint32]:
        lanes = np.arange(LANES, dtype=np.uint32)
        axis = "xyz".find(name[-1])
        if name == "%laneid":
            return lanes
        if name == "%warpid":
            return np.full(LANES, warp, np.uint32)
        if name.startswith("%tid."):
            return lanes + np.uint32(warp * LANES) if axis == 0 else np.zeros(LANES, np.uint32)
        if name.startswith("%ntid."):
            return np.full(LANES, self.threads if axis == 0 else 1, np.uint32)
        if name.startswith("%ctaid."):
            return np.full(LANES, block.place[axis], np.uint32)
        if name.startswith("%nctaid."):
            return np.full(LANES, block.machine.grid[axis], np.uint32)
        if name in ("%cluster_ctarank", "%cluster_ctaid.x"):
            return np.full(LANES, block.rank, np.uint32)
        if name == "%dynamic_smem_size":
            return np.full(LANES, block.shared.size, np.uint32)
        if name == "%clock_hi":
            return np.zeros(LANES, np.uint32)
        raise PtxError(f"special register {name}")

    def register(self, name: str) -> int:
        """Index of a register to write; one that nothing reads for ``_``."""
        if name == "_":
            if name not in self._index:
                self._index[name] = len(self._initial)
                self._initial.append(None)
            return self._index[name]
        if name not in self._index:
            raise PtxError(f"{name} is no register")
        return self._index[name]

    def width(self, name: str) -> int:
        """Bits of a register."""
        return self.program.widths[name]

    def operand(self, text: str, width: int) -> int:
        """Index of what an operand reads: a register, a constant of so many bits, a special register."""
        if text in self._index:
            have = self.program.widths[text]
            if (have == 1) != (width == 1):
                raise PtxError(f"{text} has {have} bits, {width} are wanted")
            return self._index[text]
        if text.startswith("%"):
            if text not in self._special:
                self._special[text] = len(self._initial)
                self._initial.append(None)
            return self._special[text]
        return self._constant(self.number(text, width), width)

    def number(self, text: str, width: int) -> int:
        """A literal or the address of a symbol, as the bits of an unsigned integer."""
        if text in self._shared:
            return self._shared[text]
        if text in self._param:
            return self._param[text]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return int(text[2:], 16)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            bits = int(text[2:], 16)
            if width == 64:
                return bits
            (value,) = struct.unpack("<d", struct.pack("<Q", bits))
            return int(np.float32(value).view(np.uint32))
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            value = int(text.rstrip("U"), 0)
            return int(value != 0) if width == 1 else value % (1 << width)
        raise PtxError(f"operand {text}")

    def _constant(self, bits: int, width: int) -> int:
        key = (bits, width)
        if key not in self._constants:
            value: NDArray[Any] = np.full(LANES, bits, _DTYPES[width])
            value.flags.writeable = False
            self._constants[key] = len(self._initial)
            self._initial.append(value)
        return self._constants[key]

    def vector(self, text: str) -> list[str]:
        """Names in braces, or the one name."""
        return text[1:-1].split(",") if text.startswith("{") else [text]

    def address(self, text: str) -> Callable[[Warp], NDArray[np.int64]]:
        """What ``[register + offset]`` gives for each lane."""
        match = re.fullmatch(r"\[([^+\]]+?)(?:\+(-?\d+))?\]", text)
        if match is None:
            raise PtxError(f"address {text}")
        offset = int(match[2] or 0)
        if match[1] in self._index:
            index = self._index[match[1]]
            return lambda warp: warp.values[index].astype(np.int64) + offset
        fixed = np.full(LANES, self.number(match[1], 64) + offset, np.int64)
        return lambda warp: fixed

    def target(self, label: str) -> int:
        """Place of a label."""
        return self.program.labels[label]

    def _step(self, each: Instruction) -> Step:
        build = BUILDERS.get(each.opcode[0])
        if build is None:
            raise PtxError(f"unknown instruction, {each.what}")
        try:
            step = build(self, each)
        except PtxError as error:
            raise PtxError(f"{error}, {each.what}") from error
        if each.guard is None or each.opcode[0] in _BRANCHES:
            return step
        return self._guarded(step, self.operand(each.guard, 1), each.negated, self._junk(each))

    def _junk(self, each: Instruction) -> list[tuple[int, NDArray[Any]]]:
        """Registers that an instruction writes, and what they may hold if it never ran: no number, no place."""
        names = self.vector(each.operands[0]) if each.operands and each.opcode[0] in ("ld", "atom", "mov") else []
        return [
            (
                self._index[name],
                np.full(LANES, True if (width := self.width(name)) == 1 else 2**width - 1, _DTYPES[width]),
            )
            for name in names
            if name in self.program.widths
        ]

    def _guarded(self, step: Step, guard: int, negated: bool, junk: list[tuple[int, NDArray[Any]]]) -> Step:
        def run(warp: Warp) -> Any:
            allowed = warp.values[guard]
            if negated:
                allowed = ~allowed
            before = warp.mask
            if before is not None:
                allowed = allowed & before
            elif allowed.all():
                return step(warp)
            if not allowed.any():
                for index, value in junk:
                    if warp.values[index] is None:
                        warp.values[index] = value
                return None
            warp.mask = allowed
            event = step(warp)
            warp.mask = before
            return event

        return run


_BRANCHES = ("bra", "ret", "exit")


@builder("bra", "ret", "exit")
def _branch(d: Decoder, i: Instruction) -> Step:
    if i.opcode[0] == "bra":
        target = d.target(i.operands[0])
        jump: Any = target
    else:
        target, jump = 1 << 40, EXIT
    if i.guard is None:
        return lambda warp: jump
    guard, negated = d.operand(i.guard, 1), i.negated

    def run(warp: Warp) -> Any:
        taken = warp.values[guard]
        if negated:
            taken = ~taken
        if warp.mask is None:
            if taken.all():
                return jump
            return Split(taken, target) if taken.any() else None
        inside = taken[warp.mask]
        if inside.all():
            return jump
        return Split(taken, target) if inside.any() else None

    return run


@builder("brx")
def _branch_indirect(d: Decoder, i: Instruction) -> Step:
    targets = [d.target(label) for label in d.program.tables[i.operands[1]]]
    index = d.operand(i.operands[0], 32)

    def run(warp: Warp) -> int:
        chosen = warp.values[index]
        if warp.mask is not None:
            chosen = chosen[warp.mask]
        first = int(chosen[0])
        if (chosen != first).any():
            raise PtxError("an indirect branch parts lanes")
        if first >= len(targets):
            raise PtxError(f"indirect branch to target {first} of {len(targets)}")
        return targets[first]

    return run


@builder("nanosleep")
def _sleep(d: Decoder, i: Instruction) -> Step:
    return lambda warp: YIELD


@builder("trap")
def _trap(d: Decoder, i: Instruction) -> Step:
    def run(warp: Warp) -> None:
        raise PtxError("trap")

    return run
