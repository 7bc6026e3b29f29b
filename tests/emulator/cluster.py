"""Programs of a cluster, which reach each other's shared memory: what ``hopper.device.cluster`` does by PTX.

An address counts bytes from an allocation on, whose number is in the upper bits; the programs of a cluster allocate the
same in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.emulator.language import Language
from tests.emulator.machine import Program
from tests.emulator.values import Barriers, Descriptor, Operand, SharedMemory, Value, value_of
from tests.machine import MachineError
from tests.machine.clocks import Message

_ALLOCATION = 1 << 20


class ClusterLanguage(Language):
    """What the language has besides."""

    def cluster_sync(self) -> None:
        self.task.pause()
        self.task.cluster_sync()

    def address_of(self, buffers: SharedMemory | Barriers) -> Value:
        return value_of(_ALLOCATION * [*map(id, self.task.program.buffers)].index(id(buffers)))

    def arrive_at_other(self, address: Operand, rank: Operand) -> None:
        self.barrier_arrive(_at(self._program(rank), address, Barriers))

    def copy_to_other(self, to: Operand, source: Operand, barrier: Operand, rank: Operand, num_bytes: int) -> None:
        program = self._program(rank)
        memory, origin = _at(program, to, SharedMemory), _at(self.task.program, source, SharedMemory)
        signalled = _at(program, barrier, Barriers)
        if num_bytes != origin.data.nbytes or num_bytes != memory.data.nbytes:
            raise MachineError(f"a copy of {num_bytes} bytes from {origin.shape} to {memory.shape}")

        def finish(message: Message) -> None:
            memory.data.copy_(origin.data)
            signalled.one.land(num_bytes, message)

        self.task.pause()
        signalled.reached_by(self.task)
        self.task.start_move(origin.places, memory.places, program, finish)

    def multicast_box(
        self, desc: Descriptor, number: int, kernel: str, to: Operand, barrier: Operand, at: Sequence[Operand]
    ) -> None:  # fmt: skip
        for program in self.task.program.cluster:
            memory = _at(program, to, SharedMemory, desc.block_shape[-1])
            self.copy_in(desc, at, _at(program, barrier, Barriers), memory.reshape(desc.block_shape))

    def _program(self, rank: Operand) -> Program:
        return self.task.program.cluster[int(value_of(rank))]


def _at(program: Program, address: Operand, kind: type, cols: int = 0) -> Any:
    """The buffer or barrier at an address of a program, or so many columns of a buffer, which lie one after another."""
    number, offset = divmod(int(value_of(address)), _ALLOCATION)
    if number >= len(program.buffers):
        raise MachineError(f"program {program.number} has not yet allocated what another one reaches")
    buffers = program.buffers[number]
    index, rest = divmod(offset, buffers.buffer_bytes)
    found = buffers.index(index) if isinstance(buffers, kind) else None
    if isinstance(found, SharedMemory) and cols:
        place, rest = divmod(rest, found.data.nbytes * cols // found.shape[1])
        found = found if cols == found.shape[1] else found.slice(place * cols, cols, 1)
    if rest or found is None:
        raise MachineError(f"no {kind.__name__} begins at byte {offset} of {buffers}")
    return found
