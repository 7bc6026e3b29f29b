"""Part two of the demo: time and peak memory for growing lengths, until standard attention runs out of memory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from flashtile.cli.demo.probe import Answer, Request
from flashtile.errors import InvalidInputError


@dataclass(frozen=True)
class Plan:
    """Which calls are measured.

    Attributes:
        template: A request whose method, seqlen and backward are filled in.
        first: The shortest length; each next one is twice as long.
        beyond: How many lengths flashtile is measured at after standard attention has stopped fitting.
        patience_s: A call expected to take longer is not run.
    """

    template: Request
    first: int
    beyond: int
    patience_s: float


@dataclass(frozen=True)
class Point:
    """One measured call.

    Attributes:
        method: ``standard`` or ``flashtile``.
        backward: Whether gradients were computed too.
        seqlen: Queries and keys.
        fits: Whether it ran within the budget.
        peak_bytes: Beyond the inputs; 0 if it did not fit and an allocation failed.
        time_s: Median; 0 if it did not fit.
    """

    method: str
    backward: bool
    seqlen: int
    fits: bool
    peak_bytes: int
    time_s: float


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
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def points(plan: Plan) -> Iterator[Point]:
    """Measures the plan, forward first, then with the backward.

    Raises:
        InvalidInputError: If not even the first length fits the budget.
    """
    with _Probe() as probe:
        for backward in (False, True):
            yield from _curve(plan, probe, backward)


def _curve(plan: Plan, probe: _Probe, backward: bool) -> Iterator[Point]:
    left = {"standard": 1, "flashtile": plan.beyond + 1}
    seqlen = plan.first
    while max(left.values()) > 0:
        for method in ("standard", "flashtile"):
            if left[method] <= 0:
                continue
            request = dataclasses.replace(plan.template, method=method, seqlen=seqlen, backward=backward)
            answer = probe.ask(request)
            if seqlen == plan.first and not answer.fits:
                _refuse_budget(plan, method)
            yield Point(method, backward, seqlen, answer.fits, answer.peak_bytes, answer.time_s)
            # Time and memory grow fourfold at most. A call that will not fit fails at once, however long it would take.
            too_slow = 4 * answer.time_s > plan.patience_s
            if not answer.fits or (too_slow and 4 * answer.peak_bytes < request.budget_bytes):
                left[method] = 0
        if left["standard"] <= 0:
            left["flashtile"] -= 1
        seqlen *= 2


def _refuse_budget(plan: Plan, method: str) -> None:
    megabytes = plan.template.budget_bytes >> 20
    raise InvalidInputError(
        "--memory-budget-mb", f"is {megabytes}, too small to run {method} attention over {plan.first} tokens once"
    )


class _Probe:
    """The measuring child process, started again after it was killed or can measure no second peak."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Probe:
        self._errors = tempfile.TemporaryFile("w+")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._errors.close()

    def ask(self, request: Request) -> Answer:
        """One measurement; a process killed by a signal, as systems do for memory, means that the call does not fit."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self._stop()
            if code < 0:
                return Answer(fits=False)
            self._errors.seek(0)
            raise RuntimeError(f"the measuring process ended with code {code}:\n{self._errors.read()}")
        answer = Answer(**json.loads(line))
        if not answer.reusable:
            self._stop()
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from flashtile.cli.demo.probe import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
