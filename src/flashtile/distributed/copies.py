"""A ring's transfers by copy engines of GPUs that reach one another's memory, in place of the process group's kernels.

Such kernels take multiprocessors from those that they should run beside; a copy engine takes none. Each rank pushes
into memory of the others, which PyTorch's symmetric memory maps for it. What a stage receives has a place there, of
which there are as many as are in use at once: keys are read in the stage after they came, sums are added to in that
stage and sent in the one after it, and what comes home is added before more can come. A push waits until its receiver
says that the place is free, and says when it is done, by signals among streams: the host waits for neither. Multicast
is not used.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile import settings
from flashtile.distributed.exchange import NOTHING, Line, Parcel, Pending, named, stage_name

# Places of each kind, which stages take in turn; and its signals, that a place is free and that it is filled.
PLACES = {"keys": 2, "sums": 3, "back": 1}
_FREE = {"keys": 0, "sums": 2, "back": 4}
# A tensor starts on a multiple, in bytes.
_ALIGNMENT = 256


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
        self.size = size
        self.local: Tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self.local, line.group)
        self._stream = torch.cuda.Stream(device)
        # A signal that does not come in time ends the process's work on the GPU.
        self._timeout_ms = round(line.group._get_backend(device).options._timeout.total_seconds() * 1000)

    def of(self, peer: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor at a place of a peer's memory, in bytes from its start."""
        found: Tensor = self._handle.get_buffer(peer, list(shape), dtype, start // dtype.itemsize)
        return found

    def put(self, peer: int, signal: int) -> None:
        """Gives a peer a signal, when the stream gets there."""
        self._handle.put_signal(peer, signal, self._timeout_ms)

    def wait(self, peer: int, signal: int) -> None:
        """Has the stream wait for a signal of a peer."""
        self._handle.wait_signal(peer, signal, self._timeout_ms)

    @contextlib.contextmanager
    def beside(self) -> Iterator[list[Any]]:
        """Queues what is done inside on a stream of its own, after all that was queued on the current one.

        Yields:
            A list that then holds an event at its end.
        """
        events: list[Any] = []
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield events
            events.append(self._stream.record_event())


# By process group. Calls of all kinds share it: one stream at a time uses a ring.
_memories: dict[Any, Memory] = {}


def memory_of(line: Line, device: torch.device, size: int) -> Memory:
    """Memory of at least so many bytes; all ranks ask for the same. What is too small is replaced."""
    found = _memories.get(line.group)
    if found is None or found.size < size:
        # In powers of two, so that calls of growing lengths do not each map new memory.
        found = _memories[line.group] = Memory(line, device, 1 << max(size - 1, 0).bit_length())
    return found


def may_copy(device: torch.device) -> bool:
    """Whether a device has copy engines, and the setting asks for them."""
    return device.type == "cuda" and settings.COPIES.enabled()


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
                    size += -(-bytes_of_one // _ALIGNMENT) * _ALIGNMENT
        self._memory = memory_of(line, device, size)

    def room(self, kind: str, number: int, part: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """The place of what a stage receives; see ``exchange.Messages.room``."""
        start = self._starts[kind, number % PLACES[kind], part]
        return self._memory.local[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(list(shape))

    def post(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Queues all of a stage; see ``exchange.Messages.post``."""
        if not (sends or receives):
            return NOTHING
        peers = sorted({self._line.members[parcel.peer] for parcel in (*sends, *receives)})
        with self._memory.beside() as events:
            named(stage_name(number), peers, self._queue, number, sends, receives)
        return Pending(stage_name(number), [(_Arrival(events[0]), peers)], sends, receives)

    def _queue(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        memory = self._memory
        for parcel in receives:
            memory.put(parcel.peer, _FREE[parcel.kind])
        for parcel in sends:
            memory.wait(parcel.peer, _FREE[parcel.kind])
            for part, x in enumerate(parcel.tensors):
                if x is not None:
                    start = self._starts[parcel.kind, number % PLACES[parcel.kind], part]
                    memory.of(parcel.peer, start, x.shape, x.dtype).copy_(x)
            memory.put(parcel.peer, _FREE[parcel.kind] + 1)
        for parcel in receives:
            memory.wait(parcel.peer, _FREE[parcel.kind] + 1)


class _Arrival:
    """An event, for the current stream to wait for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
