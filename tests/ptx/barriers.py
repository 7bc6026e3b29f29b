"""Barriers, fences, register budgets: what orders warps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.machine import Barrier, Order
from tests.machine.clocks import Array
from tests.ptx.decode import Decoder, builder
from tests.ptx.machine import SHARED_BASE, Block, Step, Wait, Warp
from tests.ptx.text import Instruction, PtxError


@builder("bar", "barrier")
def _barrier(d: Decoder, i: Instruction) -> Step:
    if i.opcode[1] == "warp":
        # Lanes of a warp run together; those apart wait for the ones behind.
        return lambda warp: None
    if i.opcode[1] == "cluster":
        return _cluster(i)
    kinds = (("sync",), ("sync", "aligned"), ("cta", "sync", "aligned", "all"), ("cta", "sync"), ("arrive",))
    if i.opcode[1:] not in kinds:
        raise PtxError("barrier")
    waits = "sync" in i.opcode
    number = d.operand(i.operands[0], 32)
    threads = d.operand(i.operands[1], 32) if len(i.operands) > 1 else None

    def run(warp: Warp) -> Wait | None:
        if warp.mask is not None or warp.lane_pc is not None:
            raise PtxError("a barrier with lanes apart")
        n, count = warp.values[number], None if threads is None else warp.values[threads]
        if (n != n[0]).any():
            raise PtxError("lanes at different barriers")
        return warp.block.sync(warp, int(n[0]), None if count is None else int(count[0]), waits)

    return run


def _cluster(i: Instruction) -> Step:
    waits = i.opcode[2:] == ("wait", "acquire", "aligned")
    if not waits and i.opcode[2:] != ("arrive", "release", "aligned"):
        raise PtxError("barrier of a cluster")

    def run(warp: Warp) -> Wait | None:
        if warp.mask is not None or warp.lane_pc is not None:
            raise PtxError("a barrier with lanes apart")
        barrier, block = warp.block.cluster_barrier, warp.block
        if not waits:
            barrier.arrive(warp.actor, block.message(warp))
            return None
        return Wait(
            lambda: barrier.is_over(warp.actor), barrier.awaited(warp.actor),
            then=lambda: block.learn(warp, barrier.message(warp.actor)),
        )  # fmt: skip

    return run


_FENCES = {
    *(("proxy", "async", *more) for more in ((), ("shared::cta",), ("global",))),
    *((sem, scope) for sem in ("sc", "acq_rel") for scope in ("cta", "gpu", "sys")),
    *((scope,) for scope in ("cta", "gl", "sys")),
}


@builder("fence", "membar", "griddepcontrol")
def _fence(d: Decoder, i: Instruction) -> Step:
    if i.opcode[0] == "griddepcontrol":
        raise PtxError("launches that overlap")
    if i.opcode[1:] not in _FENCES:
        raise PtxError("fence")
    order = Order(True, True, "cta" not in i.opcode)

    def run(warp: Warp) -> None:
        if warp.block.watch is not None and "proxy" in i.opcode:
            warp.block.watch.fence(warp.actor)
        elif warp.block.watch is not None:
            warp.block.machine.tensors.fence(warp.block.watch, warp.actor, order)

    return run


@builder("setmaxnreg")
def _registers(d: Decoder, i: Instruction) -> Step:
    count, grows = int(i.operands[0]), i.opcode[1] == "inc"
    if count % 8 or not 24 <= count <= 256:
        raise PtxError("registers of a thread: 24 .. 256 in steps of 8")

    def run(warp: Warp) -> Wait | None:
        if warp.registers and (count < warp.registers) == grows and count != warp.registers:
            raise PtxError(f"{i.opcode[1]} to {count} registers, from {warp.registers}")
        return warp.block.set_registers(warp, count)

    return run


@builder("mbarrier")
def _mbarrier(d: Decoder, i: Instruction) -> Step:
    kind = i.opcode[1]
    allowed = {"init", "inval", "arrive", "expect_tx", "try_wait", "test_wait", "parity", "shared", "shared::cta",
               "shared::cluster", "b64", "release", "acquire", "cta"}  # fmt: skip
    if set(i.opcode[1:]) - allowed:
        raise PtxError("mbarrier")
    build = {"init": _init, "inval": _invalidate, "arrive": _arrive, "try_wait": _try, "test_wait": _try}
    return build[kind](d, i)


def _init(d: Decoder, i: Instruction) -> Step:
    at, count = d.address(i.operands[0]), d.operand(i.operands[1], 32)

    def run(warp: Warp) -> None:
        where = at(warp)
        for lane in warp.lanes():
            address = int(where[lane])
            if address % 8:
                raise PtxError("an mbarrier not on 8 bytes")
            # Nor may there be an mbarrier already.
            warp.block.shared.load(where[lane : lane + 1], 8, 1)
            if warp.block.watch is not None:
                warp.block.watch.write(warp.actor, warp.block.watch.places(where[lane : lane + 1], 8), warp.pc)
            made = warp.block.barriers[address] = Barrier(f"the barrier at {address - SHARED_BASE}")
            made.init(int(warp.values[count][lane]))
            warp.block.shared.mark(address, True)

    return run


def _invalidate(d: Decoder, i: Instruction) -> Step:
    at = d.address(i.operands[0])

    def run(warp: Warp) -> None:
        for lane in warp.lanes():
            address = int(at(warp)[lane])
            warp.block.barrier(address)
            if warp.block.watch is not None:
                warp.block.watch.write(warp.actor, warp.block.watch.places(at(warp)[lane : lane + 1], 8), warp.pc)
            del warp.block.barriers[address]
            warp.block.shared.mark(address, False)

    return run


def _arrive(d: Decoder, i: Instruction) -> Step:
    if i.operands[0] != "_":
        raise PtxError("the state of an arrival")
    at, expects = d.address(i.operands[1]), "expect_tx" in i.opcode
    if "shared::cluster" in i.opcode:
        return _arrive_there(at, i)
    count = d.operand(i.operands[2], 32) if len(i.operands) > 2 else None

    def run(warp: Warp) -> None:
        where = at(warp)
        watch, message = warp.block.watch, None
        if watch is not None:
            watch.read(warp.actor, watch.places(where[warp.lanes()], 8))
            message = watch.message(warp.actor)
        for lane in warp.lanes():
            value = 1 if count is None else int(warp.values[count][lane])
            barrier = warp.block.barrier(int(where[lane]))
            if expects:
                barrier.arrive(1, message, value)
            else:
                barrier.arrive(value, message)

    return run


def _arrive_there(at: Callable[[Warp], Array], i: Instruction) -> Step:
    """Maybe of another block of the cluster."""
    if i.opcode != ("mbarrier", "arrive", "shared::cluster", "b64") or len(i.operands) != 2:
        raise PtxError("mbarrier")

    def run(warp: Warp) -> None:
        message = warp.block.message(warp)
        for lane in warp.lanes():
            barrier_at(warp, int(at(warp)[lane]))[1].arrive(1, message)

    return run


def barrier_at(warp: Warp, address: int) -> tuple[Block, Barrier]:
    """The block of the cluster and its mbarrier that a warp signals, or makes a copy signal."""
    block, own = warp.block.at(address)
    if block.watch is not None and block is not warp.block:
        block.watch.read(warp.actor, block.watch.places(np.array([own]), 8))
    return block, block.barrier(own)


def _try(d: Decoder, i: Instruction) -> Step:
    if "parity" not in i.opcode or len(i.operands) != 3:
        raise PtxError("a wait without a parity")
    to, at, parity = d.register(i.operands[0]), d.address(i.operands[1]), d.operand(i.operands[2], 32)
    yes = d.operand("1", 1)

    def run(warp: Warp) -> Wait | None:
        where, wanted = at(warp), warp.values[parity]
        lanes = warp.lanes()
        address, phase = int(where[lanes[0]]), int(wanted[lanes[0]])
        if any(int(where[n]) != address or int(wanted[n]) != phase for n in lanes):
            raise PtxError("lanes wait for different phases")
        if phase > 1:
            raise PtxError(f"parity {phase}")
        barrier = warp.block.barrier(address)
        if not barrier.is_over(phase):
            return Wait(lambda: barrier.is_over(phase), barrier.awaited(phase), again=True)
        watch = warp.block.watch
        if watch is not None:
            watch.read(warp.actor, watch.places(where[lanes[:1]], 8))
            watch.learn(warp.actor, barrier.message)
            barrier.seen_by(warp.label, watch.wait(warp.actor))
        if warp.mask is None:
            warp.values[to] = warp.values[yes]
        else:
            warp.put(to, warp.values[yes])
        return None

    return run
