"""What runs at once on a streaming multiprocessor, in an order drawn at random, and who knows what of whom.

A task is one partition of one program. Tasks take turns where they synchronise; copies and matrix products that run by
themselves complete at any moment between their start and the wait for them. So one seed is one legal order of events.

Races are found whatever the order was: each task carries what it knows to be finished, a barrier passes that on from
those who arrived to those who waited, and an access that is not known to come after the last conflicting one is a race
even if this run happened to do them one after the other.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import greenlet


class EmulatorError(AssertionError):
    """The kernel did something that real hardware does not forgive."""


class RaceError(EmulatorError):
    """Two accesses to one buffer, at least one of them a write, that nothing puts in order."""


class DeadlockError(EmulatorError):
    """Every task waits."""


@dataclass(eq=False)
class Slot:
    """A piece of shared memory that is written and read as one.

    Attributes:
        name: For messages.
        version: How often it was written.
        reads: Tokens of the reads of this version.
        unfenced: Tasks whose plain stores to this version the copy and matrix engines cannot see yet.
    """

    name: str
    version: int = 0
    reads: set[int] = field(default_factory=set)
    unfenced: set[Task] = field(default_factory=set)


class Knowledge:
    """For each slot: the version known to be complete, and which of its reads are known to be over."""

    def __init__(self, seen: dict[Slot, tuple[int, frozenset[int]]] | None = None) -> None:
        self._seen = dict(seen or {})

    def copy(self) -> Knowledge:
        return Knowledge(self._seen)

    def join(self, other: Knowledge) -> None:
        for slot, (version, reads) in other._seen.items():
            mine, own = self._seen.get(slot, (0, frozenset()))
            if version > mine:
                self._seen[slot] = (version, reads)
            elif version == mine and not reads <= own:
                self._seen[slot] = (version, own | reads)

    def version(self, slot: Slot) -> int:
        return self._seen.get(slot, (0, frozenset()))[0]

    def add_read(self, slot: Slot, token: int) -> None:
        version, reads = self._seen.get(slot, (0, frozenset()))
        self._seen[slot] = (version, reads | {token})

    def add_write(self, slot: Slot) -> None:
        self._seen[slot] = (slot.version, frozenset())

    def check_read(self, slot: Slot, who: str) -> None:
        if self.version(slot) != slot.version:
            raise RaceError(f"{who} reads {slot.name}, but nothing orders it behind write {slot.version} of it")

    def check_write(self, slot: Slot, who: str) -> None:
        version, reads = self._seen.get(slot, (0, frozenset()))
        if version != slot.version:
            raise RaceError(f"{who} writes {slot.name}, but nothing orders it behind write {slot.version} of it")
        if not slot.reads <= reads:
            raise RaceError(f"{who} writes {slot.name}, which is still being read")


@dataclass(eq=False)
class Operation:
    """Something that was started and completes by itself: a copy or a matrix product.

    Attributes:
        know: What was known at its start, and what it did.
        finish: Moves the data, and signals whoever is to be signalled.
        done: Whether it has completed.
        due: When it completes, where there is a clock.
    """

    know: Knowledge
    finish: Callable[[], None]
    done: bool = False
    due: float = 0.0

    def complete(self) -> None:
        if not self.done:
            self.done = True
            self.finish()


class Barrier:
    """An mbarrier: a phase ends when ``count`` arrivals and all announced bytes are in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.phase = 0
        self._pending = 0
        self._bytes = 0
        self._arriving = Knowledge()
        self._passed = Knowledge()

    def init(self, count: int) -> None:
        if self.count:
            raise EmulatorError(f"{self.name} is initialised twice")
        self.count = self._pending = count

    def is_over(self, parity: int) -> bool:
        """Whether the phase of this parity has ended."""
        if not self.count:
            raise EmulatorError(f"{self.name} is waited for before it is initialised")
        return self.phase % 2 != parity

    def arrive(self, count: int, know: Knowledge) -> None:
        if count > self._pending:
            raise EmulatorError(f"{self.name}: {count} arrivals where {self._pending} of {self.count} are awaited")
        self._pending -= count
        self._arriving.join(know)
        self._end_phase()

    def expect(self, num_bytes: int, know: Knowledge) -> None:
        self._bytes += num_bytes
        self.arrive(1, know)

    def land(self, num_bytes: int, know: Knowledge) -> None:
        self._bytes -= num_bytes
        self._arriving.join(know)
        self._end_phase()

    def passed(self) -> Knowledge:
        """What those who wait for the last phase come to know."""
        return self._passed

    def _end_phase(self) -> None:
        if self._pending == 0 and self._bytes == 0:
            self._passed = self._arriving
            self._arriving = self._passed.copy()
            self._pending = self.count
            self.phase += 1

    def is_idle(self) -> bool:
        return self._bytes == 0


