"""About how long a kernel takes: one program alone on its multiprocessor, in cycles, and what its roles wait for.

A discrete-event model. Between two points where a role synchronises it has instructions to issue, which warpgroups
share, and latencies, which they do not; products queue for the tensor cores, copies for the way from the L2 cache.
It knows nothing of the assembler, the caches or the power limit. Its use is to see where time goes and to compare
schedules: beside 42 rows of the Hopper forward at 512 to 2048 tokens, measured on an H200 (2026-11-20, commit a35af29)
and to which ``Costs`` were fitted, its rates are 4% high, and about that off by 9% root mean square and 30% at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.emulator import run_on
from tests.emulator.machine import DeadlockError, Knowledge, Machine, Operation, Task
from tests.emulator.values import listening


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cycles of a Hopper multiprocessor, and rates per cycle.

    Attributes:
        flops: Of the tensor cores, 16-bit operands.
        shared_bytes: Of shared memory, for operands of products.
        product_latency: From issue to start, and from end to result.
        copy_bytes: From the L2 cache to shared memory and back.
        load_latency: From the start of a copy into shared memory to its first bytes.
        store_latency: The same for a copy out of it.
        special: Issue slots that an exponential takes of the special function units.
        overhead: Instructions issued to each that the source names.
        solo: Share of the issue slots that one warpgroup alone can use.
        scalar: A scalar operation of a role of one warp: latency, and instructions that are not in the cache.
        division: The same for a division by a number that is not known.
        hidden: Share of such latencies that a role of four warps sees, whose other instructions cover the rest.
        global_load: A load from global memory.
        shared_load: A load from shared memory.
        shuffle: A maximum along rows, whose last steps cross threads.
        arrive: An arrival at a barrier.
        wake: From the end of a barrier's phase to the first instruction behind the wait for it.
    """

    flops: float = 4096
    shared_bytes: float = 128
    product_latency: float = 40
    copy_bytes: float = 64
    load_latency: float = 650
    store_latency: float = 500
    special: float = 8
    overhead: float = 1.3
    solo: float = 0.85
    scalar: float = 18
    division: float = 450
    hidden: float = 0.25
    global_load: float = 600
    shared_load: float = 30
    shuffle: float = 60
    arrive: float = 15
    wake: float = 30


@dataclass(frozen=True)
class Timing:
    """What was measured.

    Attributes:
        cycles: From the start of the program to its end.
        busy: Share of them in which the tensor cores and the issue slots worked.
        roles: For each role, the share of each thing it did or waited for.
    """

    cycles: float
    busy: dict[str, float]
    roles: dict[str, dict[str, float]]


def measure(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    *,
    program: int = 0,
    replacements: Mapping[Any, Callable[..., Any]] | None = None,
    costs: Costs | None = None,
) -> Timing:
    """Runs one program of a grid against the clock; arguments as for ``emulator.launch``."""
    machine = _TimedMachine(costs or Costs())
    with listening(machine.hear):
        run_on(machine, [program], kernel, grid, arguments, replacements or {})
    cycles = machine.time
    return Timing(
        cycles,
        {name: busy / cycles for name, busy in machine.busy.items()},
        {role: {what: t / cycles for what, t in spent.items()} for role, spent in machine.spent.items()},
    )


@dataclass
class _State:
    """What a task has to do before it can go on."""

    issue: float = 0.0
    special: float = 0.0
    latency: float = 0.0
    left: float = 0.0
    until: float = 0.0
    was_blocked: bool = False


_OWN = "its own operation"
# Operations on tensors by their issue slots an element of 128 threads; those not named take one. A product with a
# scalar joins the addition behind it.
_SLOTS = {
    "mul by scalar": 0.0,
    "mul by number": 0.0,
    "convert": 0.5,
    "truediv": 8.0,
    "and": 0.5,
    "or": 0.5,
    "load": 1.0,
    "atomic": 0.5,
}


