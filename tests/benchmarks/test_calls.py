"""What a user's call costs: the host's time, new lengths, first calls, a loop."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import calls, host, loop, results, timing
from benchmarks.cases import Case, make_inputs
from benchmarks.providers import PROVIDERS, STEP, Sdpa
from tests.benchmarks.test_run import session_of

CPU = torch.device("cpu")
SMALL = Case("forward", "float32", 2, 48, 48, 2, 2, 16, causal=True)


@pytest.mark.parametrize("what", ["forward", "backward", STEP])
def test_calls_compute_what_they_stand_for(what):
    case = replace(SMALL, direction="forward" if what == "forward" else "backward")
    inputs = make_inputs(case, CPU)
    expected = PROVIDERS["sdpa"].native(PROVIDERS["sdpa"].prepare(case, inputs, what)(), case)
    for name in ("flashtile", "flashtile-cpu", "eager"):
        provider = PROVIDERS[name]
        for _ in range(2):  # a backward keeps what it needs for the next
            found = provider.prepare(case, inputs, what)
            found()
            for got, want in zip(provider.native(found(), case), expected, strict=True):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("what", calls.DIRECTIONS)
def test_a_wrong_call_is_not_timed(what, tmp_path, monkeypatch):
    monkeypatch.setattr(PROVIDERS["sdpa"], "attend", lambda case, inputs: lambda q, k, v: v * q.mean() * k.mean())
    chosen = [PROVIDERS[name] for name in ("flashtile", "flashtile-cpu", "sdpa", "flashtile-hopper")]
    right, errors = calls.checked_calls(SMALL, what, chosen, session_of(tmp_path))
    assert list(right) == ["flashtile", "flashtile-cpu"] and errors["sdpa"].startswith("wrong: relative error")
    assert errors["flashtile-hopper"].startswith("refused: ") and 0 <= errors["flashtile"] < 1e-5


def test_the_host_command_saves_both_directions_and_prints_ratios(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host, "SMALL", SMALL)
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--providers", "flashtile,sdpa", "--rounds", "2", "--burst", "2", "--first-calls", ""]
    assert host.main([*options, "--out", str(out), "--commit", "abc"]) == 0
    rows = results.read([out])
    assert len(rows) == 2 * 2 * 2 and all(row.median_ms > 0 for row in rows)
    assert {(r.case["direction"], r.provider) for r in rows} == {
        (d, n) for d in calls.DIRECTIONS for n in options[3].split(",")
    }
    ours, peer = (next(r.median_ms for r in rows if r.provider == name) for name in ("flashtile", "sdpa"))
    table = host.report(rows[:2]).splitlines()
    assert table[2].split()[-1] == f"{ours / peer:.2f}" and table[3].split()[-1] == "1.00"
    assert "/ sdpa" in capsys.readouterr().out


def test_new_lengths_are_new_and_stand_beside_known_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "SMALL", SMALL)
    monkeypatch.setattr(host, "_KNOWN", (20, 32))
    seen = []

    class Counts(Sdpa):
        def attend(self, case, inputs):
            attend = super().attend(case, inputs)
            return lambda *tensors: (seen.append(case.seqlen_q), attend(*tensors))[1]

    known, new = host.new_length_rows("forward", [Counts()], session_of(tmp_path, "host"), count=5)
    assert seen[:6] == [20, 32] * 3 and seen[6::2] == [20, 32, 20, 32, 20]
    assert len({*seen[7::2]} - {20, 32}) == 5
    assert known.case["measure"].endswith("known length") and new.case["measure"].endswith("new length")
    assert new.values["calls"] == 5 and new.values["worst_ms"] >= new.median_ms > 0
    assert json.loads(new.to_json())["values"] == new.values
    failed = host.new_length_rows("forward", [PROVIDERS["flashtile-hopper"]], session_of(tmp_path, "host"), count=5)
    assert all(row.error.startswith("refused: ") and row.median_ms is None for row in failed)


@pytest.mark.slow
def test_first_calls_are_timed_in_processes_of_their_own(tmp_path):
    rows = host.first_call_rows("sdpa", "forward", session_of(tmp_path, "host"), repeats=1)
    assert [r.case["measure"] for r in rows] == ["first call, empty cache", "first call, warm disk cache"]
    assert all(r.median_ms > 0 for r in rows)


def test_the_loop_waits_for_the_device_once_a_sample_and_is_compared_with_the_fastest_peer(
    tmp_path, capsys, monkeypatch
):
    waits, made = [], []
    monkeypatch.setattr(timing, "wait", waits.append)
    assert timing.loop_ms(lambda: made.append(1), CPU, 7) > 0
    assert len(made) == 7 and len(waits) == 2
    monkeypatch.setattr(loop, "CASES", {"cpu": [SMALL]})
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--providers", "flashtile,sdpa,eager,fa3", "--rounds", "2"]
    assert loop.main([*options, "--out", str(out), "--commit", "abc"]) == 0
    rows = results.read([out])
    assert [r.suite for r in rows] == ["loop"] * 6 and all(r.error < 1e-5 and r.spread >= 0 for r in rows)
    head, line, _ = loop.loop_table(rows)
    assert head == ["us a call", "flashtile", "sdpa", "eager", "flashtile / fastest peer"]
    times = {r.provider: r.median_ms for r in rows[:3]}
    assert line[0] == "forward, b2 s48 h2 d16"
    assert line[-1] == f"{times['flashtile'] / min(times['sdpa'], times['eager']):.2f}"
    assert "flashtile / fastest peer" in capsys.readouterr().out


def test_flash_attention_3_is_a_function_with_gradients(monkeypatch):
    """Its two operators made up: the gradients are what the second one says, of what the first one saved."""
    seen = {}

    def fwd(q, k, v, **features):
        seen["fwd"] = features
        return v * 2, q.new_zeros(1), None, None

    def bwd(dout, q, k, v, out, lse, **features):
        seen["bwd"] = features
        return dout + q, dout + k, dout + out, None

    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)
    inputs = make_inputs(SMALL, CPU)
    (out,) = PROVIDERS["fa3"].prepare(SMALL, inputs, "forward")()
    grads = PROVIDERS["fa3"].prepare(SMALL, inputs, STEP)()
    expected = inputs.dout + inputs.q, inputs.dout + inputs.k, inputs.dout + 2 * inputs.v
    assert torch.equal(out, 2 * inputs.v) and all(map(torch.equal, grads, expected))
    windows = {"window_size_left": -1, "window_size_right": -1}
    assert seen["bwd"] == {"softmax_scale": 0.25, "is_causal": True, **windows}
    # Of so few rows as it likes.
    assert seen["fwd"] == {**seen["bwd"], "num_splits": 0}
