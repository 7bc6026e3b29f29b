import threading
from dataclasses import replace

import pytest
import torch

from benchmarks import caches, warm
from benchmarks.caches import DecodeCase
from benchmarks.cases import Case, suite

SMALL = Case("forward", "bfloat16", 1, 48, 48, 2, 2, 16, causal=True)


def test_every_cell_of_the_suites_is_called_and_none_twice():
    cases = warm.all_cases()
    assert len(cases) == len(set(cases))
    assert {*suite("forward"), *suite("backward"), *suite("forward", "float16")} <= set(cases)
    assert any(isinstance(case.lengths, tuple) for case in cases) and any(case.seqlen_k == 65536 for case in cases)
    decoded = [case for case in cases if isinstance(case, DecodeCase)]
    assert {(c.num_heads_q, c.num_heads_kv, c.head_dim) for c in decoded} == {*caches._HEADS}
    assert {c.variant for c in decoded} == {*caches.VARIANTS}
    assert {(c.direction, c.dtype) for c in {*cases} - {*decoded}} == {
        (x, y) for x in ("forward", "backward") for y in ("bfloat16", "float16")
    }


def test_a_call_says_what_went_wrong_and_takes_a_refusal_for_an_answer(monkeypatch):
    assert warm.call_once(SMALL, "flashtile-cpu", "cpu") is None
    assert warm.call_once(SMALL, "flashtile-hopper", "cpu") is None, "it refuses the device"
    assert warm.call_once(DecodeCase(4, 2, 16, 1, 64, variant="page16"), "flashtile-cpu", "cpu") is None
    assert warm.call_once(replace(SMALL, dtype="nothing"), "eager", "cpu").startswith("failed: ")


@pytest.mark.long
def test_processes_run_the_calls(capsys, monkeypatch):
    monkeypatch.setattr(warm, "all_cases", lambda: [SMALL, replace(SMALL, direction="backward")])
    assert warm.main(["--device", "cpu", "--workers", "2", "--providers", "flashtile-cpu,fa3"]) == 1
    printed = capsys.readouterr().out
    assert "2 of 4 calls went well" in printed and printed.count("fa3: failed: ") == 2
    if not torch.cuda.is_available():
        assert warm.main([]) == 2


def wait_for_ever() -> None:
    threading.Event().wait()


def test_a_process_that_does_not_answer_is_ended():
    said = dict(warm.side_by_side(wait_for_ever, [()], 1, 0.5))
    assert said == {(): "no answer within 0 s"}
