"""Warps that take turns: scheduling, divergence, barriers, what is in flight."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.machine import Barrier, ClusterBarrier, MachineError, Stamp, Tensors, deadlock
from tests.machine.clocks import Message, joined
from tests.ptx.memory import GlobalMemory, SharedMemory
from tests.ptx.races import BlockWatch
from tests.ptx.text import PtxError

LANES = 32
# Where a block's shared memory starts: the first KiB is the system's.
SHARED_BASE = 1024
# Addresses of the shared memory of a cluster's blocks are so far apart; the first are each block's own.
WINDOW = 1 << 24
_END = 1 << 40
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Wait:
    """A warp cannot go on yet.

    Attributes:
        ready: Whether it can.
        about: What it waits for, for messages.
        again: Whether the instruction then runs again, rather than the next one.
        then: What to do when it goes on.
    """

    ready: Callable[[], bool]
    about: str
    again: bool = False
    then: Callable[[], None] | None = None


@dataclass(frozen=True)
class Split:
    """Lanes part: those in ``taken`` jump."""

    taken: Mask
    target: int


class Turn:
    """The warp goes on later: it would only spin."""


class Exit:
    """The active lanes are done."""


YIELD, EXIT = Turn(), Exit()
Step = Callable[["Warp"], Any]


@dataclass
class _NamedBarrier:
    threads: int = 0
    needed: int = 0
    generation: int = 0
    message: Message = None
    last: Message = None


@dataclass
class Copy:
    """A copy in flight; ``run`` does it, at some moment. ``stamp`` is the watch's; ``writes`` if to a tensor."""

    run: Callable[[], None]
    done: bool = False
    stamp: Stamp | None = None
    writes: bool = False


