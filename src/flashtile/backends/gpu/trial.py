"""Tiles that Triton's kernels run with in place of the tables', as ``flashtile tune`` compares them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# The portable backend's, and decode, which both GPU backends run.
KERNELS = {
    "forward", "dkdv", "dk", "dv", "dq", "dbias", "diagonals", "quantized", "decode", "second_rows", "second_dq",
    "second_dkdv",
}  # fmt: skip
_held: dict[str, Any] = {}
_all: tuple[tuple[str, Any], ...] = ()


@contextlib.contextmanager
def trial(**configs: Any) -> Iterator[None]:
    """Runs the named ``KERNELS`` with the given tiles, each of the class in the kernel's own ``config`` module."""
    global _held, _all
    if not configs.keys() <= KERNELS:
        raise ValueError(f"no kernel is called {', '.join(sorted(configs.keys() - KERNELS))}")
    before, _held = _held, _held | configs
    _all = tuple(_held.items())
    try:
        yield
    finally:
        _held = before
        _all = tuple(_held.items())


def tried(kernel: str) -> Any:
    """The tiles on trial of a kernel, or None."""
    return _held.get(kernel)


def on_trial() -> tuple[tuple[str, Any], ...]:
    """All tiles on trial; a kernel's depend on these and the problem alone."""
    return _all
