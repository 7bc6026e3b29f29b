import time

import pytest
import torch

from benchmarks.timing import Deadline, OutOfTimeError, head_start_of, interleaved, measure, summarise

CPU = torch.device("cpu")


def test_summarise_is_median_and_quartile_distance():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median_ms == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert summarise([7.0]).spread == 0.0


def test_a_call_takes_at_least_as_long_as_it_sleeps():
    calls = {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}
    timings = measure(calls, CPU, rounds=3, burst_ms=1)
    assert timings["short"].median_ms >= 2.0 and timings["long"].median_ms >= 8.0


def test_rounds_interleave_and_start_with_another_call_each_time():
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) or len(seen) for name in "abc"}
    assert interleaved(calls, 3) == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    assert seen == list("abcbcacab")


@pytest.mark.parametrize(("budget_s", "rounds"), [(1e9, 9), (42, 4), (39, 3)])
def test_no_round_is_started_that_would_end_after_the_deadline(budget_s, rounds):
    now_s = [100.0]
    clock = lambda: now_s[0]  # noqa: E731

    def sample():
        now_s[0] += 10
        return 1.0

    assert interleaved({"a": sample}, 9, Deadline(budget_s, clock)) == {"a": [1.0] * rounds}


def test_fewer_than_three_rounds_are_no_measurement():
    now_s = [0.0]

    def sample():
        now_s[0] += 10
        return 1.0

    with pytest.raises(OutOfTimeError, match="2 of 9 rounds"):
        interleaved({"a": sample}, 9, Deadline(25, lambda: now_s[0]))
    assert interleaved({"a": sample}, 2, Deadline(25, lambda: now_s[0])) == {"a": [1.0, 1.0]}


def test_a_head_start_covers_the_slowest_to_queue_and_is_the_same_for_all():
    assert head_start_of([0.1, 0.2]) == 0.5
    assert head_start_of([0.1, 4.0, 2.0]) == 6.0
    assert head_start_of([5000.0]) == 50.0
