"""Finds accesses to global memory that nothing orders, of one program's actors and of different programs'.

The clocks are those of ``clocks``, whose last components stand for all actors of a launch; so what an actor of another
program is known to have done travels through barriers too. Between programs only atomics order (PTX ISA, "Memory
Consistency Model"): who acquires a value learns what those knew who released it, or released what read-modify-writes
have made it from since. A relaxed one passes on what a release before it said and nothing of its own, but for what a
``fence.acq_rel`` before it has released. A fence behind a relaxed read acquires what that read. Scopes count: what is
said to a block, or asked in one, is not heard across blocks.

Accesses are strong (atomic, or volatile) or weak (all others). Two that conflict must be ordered unless both are
strong, whatever their order was in this run; within the scope of a block, an access is strong to that block alone.
Copies by TMA are weak and over for their actor when it has waited for all of them; what they add is strong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.machine.clocks import Array, Message, Watch, joined
from tests.machine.errors import RaceError

# Places: pairs of bytes from the start of a tensor's memory on, or what gives them.
Places = Array | Callable[[], Array]
# What was released with a value: by the first actor of the program that did, and whether others are in its scope.
Released = dict[tuple[int, bool], Message]
_EVER = np.iinfo(np.int32).max
# Accesses that are kept as they came.
_MOST = 4096


class Order(NamedTuple):
    """What an atomic or a fence orders.

    Attributes:
        acquires: Whether it learns what has been released there.
        releases: Whether it publishes what its actor knows.
        is_wide: Whether other programs are within its scope.
    """

    acquires: bool
    releases: bool
    is_wide: bool = True

    @classmethod
    def of(cls, sem: str, scope: str) -> Order:
        """By the words of PTX and of Triton."""
        return cls(sem in ("acquire", "acq_rel", "sc"), sem in ("release", "acq_rel", "sc"), scope not in ("cta",))


class _Log:
    """Accesses of one kind to one tensor: as they came, and from the first question on by place and component."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: list[tuple[int, int, Places]] = []
        self._columns: dict[int, int] = {}
        self._times = np.zeros((0, 0), np.int32)

    def add(self, component: int, time: int, places: Places) -> None:
        if self._columns or len(self._events) > _MOST:
            self._sort()
            self._put(component, time, places)
        else:
            self._events.append((component, time, places))

    def unknown(self, places: Array, clock: Array) -> tuple[int, int] | None:
        """A place with an access that the clock does not know, and the access's component."""
        if not self._events and not self._columns:
            return None
        self._sort()
        wrong = self._times[places, : len(self._columns)] > clock[list(self._columns)]
        if not np.count_nonzero(wrong):
            return None
        row, column = np.argwhere(wrong)[0]
        return int(places[row]), list(self._columns)[column]

    def _sort(self) -> None:
        events, self._events = self._events, []
        for event in events:
            self._put(*event)

    def _put(self, component: int, time: int, places: Places) -> None:
        column = self._columns.setdefault(component, len(self._columns))
        if column >= self._times.shape[1]:
            more = np.zeros((self._size, max(8, self._times.shape[1])), np.int32)
            self._times = np.concatenate([self._times.reshape(self._size, -1), more], axis=1)
        self._times[places() if callable(places) else places, column] = time


