"""A ring's transfers by copy engines of GPUs that reach one another's memory, in place of the process group's kernels.

Such kernels take multiprocessors from those that they should run beside, or wait until these leave some; a copy engine
takes none. Each rank pushes into memory of the others, which PyTorch's symmetric memory maps for it. What a stage
receives has a place there, of which there are as many as are in use at once: keys are read in the stage after they
came, sums are added to in that stage and sent in the one after it, and what comes home is added before more can come. A
push waits until its receiver says that the place is free, and says when it is done. These signals are words of memory
that streams write and wait for, without a kernel: nothing takes part but GPUs' queues of work. Multicast is not used.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu import driver
from flashtile.core import settings
from flashtile.core.errors import ExchangeError, InvalidInputError
from flashtile.distributed.exchange import NOTHING, Line, Parcel, Pending, Ranks, named, stage_name

# Places of each kind, which stages take in turn; and its signals, that a place is free and that it is filled.
PLACES = {"keys": 2, "sums": 3, "back": 1}
_FREE = {"keys": 0, "sums": 2, "back": 4}
SIGNALS = 6
# A tensor starts on a multiple, in bytes.
_ALIGNMENT = 256
# How often what streams wait for is looked at, and sooner where a group's timeout is short.
_PERIOD_S = 1.0


class Memory:
    """Memory of this rank that all ranks of a line may write to, and theirs.

    Args:
        line: The ranks; all of them make one of the same size, which waits for all.
        device: A GPU.
        size: In bytes.
    """

    def __init__(self, line: Line, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        # Read when memory is mapped.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.size, self._rank, self._ranks = size, line.rank, line.size
        # The signals come first: one of each for each peer, 1 from when it is given until it was waited for.
        self._first = _aligned(4 * SIGNALS * line.size)
        whole = symmetric.empty(self._first + size, dtype=torch.uint8, device=device)
        whole[: self._first].zero_()
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(whole, line.group)
        self._whole = whole
        self._tensors: dict[Any, Tensor] = {}
        self._start = torch.cuda.Event()
        self._words = [self._handle.get_buffer(peer, [1], torch.int32, 0).data_ptr() for peer in range(line.size)]
        # Of another priority than streams usually have, so that it shares no queue with one that it should run beside.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last = self._stream
        self._watch = _Watch(device, line.group._get_backend(device).options._timeout.total_seconds())

    def at(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor at a place of this rank's memory, in bytes from its start."""
        key = start, tuple(shape), dtype
        found = self._tensors.get(key)
        if found is None:
            first = (self._first + start) // dtype.itemsize
            # Calls in inference mode share it with those that record gradients.
            with torch.inference_mode(False):
                found = self._tensors[key] = self._handle.get_buffer(self._rank, list(shape), dtype, first)
        return found

    def copy(self, peer: int, start: int, x: Tensor) -> None:
        """Copies a contiguous tensor to a place of a peer's memory, when the stream gets there."""
        driver.copy(self._stream.cuda_stream, self._words[peer] + self._first + start, x.data_ptr(), x.nbytes)

    def put(self, peer: int, signal: int) -> None:
        """Gives a peer a signal, when the stream gets there. It has waited for the one before."""
        driver.write_value(self._stream.cuda_stream, self._words[peer] + 4 * (signal * self._ranks + self._rank), 1)

    def wait(self, peer: int, signal: int) -> None:
        """Has the stream wait for a signal of a peer, and take it back."""
        word = self._words[self._rank] + 4 * (signal * self._ranks + peer)
        driver.wait_value(self._stream.cuda_stream, word, 1)
        driver.write_value(self._stream.cuda_stream, word, 0)

    @contextlib.contextmanager
    def beside(self, what: str, peers: Sequence[int]) -> Iterator[list[Any]]:
        """Queues what is done inside on a stream of its own, after all that was queued on the current one.

        Yields:
            A list that then holds an event at its end.

        Raises:
            ExchangeError: An earlier signal did not come in time. Of these it would name ``what`` and ``peers``.
        """
        if self._watch.error is not None:
            raise self._watch.error
        events: list[Any] = []
        current = torch.cuda.current_stream(self._stream.device)
        is_captured = torch.cuda.is_current_stream_capturing()
        self._start.record(current)
        self._stream.wait_event(self._start)
        if self._last != current and not is_captured:
            # What it queued before may still read the places.
            self._stream.wait_stream(self._last)
            self._last = current
        yield events
        if not is_captured:
            self._watch.expect(self._stream.cuda_stream, what, peers)
        events.append(self._stream.record_event())


