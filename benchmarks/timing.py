"""Interleaved timing: in every round each provider runs once, so that a moving clock moves all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

# Long enough for the host to queue a burst of calls before the device starts on the first.
_HEAD_START_CYCLES = 1_000_000
_MAX_REPS = 50
# A median of fewer says nothing about its spread.
_FEWEST_ROUNDS = 3


class OutOfTimeError(RuntimeError):
    """The deadline came before there were enough rounds for a median."""


@dataclass(frozen=True)
class Timing:
    """What the rounds of one provider say.

    Attributes:
        median_ms: Median over rounds of the mean time of a call, in milliseconds.
        spread: Distance of the quartiles over the median.
    """

    median_ms: float
    spread: float


def summarise(samples_ms: list[float]) -> Timing:
    """Median and relative quartile distance of one provider's rounds."""
    median = statistics.median(samples_ms)
    if len(samples_ms) < 2:
        return Timing(median, 0.0)
    low, _, high = statistics.quantiles(samples_ms, n=4, method="inclusive")
    return Timing(median, (high - low) / median)


def time_burst(call: Call, reps: int, device: torch.device) -> float:
    """Mean time of ``reps`` calls in a row, in milliseconds: device time on a GPU, wall time elsewhere."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(reps):
            call()
        return (time.perf_counter() - start_s) * 1e3 / reps
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    for _ in range(reps):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / reps


def measure(
    calls: Mapping[Key, Call],
    device: torch.device,
    *,
    rounds: int,
    burst_ms: float = 6.0,
    on_round: Callable[[int], None] = lambda _: None,
    deadline_s: float | None = None,
) -> dict[Key, Timing]:
    """Times the calls side by side.

    Args:
        calls: By provider, or by whatever tells them apart; each is warmed up here.
        device: Where they run.
        rounds: How often each is sampled. Every round starts with another provider.
        burst_ms: About how long one sample takes; decides the calls in it, the same in every round.
        on_round: Told the number of rounds done.
        deadline_s: No round is started that would end after this instant of ``time.monotonic()``, judged by the longest
            so far. All calls have the same number of rounds.

    Returns:
        A timing by the same key.

    Raises:
        OutOfTimeError: If the deadline leaves fewer than three rounds, or fewer than asked for if that is less.
    """
    reps = {}
    for name, call in calls.items():
        call()
        once_ms = time_burst(call, 2, device)
        reps[name] = max(1, min(_MAX_REPS, math.ceil(burst_ms / max(once_ms, 1e-6))))
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    order = list(calls)
    longest_s = 0.0
    for done in range(rounds):
        start_s = time.monotonic()
        if deadline_s is not None and start_s + longest_s > deadline_s:
            if done < min(_FEWEST_ROUNDS, rounds):
                raise OutOfTimeError(f"{done} of {rounds} rounds were done at the deadline")
            break
        for name in order:
            samples[name].append(time_burst(calls[name], reps[name], device))
        order = order[1:] + order[:1]
        longest_s = max(longest_s, time.monotonic() - start_s)
        on_round(done + 1)
    return {name: summarise(values) for name, values in samples.items()}