class Tensor:
    """Who has done what to one tensor's memory."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        # Who wrote a place last by a weak write: a component, its time, and the line; time 0 is never.
        self.writer = self.written = self.line = np.zeros(0, np.int32)
        self.weak_reads, self.strong_reads, self.strong_writes = _Log(size), _Log(size), _Log(size)
        self.is_strong = False
        self.released: dict[int, Released] = {}

    @property
    def is_written(self) -> bool:
        return self.is_strong or len(self.written) > 0

    def remember(self, places: Array, component: int, time: int, line: int) -> None:
        if not len(self.written):
            self.writer, self.written, self.line = (np.zeros(self.size, np.int32) for _ in range(3))
        self.writer[places], self.written[places], self.line[places] = component, time, line


class Tensors:
    """What is known about global memory in one launch.

    Args:
        actors: Those of all programs together.
        who: What to call one of them.
        where: What stands at a line.
        ordered_sums: Whether additions must be ordered as other writes, because their order decides about a sum.
    """

    def __init__(
        self, actors: int, who: Callable[[int], str], where: Callable[[int], str], ordered_sums: bool = False
    ) -> None:
        self.actors = actors
        self.ordered_sums = ordered_sums
        self._who, self._where = who, where
        self._tensors: dict[int, Tensor] = {}
        # What an actor's last fence lets its atomics release, and what its next one will acquire.
        self._fenced: dict[int, tuple[Message, bool]] = {}
        self._heard: dict[int, Released] = {}
        self._copies = np.zeros(actors, np.int32)

    def tensor(self, name: str, base: int, size: int) -> Tensor:
        """Memory of so many bytes from an address on."""
        if base not in self._tensors:
            self._tensors[base] = Tensor(name, -(-size // 2))
        return self._tensors[base]

    # Accesses.

    def read(self, watch: Watch, actor: int, tensor: Tensor, places: Places) -> None:
        """A weak read."""
        clock = watch.everywhere(actor)
        if tensor.is_written:
            places = places() if callable(places) else places
            self._may_follow("reads", tensor, places, clock, watch, actor, strong=False)
        tensor.weak_reads.add(watch.first + actor, int(clock[watch.first + actor]), places)

    def write(
        self, watch: Watch, actor: int, tensor: Tensor, places: Array, line: int,
        same: Callable[[], bool] | None = None, is_part: bool = False, copies: bool = False,
    ) -> None:  # fmt: skip
        """A weak write; ``same`` and ``is_part`` as in ``Watch.write``, ``copies`` if a copy of the actor does it."""
        clock = watch.everywhere(actor)
        try:
            if not is_part:
                self._may_follow("writes", tensor, places, clock, watch, actor, strong=False)
            self._may_replace(tensor, places, clock, watch, actor, strong=False)
        except RaceError:
            if same is None or not same():
                raise
        tensor.remember(places, *self._stamp(watch, actor, copies), line)
        # Nothing is released with what it leaves.
        for place in [each for each in tensor.released if (places == each).any()]:
            del tensor.released[place]

    def strong(
        self, watch: Watch, actor: int, tensor: Tensor, places: Array, line: int, order: Order, *,
        reads: bool = False, copies: bool = False,
    ) -> None:  # fmt: skip
        """A strong access, which only reads or also writes."""
        clock = watch.everywhere(actor)
        if not order.is_wide:
            clock = clock.copy()
            for first in (watch.first, self.actors + watch.first):
                clock[first : first + watch.actors] = _EVER
        self._may_follow("reads" if reads else "writes", tensor, places, clock, watch, actor, strong=order.is_wide)
        if not reads:
            self._may_replace(tensor, places, clock, watch, actor, strong=order.is_wide)
        component, time = self._stamp(watch, actor, copies)
        if not order.is_wide and reads:
            tensor.weak_reads.add(component, time, places)
        elif not order.is_wide:
            tensor.remember(places, component, time, line)
        elif reads:
            tensor.strong_reads.add(component, time, places)
        else:
            tensor.is_strong = True
            tensor.strong_writes.add(component, time, places)

    def copies_are_over(self, watch: Watch, actor: int, left: int) -> None:
        """An actor has waited for all but the last of its copies to have written."""
        component = watch.first + actor
        clock = watch.everywhere(actor)
        clock[self.actors + component] = max(clock[self.actors + component], self._copies[component] - left)

    # What orders.

    def synchronise(
        self, watch: Watch, actor: int, tensor: Tensor, place: int, order: Order, *, reads: bool = True,
        writes: bool = True,
    ) -> None:  # fmt: skip
        """An atomic on a value; one that only writes ends what was released with the value before."""
        heard = tensor.released.get(place, {}) if reads else {}
        if order.acquires:
            self._learn(watch, actor, heard, order.is_wide)
        elif heard:
            read = self._heard.setdefault(watch.first + actor, {})
            for (who, wide), known in heard.items():
                key = who, wide and order.is_wide
                read[key] = joined(read.get(key), known)
        if not writes:
            return
        if not reads:
            tensor.released.pop(place, None)
        told: tuple[Message, bool] | None = self._fenced.get(watch.first + actor)
        if order.releases:
            told = watch.message(actor), True
        if told is not None:
            released = tensor.released.setdefault(place, {})
            key = watch.first, told[1] and order.is_wide
            released[key] = joined(released.get(key), told[0])

    def synchronise_each(
        self, watch: Watch, actor: int, tensor: Tensor, places: Array, order: Order, *, reads: bool = True,
        writes: bool = True,
    ) -> None:  # fmt: skip
        """An atomic on several values; most neither find nor leave anything there."""
        if tensor.released or order.releases or watch.first + actor in self._fenced:
            for place in set(places.tolist()):
                self.synchronise(watch, actor, tensor, place, order, reads=reads, writes=writes)

    def fence(self, watch: Watch, actor: int, order: Order) -> None:
        """A fence of all accesses."""
        self._learn(watch, actor, self._heard.pop(watch.first + actor, {}), order.is_wide)
        self._fenced[watch.first + actor] = watch.message(actor), order.is_wide

    def _learn(self, watch: Watch, actor: int, heard: Released, is_wide: bool) -> None:
        for (who, wide), known in heard.items():
            if who == watch.first:
                watch.learn(actor, known)
            elif wide and is_wide and known is not None:
                mine = watch.everywhere(actor)
                np.maximum(mine, known[-len(mine) :], out=mine)

    # The rules.

    def _stamp(self, watch: Watch, actor: int, copies: bool) -> tuple[int, int]:
        component = watch.first + actor
        if not copies:
            return component, int(watch.everywhere(actor)[component])
        self._copies[component] += 1
        return self.actors + component, int(self._copies[component])

    def _may_follow(
        self, does: str, tensor: Tensor, places: Array, clock: Array, watch: Watch, actor: int, *, strong: bool
    ) -> None:
        who = self._who(watch.first + actor)
        if len(tensor.written):
            wrong = places[tensor.written[places] > clock[tensor.writer[places]]]
            if len(wrong):
                place = int(wrong[0])
                raise RaceError(
                    f"race: {who} {does} byte {2 * place} of {tensor.name}, and nothing orders that after the write of "
                    f"{self._name(int(tensor.writer[place]))} at {self._where(int(tensor.line[place]))}"
                )
        if not strong and (found := tensor.strong_writes.unknown(places, clock)):
            raise RaceError(
                f"race: {who} {does} byte {2 * found[0]} of {tensor.name}, and nothing orders that after what "
                f"{self._name(found[1])} writes there by an atomic"
            )

    def _may_replace(
        self, tensor: Tensor, places: Array, clock: Array, watch: Watch, actor: int, *, strong: bool
    ) -> None:
        for log in (tensor.weak_reads,) if strong else (tensor.weak_reads, tensor.strong_reads):
            if found := log.unknown(places, clock):
                raise RaceError(
                    f"race: {self._who(watch.first + actor)} writes byte {2 * found[0]} of {tensor.name}, which "
                    f"{self._name(found[1])} may still have to read"
                )

    def _name(self, component: int) -> str:
        return ("a copy of " if component >= self.actors else "") + self._who(component % self.actors)
