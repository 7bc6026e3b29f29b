"""The forward's tiles."""

from __future__ import annotations

from flashtile.backends.portable import tuned
from flashtile.backends.portable.config import PortableTiles
from flashtile.call.problem import Problem


def choose(problem: Problem, arch: str | None = None) -> PortableTiles:
    """The forward's tiles for a problem, or for an architecture other than its device's."""
    return tuned.choose(problem, "forward", arch)