class _Watch(threading.Thread):
    """Ends a process's work on a GPU when a signal does not come in time: a stream would wait for it for ever.

    A stage ends by writing its number to memory of the host, where a thread looks for it. If it is not there
    ``timeout_s`` after it was queued, a kernel fails and all work with it: who waits for the GPU gets an error of CUDA.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(name="flashtile-copies", daemon=True)
        self.error: ExchangeError | None = None
        self._timeout_s, self._count = timeout_s, 0
        self._done = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._awaited: collections.deque[tuple[int, float, str, Sequence[int]]] = collections.deque()
        self._stream = torch.cuda.Stream(device)
        self._holds = torch.zeros((), dtype=torch.bool, device=device)
        # Loaded now: nothing can be while a stream waits.
        torch._assert_async(~self._holds)
        torch.cuda.synchronize(device)
        self.start()

    def expect(self, stream: int, what: str, peers: Sequence[int]) -> None:
        """Queues the end of a stage."""
        self._count += 1
        self._awaited.append((self._count, time.monotonic() + self._timeout_s, what, peers))
        driver.write_value(stream, self._done.data_ptr(), self._count, bits=64)

    def run(self) -> None:
        """Looks until a stage is late."""
        while self.error is None:
            time.sleep(min(_PERIOD_S, self._timeout_s / 4))
            done = int(self._done)
            while self._awaited and self._awaited[0][0] <= done:
                self._awaited.popleft()
            if self._awaited and self._awaited[0][1] < time.monotonic():
                _, _, what, peers = self._awaited[0]
                self.error = ExchangeError(what, peers, f"no signal in {self._timeout_s:g} s")
                print(f"flashtile: {self.error}; the process's work on the GPU ends", file=sys.stderr, flush=True)
                with torch.cuda.stream(self._stream):
                    torch._assert_async(self._holds)


# By process group; calls of all kinds share it.
_memories: dict[Any, Memory] = {}


def memory_of(line: Line, device: torch.device, size: int) -> Memory:
    """Memory of at least so many bytes; all ranks ask for the same. What is too small is replaced."""
    found = _memories.get(line.group)
    if found is None or found.size < size:
        # In powers of two, so that calls of growing lengths do not each map new memory.
        found = _memories[line.group] = Memory(line, device, 1 << max(size - 1, 0).bit_length())
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def reach(device: torch.device) -> list[str]:
    """The name of a GPU and of those whose memory it can write to, anywhere the same; empty for another device."""
    if device.type != "cuda":
        return []
    others = (i for i in range(torch.cuda.device_count()) if i != device.index)
    reached = [i for i in others if torch.cuda.can_device_access_peer(device, i)]
    # The first digits tell GPUs apart, and the record that all ranks exchange is short.
    return [str(torch.cuda.get_device_properties(i).uuid)[:13] for i in (device.index, *reached)]


def may_copy(ranks: Ranks, reached: Sequence[Sequence[str]]) -> bool:
    """Whether the setting lets copy engines carry keys, and each rank reaches the memory of all others of its ring.

    ``reached`` is what ``reach`` says on each rank, in the order of their shards.

    Raises:
        InvalidInputError: The setting is on, and a rank does not; on all ranks.
    """
    is_on, apart = settings.COPIES.enabled(), ranks.ulysses.size
    if not is_on and settings.COPIES.get() != "auto":
        return False
    rings = [range(first, len(reached), apart) for first in range(apart)]
    pairs = (pair for ring in rings for pair in itertools.permutations(ring, 2))
    found = next(((i, j) for i, j in pairs if not set(reached[j][:1]) & set(reached[i])), None)
    if found and is_on:
        i, j = (ranks.members[one] for one in found)
        raise InvalidInputError(
            settings.COPIES.name, f"is on, but rank {i} cannot write to the memory of rank {j}'s GPU"
        )
    return not found


class Copies:
    """The sends and receives of a ring's stages, like ``exchange.Messages``.

    Args:
        line: The ring.
        device: Of the tensors.
        sizes: The most bytes of a tensor, by kind.
    """

    def __init__(self, line: Line, device: torch.device, sizes: Mapping[str, int]) -> None:
        self._line, self._starts = line, {}
        size = 0
        for kind, bytes_of_one in sizes.items():
            for place in range(PLACES[kind]):
                for part in range(2):
                    self._starts[kind, place, part] = size
                    size += _aligned(bytes_of_one)
        self._memory = memory_of(line, device, size)

    def room(self, kind: str, number: int, part: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """The place of what a stage receives; see ``exchange.Messages.room``."""
        start = self._starts[kind, number % PLACES[kind], part]
        return self._memory.at(start, shape, dtype)

    def post(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Queues all of a stage; see ``exchange.Messages.post``."""
        if not (sends or receives):
            return NOTHING
        peers = sorted({self._line.members[parcel.peer] for parcel in (*sends, *receives)})
        what = stage_name(number)
        with self._memory.beside(what, peers) as events:
            named(what, peers, self._queue, number, sends, receives)
        return Pending(what, [(_Arrival(events[0]), peers)], sends, receives)

    def _queue(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        memory = self._memory
        for parcel in receives:
            memory.put(parcel.peer, _FREE[parcel.kind])
        for parcel in sends:
            memory.wait(parcel.peer, _FREE[parcel.kind])
            for part, tensors in enumerate(parcel.tensors):
                start = self._starts.get((parcel.kind, number % PLACES[parcel.kind], part), 0)
                for x in tensors:
                    memory.copy(parcel.peer, start, x)
                    start += x.nbytes
            memory.put(parcel.peer, _FREE[parcel.kind] + 1)
        for parcel in receives:
            memory.wait(parcel.peer, _FREE[parcel.kind] + 1)


class _Arrival:
    """An event, for the current stream to wait for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
