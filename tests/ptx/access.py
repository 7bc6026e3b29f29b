"""Loads, stores, atomics, matrices of 8 x 8 between shared memory and registers, old asynchronous copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.machine import Order
from tests.ptx.arithmetic import _UNSIGNED, Array, as_type, to_bits
from tests.ptx.decode import Decoder, builder
from tests.ptx.machine import SHARED_BASE, Copy, Step, Wait, Warp
from tests.ptx.memory import Region
from tests.ptx.text import WIDTHS, Instruction, PtxError

_ORDERS = {"volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "gpu", "sys", "cta", "ca", "cg", "cs", "wb",
           "wt", "cv", "nc", "L1::evict_last", "L1::evict_first", "L1::no_allocate"}  # fmt: skip


def _shape(i: Instruction, spaces: tuple[str, ...], others: set[str]) -> tuple[str, str, int]:
    """(space, type, count) of an access."""
    kind, space, count = i.opcode[-1], "", 1
    for each in i.opcode[1:-1]:
        if each in spaces:
            space = each.partition(":")[0]
        elif each in ("v2", "v4", "v8"):
            count = int(each[1])
        elif each not in others:
            raise PtxError(f"modifier {each}")
    if not space:
        raise PtxError("access without a space")
    return space, kind, count


def _order(i: Instruction) -> Order | None:
    """What an access to global memory orders; None for a weak one."""
    words = set(i.opcode)
    scope = next((each for each in ("cta", "gpu", "sys") if each in words), "gpu")
    sem = next((each for each in ("acquire", "release", "acq_rel", "relaxed", "volatile") if each in words), "")
    return Order.of(sem, scope) if sem or i.opcode[0] in ("atom", "red") else None


def _parts(region: Region, at: Array, size: int) -> Array:
    """Pairs of bytes from addresses on, from the start of a tensor's memory."""
    return (((at - region.base) >> 1)[:, None] + np.arange(max(1, size >> 1))).ravel()


def _firsts(region: Region, at: Array) -> set[int]:
    return set(((at - region.base) >> 1).tolist())


def read_weakly(warp: Warp, region: Region, at: Array, size: int) -> None:
    """``size`` bytes from each address on are read by the warp, or for it."""
    if warp.block.watch is not None:
        tensors = warp.block.machine.tensors
        tensor = tensors.tensor(region.name, region.base, region.size)
        tensors.read(warp.block.watch, warp.actor, tensor, _parts(region, at, size))


def _strongly(warp: Warp, region: Region, at: Array, size: int, order: Order, **kinds: bool) -> None:
    """A strong access; ``reads`` and ``writes`` as ``Tensors.synchronise``."""
    watch, tensors = warp.block.watch, warp.block.machine.tensors
    if watch is None:
        return
    tensor = tensors.tensor(region.name, region.base, region.size)
    only_reads = not kinds.get("writes", True)
    tensors.strong(watch, warp.actor, tensor, _parts(region, at, size), warp.pc, order, reads=only_reads)
    for place in _firsts(region, at):
        tensors.synchronise(watch, warp.actor, tensor, place, order, **kinds)


def _on(warp: Warp, space: str, at: Array) -> list[tuple[Region, Any]]:
    """The regions of the active lanes' addresses, and the lanes of each as a mask or None for all 32."""
    mask = warp.mask
    if space == "shared":
        return [(warp.block.shared, mask)]
    if mask is None:
        return warp.block.machine.memory.groups(at)
    found = []
    for region, inside in warp.block.machine.memory.groups(at[mask]):
        lanes = mask.copy()
        if inside is not None:
            lanes[mask] = inside
        found.append((region, lanes))
    return found


