"""Part two of the demo: time and peak memory for growing lengths, until standard attention runs out of memory."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from flashtile.core.errors import InvalidInputError
from flashtile_lab.commands.demo.probe import METHODS, Point, Setting, serve


def budget_bytes(asked_mb: int | None, device: torch.device, quick: bool) -> int:
    """The memory that a call may take: as asked, or what shows the difference soon.

    Raises:
        InvalidInputError: If this machine does not have what was asked for.
    """
    available = _available_bytes(device)
    if asked_mb is None:
        default = 8 << 30 if device.type == "cuda" else 1 << 30
        return min(96 << 20 if quick else default, available // 2)
    if asked_mb << 20 > available:
        raise InvalidInputError(
            "--memory-budget-mb", f"is {asked_mb}, but only {available >> 20} MB of memory are free here"
        )
    return asked_mb << 20


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    facts = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", facts.read_text()) if facts.exists() else None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def points(setting: Setting, first: int, beyond: int, patience_s: float) -> Iterator[Point]:
    """Measures every method at ``first`` tokens, twice as many and so on: forward, then with the backward.

    Args:
        setting: What the calls share.
        first: The shortest length.
        beyond: How many lengths the others are measured at after standard attention has stopped fitting.
        patience_s: A call expected to take longer is not run.

    Raises:
        InvalidInputError: If not even the first length fits the budget.
    """
    probe = Probe(setting)
    try:
        for backward in (False, True):
            seqlen, left = first, {**dict.fromkeys(METHODS, beyond + 1), "standard": 1}
            while max(left.values()) > 0:
                for method in [each for each in left if left[each] > 0]:
                    point = probe.measure(method, backward, seqlen)
                    if seqlen == first and not point.fits:
                        raise InvalidInputError(
                            "--memory-budget-mb",
                            f"is {setting.budget_bytes >> 20}, too small to run {method} attention over {first} tokens "
                            "once",
                        )
                    yield point
                    # Time and memory grow fourfold at most. A call that will not fit fails at once, however long it
                    # would take.
                    too_slow = 4 * point.time_s > patience_s
                    if not point.fits or (too_slow and 4 * point.peak_bytes < setting.budget_bytes):
                        left[method] = 0
                if left["standard"] <= 0:
                    left = {method: rest - 1 for method, rest in left.items()}
                seqlen *= 2
    finally:
        probe.stop()


class Probe:
    """The measuring child process.

    On a CPU each call has a process of its own: buffers that mathematics libraries keep from one call would hide what
    the next one takes. Linux forks it from a server that has imported everything and computed nothing.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        forked, get_context = sys.platform == "linux" and setting.device == "cpu", multiprocessing.get_context
        self._context = get_context("forkserver") if forked else get_context("spawn")
        self._context.set_forkserver_preload(["flashtile_lab.commands.demo.probe"])
        self._process: BaseProcess | None = None

    def measure(self, method: str, backward: bool, seqlen: int) -> Point:
        """One measurement; a process killed by a signal, as systems do for memory, means that the call does not fit."""
        if self._process is None:
            self._connection, theirs = self._context.Pipe()
            self._process = self._context.Process(target=serve, args=(theirs, self._setting), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._connection.send((method, backward, seqlen))
            point: Point = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self._process = None
            if code is not None and code < 0:
                return Point(method, backward, seqlen)
            raise RuntimeError(f"the measuring process ended with code {code}") from None
        if self._setting.device == "cpu":
            self.stop()
        return point

    def stop(self) -> None:
        """Ends the process, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
