"""A process that can be trusted to end: with everything it started, at its limit or when it is told to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

from benchmarks.results import ROOT

Ending = Literal["itself", "limit", "stopped"]

_POLL_S = 0.1
_GRACE_S = 3.0
_LOG_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        ending: By ``itself``, at its ``limit``, or because it was ``stopped``.
        code: Exit code, negative for a signal; None if it could not be started.
        seconds: How long it ran.
        log: File with all that it printed.
    """

    ending: Ending
    code: int | None
    seconds: float
    log: Path

    def text(self) -> str:
        """What it printed; of a long log the end."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_CHARACTERS))
            return file.read().decode("utf-8", errors="replace")

    def last_line(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "nothing"


def run_process(
    command: Sequence[str], *, limit_s: float, log: Path, environment: Mapping[str, str], stopped: Event
) -> Outcome:
    """Runs a command in a session of its own, from the root of the sources.

    Args:
        command: Its words.
        limit_s: Seconds after which it is killed with all its descendants in that session.
        log: File that takes everything it prints.
        environment: Variables on top of this process's own; ``src`` and the root lead PYTHONPATH.
        stopped: Set to end it early.

    Returns:
        How it ended.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **environment}
    start_s = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                list(command), cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            file.write(str(error).encode())
            return Outcome("itself", None, 0.0, log)
        ending: Ending = "itself"
        try:
            while process.poll() is None:
                if stopped.is_set() or time.monotonic() - start_s > limit_s:
                    ending = "stopped" if stopped.is_set() else "limit"
                    break
                time.sleep(_POLL_S)
        finally:
            # Also after an end of its own: what it left behind would run beside the next stage.
            _end_session(process)
    return Outcome(ending, process.returncode, time.monotonic() - start_s, log)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Asks everyone in the process's session to end, then makes them."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        members = _members(process)
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)
        until_s = time.monotonic() + patience_s
        while members and time.monotonic() < until_s:
            process.poll()
            members = _members(process)
            time.sleep(_POLL_S / 5)
        if not members:
            break
    with contextlib.suppress(subprocess.TimeoutExpired):
        # One that waits inside a driver may not even die of SIGKILL; the stages after it need not wait with it.
        process.wait(_GRACE_S)


def _members(process: subprocess.Popen[bytes]) -> list[int]:
    """Ids of the living processes of a session; groups alone would miss those that made one of their own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc/self/stat").exists() else ():
        try:
            # The name in parentheses may hold anything; behind it stand state, parent, group and session.
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == process.pid and state not in "ZX":
            found.append(int(entry.name))
    if not found and process.poll() is None:
        found = [process.pid]
    return found
