"""Builds every distinct kernel that drawn calls start, for an architecture and without a GPU."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

from flashtile.call.problem import gpu_of
from flashtile_lab.kernels import hopper as hopper
from flashtile_lab.kernels import report as builds
from flashtile_lab.kernels.build import KernelBuild
from flashtile_lab.kernels.build import build_of as described_build
from tests.fuzz.drawn import Drawn
from tests.fuzz.launches import Started, started


@dataclass(frozen=True, eq=False)
class Found:
    """A distinct build, with the first call that starts it and what to do with its numbers."""

    build: KernelBuild
    call: Drawn


@dataclass(frozen=True)
class Failure:
    """A fault, and the call that has it."""

    arch: str
    what: str
    call: Drawn

    def __str__(self) -> str:
        return f"{self.arch}: {self.what}\n    {self.call}"


@dataclass(frozen=True)
class Result:
    """A build's report, None if there is none, the faults, and how long it took a core."""

    found: Found
    report: builds.KernelReport | None
    faults: tuple[str, ...]
    seconds: float


def distinct(calls: Sequence[Drawn], arch: str) -> tuple[list[Found], list[Failure]]:
    """The builds of calls on an architecture, each once, and the calls that fail before one is asked for."""
    found: dict[object, Found] = {}
    failures = []
    for call in calls:
        try:
            launches = started(call, gpu_of(arch).capability)
        except Exception as error:
            failures.append(Failure(arch, f"no launch: {type(error).__name__}: {error}", call))
            continue
        for each in launches:
            build = build_of(each)
            found.setdefault(key_of(build), Found(build, call))
    return list(found.values()), failures


def build_of(each: Started) -> KernelBuild:
    """The build of a launch."""
    return described_build(
        each.launch, name=each.launch.kernel.__name__, backend=each.backend, direction=each.direction,
        config=each.about, spill_limit=_limit(each),
    )  # fmt: skip


def _limit(each: Started) -> int | None:
    """What the Hopper backend promises of its kernels: nothing of partial results in parts of a tile's columns."""
    p, name = each.problem, each.launch.kernel.__name__
    if each.backend != "hopper" or p is None:
        return None
    is_in_parts = 128 < p.head_dim_v <= 192 and "partial" in str(each.about.get("features"))
    return None if is_in_parts else hopper.limits(p).get(name)


def key_of(build: KernelBuild) -> object:
    """What the compiled code depends on."""
    # The promise is none of it; layouts compare by what they print.
    constants = {name: repr(value) for name, value in build.constexprs.items()}
    values = (sorted(each.items()) for each in (build.signature, constants, build.options))
    return build.kernel, *map(tuple, values), tuple(sorted(build.divisible))


def compiled(found: Found, arch: str) -> Result:
    """One build's result."""
    start, report = _seconds(), None
    try:
        report = builds.compile_build(found.build, arch)
        faults = tuple(report.problems)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        faults = (f"does not build: {type(cause).__name__}: {str(cause).strip()[-400:]}",)
    return Result(found, report, faults, _seconds() - start)


def _seconds() -> float:
    """Of this process and the assemblers that it started, as others may share the cores."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


_TODO: list[Found] = []


def _by_number(number: int, arch: str) -> tuple[int, Result]:
    result = compiled(_TODO[number], arch)
    # Kernels cannot be sent to another process.
    return number, replace(result, found=None)  # type: ignore[arg-type]


def run(todo: Sequence[Found], arch: str, workers: int = 1) -> Iterator[Result]:
    """Compiles, and yields each result as it is ready; workers are forked, as they have to know the kernels."""
    if workers == 1:
        yield from (compiled(each, arch) for each in todo)
        return
    _TODO[:] = todo
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        waiting: list[Any] = [pool.submit(_by_number, number, arch) for number in range(len(todo))]
        for done in as_completed(waiting):
            number, result = done.result()
            yield replace(result, found=todo[number])


def fuzz(
    calls: Sequence[Drawn], archs: Sequence[str], workers: int, most: int | None, say: Callable[[str], None]
) -> list[Failure]:
    """Builds what calls start on each architecture, at most ``most`` distinct kernels of each; says what it finds."""
    failures: list[Failure] = []
    for turn, arch in enumerate(archs):
        todo, wrong = distinct(calls, arch)
        for failure in wrong:
            say(f"FAILED {failure}")
        failures += wrong
        chosen, start, seconds = spread(todo, most, turn / len(archs)), time.monotonic(), 0.0
        spills = []
        for result in run(sorted(chosen, key=weight, reverse=True), arch, workers):
            label = result.found.build.label
            for fault in result.faults:
                failures.append(Failure(arch, f"{label}: {fault}", result.found.call))
                say(f"FAILED {failures[-1]}")
            if result.report is not None and result.report.spill_bytes:
                spills.append((result.report.spill_bytes, label))
            seconds += result.seconds
            if result.seconds > 30:
                say(f"slow: {arch}: {label}: {result.seconds:.0f} s")
        worst = "; ".join(f"{size} B {label}" for size, label in sorted(spills, reverse=True)[:5])
        took = f"{time.monotonic() - start:.0f} s, {seconds:.0f} s of cores"
        done = f"{arch}: {len(chosen)} of {len(todo)} distinct builds, {took}"
        say(f"{done}; {len(spills)} spill{': ' + worst if worst else ''}")
    return failures


def weight(found: Found) -> int:
    """Roughly, numbers of a kernel's tiles: those that are most likely not to fit are compiled first."""
    of = found.build.constant
    rows, keys, columns = of("BLOCK_M") or 1, of("BLOCK_N") or 1, of("BLOCK_DIM") or of("BLOCK_D") or 0
    return rows * keys + (rows + keys) * columns


def spread(todo: Sequence[Found], most: int | None, turn: float = 0.0) -> list[Found]:
    """So many builds, evenly from the list; ``turn``, less than 1, says how far from the start the first one is."""
    if most is None or len(todo) <= most:
        return list(todo)
    return [todo[int((n + turn) * len(todo) / most)] for n in range(most)]
