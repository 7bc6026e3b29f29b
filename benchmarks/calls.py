"""Shared by host and loop: a user's calls, forward alone or with a backward, checked before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import Case
from benchmarks.checks import Call
from benchmarks.providers import STEP, Provider
from benchmarks.results import Row
from benchmarks.run import checked
from benchmarks.session import Session
from benchmarks.timing import interleaved, summarise

DIRECTIONS = ("forward", STEP)


def checked_calls(
    case: Case, what: str, chosen: Sequence[Provider], session: Session
) -> tuple[dict[str, Call], dict[str, float | str]]:
    """The calls with correct results, and the error or failure reason of all, by name."""
    case = replace(case, direction="forward" if what == "forward" else "backward")
    return checked(case, chosen, session.device, what)


def timed_rows(
    session: Session,
    case: dict[str, Any],
    errors: dict[str, float | str],
    samples: Mapping[str, Callable[[], float]],
    rounds: int,
) -> list[Row]:
    """One row per provider; the correct ones have samples taken in interleaved rounds."""
    timings = {name: vars(summarise(x)) for name, x in interleaved(samples, rounds, session.deadline).items()}
    return [session.run.row(case, name, error=error, **timings.get(name, {})) for name, error in errors.items()]


def as_row(case: Case, measure: str, what: str) -> dict[str, Any]:
    """The case of a row: the measurement and the shape."""
    shape = {name: value for name, value in case.to_dict().items() if name != "direction"}
    return {"measure": measure, "direction": what, **shape}
