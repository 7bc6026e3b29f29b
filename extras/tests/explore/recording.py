"""Records what the roles of a Hopper kernel do in the emulator: each one's events in order, with barriers and lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests import emulator
from tests.emulator.cluster import ClusterLanguage
from tests.emulator.machine import Machine, Operation
from tests.emulator.values import Value, value_of

OPS = ("wait", "arrive", "expect", "load", "product", "product_wait", "store", "store_wait", "exp")
KERNELS = "src/flashtile/backends/"


class Recorder:
    """Events by role, with the barriers and the lines that they name."""

    def __init__(self) -> None:
        self.turn = 0
        self.events: list[list[int]] = []
        self.roles: dict[int, str] = {}
        self.barriers: dict[int, int] = {}
        self.barrier_rows: list[list[Any]] = []
        self.lines: dict[tuple[tuple[str, str, int], ...], int] = {}
        self._kept: list[Any] = []

    def note(self, language: ClusterLanguage, op: str, a: int = 0, b: int = 0, start: int | None = None) -> list[int]:
        """Adds an event of the running role: [role, op, line, a, b, first turn, last turn]."""
        self.turn += 1
        role = language.task.actor
        self.roles[role] = language.task.name.partition(" ")[0]
        first = self.turn if start is None else start
        self.events.append([role, OPS.index(op), self._line(), int(a), int(b), first, self.turn])
        return self.events[-1]

    def ends_with(self, operation: Operation, event: list[int]) -> None:
        """The event lasts until the operation has completed."""
        finish = operation.finish

        def finished() -> None:
            self.turn += 1
            event[6] = self.turn
            finish()

        operation.finish = finished

    def barrier(self, barrier: Any) -> int:
        """The number of a barrier."""
        one = barrier.one
        if id(one) not in self.barriers:
            self.barriers[id(one)] = len(self.barrier_rows)
            self.barrier_rows.append([one.name, one.count])
            self._kept.append(one)
        return self.barriers[id(one)]

    def _line(self) -> int:
        """The number of the kernel's lines that run now, from the role's own to the innermost."""
        chain: list[tuple[str, str, int]] = []
        frame = sys._getframe(2)
        while frame is not None:
            # A kernel's own globals hold no name of its module.
            if "__name__" not in frame.f_globals:
                file, name = frame.f_code.co_filename.partition(KERNELS)[2], frame.f_code.co_name
                # The first partition runs inside the kernel's own frame, the others do not.
                if name != "attention_forward":
                    chain.insert(0, (file, name, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return self.lines.setdefault(tuple(chain), len(self.lines))

    def to_json(self) -> dict[str, Any]:
        """The recording; each role's events in its order."""
        return {
            "roles": [self.roles[role] for role in sorted(self.roles)],
            "barriers": self.barrier_rows,
            "lines": [list(map(list, chain)) for chain in self.lines],
            "events": self.events,
        }


class RecordingLanguage(ClusterLanguage):
    """The emulator's language, each operation noted."""

    recorder: Recorder

    def barrier_wait(self, barrier: Any, parity: Any, pred: Any = True) -> None:
        start = self.recorder.turn
        super().barrier_wait(barrier, parity, pred)
        if value_of(pred):
            self.recorder.note(self, "wait", self.recorder.barrier(barrier), barrier.one.phase, start)

    def barrier_arrive(self, barrier: Any, *, count: int = 1, pred: Any = True) -> None:
        super().barrier_arrive(barrier, count=count, pred=pred)
        if value_of(pred):
            self.recorder.note(self, "arrive", self.recorder.barrier(barrier), count)

    def barrier_expect(self, barrier: Any, num_bytes: int, pred: Any = True) -> None:
        super().barrier_expect(barrier, num_bytes, pred)
        if value_of(pred):
            self.recorder.note(self, "expect", self.recorder.barrier(barrier), num_bytes)

    def copy_in(self, desc: Any, at: Any, barrier: Any, memory: Any, pred: Any = True) -> None:
        super().copy_in(desc, at, barrier, memory, pred)
        if value_of(pred):
            event = self.recorder.note(self, "load", self.recorder.barrier(barrier), desc.num_bytes)
            self.recorder.ends_with(self.machine.loads[-1], event)

    def copy_out(self, desc: Any, at: Any, memory: Any) -> None:
        super().copy_out(desc, at, memory)
        event = self.recorder.note(self, "store", 0, memory.data.numel() * memory.data.element_size())
        self.recorder.ends_with(self.task.stores[-1], event)

    def copy_out_wait(self, outstanding: int) -> None:
        start = self.recorder.turn
        super().copy_out_wait(outstanding)
        self.recorder.note(self, "store_wait", outstanding, 0, start)

    def product(self, a: Any, b: Any, acc: Any, **rest: Any) -> Any:
        pending = super().product(a, b, acc, **rest)
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        event = self.recorder.note(self, "product", flops, int(isinstance(a, Value)))
        self.recorder.ends_with(self.task.products[-1], event)
        return pending

    def product_wait(self, outstanding: int = 0, deps: Any = ()) -> Any:
        start = self.recorder.turn
        found = super().product_wait(outstanding, deps)
        self.recorder.note(self, "product_wait", outstanding, 0, start)
        return found

    def shared_names(self) -> dict[str, Any]:
        names = super().shared_names()
        plain = names["exp2"]

        def exp2(x: Any) -> Value:
            if value_of(x).data.dim() == 2:
                self.recorder.note(self, "exp", value_of(x).data.numel())
            return plain(x)

        return names | {"exp2": exp2}


@contextmanager
def recording() -> Iterator[Recorder]:
    """Within, the emulator's runs are noted."""
    recorder = Recorder()

    def language(machine: Machine, num_programs: tuple[int, ...]) -> ClusterLanguage:
        made = RecordingLanguage(machine, num_programs)
        made.recorder = recorder
        return made

    with mock.patch.object(emulator, "ClusterLanguage", language):
        yield recorder
