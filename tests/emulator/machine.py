"""What runs at once on a streaming multiprocessor, in an order drawn at random.

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
from typing import Any

import numpy as np
from greenlet import greenlet

from tests.machine import MachineError, Names, Order, Stamp, Tensors, Watch, deadlock
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
        watch: Knows shared memory by numbered pieces, each written and read as one.
        roles: What its partitions run.
    """

    def __init__(self, machine: Machine, number: int) -> None:
        self.number = number
        self.watch = Watch(0, _PARTITIONS, self, number * _PARTITIONS, machine.tensors.actors)
        self.roles: dict[int, str] = {}
        self._names: list[str] = []
        self._lines = machine.lines

    def allocate(self, names: list[str]) -> Array:
        """Numbers for new pieces of shared memory."""
        self._names += names
        return self.watch.add_places(len(names))

    def here(self) -> int:
        """A number for the line of the kernel that runs now."""
        frame = sys._getframe(1)
        # A kernel's own globals hold no name of its module.
        while frame.f_back is not None and "__name__" in frame.f_globals:
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if line not in self._lines:
            self._lines.append(line)
        return self._lines.index(line)

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
        partition: Its number there, which the program's watch knows it by.
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
        self.partition = partition
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
        self.name = self.program.roles[self.partition] = role

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
            self.program.watch.learn_end(self.partition, operation.stamp)

    # Global memory, whose places are pairs of bytes of a tensor's.

    def read_tensor(self, tensor: Tensor, places: Places) -> None:
        self.machine.tensors.read(self.program.watch, self.partition, tensor, places)

    def write_tensor(self, tensor: Tensor, places: Array, same: Callable[[], bool] | None = None, **how: bool) -> None:
        line = self.program.here()
        self.machine.tensors.write(self.program.watch, self.partition, tensor, places, line, same, **how)

    def share_tensor(self, tensor: Tensor, places: Array, order: Order, **how: bool) -> None:
        """A strong access."""
        line = self.program.here()
        self.machine.tensors.strong(self.program.watch, self.partition, tensor, places, line, order, **how)

    def synchronise(self, tensor: Tensor, place: int, order: Order, *, writes: bool = True) -> None:
        """The strong access orders, too."""
        self.machine.tensors.synchronise(self.program.watch, self.partition, tensor, place, order, writes=writes)

    # Plain accesses are complete at once; engines hold what they read until the wait for them.

    def read(self, places: Array) -> None:
        self.program.watch.read(self.partition, places)

    def write(self, places: Array) -> None:
        self.program.watch.write(self.partition, places, self.program.here())

    def fence(self) -> None:
        self.program.watch.fence(self.partition)

    def message(self, ended: Stamp | None = None) -> Message:
        """What an arrival of the task, or of a load that it started, tells others."""
        return self.program.watch.message(self.partition, ended)

    def learn(self, message: Message) -> None:
        """The task has passed a barrier that told this."""
        self.program.watch.learn(self.partition, message)

    def start_load(self, places: Array, finish: Callable[[Message], None]) -> None:
        """A copy into shared memory starts, and completes at any moment from now on."""
        stamp = self.program.watch.start_load(self.partition, places, self.program.here(), "copy")
        message = self.message(stamp)
        self.machine.loads.append(Operation(lambda: finish(message), stamp))

    def start_copies(self, places: Array, finish: Callable[[Message], None]) -> None:
        """Copies by its threads start, and are all complete at some moment from now on."""
        stamp = self.program.watch.start_load(self.partition, places, self.program.here())
        message = self.program.watch.end_of([stamp])
        self.machine.loads.append(Operation(lambda: finish(message), stamp))

    def start_read(self, places: list[Array], queue: str, finish: Callable[[], None]) -> Operation:
        """A copy out of shared memory or a product of what lies there starts."""
        # A product of what nobody wrote is NaN.
        is_product = queue == "product"
        whole = np.concatenate(places) if places else np.zeros(0, np.int64)
        stamp = self.program.watch.start_read(self.partition, whole, queue, may_be_unwritten=is_product)
        return Operation(finish, stamp)


class Machine:
    """Runs tasks in random turns until all are done.

    Args:
        seed: Draws the order.
        resident: Programs that run at once; the others start in order as these end.
        total: Programs of the launch.
        ordered_sums: As for ``Tensors``.

    Attributes:
        box: Rows and columns of shared memory that a copy may write by themselves; 0 for all of a buffer.
        tensors: Knows who has done what to global memory.
        lines: Lines of the kernel by number.
    """

    def __init__(self, seed: int, resident: int, total: int, ordered_sums: bool = False) -> None:
        self.random = random.Random(seed)
        # How likely a load lands while somebody could run: on a busy device roles go far while one is under way.
        self.haste = self.random.choice((0.3, 0.05, 0.01))
        self.resident = resident
        self.now: Task | None = None
        self.loads: list[Operation] = []
        self.tasks: list[Task] = []
        self.main = greenlet.getcurrent()
        self.box = (0, 0)
        self.lines: list[str] = []
        self._programs: dict[int, Program] = {}
        self.tensors = Tensors(total * _PARTITIONS, self._role, self.lines.__getitem__, ordered_sums)

    def _role(self, actor: int) -> str:
        return self._programs[actor // _PARTITIONS].roles[actor % _PARTITIONS]

    @property
    def running(self) -> Task:
        """The task whose turn it is."""
        assert self.now is not None
        return self.now

    def spawn(self, program: Program, partition: int, role: str, body: Callable[[], None], warps: int = 4) -> Task:
        task = Task(self, program, partition, role, body, warps)
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
                number, body = waiting.popleft()
                program = self._programs[number] = Program(self, number)
                self.spawn(program, 0, f"program {number}", body)
                running.add(number)
            if not self.tasks:
                break
            self._turn()
        if self.loads:
            raise MachineError("a program ended before its loads had landed")

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
