"""``flashtile.log``, and plans that say what their first run ran with and are ranges of profilers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from flashtile.call import events
from flashtile.call.backend import LAUNCHED, Backend, Direction, Plan
from flashtile.call.problem import Problem
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, shown
from flashtile.ops import dispatch, plans

# What lines were written of, and the builds that they named.
_lines: set[tuple[Any, ...]] = set()
_named: set[Any] = set()


def log(what: str | None = "calls") -> None:
    """Says what runs: lines for Python's logger ``flashtile``, which go to stderr unless the program has handlers.

    Sets the variable ``FLASHTILE_LOG``, so that processes that are started later do the same, and makes all kinds of
    calls new again, so that those that have run before are told too: each is planned once more. Calls that differ in
    batch and lengths alone are of one kind, unless they run with other builds.

    Args:
        what: ``"calls"``: a line for each new kind of call: backend, kernels, tiles, why no faster backend, and where
            each build came from. ``"compiles"``: a warning of each kernel that is compiled, with the call that asked
            for it. ``"ranges"``: each call is a range for ``torch.profiler``, and on a GPU for NVTX, with its kind in
            the name. Several with commas between, or None for nothing.

    Raises:
        InvalidInputError: what is something else.
    """
    if what is None:
        os.environ.pop(settings.LOG.name, None)
    elif {*str(what).lower().replace(" ", "").split(",")} <= {*settings.LOGGED}:
        os.environ[settings.LOG.name] = what
    else:
        names = " or ".join(settings.LOGGED)
        raise InvalidInputError("what", f"is {shown(what)}, must be {names}, several with commas between, or None")
    _lines.clear()
    plans.kept.clear()


def logged(plan: Plan, backend: Backend, problem: Problem, direction: Direction) -> Plan:
    """A backend's plan, or one with what is wanted around it."""
    wanted = events.wanted() - {"compiles"}
    return _LoggedPlan(plan, wanted, backend, problem, direction) if wanted else plan


class _LoggedPlan:
    """A plan with a line after its first run and a range around each, or one of the two."""

    def __init__(self, plan: Any, wanted: set[str], backend: Backend, problem: Problem, direction: Direction) -> None:
        self._plan, self._backend, self._problem, self._direction = plan, backend, problem, direction
        self._is_told = "calls" not in wanted
        self._range = f"flashtile {backend.name} {dispatch.kind_of(problem, direction)}" if "ranges" in wanted else ""

    def __call__(self, *call: Any) -> Any:
        return self._run(self._plan, call)

    def in_chain(self, *call: Any) -> Any:
        """As of a plan that has it, see ``call.backend.Chain``."""
        return self._run(self._plan.in_chain, call)

    def _run(self, run: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        if not self._range:
            return self._told(run, call)
        with torch.profiler.record_function(self._range):
            if self._problem.device_type != "cuda":
                return self._told(run, call)
            with torch.cuda.nvtx.range(self._range):
                return self._told(run, call)

    def _told(self, run: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        if self._is_told:
            return run(*call)
        launched: list[tuple[str, Any]] = []
        token = LAUNCHED.set(launched)
        try:
            found = run(*call)
        finally:
            LAUNCHED.reset(token)
        self._is_told = True
        self._tell(launched)
        return found

    def _tell(self, launched: list[tuple[str, Any]]) -> None:
        p, direction = self._problem, self._direction
        how = f"{self._backend.name}: {self._backend.describe(p, direction)}"
        alike = dispatch.kind_of(p.but(batch=0, seqlen_q=0, seqlen_k=0), direction)
        # Tiles are in the builds; what is said of them may have lengths too.
        key = (alike, self._backend.name, *launched) if launched else (alike, how)
        if key in _lines:
            return
        _lines.add(key)
        fresh = {build for _, build in launched if build is not None} - _named
        _named.update(fresh)
        kernels = dict.fromkeys(f"{kernel} {_origin(build, build in fresh)}" for kernel, build in launched)
        faster = dispatch.faster(self._backend, p, direction)
        events.write(logging.INFO, "; ".join((f"{dispatch.kind_of(p, direction)}: {how}", *kernels, *faster)))


def _origin(build: Any, is_fresh: bool) -> str:
    return "interpreted" if build is None else build.origin if is_fresh else "loaded before"