@builder("ld")
def _load(d: Decoder, i: Instruction) -> Step:
    if i.opcode[1] == "param":
        return _load_param(d, i)
    space, kind, count = _shape(i, ("global", "shared", "shared::cta"), _ORDERS)
    names = d.vector(i.operands[0])
    if len(names) != count:
        raise PtxError("destinations")
    to, size, at = [d.register(name) for name in names], WIDTHS[kind] // 8, d.address(i.operands[1])
    wide = [_UNSIGNED[max(d.width(name), 8)] for name in names]
    # A signed kind extends the sign into a wider register.
    held = f"i{size}" if kind[0] == "s" else f"u{size}"
    order = _order(i)

    def run(warp: Warp) -> None:
        where = at(warp)
        watch = warp.block.watch
        if watch is not None and space == "shared":
            active = where if warp.mask is None else where[warp.mask]
            watch.read(warp.actor, watch.places(active, size * count))
        for region, lanes in _on(warp, space, where):
            if lanes is None:
                for index, value, as_wide in zip(to, region.load(where, size, count), wide, strict=True):
                    warp.values[index] = value.view(held).astype(as_wide, copy=False)
                look(warp, region, where)
                continue
            before, warp.mask = warp.mask, lanes
            for index, value, as_wide in zip(to, region.load(where[lanes], size, count), wide, strict=True):
                whole = np.zeros(32, as_wide)
                whole[lanes] = value.view(held)
                warp.put(index, whole)
            warp.mask = before
            look(warp, region, where[lanes])

    def look(warp: Warp, region: Region, where: Array) -> None:
        if space != "shared" and order is None:
            read_weakly(warp, region, where, size * count)
        elif space != "shared":
            _strongly(warp, region, where, size * count, order, writes=False)

    return run


def _load_param(d: Decoder, i: Instruction) -> Step:
    name, kind = i.operands[1][1:-1], i.opcode[-1]
    if "+" in name or name not in dict(d.program.params):
        raise PtxError("part of a parameter")
    to, unsigned = d.register(i.operands[0]), _UNSIGNED[WIDTHS[kind]]
    wide = _UNSIGNED[max(d.width(i.operands[0]), 8)]

    def run(warp: Warp) -> None:
        value = np.frombuffer(warp.block.machine.params[name], unsigned)
        result = np.full(32, value[0], wide)
        if warp.mask is None:
            warp.values[to] = result
        else:
            warp.put(to, result)

    return run


