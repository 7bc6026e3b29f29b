"""Measures tiles of the portable kernels for given calls on this machine's GPU, and saves the faster ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.described import described_tensors
from flashtile.backends.gpu.trial import trial
from flashtile.backends.portable import BACKEND, tuned
from flashtile.backends.portable import config as portable
from flashtile.backends.portable.backward import config as backward
from flashtile.backends.portable.config import PortableTiles
from flashtile.call.arguments import Grads
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem, Tensors
from flashtile.ops import dispatch

# Limits on the time of the tables' tiles over the time of saved tiles: the geometric mean of all calls, and the least.
_LEAST_GAIN, _WORST = 1.03, 0.98
# The most float32 numbers of a tile per thread: more would spill registers.
_MOST_NUMBERS = 224
_ROUNDS, _BURST_MS = 7, 5.0
_GRADS = {
    "forward": Grads(),
    "dkdv": Grads(k=True, v=True),
    "dk": Grads(k=True),
    "dv": Grads(v=True),
    "dq": Grads(True),
}
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Task:
    """One kernel for all calls of one key, with the tables' tiles. ``odd`` is a small odd call that is only checked."""

    kernel: str
    key: portable.Key
    table: PortableTiles
    problems: tuple[Problem, ...]
    odd: Problem

    def using(self, tiles: PortableTiles) -> Any:
        """A context in which the kernel runs with these tiles."""
        return trial(**{self.kernel: tiles})


@dataclass
class Result:
    """The tiles to use, their speedup over the tables' tiles, how many others were timed, and why the rest was not."""

    task: Task
    tiles: PortableTiles
    gain: float = 1.0
    timed: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def tasks(problems: Iterable[Problem], directions: Sequence[Direction]) -> list[Task]:
    """The tasks for the kernels of some calls.

    Raises:
        UnsupportedError: The portable backend cannot run a call.
    """
    found: dict[portable.Key, Task] = {}
    for problem, direction in itertools.product(problems, directions):
        dispatch.select(problem, direction, BACKEND.name)
        arch, rows = portable.arch_of(problem), max(1, min(333, problem.seqlen_q) - 3)
        kernels = ("forward",) if direction == "forward" else (*backward.key_kernels(problem), "dq")
        for kernel in kernels:
            call = problem.but(grads=_GRADS[kernel])
            table = tuned.choose(call, kernel, arch)
            odd = call.but(batch=3, seqlen_q=rows, seqlen_k=rows, varlen=True)
            # The odd call is packed if packed sequences take the same tiles.
            odd = odd.but(varlen=tuned.choose(odd, kernel, arch) == table)
            key = tuned.key_of(call, kernel, table)
            others = found[key].problems if key in found else ()
            found[key] = Task(kernel, key, table, tuple(dict.fromkeys((*others, call))), odd)
    return list(found.values())


def candidates(task: Task, best: PortableTiles, arch: str) -> list[PortableTiles]:
    """Tiles worth timing: the tables' tiles for any GPU at these head dims, and ``best`` with one property changed.

    They fit the architecture's shared memory and registers, as far as that can be computed before they are built.
    """
    p, kernel, made = task.odd, task.kernel, list[PortableTiles]()
    dims = portable.tile_dims(p)
    if arch != "interpreter" and p.dtype != torch.float32:
        keys = [key for key in portable.shipped() if key[1:3] == (kernel, "16 bits")]
        rows = [portable.narrowest(max(64, *dims), *key) for key in keys]
        made = [PortableTiles.parse(row.tiles) for row in rows if row is not None]
    made += _neighbours(best, not p.band.unbounded)
    columns = {"forward": dims[1], "dq": dims[0], "dk": dims[0], "dv": dims[1], "dkdv": sum(dims)}[kernel]
    fitting = []
    for each in dict.fromkeys(made):
        over_keys, threads = kernel in ("forward", "dq"), each.num_warps * (64 if arch == "gfx942" else 32)
        fixed, moving = (each.block_m, each.block_n) if over_keys else (each.block_n, each.block_m)
        numbers = fixed * columns + fixed * moving * (1 if kernel in ("forward", "dv") else 2)
        shared = (2 * each.num_stages - 1) * moving * sum(dims) * p.dtype.itemsize // 2
        able = (not each.tma or arch in ("sm_90", "sm_100", "interpreter")) and (not each.maxnreg or arch != "gfx942")
        small = max(fixed, moving) <= tuned.MAX_TILE and shared <= portable.SHARED_BYTES.get(arch, shared)
        if able and small and numbers <= _MOST_NUMBERS * threads:
            fitting.append(each)
    return fitting


