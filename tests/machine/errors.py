"""What hardware does not forgive, as exceptions."""

from __future__ import annotations


class MachineError(AssertionError):
    """The kernel did something that hardware does not forgive."""


class RaceError(MachineError):
    """Two accesses to one place, at least one of them a write, that nothing orders."""


class DeadlockError(MachineError):
    """Everybody waits."""
