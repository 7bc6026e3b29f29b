"""A ring's transfers by copy engines of GPUs that reach one another's memory, in place of the process group's kernels.

Those kernels take multiprocessors from the kernels that they should run beside, or wait until some are free; a copy
engine takes none. Each rank writes into memory of the others, which PyTorch's symmetric memory maps for it. Each tensor
that a stage receives has a place in that memory, and each kind has as many places as are in use at once: keys are read
in the stage after they arrived, sums are added to in that stage and sent in the next, and sums that come home are added
before more arrive. A rank writes only after the receiver has signalled that the place is free, and signals when it has
written. A signal is a word of memory that streams write and wait for, without a kernel. Multicast is not used.
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
from flashtile.distributed.exchange import NOTHING, Parcel, Pending, RankLine, Ranks, named, stage_name

# Places of each kind, used by stages in turn; and its signals "the place is free", with "the place is filled" after it.
PLACES = {"keys": 2, "sums": 3, "back": 1}
_FREE = {"keys": 0, "sums": 2, "back": 4}
SIGNALS = 6
# A tensor starts on a multiple, in bytes.
_ALIGNMENT = 256
# Period in seconds of the check of what streams wait for; shorter if a group's timeout is short.
_PERIOD_S = 1.0


class Memory:
    """Memory of this rank that all ranks of a line may write to, and the same memory of the other ranks.

    Args:
        line: The ranks. All of them make memory of the same size; the constructor waits for all.
        device: A GPU.
        size: In bytes.
    """

    def __init__(self, line: RankLine, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        # PyTorch reads this when it maps memory.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.size, self._rank, self._ranks = size, line.rank, line.size
        # Signals come first, one of each for each peer. A signal is 1 from the time it is given until it was waited
        # for.
        self._first = _aligned(4 * SIGNALS * line.size)
        whole = symmetric.empty(self._first + size, dtype=torch.uint8, device=device)
        whole[: self._first].zero_()
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(whole, line.group)
        self._whole = whole
        self._tensors: dict[Any, Tensor] = {}
        self._start = torch.cuda.Event()
        self._words = [self._handle.get_buffer(peer, [1], torch.int32, 0).data_ptr() for peer in range(line.size)]
        # The priority differs from the usual one, so that the stream shares no queue with a stream that it should run
        # beside.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last = self._stream
        self._watch = _Watch(device, line.group._get_backend(device).options._timeout.total_seconds())

    def at(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in this rank's memory, ``start`` bytes after the signals."""
        key = start, tuple(shape), dtype
        found = self._tensors.get(key)
        if found is None:
            first = (self._first + start) // dtype.itemsize
            # Calls in inference mode share the tensor with calls that record gradients.
            with torch.inference_mode(False):
                found = self._tensors[key] = self._handle.get_buffer(self._rank, list(shape), dtype, first)
        return found

    def copy(self, peer: int, start: int, x: Tensor) -> None:
        """Queues the copy of a contiguous tensor to a place of a peer's memory."""
        driver.copy(self._stream.cuda_stream, self._words[peer] + self._first + start, x.data_ptr(), x.nbytes)

    def put(self, peer: int, signal: int) -> None:
        """Queues a signal to a peer, which has waited for the signal before."""
        driver.write_value(self._stream.cuda_stream, self._words[peer] + 4 * (signal * self._ranks + self._rank), 1)

    def wait(self, peer: int, signal: int) -> None:
        """Queues a wait for a signal of a peer, and its reset."""
        word = self._words[self._rank] + 4 * (signal * self._ranks + peer)
        driver.wait_value(self._stream.cuda_stream, word, 1)
        driver.write_value(self._stream.cuda_stream, word, 0)

    @contextlib.contextmanager
    def beside(self, what: str, peers: Sequence[int]) -> Iterator[list[Any]]:
        """Queues the work done inside on a separate stream, after all work queued on the current stream.

        Yields:
            A list. At the end it holds the event that marks the end of the work.

        Raises:
            ExchangeError: An earlier signal did not come in time. A later error names ``what`` and ``peers``.
        """
        if self._watch.error is not None:
            raise self._watch.error
        events: list[Any] = []
        current = torch.cuda.current_stream(self._stream.device)
        is_captured = torch.cuda.is_current_stream_capturing()
        self._start.record(current)
        self._stream.wait_event(self._start)
        if self._last != current and not is_captured:
            # Work queued earlier on the last stream may still read the places.
            self._stream.wait_stream(self._last)
            self._last = current
        yield events
        if not is_captured:
            self._watch.expect(self._stream.cuda_stream, what, peers)
        events.append(self._stream.record_event())