class Task:
    """One partition of one program.

    Attributes:
        name: The role's function and program, for messages.
        warps: How many warps it stands for.
        know: What it knows to be finished.
        products: Its matrix products in flight, oldest first.
        stores: Its copies from shared memory in flight, oldest first.
        unfenced: Slots it has stored to since its last fence.
    """

    def __init__(
        self, machine: Machine, name: str, program: int, body: Callable[[], None], know: Knowledge, warps: int
    ) -> None:
        self.machine = machine
        self.name = name
        self.program = program
        self.warps = warps
        self.know = know
        self.products: deque[Operation] = deque()
        self.stores: deque[Operation] = deque()
        self.unfenced: set[Slot] = set()
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.priority = machine.random.random()
        self.greenlet = greenlet(body, machine.main)

    def pause(self) -> None:
        """Lets others go first."""
        self.machine.switch(self)

    def step_back(self) -> None:
        """Lets everyone go first who is not just looking whether something has changed."""
        self.priority = self.machine.random.random() - 1
        self.machine.switch(self)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Sleeps until ``ready``."""
        self.ready, self.waits_for = ready, what
        self.machine.switch(self)
        self.ready = None

    def drain(self, operations: deque[Operation], outstanding: int) -> None:
        """Waits until at most ``outstanding`` of the operations are in flight, oldest first."""
        while len(operations) > outstanding:
            self.machine.await_operation(self, operations[0])
            operation = operations.popleft()
            operation.complete()
            self.know.join(operation.know)

    # Plain accesses are complete at once; engines hold what they read until the wait for them.

    def read(self, slots: list[Slot]) -> None:
        for slot in slots:
            if not slot.version:
                raise EmulatorError(f"{self.name} reads {slot.name}, which nothing has written")
            self.know.check_read(slot, self.name)
            self.know.add_read(slot, self.machine.begin_read(slot))

    def write(self, slots: list[Slot]) -> None:
        for slot in slots:
            self.know.check_write(slot, self.name)
            self.machine.begin_write(slot)
            self.know.add_write(slot)
            slot.unfenced.add(self)
            self.unfenced.add(slot)

    def fence(self) -> None:
        for slot in self.unfenced:
            slot.unfenced.discard(self)
        self.unfenced.clear()

    def start(self, reads: list[Slot], writes: list[Slot], finish: Callable[[Operation], None], what: str) -> Operation:
        """Starts an engine on slots it reads and slots it writes."""
        who = f"{what} of {self.name}"
        operation = Operation(self.know.copy(), lambda: finish(operation))
        for slot in (*reads, *writes):
            if slot.unfenced:
                raise RaceError(f"{who} touches {slot.name}, whose plain stores were not fenced")
        for slot in reads:
            self.know.check_read(slot, who)
            operation.know.add_read(slot, self.machine.begin_read(slot))
        for slot in writes:
            self.know.check_write(slot, who)
            self.machine.begin_write(slot)
            operation.know.add_write(slot)
        return operation


class Machine:
    """Runs tasks in random turns until all are done.

    Args:
        seed: Draws the order.
        resident: Programs that run at once; the others start in order as these end.
    """

    def __init__(self, seed: int, resident: int) -> None:
        self.random = random.Random(seed)
        self.resident = resident
        self.now: Task | None = None
        self.loads: list[Operation] = []
        self._tokens = itertools.count()
        self.tasks: list[Task] = []
        self.main = greenlet.getcurrent()

    @property
    def running(self) -> Task:
        """The task whose turn it is."""
        assert self.now is not None
        return self.now

    def begin_read(self, slot: Slot) -> int:
        token = next(self._tokens)
        slot.reads.add(token)
        return token

    def begin_write(self, slot: Slot) -> None:
        slot.version += 1
        slot.reads = set()
        slot.unfenced = set()

    def spawn(self, name: str, program: int, body: Callable[[], None], know: Knowledge, warps: int = 4) -> Task:
        task = Task(self, name, program, body, know, warps)
        self.tasks.append(task)
        return task

    # What a machine with a clock does more.

    def schedule_copy(self, operation: Operation, num_bytes: int, is_load: bool) -> None:
        """Says when a copy into or out of shared memory completes."""

    def schedule_product(self, operation: Operation, shape: tuple[int, int, int], is_left_shared: bool) -> None:
        """Says when a product of shape (m, n, k) completes."""

    def await_operation(self, task: Task, operation: Operation) -> None:
        """Lets the time pass until an operation is due."""

    def switch(self, task: Task) -> None:
        """Called by the running task: back to the loop that draws the next one."""
        self.main.switch()
        self.now = task

    def run(self, programs: dict[int, Callable[[], None]]) -> None:
        """Runs programs by number; each is the body of its first partition."""
        waiting = deque(programs.items())
        while True:
            running = {task.program for task in self.tasks}
            while waiting and len(running) < self.resident:
                program, body = waiting.popleft()
                self.spawn(f"program {program}", program, body, Knowledge())
                running.add(program)
            if not self.tasks:
                break
            self._turn()
        if self.loads:
            raise EmulatorError("a program ended before its loads had landed")

    def _turn(self) -> None:
        able = [task for task in self.tasks if task.ready is None or task.ready()]
        # Any copy in flight may complete now.
        if self.loads and (not able or self.random.random() < 0.3):
            self.loads.pop(self.random.randrange(len(self.loads))).complete()
            return
        if not able:
            waits = "\n".join(f"  {task.name} waits for {task.waits_for}" for task in self.tasks)
            raise DeadlockError(f"every task waits:\n{waits}")
        task = max(able, key=lambda each: each.priority)
        if self.random.random() < 0.3:
            task.priority = self.random.random()
        self.now = task
        task.greenlet.switch()
        if task.greenlet.dead:
            self.tasks.remove(task)
