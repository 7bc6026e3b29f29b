import time

import pytest
import torch

from benchmarks.timing import measure, summarise

CPU = torch.device("cpu")


def test_summarise_is_median_and_quartile_distance():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median_ms == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert summarise([7.0]).spread == 0.0


def test_a_call_that_sleeps_longer_reads_longer():
    timings = measure(
        {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}, CPU, rounds=3, burst_ms=1
    )
    assert 2.0 <= timings["short"].median_ms < timings["long"].median_ms
    assert timings["long"].median_ms >= 8.0


def test_rounds_interleave_and_start_with_another_call_each_time():
    seen: list[str] = []
    calls = {name: lambda name=name: (seen.append(name), time.sleep(0.001)) for name in "abc"}
    rounds: list[int] = []
    measure(calls, CPU, rounds=3, burst_ms=0.001, on_round=rounds.append)
    assert seen[-9:] == list("abcbcacab")
    assert rounds == [1, 2, 3]
