"""The state of an mbarrier, and what is said when everybody waits."""

from __future__ import annotations

from collections.abc import Iterable

from tests.machine.clocks import Message, Stamp, joined
from tests.machine.errors import DeadlockError, MachineError, RaceError


class Barrier:
    """An mbarrier: a phase ends when ``count`` arrivals and all announced bytes are in.

    PTX ISA, "Asynchronous Barriers: mbarrier". Who waits for a phase learns what those knew who arrived in it. Parities
    tell two phases apart: no phase may end before all who wait for the one before it have seen its end.

    Attributes:
        name: For messages.
        count: Arrivals of a phase, 0 before the barrier is initialised.
        phase: How many phases have ended.
        message: What is known to who waited for the last phase that ended.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.phase = 0
        self.message: Message = None
        self._pending = 0
        self._bytes = 0
        self._arriving: Message = None
        self._seen_by: dict[str, Stamp] = {}

    def init(self, count: int) -> None:
        """From now on a phase takes so many arrivals."""
        if self.count:
            raise MachineError(f"{self.name} is initialised twice")
        self.count = self._pending = count

    def arrive(self, times: int, message: Message, expected: int = 0) -> None:
        """Arrivals of one who knows ``message``, and bytes that copies will bring."""
        if times > self._pending:
            raise MachineError(f"{self.name}: {times} arrivals where {self._pending} of {self.count} are awaited")
        self._pending -= times
        self._bytes += expected
        self._take(message)

    def land(self, num_bytes: int, message: Message) -> None:
        """A copy has brought its bytes."""
        self._bytes -= num_bytes
        self._take(message)

    def seen_by(self, name: str, wait: Stamp) -> None:
        """Somebody has waited for the last phase that ended."""
        self._seen_by[name] = wait

    def is_over(self, parity: int) -> bool:
        """Whether the phase of this parity has ended."""
        if not self.count:
            raise MachineError(f"{self.name} is waited for before it is initialised")
        return self.phase % 2 != parity

    def awaited(self, parity: int) -> str:
        """What somebody waits for here."""
        return (
            f"parity {parity} of {self.name}, in phase {self.phase}: "
            f"{self._pending} of {self.count} arrivals and {self._bytes} bytes are missing"
        )

    def _take(self, message: Message) -> None:
        self._arriving = joined(self._arriving, message)
        if self._pending == 0 and self._bytes == 0:
            seen, self._seen_by = self._seen_by, {}
            for name, wait in seen.items():
                if self._arriving is not None and self._arriving[wait.component] < wait.time:
                    raise RaceError(
                        f"race: phase {self.phase} of {self.name} ends, and nothing orders that after {name} has seen "
                        f"the end of phase {self.phase - 1}"
                    )
            self.phase += 1
            self._pending = self.count
            self.message, self._arriving = self._arriving, None


class ClusterBarrier:
    """The barrier of a cluster: who arrives waits for all of its programs who have not ended.

    PTX ISA, "barrier.cluster".
    """

    def __init__(self) -> None:
        self._arrivals: dict[int, int] = {}
        self._messages: list[Message] = []

    def join(self, actor: int) -> None:
        """Others wait for an actor from now on."""
        self._arrivals[actor] = 0

    def leave(self, actor: int) -> None:
        """An actor has ended."""
        del self._arrivals[actor]

    def arrive(self, actor: int, message: Message) -> None:
        """An actor who knows ``message`` is there."""
        phase = self._arrivals[actor]
        if phase == len(self._messages):
            self._messages.append(None)
        self._messages[phase] = joined(self._messages[phase], message)
        self._arrivals[actor] += 1

    def is_over(self, actor: int) -> bool:
        """Whether all have arrived as often as the actor."""
        return min(self._arrivals.values()) >= self._arrivals[actor]

    def message(self, actor: int) -> Message:
        """What is known to the actor once that is so."""
        return self._messages[self._arrivals[actor] - 1]

    def awaited(self, actor: int) -> str:
        """What the actor waits for here."""
        late = sum(each < self._arrivals[actor] for each in self._arrivals.values())
        return f"the barrier of its cluster: {late} of {len(self._arrivals)} are missing"


def deadlock(waits: Iterable[tuple[str, str]]) -> DeadlockError:
    """The error for when nobody can go on: who waits for what."""
    return DeadlockError("deadlock, everybody waits:\n" + "\n".join(f"  {who} waits for {what}" for who, what in waits))
