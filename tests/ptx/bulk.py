"""Copies of boxes by the tensor memory accelerator (PTX ISA, "Tensors": boxes, swizzling, out-of-bounds accesses)."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.machine import Order
from tests.ptx import access
from tests.ptx.arithmetic import Array
from tests.ptx.barriers import barrier_at
from tests.ptx.decode import Decoder
from tests.ptx.machine import SHARED_BASE, WINDOW, Block, Copy, Step, Wait, Warp
from tests.ptx.memory import GlobalMemory, Region
from tests.ptx.text import Instruction, PtxError

# Coordinates are int32. Stores of boxes of which some reached past 2**31 and some began behind it, negative,
# ended in an illegal instruction on an H200; which of them did it is not known. That hardware forgives neither, in any
# dimension, loads included, is an assumption, and so is the lower bound: nobody wants what is that far behind a start.
_LAST, _FIRST = 2**31 - 1, -(2**30)
# Rows of 128 bytes after which a swizzle pattern repeats, minus one, by bytes of the swizzle.
_SWIZZLE_ROWS = {0: 0, 32: 1, 64: 3, 128: 7}


def swizzled(address: Array, span: int) -> Array:
    """Where a byte lies: the 16-byte chunk's number is xored with bits of the 128-byte row's."""
    return address ^ (((address >> 7) & _SWIZZLE_ROWS[span]) << 4)


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says, outermost dimension first.

    Attributes:
        address: Of the first element.
        size: Bytes of an element.
        shape: Elements along each dimension.
        strides: Bytes from one element to the next along each dimension.
        box: Elements that one copy moves along each dimension.
        swizzle: Bytes of the swizzle, 0 for none.
        float32: Whether elements are float32, for what adds.
    """

    address: int
    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    float32: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.address % 16:
            wrong.append("address not on 16 bytes")
        if any(s % 16 or not 0 <= s < 1 << 40 for s in self.strides[:-1]):
            wrong.append("strides must be multiples of 16 bytes below 2**40")
        if any(not 0 < n <= 1 << 32 for n in self.shape):
            wrong.append("shape")
        if any(not 0 < n <= 256 for n in self.box):
            wrong.append("box sides must be 1 .. 256")
        inner = self.box[-1] * self.size
        if inner % 16 or (self.swizzle and inner > self.swizzle):
            wrong.append(f"{inner} bytes of the box's rows in a swizzle of {self.swizzle}")
        if wrong:
            raise PtxError(f"{self}: {', '.join(wrong)}")

    @property
    def bytes(self) -> int:
        """Bytes of a box in shared memory."""
        return int(np.prod(self.box)) * self.size

    def look_at(self, coordinates: tuple[int, ...]) -> None:
        """Raises PtxError where a box begins or ends so far away that 32 bits do not hold it."""
        for start, side in zip(coordinates, self.box, strict=True):
            if start < _FIRST or start + side > _LAST:
                raise PtxError(f"a box of {self.box} at {coordinates}: coordinates beyond 32 bits, or wrapped there")

    def places(self, coordinates: tuple[int, ...]) -> tuple[Array, Array]:
        """(first address, elements inside) of each row of a box along the last dimension, in the box's order."""
        address = np.full((), self.address, np.uint64)
        inside = np.full((), True)
        for side, start, stride, limit in zip(self.box[:-1], coordinates, self.strides, self.shape, strict=False):
            at = start + np.arange(side)
            address = address[..., None] + at.astype(np.uint64) * np.uint64(stride)
            inside = inside[..., None] & (at >= 0) & (at < limit)
        return address.ravel(), inside.ravel()


@functools.lru_cache(maxsize=512)
def _layout(start: int, rows: int, row_bytes: int, swizzle: int) -> Array:
    """Place in shared memory of each byte of a box, [rows, row_bytes]."""
    lines = start + np.arange(rows * row_bytes).reshape(rows, row_bytes)
    return swizzled(lines, swizzle) - SHARED_BASE