class _TimedMachine(Machine):
    def __init__(self, costs: Costs) -> None:
        super().__init__(seed=0, resident=1)
        self.costs = costs
        self.time = 0.0
        self.busy: dict[str, float] = defaultdict(float)
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._states: dict[Task, _State] = defaultdict(_State)
        self._tensor_free = 0.0
        self._copy_free = 0.0

    def hear(self, kind: str, elements: int) -> None:
        """Adds an operation of the running task to what it has to do."""
        costs, state = self.costs, self._states[self.running]
        share = costs.hidden if self.running.warps >= 4 else 1.0
        if kind in ("load shared", "store shared"):
            state.issue += elements / 512
            state.latency += (costs.shared_load + elements / (4 * costs.shared_bytes)) * share
        elif kind == "arrive":
            state.latency += costs.arrive * share
        elif elements >= 64:
            # Four schedulers issue an instruction for 32 threads each.
            state.issue += elements / 128 * _SLOTS.get(kind, 1.0)
            state.special += elements / 128 * costs.special * (kind == "exp2")
            state.latency += costs.shuffle * share * (kind == "reduce max")
            state.latency += costs.global_load * share * (kind == "load")
        elif kind in ("load", "atomic"):
            state.latency += costs.global_load * share
        else:
            unknown = kind.startswith(("floordiv", "mod")) and not kind.endswith("by number")
            state.latency += (costs.division if unknown else costs.scalar) * share

    def schedule_copy(self, operation: Operation, num_bytes: int, is_load: bool) -> None:
        self._copy_free = max(self._copy_free, self.time) + num_bytes / self.costs.copy_bytes
        operation.due = self._copy_free + (self.costs.load_latency if is_load else self.costs.store_latency)

    def schedule_product(self, operation: Operation, shape: tuple[int, int, int], is_left_shared: bool) -> None:
        m, n, k = shape
        # The right operand is read once for each 64 rows of the left one.
        num_bytes = 2 * k * (n * m / 64 + m * is_left_shared)
        takes = max(2 * m * n * k / self.costs.flops, num_bytes / self.costs.shared_bytes)
        start = max(self.time + self.costs.product_latency, self._tensor_free)
        self._tensor_free = start + takes
        self.busy["tensor cores"] += takes
        operation.due = self._tensor_free + self.costs.product_latency

    def await_operation(self, task: Task, operation: Operation) -> None:
        task.wait(lambda: self.time >= operation.due, _OWN)

    def switch(self, task: Task) -> None:
        state = self._states[task]
        state.left = max(state.issue, state.special) * self.costs.overhead
        state.until = self.time + state.latency
        state.issue = state.special = state.latency = 0.0
        state.was_blocked = False
        super().switch(task)

    def run(self, programs: dict[int, Callable[[], None]]) -> None:
        for program, body in programs.items():
            self.spawn(f"program {program}", program, body, Knowledge())
        while self.tasks:
            task = self._next()
            if task is None:
                self._advance()
                continue
            self.now = task
            task.greenlet.switch()
            if task.greenlet.dead:
                self.tasks.remove(task)

    def _next(self) -> Task | None:
        """A task that has done its work and waits for nothing."""
        for task in self.tasks:
            state = self._states[task]
            if state.until > self.time or state.left > 0:
                continue
            if task.ready is None:
                return task
            if not task.ready():
                state.was_blocked = True
                continue
            if state.was_blocked and task.waits_for != _OWN:
                state.was_blocked = False
                state.until = self.time + self.costs.wake
            if state.until <= self.time:
                return task
        return None

    def _advance(self) -> None:
        """Lets the time pass to the next event."""
        computing = [t for t in self.tasks if self._states[t].until <= self.time and self._states[t].left > 0]
        rate = min(self.costs.solo, 1 / len(computing)) if computing else 0.0
        events = [self.time + self._states[t].left / rate for t in computing]
        events += [s.until for s in (self._states[t] for t in self.tasks) if s.until > self.time]
        events += [o.due for o in (*self.loads, *(o for t in self.tasks for o in (*t.products, *t.stores)))]
        events = [event for event in events if event > self.time]
        if not events:
            raise DeadlockError("every task waits: " + ", ".join(f"{t.name} for {t.waits_for}" for t in self.tasks))
        passed = min(events) - self.time
        for task in self.tasks:
            state = self._states[task]
            if task in computing:
                what = "computes"
                state.left = max(state.left - passed * rate, 0.0)
                state.left = 0.0 if state.left < 1e-6 else state.left
            elif state.until > self.time:
                what = "latency"
            else:
                what = f"waits for {task.waits_for.partition(',')[0].rpartition(' of ')[2]}"
            self.spent[task.name.partition(" of program")[0]][what] += passed
        self.busy["issue slots"] += passed * rate * len(computing)
        self.time += passed
        for operation in [o for o in self.loads if o.due <= self.time]:
            self.loads.remove(operation)
            operation.complete()
