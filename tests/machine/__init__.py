"""Order in shared and global memory, for the emulator of the kernels' source and the interpreter of their PTX.

``clocks`` finds races and missing proxy fences in a program's shared memory, ``tensors`` races in global memory, where
atomics order too. ``barriers`` counts phases of mbarriers and says what is missing where everybody waits. Who acts is a
number here: a warp-specialised role in the emulator, a warp in the interpreter.
"""

from __future__ import annotations

from tests.machine.barriers import Barrier, ClusterBarrier, deadlock
from tests.machine.clocks import Names, Stamp, Watch
from tests.machine.errors import DeadlockError, MachineError, RaceError
from tests.machine.tensors import Order, Tensors

__all__ = [
    "Barrier", "ClusterBarrier", "DeadlockError", "MachineError", "Names", "Order", "RaceError", "Stamp", "Tensors",
    "Watch", "deadlock",
]  # fmt: skip
