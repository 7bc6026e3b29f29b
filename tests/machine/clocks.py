"""Finds accesses to shared memory that nothing orders, whatever the order was in this run.

Every actor (a warp, a warp-specialised role) has a vector clock, as in FastTrack (Flanagan and Freund 2009): what it
knows to have happened of each other actor and of each asynchronous operation. Barriers pass that on. For every place it
is kept who wrote it last and who has read it since; an access whose actor does not know of a conflicting one is a race,
even if this run happened to do them one after the other.

Asynchronous operations have components of their own in the clocks. Those of one actor that only read (stores by TMA,
matrix products) end in the order of their start, so a queue and a number say how far it is. Loads end in any order, and
each has a component of its own. Another one for each actor counts its waits for barriers.

Besides, what ordinary stores and copies by threads wrote may be read by copies and products only if a
``fence.proxy.async`` stands between (PTX ISA, "Causality Order": along the path): of the writer after its write, or of
the reader after their barrier. Who started copies by threads has not written until they end, so its fence is too early.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.machine.errors import MachineError, RaceError

Array = NDArray[Any]
Message = NDArray[Any] | None
# Loads in flight that are told apart.
_LOADS = 1024
# What an actor's asynchronous reads wait in, each in order.
QUEUES = ("copy", "product")


class Names(Protocol):
    """What to call things in messages."""

    def place(self, place: int) -> str:
        """A place in shared memory."""

    def actor(self, actor: int) -> str:
        """One who acts."""

    def line(self, line: int) -> str:
        """Where in the program a write stands, by the number that it was given."""


class Stamp(NamedTuple):
    """An asynchronous operation: a component of the clocks, and its value once the operation is over."""

    component: int
    time: int


class Watch:
    """What is known about the shared memory of one program.

    Args:
        places: Pieces of memory that are told apart.
        actors: How many act at most.
        names: What to call them.
        first: The number of the first of them among the actors of all programs.
        total: How many those are, where global memory is watched too: see ``tensors``.
        mate: The watch of another program of the cluster: the actors are those of the cluster, each known to both.
    """

    def __init__(
        self, places: int, actors: int, names: Names, first: int = 0, total: int = 0, mate: Watch | None = None
    ) -> None:
        self._actors, self._names = actors, names
        self.actors, self.first, self._total = actors, first, total
        self._first_load = actors * (1 + len(QUEUES))
        self._waits = slice(self._first_load + _LOADS, self._first_load + _LOADS + actors)
        # Who wrote a place last: a component, its time, and where that stands in the program; time 0 is never.
        self._writer = np.zeros(places, np.int32)
        self._written = np.zeros(places, np.int32)
        self._line = np.zeros(places, np.int32)
        # When each component in _readers read a place last.
        self._reads = np.zeros((places, 0), np.int32)
        self._readers: list[int] = []
        self._unfenced = np.zeros(places, bool)
        self._fenced_by = np.zeros(places, np.int64)
        if mate is not None:
            self._seen, self._everywhere = mate._seen, mate._everywhere
            self._started, self._next_load = mate._started, mate._next_load
            return
        # What each actor knows of each component, and how far those of operations are.
        # At the end are the actors of all programs and, one each, what TMA writes to global memory for them.
        own = self._waits.stop
        self._seen = np.zeros((actors, own + 2 * total), np.int32)
        self._everywhere = [self._seen[actor, own:] for actor in range(actors)]
        self._seen[range(actors), range(actors)] = 1
        for actor in range(actors if total else 0):
            self._everywhere[actor][first + actor] = 1
        self._started = np.zeros(self._first_load + _LOADS, np.int32)
        self._next_load = itertools.cycle(range(_LOADS))

    def add_places(self, count: int) -> Array:
        """More places, which nobody has written."""
        first = len(self._writer)
        for name in ("_writer", "_written", "_line", "_reads", "_unfenced", "_fenced_by"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((count, *old.shape[1:]), old.dtype)]))
        return np.arange(first, first + count)

    # Accesses that are over when they return.

    def read(self, actor: int, places: Array, by: str = "", may_be_unwritten: bool = False) -> None:
        """An actor reads; ``by`` names what reads for it through the asynchronous proxy."""
        self._may_read(actor, places, by, may_be_unwritten)
        self._has_read(actor, places, int(self._seen[actor, actor]))

    def write(
        self, actor: int, places: Array, line: int, same: Callable[[], bool] | None = None, is_part: bool = False
    ) -> None:
        """An actor writes by ordinary stores, at a line of the program.

        Args:
            actor: Who.
            places: Where.
            line: What ``Names.line`` knows.
            same: Whether what it writes is there already: several may write the same, and whoever reads it after one of
                them finds it.
            is_part: Whether it writes only part of a place, and others may write the rest.
        """
        try:
            self._may_write(actor, places, is_part)
        except RaceError:
            if same is None or not same():
                raise
        self._wrote(places, actor, int(self._seen[actor, actor]), line)
        self._unfenced[places] = True

    def fence(self, actor: int) -> None:
        """Copies and products may read what the actor wrote; its own also what it knows to be written."""
        places = np.flatnonzero(self._unfenced)
        writers = self._writer[places]
        known = self._seen[actor][writers] >= self._written[places]
        self._fenced_by[places[known]] |= 1 << actor
        self._unfenced[places[writers == actor]] = False

    # Asynchronous operations, from their start.

    def start_load(self, actor: int, places: Array, line: int, by: str = "") -> Stamp:
        """A copy into shared memory starts; ``by`` as for ``read``.

        A copy by threads (PTX ISA, ``cp.async``) writes through the generic proxy, as stores do.
        """
        self._may_write(actor, places)
        if by:
            self._may_follow(actor, places, f"a {by} of {self._names.actor(actor)} writes")
        stamp = self._new(self._first_load + next(self._next_load))
        self._wrote(places, *stamp, line)
        self._unfenced[places] = not by
        return stamp

    def start_read(self, actor: int, places: Array, queue: str, may_be_unwritten: bool = False) -> Stamp:
        """A copy out of shared memory, or a product of what lies there, starts; it is the last one of its queue."""
        self._may_read(actor, places, queue, may_be_unwritten)
        stamp = self._new(self._actors * (1 + QUEUES.index(queue)) + actor)
        self._has_read(stamp.component, places, stamp.time)
        return stamp

    def start_move(self, actor: int, places: Array, to: Watch, there: Array, line: int) -> Stamp:
        """A copy from here into the shared memory of another program of the cluster starts."""
        self._may_read(actor, places, "copy", may_be_unwritten=False)
        stamp = to.start_load(actor, there, line, "copy")
        self._has_read(stamp.component, places, stamp.time)
        return stamp

    def end(self, actor: int, line: int) -> None:
        """A program of a cluster ends, and its shared memory is no more: nobody may read or write it from then on."""
        self.write(actor, np.arange(len(self._writer)), line)

    def learn_end(self, actor: int, stamp: Stamp) -> None:
        """An actor knows that an operation is over."""
        self._seen[actor, stamp.component] = max(self._seen[actor, stamp.component], stamp.time)

    # What barriers pass on.

    def everywhere(self, actor: int) -> Array:
        """What an actor knows of those of all programs; it may be changed."""
        return self._everywhere[actor]

    def message(self, actor: int, ended: Stamp | None = None) -> Array:
        """What others learn from an arrival of an actor, or of a load it started; what the actor does next is new."""
        known = self._seen[actor].copy()
        self._seen[actor, actor] += 1
        if self._total:
            self._everywhere[actor][self.first + actor] += 1
        if ended is not None:
            known[ended.component] = ended.time
        return known

    def wait(self, actor: int) -> Stamp:
        """An actor has seen the end of a phase of a barrier."""
        component = self._waits.start + actor
        self._seen[actor, component] += 1
        return Stamp(component, int(self._seen[actor, component]))

    def end_of(self, actor: int, stamps: Iterable[Stamp]) -> Array:
        """What others learn from an arrival that copies of threads make at their end: of these alone.

        Copies start after what their threads have waited for.
        """
        known = np.zeros_like(self._seen[0])
        known[self._waits] = self._seen[actor, self._waits]
        for stamp in stamps:
            known[stamp.component] = max(known[stamp.component], stamp.time)
        return known

    def learn(self, actor: int, message: Message) -> None:
        """An actor has passed a barrier."""
        if message is not None:
            mine = self._seen[actor]
            np.maximum(mine, message, out=mine)

    # The rules.

    def _may_read(self, actor: int, places: Array, by: str, may_be_unwritten: bool) -> None:
        written = self._written[places]
        known = self._seen[actor][self._writer[places]] >= written
        if np.count_nonzero(known) < len(known):
            self._race("reads", actor, places[~known])
        if not may_be_unwritten and np.count_nonzero(written) < len(written):
            place = self._names.place(int(places[written == 0][0]))
            raise MachineError(f"{self._names.actor(actor)} reads {place}, which nobody wrote")
        if by:
            self._may_follow(actor, places, f"a {by} of {self._names.actor(actor)} reads")

    def _may_follow(self, actor: int, places: Array, does: str) -> None:
        """The asynchronous proxy sees ordinary stores only after a fence."""
        lost = self._unfenced[places] & (self._fenced_by[places] >> actor & 1 == 0)
        if np.count_nonzero(lost):
            place = int(places[lost][0])
            raise RaceError(f"{does} {self._names.place(place)} without a proxy fence after {self._last_write(place)}")

    def _may_write(self, actor: int, places: Array, is_part: bool = False) -> None:
        seen = self._seen[actor]
        if not is_part:
            known = seen[self._writer[places]] >= self._written[places]
            if np.count_nonzero(known) < len(known):
                self._race("writes", actor, places[~known])
        unknown = self._reads[places] > seen[self._readers]
        if np.count_nonzero(unknown):
            index, column = np.argwhere(unknown)[0]
            who, (queue, reader) = "a copy to another program", divmod(self._readers[column], self._actors)
            if queue <= len(QUEUES):
                who = (f"a {QUEUES[queue - 1]} of " if queue else "") + self._names.actor(reader)
            raise RaceError(
                f"race: {self._names.actor(actor)} writes {self._names.place(int(places[index]))}, "
                f"which {who} may still have to read"
            )

    def _race(self, does: str, actor: int, places: Array) -> None:
        place = int(places[0])
        raise RaceError(
            f"race: {self._names.actor(actor)} {does} {self._names.place(place)}, "
            f"and nothing orders that after {self._last_write(place)}"
        )

    def _last_write(self, place: int) -> str:
        writer, line = int(self._writer[place]), self._names.line(int(self._line[place]))
        return f"the write of {self._names.actor(writer) if writer < self._actors else 'a copy'} at {line}"

    def _wrote(self, places: Array, component: int, time: int, line: int) -> None:
        self._writer[places], self._written[places], self._line[places] = component, time, line
        self._fenced_by[places] = 0

    def _new(self, component: int) -> Stamp:
        self._started[component] += 1
        return Stamp(component, int(self._started[component]))

    def _has_read(self, component: int, places: Array, time: int) -> None:
        """Reads of a component are kept in a column that is made when it first reads."""
        if component not in self._readers:
            self._readers.append(component)
            self._reads = np.concatenate([self._reads, np.zeros((len(self._reads), 1), np.int32)], axis=1)
        self._reads[places, self._readers.index(component)] = time


def joined(old: Message, new: Message) -> Message:
    """Both messages in one."""
    if old is None or new is None:
        return new if old is None else old
    return np.maximum(old, new)
