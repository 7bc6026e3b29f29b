"""Interleaved timing: in every round each provider runs once, so that clock changes affect all of them."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

# The shortest and longest wait of the device before a burst, and cycles of its clock per millisecond.
_HEAD_START_MS, _HEAD_START_MOST_MS, _CYCLES_PER_MS = 0.5, 50.0, 2e6
_MAX_REPS = 50
# Fewer rounds give no estimate of the spread.
_FEWEST_ROUNDS = 3


class OutOfTimeError(RuntimeError):
    """The deadline came before there were enough rounds for a median."""


class Deadline:
    """An instant, ``budget_s`` from now, by which all work must have ended."""

    def __init__(self, budget_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._end_s = clock() + budget_s

    def allows(self, seconds: float) -> bool:
        """Whether that many seconds are left."""
        return self.clock() + seconds <= self._end_s


@dataclass(frozen=True)
class Timing:
    """Median over rounds of the mean time of a call in milliseconds; interquartile range over the median."""

    median_ms: float
    spread: float


def summarise(samples_ms: list[float]) -> Timing:
    """Median and relative interquartile range of one provider's rounds."""
    median = statistics.median(samples_ms)
    if len(samples_ms) < 2:
        return Timing(median, 0.0)
    low, _, high = statistics.quantiles(samples_ms, n=4, method="inclusive")
    return Timing(median, (high - low) / median)


def wait(device: torch.device) -> None:
    """Waits until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Memory that an allocation could still get."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_ms(call: Call, device: torch.device, burst: int = 1) -> float:
    """Host time of a call, in milliseconds, in a burst that starts on an idle device, without the wait at its end."""
    wait(device)
    start_s = time.perf_counter()
    for _ in range(burst):
        call()
    return (time.perf_counter() - start_s) * 1e3 / burst


def loop_ms(call: Call, device: torch.device, reps: int) -> float:
    """Wall time of a call, in milliseconds, over ``reps`` in a row and the wait at the end: host and device overlap."""
    wait(device)
    start_s = time.perf_counter()
    for _ in range(reps):
        call()
    wait(device)
    return (time.perf_counter() - start_s) * 1e3 / reps


def time_burst(
    call: Call, reps: int, device: torch.device, head_start_ms: float = _HEAD_START_MS, meet: Call | None = None
) -> float:
    """Mean time of ``reps`` calls in a row, in milliseconds: device time on a GPU, wall time elsewhere.

    The device starts late enough that the host is always ahead of it: see ``head_start_of``. After that it does what
    ``meet`` queues, in which devices may wait for one another.
    """
    if device.type != "cuda":
        return host_ms(call, device, reps)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(head_start_ms * _CYCLES_PER_MS))
    if meet is not None:
        meet()
    start.record()
    for _ in range(reps):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / reps


def head_start_of(queueing_ms: Iterable[float]) -> float:
    """One head start for all compared calls, from the time that each one's burst takes to queue.

    The same for all, because a device that has waited is a little cooler.
    """
    return min(_HEAD_START_MOST_MS, max(_HEAD_START_MS, *(1.5 * each for each in queueing_ms)))


def reps_for(once_ms: float, burst_ms: float) -> int:
    """The number of calls in a burst of about ``burst_ms``."""
    return max(1, min(_MAX_REPS, math.ceil(burst_ms / max(once_ms, 1e-6))))


def interleaved(
    samples: Mapping[Key, Callable[[], float]], rounds: int, deadline: Deadline | None = None
) -> dict[Key, list[float]]:
    """Takes a sample of each in every round; the first one rotates.

    No round is started that would end after the deadline, judged by the longest so far.

    Raises:
        OutOfTimeError: If that leaves fewer than three rounds, or than the number requested if smaller.
    """
    deadline = deadline or Deadline()
    found: dict[Key, list[float]] = {name: [] for name in samples}
    order, longest_s = list(samples), 0.0
    for done in range(rounds):
        if not deadline.allows(longest_s):
            if done < min(_FEWEST_ROUNDS, rounds):
                raise OutOfTimeError(f"{done} of {rounds} rounds were done at the deadline")
            break
        start_s = deadline.clock()
        for name in order:
            found[name].append(samples[name]())
        order = order[1:] + order[:1]
        longest_s = max(longest_s, deadline.clock() - start_s)
    return found


def measure(
    calls: Mapping[Key, Call], device: torch.device, *, rounds: int, burst_ms: float, deadline: Deadline | None = None
) -> dict[Key, Timing]:
    """Times the calls in interleaved rounds, after a warm-up, in bursts of about ``burst_ms``; see ``interleaved``."""
    reps, queueing_ms = {}, {}
    for name, call in calls.items():
        call()
        reps[name] = reps_for(time_burst(call, 2, device), burst_ms)
        queueing_ms[name] = reps[name] * host_ms(call, device)
    head_start_ms = head_start_of(queueing_ms.values()) if calls else 0.0
    samples = {
        name: functools.partial(time_burst, call, reps[name], device, head_start_ms) for name, call in calls.items()
    }
    return {name: summarise(values) for name, values in interleaved(samples, rounds, deadline).items()}