@builder("st")
def _store(d: Decoder, i: Instruction) -> Step:
    space, kind, count = _shape(i, ("global", "shared", "shared::cta"), _ORDERS)
    at, bits = d.address(i.operands[0]), WIDTHS[kind]
    sources = [d.operand(name, bits) for name in d.vector(i.operands[1])]
    unsigned, order = _UNSIGNED[bits], _order(i)
    if len(sources) != count:
        raise PtxError("sources")

    def run(warp: Warp) -> None:
        where = at(warp)
        values = [warp.values[s].astype(unsigned, copy=False) for s in sources]
        watch = warp.block.watch
        if watch is not None and space == "shared":
            active = slice(None) if warp.mask is None else warp.mask

            def same() -> bool:
                there = warp.block.shared.load(where[active], bits // 8, count)
                return all(np.array_equal(a, b[active]) for a, b in zip(there, values, strict=True))

            places = watch.places(where[active], bits // 8 * count)
            watch.write(warp.actor, places, warp.pc, same, is_part=bits * count == 8)
        for region, lanes in _on(warp, space, where):
            some = where if lanes is None else where[lanes]
            given = values if lanes is None else [v[lanes] for v in values]
            if space == "global" and watch is not None:
                look(warp, region, some, given)
            region.store(some, bits // 8, given)

    def look(warp: Warp, region: Region, where: Array, values: list[Array]) -> None:
        there = region.load(where, bits // 8, count)
        if order is not None:
            _strongly(warp, region, where, bits // 8 * count, order, reads=False)
            return
        tensors = warp.block.machine.tensors
        tensors.write(
            warp.block.watch, warp.actor, tensors.tensor(region.name, region.base, region.size),
            _parts(region, where, bits // 8 * count), warp.pc, lambda: all(map(np.array_equal, there, values)),
            is_part=bits * count == 8,
        )  # fmt: skip

    return run


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "exch": lambda old, new: new, "inc": lambda old, top: old.dtype.type(0) if old >= top else old + 1,
}  # fmt: skip


@builder("atom", "red")
def _atomic(d: Decoder, i: Instruction) -> Step:
    names = [each for each in i.opcode[1:-1] if each in _ATOMIC or each == "cas"]
    if len(names) != 1:
        raise PtxError("atomic")
    space, kind, count = _shape(i, ("global", "shared", "shared::cta"), _ORDERS | set(names))
    operands = list(i.operands)
    to = [d.register(name) for name in d.vector(operands.pop(0))] if i.opcode[0] == "atom" else []
    at, width = d.address(operands[0]), WIDTHS[kind]
    sources = [[d.operand(name, width) for name in d.vector(each)] for each in operands[1:]]
    typed, bits, unsigned = as_type(kind), to_bits(kind), _UNSIGNED[width]
    name, order = names[0], _order(i)
    is_sum = name == "add" and "f" in kind

    def look(warp: Warp, region: Region, where: Array) -> None:
        tensors, size = warp.block.machine.tensors, width // 8 * count
        if is_sum and tensors.ordered_sums and warp.block.watch is not None:
            tensor = tensors.tensor(region.name, region.base, region.size)
            tensors.write(warp.block.watch, warp.actor, tensor, _parts(region, where, size), warp.pc)
        else:
            assert order is not None
            _strongly(warp, region, where, size, order)

    def run(warp: Warp) -> None:
        where = at(warp)
        if space == "shared" and warp.block.watch is not None:
            raise PtxError("atomics in shared memory are not watched")
        olds = [np.zeros(32, unsigned) for _ in range(count)]
        for region, lanes in _on(warp, space, where):
            active = np.arange(32) if lanes is None else np.flatnonzero(lanes)
            region.load(where[active], width // 8, count)
            look(warp, region, where[active])
            # Lanes at one place take turns.
            apart = len(np.unique(where[active])) == len(active) and name != "inc"
            for some in [active] if apart else active[:, None]:
                here = where[some]
                found = region.load(here, width // 8, count)
                given = [[warp.values[s][some] for s in each] for each in sources]
                new = []
                for n in range(count):
                    olds[n][some] = found[n]
                    if name == "cas":
                        new.append(np.where(found[n] == given[0][n], given[1][n], found[n]))
                    else:
                        new.append(bits(np.asarray(_ATOMIC[name](typed(found[n]), typed(given[0][n])))))
                region.store(here, width // 8, new)
        for index, old in zip(to, olds, strict=False):
            if warp.mask is None:
                warp.values[index] = old
            else:
                warp.put(index, old)

    return run


def _matrices(warp: Warp, at: Callable[[Warp], Array], count: int) -> Array:
    """Places in shared memory of the rows of 16 bytes, [count, 8]: lanes 8 n .. 8 n + 7 have those of matrix n."""
    if warp.mask is not None:
        raise PtxError("matrices with lanes apart")
    rows = at(warp)[: 8 * count]
    if (rows & 15).any():
        raise PtxError(f"rows of a matrix are not on 16 bytes: {rows}")
    if rows.min() < SHARED_BASE or rows.max() + 16 > SHARED_BASE + warp.block.shared.size:
        raise PtxError("rows of a matrix outside shared memory")
    warp.block.shared.touch(rows, 16)
    return ((rows - SHARED_BASE) >> 1).reshape(count, 8)


@builder("ldmatrix", "stmatrix")
def _matrix(d: Decoder, i: Instruction) -> Step:
    allowed = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    found = set(i.opcode[1:])
    if found - allowed:
        raise PtxError(f"modifiers {found - allowed}")
    count = int(next(each for each in i.opcode if each in ("x1", "x2", "x4"))[1])
    storing, trans = i.opcode[0] == "stmatrix", "trans" in found
    vector, address = (i.operands[1], i.operands[0]) if storing else i.operands
    names, at = d.vector(vector), d.address(address)
    registers = [d.operand(name, 32) if storing else d.register(name) for name in names]

    def load(warp: Warp) -> None:
        places = _matrices(warp, at, count)
        memory = warp.block.shared.view(2)
        if warp.block.watch is not None:
            warp.block.watch.read(warp.actor, (places.reshape(-1, 1) + np.arange(8)).ravel())
        for n, index in enumerate(registers):
            matrix = memory[places[n][:, None] + np.arange(8)]
            if trans:
                matrix = matrix.T
            warp.values[index] = np.ascontiguousarray(matrix).reshape(32, 2).view(np.uint32)[:, 0]

    def store(warp: Warp) -> None:
        places = _matrices(warp, at, count)[:, :, None] + np.arange(8)
        memory = warp.block.shared.view(2)
        given = np.stack([warp.values[index] for index in registers]).view(np.uint16).reshape(count, 8, 8)
        matrices = given.transpose(0, 2, 1) if trans else given
        if warp.block.watch is not None:
            same = functools.partial(np.array_equal, memory[places], matrices)
            warp.block.watch.write(warp.actor, places.ravel(), warp.pc, same)
        memory[places] = matrices

    return store if storing else load


@builder("cp")
def _copy(d: Decoder, i: Instruction) -> Step:
    if i.opcode[1] == "reduce" or i.opcode[1:3] == ("async", "bulk"):
        from tests.ptx import bulk

        return bulk.build(d, i)
    if i.opcode[2] == "commit_group":

        def commit(warp: Warp) -> None:
            warp.copies.append([])

        return commit
    if i.opcode[2] == "wait_group":
        left = int(i.operands[0], 0)

        def wait(warp: Warp) -> Wait | None:
            return wait_for(warp, left)

        return wait
    if i.opcode[2] == "mbarrier":
        return _arrive_after(d, i)
    if set(i.opcode[2:]) - {"ca", "cg", "shared", "shared::cta", "global", "L2::128B"}:
        raise PtxError("copy")
    to, origin, size = d.address(i.operands[0]), d.address(i.operands[1]), int(i.operands[2], 0)
    given = d.operand(i.operands[3], 32) if len(i.operands) > 3 else None

    def run(warp: Warp) -> None:
        machine, block = warp.block.machine, warp.block
        lanes = warp.lanes()
        targets, sources = to(warp), origin(warp)
        count = np.full(32, size) if given is None else warp.values[given]
        moves = [(int(targets[n]), int(sources[n]), int(count[n])) for n in lanes]

        def move() -> None:
            for target, source, n in moves:
                start = target - block.shared.base
                if n:
                    region = machine.memory.find(source)
                    first = source - region.base
                    block.shared.data[start : start + n] = region.data[first : first + n]
                block.shared.data[start + n : start + size] = 0

        copy = Copy(move)
        for _, source, n in moves:
            if n:
                read_weakly(warp, machine.memory.find(source), np.array([source]), n)
        block.shared.touch(targets[lanes], size)
        if block.watch is not None:
            copy.stamp = block.watch.start_load(warp.actor, block.watch.places(targets[lanes], size), warp.pc)
        machine.start(copy)
        warp.copies[-1].append(copy)

    return run


def _arrive_after(d: Decoder, i: Instruction) -> Step:
    """An arrival of each lane once all copies that it has started are complete; others learn of these alone."""
    if i.opcode[3:] not in (("arrive", "noinc", "shared", "b64"), ("arrive", "noinc", "shared::cta", "b64")):
        raise PtxError("an arrival that the barrier awaits in addition")
    at = d.address(i.operands[0])

    def run(warp: Warp) -> None:
        machine, where, lanes = warp.block.machine, at(warp), warp.lanes()
        barriers = [warp.block.barrier(int(where[lane])) for lane in lanes]
        copies = [copy for group in warp.copies for copy in group]
        warp.copies[-1] = []
        message = None
        if warp.block.watch is not None:
            warp.block.watch.read(warp.actor, warp.block.watch.places(where[lanes], 8))
            message = warp.block.watch.end_of(warp.actor, (copy.stamp for copy in copies))

        def arrive() -> None:
            for copy in copies:
                if not copy.done:
                    machine.finish(copy)
            for barrier in barriers:
                barrier.arrive(1, message)

        machine.start(Copy(arrive))

    return run


def wait_for(warp: Warp, left: int, has_written: bool = False) -> Wait | None:
    """Waits until all groups of copies but the last ``left`` are done, or have at least read what they copy."""
    closed = warp.copies[:-1]
    waited = [copy for group in closed[: len(closed) - left] for copy in group]
    warp.copies = [*closed[max(0, len(closed) - left) :], warp.copies[-1]] if left < len(closed) else warp.copies

    in_flight = sum(copy.writes for group in warp.copies for copy in group)

    def learn() -> None:
        if warp.block.watch is not None:
            for copy in waited:
                warp.block.watch.learn_end(warp.actor, copy.stamp)
            if has_written:
                warp.block.machine.tensors.copies_are_over(warp.block.watch, warp.actor, in_flight)

    if all(copy.done for copy in waited):
        learn()
        return None
    return Wait(lambda: all(copy.done for copy in waited), f"{len(waited)} copies", then=learn)
