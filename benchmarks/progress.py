"""A progress bar where there is a terminal and rich to draw it, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Reports cells as they start and end.

    Args:
        total: Number of cells.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._start_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            try:
                from rich.progress import Progress as Bar
                from rich.progress import TimeElapsedColumn
            except ImportError:
                return self
            self._bar = Bar(*Bar.get_default_columns(), TimeElapsedColumn())
            self._bar.start()
            self._task = self._bar.add_task("", total=float(self.total))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, name: str) -> None:
        """A cell starts."""
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def part(self, fraction: float) -> None:
        """How far the cell is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done + fraction)

    def end(self, line: str) -> None:
        """A cell is done; the line says how it went."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=float(self.done))
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            elapsed_s = time.monotonic() - self._start_s
            print(f"[{self.done:2}/{self.total}] {elapsed_s:5.1f} s  {line}", flush=True)

    def note(self, line: str) -> None:
        """Something worth knowing that is not the end of a cell."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)
