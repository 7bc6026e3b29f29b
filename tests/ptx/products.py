"""Matrix products: wgmma and mma, with the operands' and accumulators' layouts as the PTX ISA has them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.machine import Stamp
from tests.ptx.arithmetic import Array, bf16_to_f32
from tests.ptx.bulk import swizzled
from tests.ptx.decode import Decoder, builder
from tests.ptx.machine import SHARED_BASE, Block, Step, Sums, Wait, Warp
from tests.ptx.text import Instruction, PtxError

_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
_LANE = np.arange(32)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def floats(kind: str) -> tuple[int, Callable[[Array], Array]]:
    """Bytes of an operand's element, and what makes float32 of its bits."""
    if kind == "bf16":
        return 2, bf16_to_f32
    if kind == "f16":
        return 2, lambda x: x.view(np.float16).astype(np.float32)
    if kind == "e4m3":
        return 1, lambda x: _E4M3[x]
    raise PtxError(f"products of {kind}")


@functools.lru_cache(maxsize=4096)
def _places(descriptor: int, sides: int, transposed: bool, first: int, size: int) -> Array:
    """Place in shared memory, in elements of ``size`` bytes, of operand elements [sides, 32 bytes] from ``first`` on.

    PTX ISA, "Matrix descriptor" and "Strides": in units of 16 bytes, the start in bits 0-13, the leading dimension's
    byte offset in 16-29, the stride dimension's in 32-45, the swizzle in 62-63. ``transposed``: consecutive elements
    belong to consecutive rows (columns of B), not to consecutive k.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    span = _SPANS[descriptor >> 62]
    if descriptor >> 46 & 0xFFFF or descriptor >> 14 & 3 or descriptor >> 30 & 3:
        raise PtxError(f"matrix descriptor {descriptor:#x}: a base offset, or bits that must be 0")
    side, k = first + np.arange(sides)[:, None], np.arange(32 // size)[None, :]
    if size == 1:
        if transposed:
            raise PtxError("8-bit operands are not transposed")
        # The layout of 16-bit ones, byte by byte.
        whole = _places(descriptor, sides, False, first, 2)
        return np.repeat(whole * 2, 2, axis=1) + k % 2
    if span == 0:
        # Matrices of 8 rows x 16 bytes, each in one piece.
        lines, inner = (side, k) if not transposed else (k, side)
        over, along = (stride, leading) if not transposed else (leading, stride)
        address = start + lines // 8 * over + inner // 8 * along + lines % 8 * 16 + inner % 8 * 2
    elif transposed:
        chunk = span // 2
        address = start + side // chunk * leading + side % chunk * 2 + k // 8 * stride + k % 8 * span
    else:
        address = start + side // 8 * stride + side % 8 * span + k * 2
    return (swizzled(address, span) - SHARED_BASE) >> 1


def _in_shared(block: Block, descriptor: int, sides: int, transposed: bool, size: int, first: int = 0) -> Array:
    places = _places(descriptor, sides, transposed, first, size)
    if places.min() < 0 or places.max() >= len(block.shared.view(size)):
        raise PtxError(f"an operand outside shared memory: descriptor {descriptor:#x}")
    block.shared.touch(places * size + SHARED_BASE, size)
    return places


def fragment(columns: int, rows_apart: int = 8) -> tuple[Array, Array]:
    """(row, column) of each accumulator register of each lane, [registers, 32], in a warp's 16 rows."""
    n = np.arange(columns // 2)[:, None]
    row = _LANE[None, :] // 4 + rows_apart * (n // 2 % 2)
    column = 8 * (n // 4) + 2 * (_LANE[None, :] % 4) + n % 2
    return row, column


def _spread(value: Array, convert: Callable[[Array], Array], size: int) -> Array:
    """[32, 4 / size] float32: the elements that each lane has in a register."""
    return convert(np.ascontiguousarray(value).view(np.uint16 if size == 2 else np.uint8)).reshape(32, 4 // size)


def _a_rows(values: list[Array], convert: Callable[[Array], Array], size: int) -> Array:
    """[16, 32 / size] float32 of the four registers of an A fragment."""
    count = 4 // size
    a = np.empty((16, 32 // size), np.float32)
    for n, value in enumerate(values):
        row, column = _LANE // 4 + 8 * (n % 2), count * (_LANE % 4) + 4 * count * (n // 2)
        a[row[:, None], column[:, None] + np.arange(count)] = _spread(value, convert, size)
    return a


@builder("wgmma")
def _wgmma(d: Decoder, i: Instruction) -> Step:
    kind = i.opcode[1]
    if kind == "fence":

        def fence(warp: Warp) -> None:
            warp.fenced = list(warp.values)

        return fence
    if kind == "commit_group":

        def commit(warp: Warp) -> None:
            warp.products.append([])

        return commit
    if kind == "wait_group":
        left = int(i.operands[0], 0)

        def wait(warp: Warp) -> Wait | None:
            while len(warp.products) - 1 > left:
                for product in warp.products.pop(0):
                    product()
            return None

        return wait
    return _product(d, i)


def _product(d: Decoder, i: Instruction) -> Step:
    shape = re.fullmatch(r"m64n(\d+)k(16|32)", i.opcode[4])
    if i.opcode[:4] != ("wgmma", "mma_async", "sync", "aligned") or shape is None or i.opcode[5] != "f32":
        raise PtxError("product")
    columns, (size, convert) = int(shape[1]), floats(i.opcode[6])
    acc = [d.register(name) for name in d.vector(i.operands[0])]
    in_registers = i.operands[1].startswith("{")
    signs = [int(text) for text in i.operands[4:6]]
    # 8-bit operands have no way to be transposed, and no words about it.
    turned = [int(text) for text in i.operands[6:]] if size == 2 else [0] * (2 - in_registers)
    if len(acc) != columns // 2 or signs != [1, 1] or len(turned) != 2 - in_registers or i.opcode[6] != i.opcode[7]:
        raise PtxError("product")
    if int(shape[2]) != 32 // size or (size == 1 and len(i.operands) != 6):
        raise PtxError("product")
    a = [d.operand(name, 32 if in_registers else 64) for name in d.vector(i.operands[1])]
    b, adds = d.operand(i.operands[2], 64), d.operand(i.operands[3], 1)
    row, column = fragment(columns)

    def operands(warp: Warp) -> tuple[Array | None, Array]:
        v, block, left = warp.values, warp.block, None
        if not in_registers:
            left = _in_shared(block, _one(v[a[0]]), 16, bool(turned[0]), size, warp.index % 4 * 16)
        return left, _in_shared(block, _one(v[b]), columns, bool(turned[-1]), size)

    def start(warp: Warp, places: tuple[Array | None, Array]) -> Stamp | None:
        if warp.block.watch is None:
            return None
        # The watch counts in 16 bits.
        halves = [each if size == 2 else each[:, ::2] >> 1 for each in places if each is not None]
        both = np.concatenate([each.ravel() for each in halves])
        # A product may be issued on nothing and never looked at; its result is NaN.
        return warp.block.watch.start_read(warp.actor, both, "product", may_be_unwritten=True)

    def end(warp: Warp, stamp: Stamp | None) -> None:
        if stamp is not None:
            warp.block.watch.learn_end(warp.actor, stamp)

    def multiply(warp: Warp, keep: bool, places: tuple[Array | None, Array], sums: Sums) -> None:
        v, memory = warp.values, warp.block.shared.view(size)
        left = _a_rows([v[n] for n in a], convert, size) if places[0] is None else convert(memory[places[0]])
        result = left @ convert(memory[places[1]]).T
        if keep:
            if any(each is None for each in sums.values):
                raise PtxError("a product adds to registers that nobody wrote")
            before = np.empty((16, columns), np.float32)
            before[row, column] = np.stack(sums.values).view(np.float32)
            result += before
        sums.values = list(result[row, column].view(np.uint32))
        sums.pending -= 1
        if sums.pending == 0:
            warp.sums.pop(tuple(acc), None)
            for index, value in zip(acc, sums.values, strict=True):
                v[index] = warp.fenced[index] = value

    def run(warp: Warp) -> None:
        if warp.mask is not None:
            raise PtxError("a product with lanes apart")
        keep = bool(warp.values[adds][0])
        if (warp.values[adds] != keep).any():
            raise PtxError("lanes disagree whether to add")
        for n in (*acc, *a) if in_registers else acc:
            if warp.values[n] is not None and (not warp.fenced or warp.values[n] is not warp.fenced[n]):
                about = "registers of a product were written behind the last wgmma.fence"
                if warp.block.machine.options.strict_fences:
                    raise PtxError(about)
                warp.block.machine.notes.add(f"{about}, {i.what}")
                break
        places = operands(warp)
        stamp = start(warp, places)
        if warp.block.machine.options.product_at_wait:
            # Nothing but products may use the accumulator until the last of them that are in flight is waited for.
            sums = warp.sums.setdefault(tuple(acc), Sums([warp.values[n] for n in acc]))
            sums.pending += 1
            for n in acc:
                warp.values[n] = None
            warp.products[-1].append(lambda: (multiply(warp, keep, places, sums), end(warp, stamp)))
        else:
            multiply(warp, keep, places, Sums([warp.values[n] for n in acc], pending=1))
            # Its operands may be read until the wait.
            warp.products[-1].append(lambda: end(warp, stamp))

    return run


def _one(values: Any) -> int:
    if (values != values[0]).any():
        raise PtxError(f"lanes have different matrix descriptors: {values}")
    return int(values[0])


@builder("mma")
def _mma(d: Decoder, i: Instruction) -> Step:
    shape = re.fullmatch(r"m16n8k(8|16|32)", i.opcode[3])
    if i.opcode[1:3] != ("sync", "aligned") or shape is None or i.opcode[4:6] != ("row", "col"):
        raise PtxError("product")
    depth, kinds = int(shape[1]), i.opcode[6:]
    if kinds[0] != "f32" or kinds[3] != "f32":
        raise PtxError("accumulator")
    size, convert = floats(kinds[1])
    if depth > 32 // size or (size == 1 and depth != 32):
        raise PtxError("product")
    to = [d.register(name) for name in d.vector(i.operands[0])]
    a, b, c = ([d.operand(name, 32) for name in d.vector(text)] for text in i.operands[1:4])
    row, column = fragment(8)

    def run(warp: Warp) -> None:
        if warp.mask is not None:
            raise PtxError("a product with lanes apart")
        v = warp.values
        left = _a_rows([v[n] for n in a] + [np.zeros(32, np.uint32)] * (4 - len(a)), convert, size)[:, :depth]
        right, count = np.empty((depth, 8), np.float32), 4 // size
        for n, index in enumerate(b):
            k = count * (_LANE % 4) + 4 * count * n
            right[k[:, None] + np.arange(count), _LANE[:, None] // 4] = _spread(v[index], convert, size)
        before = np.empty((16, 8), np.float32)
        before[row, column] = np.stack([v[n] for n in c]).view(np.float32)
        out = (before + left @ right)[row, column].view(np.uint32)
        for n, index in enumerate(to):
            v[index] = out[n]

    return run
