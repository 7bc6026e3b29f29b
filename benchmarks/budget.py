"""Ends a process in time whatever it is doing, since no exception reaches a thread that waits for a device."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

# What a process returns that was stopped in the middle of something.
OUT_OF_TIME = 75


@contextlib.contextmanager
def hard_stop(budget_s: float | None, last_words: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ends the process if the block takes too long.

    Args:
        budget_s: Seconds from now; None for no limit.
        last_words: Called first, in another thread than the one that hangs; must not touch the device.
    """
    if budget_s is None:
        yield
        return

    def stop() -> None:
        try:
            last_words()
            sys.stdout.flush()
        finally:
            os._exit(OUT_OF_TIME)

    timer = threading.Timer(max(0.0, budget_s), stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
