"""The counter of an integration's calls."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import torch

import flashtile


class Calls:
    """Counts another library's attention calls: those which flashtile ran, and by reason those left to that library.

    A call inside a function that ``torch.compile`` traces is not counted: the program would guard on the counter's
    value.

    Args:
        log: The name of the logger that gets one line at the first call that flashtile runs.

    Attributes:
        served: Calls that flashtile ran.
        left: By reason, the number of calls that the other library ran.
    """

    def __init__(self, log: str = "flashtile") -> None:
        self._lock = threading.Lock()
        self._told, self._logger = False, logging.getLogger(log)
        self.clear()

    def clear(self) -> None:
        """Starts counting again."""
        with self._lock:
            self.served = 0
            self.left: Counter[str] = Counter()

    def serve(self) -> None:
        """Counts a call that flashtile runs."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self.served += 1
                told, self._told = self._told, True
            if not told:
                self._logger.info("attention runs with flashtile %s", flashtile.__version__)

    def leave(self, reason: str) -> None:
        """Counts a call that the other library runs."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self.left[reason] += 1

    def __str__(self) -> str:
        lines = [f"{self.served} calls ran with flashtile, {self.left.total()} were left"]
        return "\n".join(lines + [f"  {count} left: {reason}" for reason, count in self.left.most_common()])
