"""What runs at once, in an order drawn at random.

A task is one partition of one program. Tasks take turns where they synchronise; copies and matrix products that run by
themselves complete at any moment between their start and the wait for them. So one seed is one legal order of events.
What a task knows of the others, and so which accesses are races whatever the order was, is ``tests.machine``'s to say.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from greenlet import greenlet

from tests.machine import ClusterBarrier, MachineError, Names, Order, Stamp, Tensors, Watch, deadlock
from tests.machine.clocks import Array, Message
from tests.machine.tensors import Places, Tensor

# Partitions of one program, at most.
_PARTITIONS = 16


@dataclass(eq=False)
class Operation:
    """Something that was started and completes by itself: a copy or a matrix product.

    Attributes:
        finish: Moves the data, and signals whoever is to be signalled.
        stamp: The watch's.
        done: Whether it has completed.
    """

    finish: Callable[[], None]
    stamp: Stamp
    done: bool = False

    def complete(self) -> None:
        if not self.done:
            self.done = True
            self.finish()


class Program(Names):
    """One program of the grid: its shared memory, and who knows what of it.

    Attributes:
        number: Its place in the grid.
        cluster: The programs that run together with it and reach its shared memory, itself among them, in order.
        first: The actor that is its first partition.
        barrier: Its cluster's.
        watch: Knows shared memory by numbered pieces, each written and read as one.
        roles: What the partitions of its cluster run.
        buffers: What it has allocated, in order; other programs of its cluster have the same at the same addresses.
        is_over: Whether it has ended.
    """

    def __init__(self, machine: Machine, number: int, cluster: list[Program]) -> None:
        self.number = number
        self.cluster, self.first = cluster, len(cluster) * _PARTITIONS
        mate = cluster[0] if cluster else None
        cluster.append(self)
        actors, first, total = _PARTITIONS * machine.cluster, number * _PARTITIONS - self.first, machine.tensors.actors
        self.watch = Watch(0, actors, self, first, total, mate and mate.watch)
        self.barrier = mate.barrier if mate else ClusterBarrier()
        self.roles: dict[int, str] = mate.roles if mate else {}
        self.buffers: list[Any] = []
        self.is_over = False
        self._names: list[str] = []
        self._lines, self._numbers = machine.lines, machine.numbers
        self._suffix = f" of program {number}" if machine.cluster > 1 else ""

    def allocate(self, names: list[str]) -> Array:
        """Numbers for new pieces of shared memory."""
        self._names += [name + self._suffix for name in names]
        return self.watch.add_places(len(names))

    def end(self, task: Task) -> None:
        """Its last task ends."""
        if len(self.cluster) > 1:
            self.watch.end(task.actor, self.here())
        self.is_over = True

    def here(self) -> int:
        """A number for the line of the kernel that runs now."""
        frame = sys._getframe(1)
        # A kernel's own globals hold no name of its module.
        while frame.f_back is not None and "__name__" in frame.f_globals:
            frame = frame.f_back
        at = frame.f_code, frame.f_lineno
        if at not in self._numbers:
            self._numbers[at] = len(self._lines)
            self._lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._numbers[at]

    def place(self, place: int) -> str:
        return self._names[place]

    def actor(self, actor: int) -> str:
        return self.roles[actor]

    def line(self, line: int) -> str:
        return self._lines[line]


class Task:
    """One partition of one program.

    Attributes:
        machine: Whose turns it takes.
        program: What it is part of.
        actor: What the program's watch knows it by.
        products: Its matrix products in flight, oldest first.
        stores: Its copies from shared memory in flight, oldest first.
        copies: Those that its threads have made since the last arrival that follows them.
        warps: How many it has.
    """

    def __init__(
        self, machine: Machine, program: Program, partition: int, role: str, body: Callable[[], None], warps: int = 4
    ) -> None:
        self.machine = machine
        self.program = program
        self.actor = program.first + partition
        self.rename(role)
        self.products: deque[Operation] = deque()
        self.stores: deque[Operation] = deque()
        self.copies: list[tuple[Any, Any, Any]] = []
        self.warps = warps
        self.ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.priority = machine.random.random()
        self.greenlet = greenlet(body, machine.main)

    def rename(self, role: str) -> None:
        """What messages call it: the function it runs."""
        self.name = self.program.roles[self.actor] = role

    def pause(self) -> None:
        """Lets others go first."""
        self.machine.switch(self)

    def step_back(self) -> None:
        """Lets everyone go first who is not just looking whether something has changed."""
        self.priority = self.machine.random.random() - 1
        self.machine.switch(self)

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Sleeps until ``ready``; ``what`` says what it waits for."""
        self.ready, self.waits_for = ready, what
        self.machine.switch(self)
        self.ready = None

    def drain(self, operations: deque[Operation], outstanding: int) -> None:
        """Waits until at most ``outstanding`` of the operations are in flight, oldest first."""
        while len(operations) > outstanding:
            operation = operations.popleft()
            operation.complete()
            self.program.watch.learn_end(self.actor, operation.stamp)

    # Global memory, whose places are pairs of bytes of a tensor's.

    def read_tensor(self, tensor: Tensor, places: Places) -> None:
        self.machine.tensors.read(self.program.watch, self.actor, tensor, places)

    def write_tensor(self, tensor: Tensor, places: Array, same: Callable[[], bool] | None = None, **how: bool) -> None:
        line = self.program.here()
        self.machine.tensors.write(self.program.watch, self.actor, tensor, places, line, same, **how)

    def share_tensor(self, tensor: Tensor, places: Array, order: Order, **how: bool) -> None:
        """A strong access."""
        line = self.program.here()
        self.machine.tensors.strong(self.program.watch, self.actor, tensor, places, line, order, **how)

    def synchronise(self, tensor: Tensor, places: Array, order: Order, *, writes: bool = True) -> None:
        """The strong access orders, too."""
        self.machine.tensors.synchronise_each(self.program.watch, self.actor, tensor, places, order, writes=writes)

    # Plain accesses are complete at once; engines hold what they read until the wait for them.

    def read(self, places: Array) -> None:
        self.program.watch.read(self.actor, places)

    def write(self, places: Array) -> None:
        self.program.watch.write(self.actor, places, self.program.here())

    def fence(self) -> None:
        self.program.watch.fence(self.actor)

    def cluster_sync(self) -> None:
        """Waits for all tasks of all programs of the cluster."""
        barrier, actor = self.program.barrier, self.actor
        barrier.arrive(actor, self.message())
        self.wait(lambda: barrier.is_over(actor), lambda: barrier.awaited(actor))
        self.learn(barrier.message(actor))

    def message(self, ended: Stamp | None = None) -> Message:
        """What an arrival of the task, or of a load that it started, tells others."""
        return self.program.watch.message(self.actor, ended)

    def learn(self, message: Message) -> None:
        """The task has passed a barrier that told this."""
        self.program.watch.learn(self.actor, message)

    def start_load(self, places: Array, finish: Callable[[Message], None], program: Program | None = None) -> None:
        """A copy into the shared memory of a program, its own if not given, starts; it completes at any moment."""
        stamp = (program or self.program).watch.start_load(self.actor, places, self.program.here(), "copy")
        message = self.message(stamp)
        self.machine.loads.append(Operation(lambda: finish(message), stamp))

    def start_move(self, places: Array, there: Array, program: Program, finish: Callable[[Message], None]) -> None:
        """A copy to the shared memory of another program of the cluster starts, likewise."""
        stamp = self.program.watch.start_move(self.actor, places, program.watch, there, self.program.here())
        message = self.message(stamp)
        self.machine.loads.append(Operation(lambda: finish(message), stamp))

    def start_copies(self, places: Array, finish: Callable[[Message], None]) -> None:
        """Copies by its threads start, and are all complete at some moment from now on."""
        stamp = self.program.watch.start_load(self.actor, places, self.program.here())
        message = self.program.watch.end_of(self.actor, [stamp])
        self.machine.loads.append(Operation(lambda: finish(message), stamp))

    def start_read(self, places: list[Array], queue: str, finish: Callable[[], None]) -> Operation:
        """A copy out of shared memory or a product of what lies there starts."""
        # A product of what nobody wrote is NaN.
        is_product = queue == "product"
        whole = np.concatenate(places) if places else np.zeros(0, np.int64)
        stamp = self.program.watch.start_read(self.actor, whole, queue, may_be_unwritten=is_product)
        return Operation(finish, stamp)