class _Watch(threading.Thread):
    """Ends a process's work on a GPU if a signal does not come in time; otherwise a stream would wait for ever.

    A stage ends by writing its number to host memory, which a thread reads. If the number is not there ``timeout_s``
    seconds after the stage was queued, a kernel fails, and with it all work on the GPU: whoever waits gets a CUDA
    error.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(name="flashtile-copies", daemon=True)
        self.error: ExchangeError | None = None
        self._timeout_s, self._count = timeout_s, 0
        self._done = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._awaited: collections.deque[tuple[int, float, str, Sequence[int]]] = collections.deque()
        self._stream = torch.cuda.Stream(device)
        self._holds = torch.zeros((), dtype=torch.bool, device=device)
        # This loads the kernel now; no kernel can be loaded while a stream waits.
        torch._assert_async(~self._holds)
        torch.cuda.synchronize(device)
        self.start()

    def expect(self, stream: int, what: str, peers: Sequence[int]) -> None:
        """Queues the write that ends a stage."""
        self._count += 1
        self._awaited.append((self._count, time.monotonic() + self._timeout_s, what, peers))
        driver.write_value(stream, self._done.data_ptr(), self._count, bits=64)

    def run(self) -> None:
        """Checks until a stage is late."""
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


# Memory by process group, shared by calls of all kinds.
_memories: dict[Any, Memory] = {}


def memory_of(line: RankLine, device: torch.device, size: int) -> Memory:
    """Memory of at least ``size`` bytes; all ranks ask for the same. Memory that is too small is replaced."""
    found = _memories.get(line.group)
    if found is None or found.size < size:
        # Sizes are powers of two, so that calls of growing lengths do not each map new memory.
        found = _memories[line.group] = Memory(line, device, 1 << max(size - 1, 0).bit_length())
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def reach(device: torch.device) -> list[str]:
    """Identifiers of a GPU and of the GPUs that it can write to, the same in every process; empty for other devices."""
    if device.type != "cuda":
        return []
    others = (i for i in range(torch.cuda.device_count()) if i != device.index)
    reached = [i for i in others if torch.cuda.can_device_access_peer(device, i)]
    # The first digits distinguish GPUs, and the record that all ranks exchange stays short.
    return [str(torch.cuda.get_device_properties(i).uuid)[:13] for i in (device.index, *reached)]


def may_copy(ranks: Ranks, reached: Sequence[Sequence[str]]) -> bool:
    """Whether the setting lets copy engines carry keys, and each rank reaches the memory of all others of its ring.

    ``reached`` holds the results of ``reach`` on each rank, in the order of the ranks' shards.

    Raises:
        InvalidInputError: The setting is on, and a rank does not reach another one. All ranks raise it.
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
    """Sends and receives of a ring's stages, with the interface of ``exchange.Messages``.

    Args:
        line: The ring.
        device: The device of the tensors.
        sizes: By kind, the most bytes of a tensor.
    """

    def __init__(self, line: RankLine, device: torch.device, sizes: Mapping[str, int]) -> None:
        self._line, self._starts = line, {}
        size = 0
        for kind, bytes_of_one in sizes.items():
            for place in range(PLACES[kind]):
                for part in range(2):
                    self._starts[kind, place, part] = size
                    size += _aligned(bytes_of_one)
        self._memory = memory_of(line, device, size)

    def room(self, kind: str, number: int, part: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """The place of a tensor that a stage receives; see ``exchange.Messages.room``."""
        start = self._starts[kind, number % PLACES[kind], part]
        return self._memory.at(start, shape, dtype)

    def post(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Queues all transfers of a stage; see ``exchange.Messages.post``."""
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
    """An event that the current stream waits for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