def _neighbours(tiles: PortableTiles, masked: bool) -> Iterator[PortableTiles]:
    """Legal tiles that differ in one property, or in two that balance each other."""
    m, n, w, s = tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages
    changes: list[dict[str, Any]] = [
        {"num_stages": s + 1}, {"num_stages": s - 1}, {"tma": not tiles.tma}, {"block_m": 2 * m}, {"block_m": m // 2},
        {"block_n": 2 * n}, {"block_n": n // 2}, {"num_warps": 2 * w}, {"num_warps": w // 2},
        {"block_m": 2 * m, "num_warps": 2 * w}, {"block_m": m // 2, "num_warps": w // 2},
        {"block_n": 2 * n, "num_stages": s - 1}, {"block_n": n // 2, "num_stages": s + 1},
    ]  # fmt: skip
    changes += [{"mask_all": a, "one_loop": o} for a, o in ((False, False), (False, True), (True, True)) if masked]
    for change in changes:
        try:
            made = dataclasses.replace(tiles, **change)
        except ValueError:
            continue
        if made.num_warps <= 8 and made.num_stages <= 5:
            yield made


def tune(task: Task, until: float, report: Callable[[str], None]) -> tuple[Result, bool]:
    """Searches from the tables' tiles, until no tiles near the best are faster, or until time.monotonic() is ``until``.

    Candidates are built in parallel, checked against the tables' results, and timed in rounds beside the tables' tiles.

    Returns:
        The result, and whether Ctrl-C ended the search. The result is then the best of the timed tiles.
    """
    result, ratios, tried, best = Result(task, task.table), {task.table: 1.0}, {task.table}, task.table
    calls: list[Run] = []
    interrupted = False
    try:
        calls += [_runner(problem, task.kernel) for problem in task.problems]
        checks = [*calls, _runner(task.odd, task.kernel)]
        wanted = [_poisoned(task, task.table, call) for call in checks]
        while time.monotonic() < until:
            new = [each for each in candidates(task, best, portable.arch_of(task.odd)) if each not in tried]
            new = new[: max(8, os.cpu_count() or 1)]
            if not new:
                break
            tried.update(new)
            right = []
            for each, said in _built(task, new):
                report(f"{' '.join(task.key[1:5])}: {len(tried) - 1} tried, {max(ratios.values()):.2f} times as fast")
                said = said or _failure(functools.partial(_wrong, task, each, checks, wanted))
                if said:
                    result.left_out[each.name] = said
                else:
                    right.append(each)
            ratios |= {each: math.exp(mean) for each, (mean, _) in _race(task, calls, right, _ROUNDS).items()}
            best = max(ratios, key=ratios.__getitem__)
    except KeyboardInterrupt:
        interrupted = True
    result.timed = len(ratios) - 1
    # The best of many measurements is partly luck, so the best tiles are timed again.
    for each in sorted(ratios, key=ratios.__getitem__, reverse=True)[:3]:
        if ratios[each] >= _LEAST_GAIN and result.tiles == task.table:
            mean, least = _race(task, calls, [each], 2 * _ROUNDS)[each]
            if mean >= math.log(_LEAST_GAIN) and least >= math.log(_WORST):
                result.tiles, result.gain = each, math.exp(mean)
    return result, interrupted


def save(result: Result) -> None:
    """Saves a result in the file in place of an older one. If the tables' tiles were best, the older one is removed."""
    place, here = tuned.path(), tuned.versions()
    assert place is not None
    entries = [each for each in tuned.read(place) if (each.key, each[8:]) != (result.task.key, here)]
    if result.tiles != result.task.table:
        entries.append(portable.Entry._make((*result.task.key, result.tiles.name, round(result.gain, 3), *here)))
    tuned.write(place, entries)


def _runner(problem: Problem, kernel: str) -> Run:
    """A function that computes a kernel's results from tensors drawn once, with the tiles that are in force."""
    p, device, bounds = problem, torch.device(problem.device_type), None
    generator, rows = torch.Generator(device).manual_seed(0), [p.batch, p.seqlen_q]
    if p.varlen:
        bounds = torch.tensor([0, 1, p.seqlen_q, p.seqlen_q // 3]).cumsum(0).to(device, torch.int32)
        rows = [1 + p.seqlen_q + p.seqlen_q // 3]
    heads, dims = (
        (p.num_heads_q, p.num_heads_kv, p.num_heads_kv, p.num_heads_q),
        (p.head_dim, p.head_dim, p.head_dim_v, p.head_dim_v),
    )
    shapes = zip(heads, dims, strict=True)
    q, k, v, dout = (torch.randn(*rows, *each, dtype=p.dtype, device=device, generator=generator) for each in shapes)
    t = Tensors(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    run = BACKEND.plan("forward", p.but(grads=Grads()), t)
    if kernel == "forward":
        return lambda: run(t)
    (out, lse), back = run(t), BACKEND.plan("backward", p, t, (dout, None))
    return lambda: tuple(x for x in vars(back(t, out, lse, dout, None)).values() if x is not None)


def _poisoned(task: Task, tiles: PortableTiles, call: Run) -> tuple[Tensor, ...]:
    """A call's results. Elements that no kernel wrote are NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with task.using(tiles):
            return call()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _wrong(task: Task, tiles: PortableTiles, calls: Sequence[Run], wanted: Sequence[tuple[Tensor, ...]]) -> str:
    """Describes an error in the results of tiles; empty if every row is correct."""
    for call, want in zip(calls, wanted, strict=True):
        for ours, theirs in zip(_poisoned(task, tiles, call), want, strict=True):
            norms = theirs.float().norm(dim=-1)
            error = ((ours.float() - theirs.float()).norm(dim=-1) / norms.clamp(min=float(norms.mean()))).amax()
            if not error <= max(8 * torch.finfo(theirs.dtype).eps, 1e-4):
                return f"a row differs by {float(error):.1e} of its size"
    return ""


def _failure(judge: Callable[[], str]) -> str:
    """The result of ``judge``, or the exception that it raised."""
    try:
        return judge()
    except Exception as error:  # compilers and drivers raise exceptions of many classes
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _built(task: Task, tiles: Sequence[PortableTiles]) -> Iterator[tuple[PortableTiles, str]]:
    """Builds tiles in parallel, as ``warm_up`` does. Yields each with the reason why it was not built, or nothing."""
    made: dict[PortableTiles, list[Callable[[], object]]] = {each: [] for each in tiles}
    direction: Direction = "forward" if task.kernel == "forward" else "backward"
    # If Triton launches kernels itself, it builds them at their launch.
    for each in tiles if task.odd.device_type == "cuda" and not torch.version.hip else ():
        with task.using(each):
            for p in (*task.problems, task.odd):
                made[each] += [build.make for build in BACKEND.builds(p, described_tensors(p), direction)]

    def make(each: PortableTiles) -> str:
        for build in made[each]:
            build()
        return ""

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from zip(tiles, pool.map(lambda each: _failure(functools.partial(make, each)), tiles), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _race(
    task: Task, calls: Sequence[Run], tiles: Sequence[PortableTiles], rounds: int
) -> dict[PortableTiles, tuple[float, float]]:
    """For each, the log of the tables' time over its own, median over rounds: the mean over calls, and the least."""
    logs: dict[PortableTiles, list[float]] = {each: [] for each in tiles}
    for call in calls:
        reps, times = 1, {each: list[float]() for each in (task.table, *tiles)}
        for _ in range(2 + rounds):  # the first warms up, the second says how many calls make a burst
            for each, taken in times.items():
                with task.using(each):
                    taken.append(time_ms(call, reps, task.odd.device_type))
            reps = max(1, min(50, math.ceil(_BURST_MS / max(1e-3, times[task.table][-1]))))
        for each in tiles:
            ratios = [table / own for table, own in zip(times[task.table][2:], times[each][2:], strict=True)]
            logs[each].append(math.log(statistics.median(ratios)))
    return {each: (statistics.mean(found), min(found)) for each, found in logs.items()}


def time_ms(call: Run, reps: int, device_type: str) -> float:
    """Mean time of a call in a burst, in milliseconds: device time on a GPU, wall time elsewhere."""
    if device_type != "cuda":
        start_s = time.perf_counter()
        for _ in range(reps):
            call()
        return (time.perf_counter() - start_s) * 1e3 / reps
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond, so that the host is ahead of the device
    start.record()
    for _ in range(reps):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / reps