class Machine:
    """Runs tasks in random turns until all are done.

    Args:
        seed: Draws the order.
        resident: Programs that run at once; the others start in order as these end.
        total: Programs of the launch.
        ordered_sums: As for ``Tensors``.
        cluster: Programs of a cluster, which start together.

    Attributes:
        box: Rows and columns of shared memory that a copy may write by themselves; 0 for all of a buffer.
        tensors: Knows who has done what to global memory.
        lines: Lines of the kernel by number.
        numbers: Their numbers, by what runs and the line there.
    """

    def __init__(self, seed: int, resident: int, total: int, ordered_sums: bool = False, cluster: int = 1) -> None:
        self.random = random.Random(seed)
        # How likely a load lands while somebody could run: on a busy device roles go far while one is under way.
        self.haste = self.random.choice((0.3, 0.05, 0.01))
        self.resident = resident
        self.cluster = cluster
        self.now: Task | None = None
        self.loads: list[Operation] = []
        self.tasks: list[Task] = []
        self.main = greenlet.getcurrent()
        self.box = (0, 0)
        self.lines: list[str] = []
        self.numbers: dict[tuple[CodeType, int], int] = {}
        self._programs: dict[int, Program] = {}
        self.tensors = Tensors(total * _PARTITIONS, self._role, self.lines.__getitem__, ordered_sums)

    def _role(self, actor: int) -> str:
        return self._programs[actor // _PARTITIONS].roles[actor % (_PARTITIONS * self.cluster)]

    @property
    def running(self) -> Task:
        """The task whose turn it is."""
        assert self.now is not None
        return self.now

    def spawn(self, program: Program, partition: int, role: str, body: Callable[[], None], warps: int = 4) -> Task:
        task = Task(self, program, partition, role, body, warps)
        program.barrier.join(task.actor)
        self.tasks.append(task)
        return task

    def switch(self, task: Task) -> None:
        """Called by the running task: back to the loop that draws the next one."""
        self.main.switch()
        self.now = task

    def run(self, programs: dict[int, Callable[[], None]]) -> None:
        """Runs programs by number; each is the body of its first partition."""
        waiting = deque(programs.items())
        while True:
            running = {task.program.number for task in self.tasks}
            while waiting and len(running) < self.resident:
                together: list[Program] = []
                for number, body in [waiting.popleft() for _ in range(self.cluster)]:
                    program = self._programs[number] = Program(self, number, together)
                    self.spawn(program, 0, f"program {number}", self._whole(program, body))
                    running.add(number)
            if not self.tasks:
                break
            self._turn()
        if self.loads:
            raise MachineError("a program ended before its loads had landed")

    def _whole(self, program: Program, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            body()
            program.end(self.running)

        return run

    def _turn(self) -> None:
        able = [task for task in self.tasks if task.ready is None or task.ready()]
        # Any copy in flight may complete now.
        if self.loads and (not able or self.random.random() < self.haste):
            self.loads.pop(self.random.randrange(len(self.loads))).complete()
            return
        if not able:
            raise deadlock((task.name, task.waits_for()) for task in self.tasks)
        task = max(able, key=lambda each: each.priority)
        if self.random.random() < 0.3:
            task.priority = self.random.random()
        self.now = task
        task.greenlet.switch()
        if task.greenlet.dead:
            self.tasks.remove(task)
            task.program.barrier.leave(task.actor)