class Block:
    """A thread block.

    Attributes:
        cluster: The blocks that run together with it and reach its shared memory, itself among them, in order.
        rank: Its place there.
    """

    def __init__(self, machine: Machine, place: tuple[int, int, int], number: int, cluster: list[Block]) -> None:
        self.machine = machine
        self.place = place
        self.cluster, self.rank = cluster, len(cluster)
        mate = cluster[0] if cluster else None
        cluster.append(self)
        self.cluster_barrier = ClusterBarrier() if mate is None else mate.cluster_barrier
        code = machine.code
        self.shared = SharedMemory(SHARED_BASE, machine.shared_bytes)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, _NamedBarrier] = {}
        self.free_registers = 0
        count = -(-code.threads // LANES)
        self.watch = None
        if machine.options.watch:
            total, first = count * math.prod(machine.grid), count * (number - self.rank)
            alone = machine.cluster == 1
            self.watch = BlockWatch(
                SHARED_BASE, machine.shared_bytes, count * machine.cluster, code.where,
                (lambda warp: f"warp {warp}") if alone else lambda warp: machine.who(first + warp),
                "" if alone else f" of block {place}", first, total, mate and mate.watch,
            )  # fmt: skip
        self.warps = [Warp(self, index, index + count * self.rank) for index in range(count)]
        self._running, self._left = count, None
        for warp in self.warps:
            self.cluster_barrier.join(warp.actor)

    def at(self, address: int) -> tuple[Block, int]:
        """The block of the cluster that has a shared address, and the address there."""
        number, own = divmod(address, WINDOW)
        block = self.cluster[number - 1] if number else self
        if not block._running:
            raise PtxError(f"shared memory of block {block.place}, which has ended")
        return block, own

    def leave(self, warp: Warp) -> None:
        """A warp has ended; with the last one, the block's shared memory is no more."""
        self.cluster_barrier.leave(warp.actor)
        self._running -= 1
        self._left = joined(self._left, self.message(warp))
        if not self._running and self.watch is not None and len(self.cluster) > 1:
            self.learn(warp, self._left)
            self.watch.end(warp.actor, warp.pc)

    def barrier(self, address: int) -> Barrier:
        """The mbarrier at an address."""
        found = self.barriers.get(address)
        if found is None:
            raise PtxError(f"no mbarrier was initialised at {address - SHARED_BASE} of shared memory")
        return found

    def message(self, warp: Warp) -> Message:
        """What an arrival of the warp tells."""
        return None if self.watch is None else self.watch.message(warp.actor)

    def learn(self, warp: Warp, message: Message) -> None:
        """The warp has passed a barrier that told this."""
        if self.watch is not None:
            self.watch.learn(warp.actor, message)

    def sync(self, warp: Warp, number: int, threads: int | None, waits: bool = True) -> Wait | None:
        """A warp arrives at a named barrier, of all threads if not said otherwise, and waits there or goes on."""
        named = self.named.setdefault(number, _NamedBarrier())
        needed = len(self.warps) * LANES if threads is None else threads
        if named.threads and named.needed != needed:
            raise PtxError(f"barrier {number}: {needed} threads expected here, {named.needed} elsewhere")
        named.needed = needed
        named.threads += LANES
        named.message = joined(named.message, self.message(warp))
        if named.threads == needed:
            named.threads = 0
            named.generation += 1
            named.last, named.message = named.message, None
            if waits:
                self.learn(warp, named.last)
            return None
        if not waits:
            return None
        generation = named.generation
        about = f"barrier {number} of {needed} threads, {named.threads} are there"
        # Nobody can pass it once more before this warp does.
        return Wait(lambda: named.generation != generation, about, then=lambda: self.learn(warp, named.last))

    def set_registers(self, warp: Warp, count: int) -> Wait | None:
        """setmaxnreg: gives registers back to the block's pool, or takes some when there are enough."""
        more = count - warp.registers
        if more > self.free_registers:
            return Wait(lambda: self.free_registers >= more, f"{more} registers a thread", again=True)
        self.free_registers -= more
        warp.registers = count
        return None


@dataclass
class Sums:
    """What products in flight add to: the accumulator's registers so far, and how many are still to come."""

    values: list[Any]
    pending: int = 0


class Warp:
    """32 lanes that run together as long as they agree where.

    Attributes:
        index: Its number in the block.
        actor: What the block's watch knows it by, its number in the cluster.
        values: Registers by the decoder's index, an array of 32 each, replaced and never changed; None: unwritten.
        mask: Lanes that the present instruction is for, None for all.
    """

    __slots__ = (
        "actor",
        "block",
        "copies",
        "executed",
        "fenced",
        "index",
        "lane_pc",
        "mask",
        "pc",
        "products",
        "registers",
        "sums",
        "values",
        "wait",
    )

    def __init__(self, block: Block, index: int, actor: int) -> None:
        code = block.machine.code
        self.block = block
        self.index = index
        self.actor = actor
        self.values: list[Any] = code.initial(block, index)
        self.mask: Mask | None = None
        self.pc = 0
        self.lane_pc: NDArray[np.int64] | None = None
        self.wait: Wait | None = None
        self.copies: list[list[Copy]] = [[]]
        self.products: list[list[Callable[[], None]]] = [[]]
        self.fenced: list[Any] = []
        self.sums: dict[tuple[int, ...], Sums] = {}
        self.executed = 0
        self.registers = code.max_registers

    def put(self, index: int, value: NDArray[Any]) -> None:
        """Writes a register for the lanes of the mask."""
        old = self.values[index]
        if old is None:
            old = np.full(LANES, -1, value.dtype) if value.dtype == bool else np.full_like(value, ~value.dtype.type(0))
        self.values[index] = np.where(self.mask, value, old)

    def lanes(self) -> list[int]:
        """The active lanes."""
        return list(range(LANES)) if self.mask is None else [int(i) for i in np.flatnonzero(self.mask)]

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"block {self.block.place} warp {self.index}"

    def run(self, code: Sequence[Step], steps: int) -> bool:
        """Runs up to so many instructions; False if the warp is done."""
        end = self.executed + steps
        while self.executed < end:
            if self.lane_pc is not None:
                self.executed += 1
                if not self._step_apart(code):
                    return False
                if self.wait is not None:
                    return True
                continue
            event: Any = None
            while self.executed < end:
                self.executed += 1
                event = code[self.pc](self)
                if event is None:
                    self.pc += 1
                elif type(event) is int:
                    self.pc = event
                else:
                    break
            if event is None or type(event) is int:
                return True
            if not self._handle(event):
                return False
            if self.wait is not None or event is YIELD:
                return True
        return True

    def _handle(self, event: Any) -> bool:
        if isinstance(event, Wait):
            self.wait = event
            if not event.again:
                self.pc += 1
        elif event is YIELD:
            self.pc += 1
        elif isinstance(event, Split):
            self.lane_pc = np.where(event.taken, event.target, self.pc + 1)
        elif event is EXIT:
            self._leave()
            return False
        else:
            raise PtxError(f"{self.label}: unknown event {event}")
        return True

    def _leave(self) -> None:
        if any(group for group in self.copies) or any(group for group in self.products):
            raise PtxError("ends with copies or products in flight")

    def _step_apart(self, code: Sequence[Step]) -> bool:
        """One instruction for the lanes that are furthest behind."""
        assert self.lane_pc is not None
        pc = int(self.lane_pc.min())
        if pc == _END:
            self._leave()
            return False
        here = self.lane_pc == pc
        if here.all():
            self.pc, self.lane_pc, self.mask = pc, None, None
            return True
        self.pc = pc
        self.mask = here
        event = code[pc](self)
        self.mask = None
        if event is None or event is YIELD:
            self.lane_pc[here] = pc + 1
        elif isinstance(event, int):
            self.lane_pc[here] = event
        elif isinstance(event, Split):
            self.lane_pc[here] = np.where(event.taken, event.target, pc + 1)[here]
        elif isinstance(event, Wait):
            self.wait = event
            if not event.again:
                self.lane_pc[here] = pc + 1
        elif event is EXIT:
            self.lane_pc[here] = _END
        else:
            raise PtxError(f"{self.label}: unknown event {event}")
        return True


@dataclass
class Options:
    """How a machine behaves where hardware is free to choose.

    Attributes:
        seed: Draws the order of events.
        resident: Blocks that run at once, all of them if None; the others start in order.
        product_at_wait: Whether a WGMMA happens at the wait for it, else at its issue.
        strict_fences: Whether registers of a product that are written behind the last ``wgmma.fence`` are an error:
            LLVM moves plain arithmetic over it, and the assembler then waits for each product. Else it is noted.
        turn: Most instructions that a warp runs before others do.
        watch: Whether to look for races in shared and global memory.
        ordered_sums: Whether what is added to tensors must come in an order that does not depend on the run.
        limit: Instructions after which a launch is given up, of all warps together.
    """

    seed: int = 0
    resident: int | None = None
    product_at_wait: bool = True
    strict_fences: bool = False
    turn: int = 400
    watch: bool = True
    ordered_sums: bool = False
    limit: int = 20_000_000


@dataclass
class Machine:
    """One launch.

    Attributes:
        code: What the decoder made of the kernel.
        grid: Blocks along x, y, z.
        params: Values of the parameters by name: bytes of scalars, a tensor map.
        memory: Where tensors are.
        shared_bytes: Shared memory of a block.
        cluster: Blocks of a cluster.
        notes: What is no error and yet worth a look.
    """

    code: Any
    grid: tuple[int, int, int]
    params: Mapping[str, Any]
    memory: GlobalMemory
    shared_bytes: int
    options: Options = field(default_factory=Options)
    cluster: int = 1
    in_flight: list[Copy] = field(default_factory=list)
    executed: int = 0
    notes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._warps = -(-self.code.threads // LANES)
        total = self._warps * math.prod(self.grid)
        self.tensors = Tensors(total, self.who, self.code.where, ordered_sums=self.options.ordered_sums)

    def who(self, number: int) -> str:
        """What to call a warp of all blocks."""
        block, warp = divmod(number, self._warps)
        x, y, _ = self.grid
        return f"warp {warp} of block {(block % x, block // x % y, block // x // y)}"

    def run(self) -> None:
        """Runs all blocks to their end.

        Raises:
            PtxError: The program does what hardware does not forgive, or never ends.
        """
        draw = random.Random(self.options.seed)
        places = [(x, y, z) for z in range(self.grid[2]) for y in range(self.grid[1]) for x in range(self.grid[0])]
        places.reverse()
        resident = self.options.resident or len(places)
        live: list[Warp] = []
        started = 0
        with np.errstate(all="ignore"):
            while places or live:
                while places and len({id(w.block) for w in live}) < resident:
                    together: list[Block] = []
                    for _ in range(self.cluster):
                        live += Block(self, places.pop(), started, together).warps
                        started += 1
                self._turn(live, draw)
                if self.executed > self.options.limit:
                    raise PtxError(f"no end after {self.executed} instructions")
        while self.in_flight:
            self.finish(self.in_flight[0])

    def _turn(self, live: list[Warp], draw: random.Random) -> None:
        able = [w for w in live if w.wait is None or w.wait.ready()]
        if self.in_flight and (not able or draw.random() < 0.3):
            self.finish(draw.choice(self.in_flight))
            return
        if not able:
            waits = ((f"{w.label} at {self.code.where(w.pc)}", w.wait.about) for w in live if w.wait)
            raise PtxError(str(deadlock(waits)))
        warp = draw.choice(able)
        if warp.wait is not None and warp.wait.then is not None:
            warp.wait.then()
        warp.wait = None
        steps = draw.randint(1, self.options.turn)
        before = warp.executed
        try:
            if not warp.run(self.code.steps, steps):
                live.remove(warp)
                warp.block.leave(warp)
        except MachineError as error:
            raise PtxError(f"{warp.label}, {self.code.where(warp.pc)}: {error}") from error
        except Exception as error:
            raise RuntimeError(f"{warp.label}, {self.code.where(warp.pc)}") from error
        finally:
            self.executed += warp.executed - before

    def start(self, copy: Copy) -> None:
        """A copy is in flight from now on."""
        self.in_flight.append(copy)

    def finish(self, copy: Copy) -> None:
        """A copy happens."""
        copy.run()
        copy.done = True
        self.in_flight.remove(copy)
