"""Tiles that kernels run with in place of the tables': for tuning, tests and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# Without a prefix they are the portable backend's; decode is what both GPU backends run.
KERNELS = {"forward", "dkdv", "dk", "dv", "dq", "dbias", "diagonals", "quantized", "decode"}
KERNELS |= {"hopper_forward", "hopper_big_heads", "hopper_backward", "hopper_big_backward", "hopper_quantized"}
KERNELS |= {"hopper_latent"}
_held: dict[str, Any] = {}
_all: tuple[tuple[str, Any], ...] = ()


@contextlib.contextmanager
def trial(**configs: Any) -> Iterator[None]:
    """Runs the named ``KERNELS`` with the given tiles, each a ``Config`` of the kernel's own ``config`` module.

    Plans of Hopper's forward and backward made before keep theirs: see ``plans.own_plans``.
    """
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
