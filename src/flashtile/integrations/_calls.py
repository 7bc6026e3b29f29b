"""The counter of an integration's calls."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import flashtile
from flashtile.ops import operation


class Calls:
    """Counts another library's attention calls: those which flashtile ran, and by reason those left to that library.

    Code that ``torch.compile`` traces cannot count, since its program would depend on the counter's value. There a call
    that flashtile runs carries the counter's name, as an argument of its operator, which counts each time it runs;
    replays of a CUDA graph run no operator. A call that is left carries nothing: it counts once, when it is traced.

    Args:
        name: What traced calls carry; empty if nothing traces its calls.
        log: The name of the logger that gets one line at the first call that flashtile runs.
        on_run: Gets the planned call and the tensors of each run in traced code.

    Attributes:
        served: Calls that flashtile ran.
        left: By reason, the number of calls that the other library ran.
    """

    def __init__(
        self, name: str = "", log: str = "flashtile", on_run: Callable[[Any, Any], None] | None = None
    ) -> None:
        self._lock, self._name, self._on_run = threading.Lock(), name, on_run
        self._told, self._logger = False, logging.getLogger(log)
        if name:
            operation.COUNTERS[name] = self._has_run
        self.clear()

    def clear(self) -> None:
        """Starts counting again."""
        with self._lock:
            self.served = 0
            self.left: Counter[str] = Counter()

    def serve(self) -> None:
        """Counts a call that flashtile runs; in traced code it must carry the counter's name instead: ``carried``."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self.served += 1
                told, self._told = self._told, True
            if not told:
                self._logger.info("attention runs with flashtile %s", flashtile.__version__)

    def carried(self) -> dict[str, Any]:
        """The keywords with which a call is counted whenever it runs, in traced code; none elsewhere."""
        return {"counted_by": self._name} if torch.compiler.is_compiling() else {}

    def leave(self, reason: str) -> None:
        """Counts a call that the other library runs."""
        if torch.compiler.is_compiling():
            self._leave_traced(reason)
        else:
            with self._lock:
                self.left[reason] += 1

    @torch.compiler.assume_constant_result
    def _leave_traced(self, reason: str) -> None:
        with self._lock:
            self.left[f"{reason} (in compiled code, counted once)"] += 1

    def _has_run(self, call: Any, tensors: Any) -> None:
        self.serve()
        if self._on_run is not None:
            self._on_run(call, tensors)

    def __str__(self) -> str:
        lines = [f"{self.served} calls ran with flashtile, {self.left.total()} were left"]
        return "\n".join(lines + [f"  {count} left: {reason}" for reason, count in self.left.most_common()])
