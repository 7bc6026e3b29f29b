"""Order in one program's shared memory, for the emulator of the kernels' source and the interpreter of their PTX.

``clocks`` finds races and missing proxy fences, ``barriers`` counts phases of mbarriers and says what is missing where
everybody waits. Who acts is a number here: a warp-specialised role in the emulator, a warp in the interpreter.
"""

from __future__ import annotations

from tests.machine.barriers import Barrier, deadlock
from tests.machine.clocks import Names, Stamp, Watch
from tests.machine.errors import DeadlockError, MachineError, RaceError

__all__ = ["Barrier", "DeadlockError", "MachineError", "Names", "RaceError", "Stamp", "Watch", "deadlock"]
