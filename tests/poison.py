"""Fills what PyTorch would leave uninitialised with NaN, so that an element no kernel wrote shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, torch.empty and its kin return NaN in float tensors and the largest value in integer ones."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the compiler, for seconds
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