def _box(block: Block, start: int, tensor: TensorMap) -> Array:
    if start % (128 if tensor.swizzle == 0 else 8 * tensor.swizzle):
        raise PtxError(f"a box at {start - SHARED_BASE} of shared memory: its swizzle {tensor.swizzle} wants more")
    row_bytes = tensor.box[-1] * tensor.size
    if start < SHARED_BASE or start + tensor.bytes > SHARED_BASE + block.shared.size:
        raise PtxError("a box outside shared memory")
    # A swizzle changes the order of these bytes and nothing else.
    block.shared.touch(np.array([start]), tensor.bytes)
    return _layout(start, tensor.bytes // row_bytes, row_bytes, tensor.swizzle)


def _columns(tensor: TensorMap, first: int) -> tuple[int, int]:
    """Elements [low, high) of a row of the box that lie inside the tensor."""
    return max(0, min(tensor.box[-1], -first)), max(0, min(tensor.box[-1], tensor.shape[-1] - first))


def _rows(memory: GlobalMemory, tensor: TensorMap, coordinates: tuple[int, ...]) -> list[tuple[int, Array, int, int]]:
    """(row of the box, its bytes inside the tensor, first byte, last byte) of rows that have any."""
    addresses, inside = tensor.places(coordinates)
    low, high = (n * tensor.size for n in _columns(tensor, coordinates[-1]))
    found: list[tuple[int, Array, int, int]] = []
    if low >= high:
        return found
    shift = coordinates[-1] * tensor.size
    for row in np.flatnonzero(inside):
        at = (int(addresses[row]) + shift + low) % (1 << 64)
        region = memory.find(at)
        first = at - region.base
        if first + high - low > region.size:
            raise PtxError(f"a box's row ends outside {region.name}")
        found.append((int(row), region.data[first : first + high - low], low, high))
    return found


def _places(region: Region, tensor: TensorMap, coordinates: tuple[int, ...]) -> Array:
    """Pairs of bytes of a tensor's memory that a box has."""
    addresses, inside = tensor.places(coordinates)
    low, high = (n * tensor.size for n in _columns(tensor, coordinates[-1]))
    first = addresses[inside].astype(np.int64) + (coordinates[-1] * tensor.size + low - region.base)
    return ((first >> 1)[:, None] + np.arange(max(0, high - low) >> 1)).ravel()


def load(warp: Warp, tensor: TensorMap, coordinates: tuple[int, ...], start: int, barrier: int) -> Copy:
    """A box from global to shared memory, zeros outside the tensor."""
    message, stamp = None, None
    block, start = warp.block.at(start)
    places, (there, told) = _box(block, start, tensor), barrier_at(warp, barrier)
    if block is not there:
        raise PtxError(f"a box in shared memory of block {block.place}, and a barrier of {there.place}")
    if block.watch is not None:
        stamp = block.watch.start_load(warp.actor, places[:, ::2].ravel() >> 1, warp.pc, "copy")
        message = block.watch.message(warp.actor, stamp)
        region, tensors = block.machine.memory.find(tensor.address), block.machine.tensors
        tensors.read(
            block.watch, warp.actor, tensors.tensor(region.name, region.base, region.size),
            lambda: _places(region, tensor, coordinates),
        )  # fmt: skip

    def run() -> None:
        tile = np.zeros(places.shape, np.uint8)
        for row, data, low, high in _rows(block.machine.memory, tensor, coordinates):
            tile[row, low:high] = data
        block.shared.data[places] = tile
        told.land(tensor.bytes, message)

    return Copy(run, stamp=stamp)


def store(warp: Warp, tensor: TensorMap, coordinates: tuple[int, ...], start: int, add: bool) -> Copy:
    """A box from shared to global memory, or added to it; nothing outside the tensor."""
    block, stamp = warp.block, None
    places = _box(block, start, tensor)
    if block.watch is not None:
        stamp = block.watch.start_read(warp.actor, places[:, ::2].ravel() >> 1, "copy")
        region, tensors = block.machine.memory.find(tensor.address), block.machine.tensors
        there, parts = tensors.tensor(region.name, region.base, region.size), _places(region, tensor, coordinates)
        if add and not tensors.ordered_sums:
            tensors.strong(block.watch, warp.actor, there, parts, warp.pc, Order.of("relaxed", "gpu"), copies=True)
        else:
            tensors.write(block.watch, warp.actor, there, parts, warp.pc, copies=True)
    if add and not tensor.float32:
        raise PtxError("only float32 is added here")

    def run() -> None:
        tile = block.shared.data[places]
        for row, data, low, high in _rows(block.machine.memory, tensor, coordinates):
            if add:
                there = data.view(np.float32)
                there += np.ascontiguousarray(tile[row, low:high]).view(np.float32)
            else:
                data[:] = tile[row, low:high]

    return Copy(run, stamp=stamp, writes=True)


def _move(d: Decoder, i: Instruction) -> Step:
    """Bytes from the block's shared memory to another one's of the cluster."""
    to, origin, signalled = (d.address(i.operands[n]) for n in (0, 1, 3))
    size = d.operand(i.operands[2], 32)

    def run(warp: Warp) -> None:
        for lane in warp.lanes():
            at = (int(each(warp)[lane]) for each in (to, origin, signalled))
            warp.block.machine.start(_moved(warp, *at, int(warp.values[size][lane])))

    return run


def _moved(warp: Warp, to: int, source: int, barrier: int, size: int) -> Copy:
    own, (block, told), message = warp.block, barrier_at(warp, barrier), None
    there, target = own.at(to)
    if there is not block or any(n % 16 for n in (source, target, size)):
        raise PtxError(f"{size} bytes from {source} to {target} of block {there.place}, a barrier of {block.place}")
    for shared, at in ((own.shared, source), (there.shared, target)):
        shared.touch(np.array([at]), size)
    if own.watch is not None and there.watch is not None:
        read, written = own.watch.places(np.array([source]), size), there.watch.places(np.array([target]), size)
        stamp = own.watch.start_move(warp.actor, read, there.watch, written, warp.pc)
        message = own.watch.message(warp.actor, stamp)
    first, last = source - SHARED_BASE, target - SHARED_BASE

    def move() -> None:
        there.shared.data[last : last + size] = own.shared.data[first : first + size]
        told.land(size, message)

    return Copy(move)


def build(d: Decoder, i: Instruction) -> Step:
    """Decodes what begins with ``cp.async.bulk`` or ``cp.reduce.async.bulk``."""
    words = [each for each in i.opcode if each not in ("cp", "async", "bulk")]
    if words == ["commit_group"]:

        def commit(warp: Warp) -> None:
            warp.copies.append([])

        return commit
    if words[0] == "wait_group" and set(words) <= {"wait_group", "read"}:
        left = int(i.operands[0], 0)

        def wait(warp: Warp) -> Wait | None:
            return access.wait_for(warp, left, has_written="read" not in words)

        return wait
    if words[0] == "reduce":
        words = words[1:]
    if words == ["shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"]:
        return _move(d, i)
    if words[0] != "tensor":
        raise PtxError("bulk copy")
    return _tensor(d, i, words[1:], i.opcode[1] == "reduce")


def _tensor(d: Decoder, i: Instruction, words: list[str], adds: bool) -> Step:
    rank = int(words[0][0])
    loads = words[1].startswith("shared")
    many = "multicast::cluster" in words
    allowed = (
        {"shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "tile", "multicast::cluster"}
        if loads
        else {"global", "shared::cta", "bulk_group", "tile", *(["add"] if adds else [])}
    )
    if set(words[1:]) - allowed or (adds and "add" not in words) or len(i.operands) != 2 + loads + many:
        raise PtxError("tensor copy")
    described, memory = (i.operands[1], i.operands[0]) if loads else (i.operands[0], i.operands[1])
    match = re.fullmatch(r"\[([^,]+),\{(.*)\}\]", described)
    if match is None:
        raise PtxError(f"tensor {described}")
    tensor_at, at = d.address(f"[{match[1]}]"), d.address(memory)
    coordinates = [d.operand(name, 32) for name in match[2].split(",")]
    if len(coordinates) != rank:
        raise PtxError("coordinates")
    signalled = d.address(i.operands[2]) if loads else None
    mask = d.operand(i.operands[3], 16) if many else None

    def run(warp: Warp) -> None:
        machine = warp.block.machine
        tensors, starts = tensor_at(warp), at(warp)
        for lane in warp.lanes():
            tensor: Any = machine.params.get(int(tensors[lane]))
            if tensor is None or len(tensor.box) != rank:
                raise PtxError(f"no tensor map of {rank} dimensions at {int(tensors[lane]):#x}")
            place = tuple(int(warp.values[c][lane].view(np.int32)) for c in reversed(coordinates))
            tensor.look_at(place)
            start = int(starts[lane])
            if signalled is None:
                copy = store(warp, tensor, place, start, adds)
                warp.copies[-1].append(copy)
                machine.start(copy)
                continue
            barrier, chosen = int(signalled(warp)[lane]), 0 if mask is None else int(warp.values[mask][lane])
            # At the same place of each block of the mask, or of the one.
            windows = [rank + 1 for rank in range(16) if chosen >> rank & 1] if many else [0]
            for window in windows:
                machine.start(load(warp, tensor, place, *(at + window * WINDOW for at in (start, barrier))))

    return run
