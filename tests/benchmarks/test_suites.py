"""The other suites: a compact run of each on the CPU, and what its numbers are compared with."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks import calls, distributed, host, loop, mods, results, run, table, timing, varlen, warm
from benchmarks.caches import DecodeCase
from benchmarks.cases import Case, make_inputs
from benchmarks.providers import PROVIDERS, STEP
from benchmarks.session import Session
from tests.benchmarks.test_run import session_of

CPU = torch.device("cpu")
SMALL = Case("forward", "float32", 2, 48, 48, 2, 2, 16, causal=True)


def test_the_dense_match_has_the_same_work():
    lengths = varlen.draw_lengths(65536, 16, 16384, varlen.SEED)
    packed = Case("forward", "bfloat16", 30, max(lengths), max(lengths), 16, 16, 128, causal=True, lengths=lengths)
    dense = varlen.dense_like(packed)
    assert dense.lengths is None and dense.seqlen_q % 128 == 0
    assert dense.batch * dense.seqlen_q == pytest.approx(65536, rel=0.01)
    assert dense.flops() == pytest.approx(packed.flops(), rel=0.01)


def test_packed_and_dense_batches_are_timed(command):
    small = "--device cpu --tokens 300 --shortest 5 --longest 100 --hidden 32 --head-dims 16 --masks causal"
    rows, printed = command(varlen, f"{small} --dtype float32 --rounds 2 --burst-ms 0.5")
    assert len(rows) == 2 * 2 * 2 and all(0 <= r.error < 2e-5 and r.median_ms > 0 for r in rows)
    assert len(varlen.ratios(rows)) == 4 and "packed / dense" in printed


@pytest.mark.long
def test_ranks_are_checked_and_timed(command):
    options = "--device cpu --tokens 32 --heads 2/2 --dtype float32 --rounds 2 --burst-ms 0.1 --masks causal,packed"
    rows, _ = command(distributed, options)
    timed = [row for row in rows if row.median_ms is not None]
    assert {row.provider for row in timed} == {distributed.ONE, *(f"flashtile-{x}" for x in distributed.OURS)}
    assert all(row.error < 1e-5 and row.tflops > 0 and row.case["ranks"] == 2 for row in timed)
    # PyTorch's has no kernel for the CPU, and no packed sequences anywhere.
    others = [row.error for row in rows if row.provider in distributed.PEERS]
    assert {text.partition(":")[0] for text in others} == {"failed", "refused"}


def test_a_wrong_result_of_ranks_gets_no_time(monkeypatch):
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda *args: None)
    case = Case("forward", "bfloat16", 1, 4, 4, 1, 1, 8)
    right = torch.ones(1, 4, 1, 8)
    assert distributed.compared((right * 1.001,), (right,), case, False) == pytest.approx(1e-3, rel=1e-3)
    for wrong in (right * 1.1, right * float("nan")):
        with pytest.raises(distributed.NotTimedError, match="wrong: relative error"):
            distributed.compared((wrong,), (right,), case, False)


BRIEF = Case("forward", "bfloat16", 1, 48, 48, 2, 2, 16, causal=True)


def test_a_call_says_what_went_wrong_and_takes_a_refusal_for_an_answer():
    assert warm.call_once(BRIEF, "flashtile-cpu", "cpu") is None
    assert warm.call_once(BRIEF, "flashtile-hopper", "cpu") is None, "it refuses the device"
    assert warm.call_once(DecodeCase(4, 2, 16, 1, 64, variant="page16"), "flashtile-cpu", "cpu") is None
    assert warm.call_once(replace(BRIEF, dtype="nothing"), "eager", "cpu").startswith("failed: ")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mod", ["documents", "prefix", "t5", *sorted({*mods.MODS} - {"documents", "prefix", "t5"})])
def test_cells_of_functions(mod, direction, command):
    options = f"--device cpu --rounds 1 --providers flashtile,flashtile-intervals --cells {direction}-d64-{mod}-"
    rows = {row.provider: row for row in command(mods, options)[0]}
    assert isinstance(rows["flashtile"].error, float) and rows["flashtile"].tflops
    assert (rows["flashtile-intervals"].median_ms is not None) == (mod in ("documents", "prefix"))


def test_wrong_results_of_functions_are_not_timed():
    cell = mods.Cell("alibi", "forward", "bfloat16", 1, 64, 2, 64)
    mod, tensors = mods.mod_of(cell, CPU), mods.inputs_of(cell, CPU)
    right = mods.call_of(cell, mod, "flashtile", tensors)()
    reference = mods.Reference(cell, mod, tensors)
    assert 0 < reference.check(right) < mods.LIMIT
    with pytest.raises(mods.NotTimedError, match="wrong: relative error"):
        reference.check((right[0] * 1.05,))


def test_pairs_that_functions_keep_are_counted():
    counts = {}
    for name in ("full", "causal", "window", "prefix", "tree"):
        cell = mods.Cell(name, "forward", "bfloat16", 1, 64, 2, 64)
        counts[name] = mods.kept_pairs(cell, mods.mod_of(cell, CPU), CPU)
    assert counts == {"full": 4096, "causal": 2080, "window": 2080, "prefix": 2080 + 31 * 32 // 2, "tree": 2080}


EIGHT_BITS = Case("forward", "bfloat16", 2, 160, 160, 2, 2, 32, causal=True)
ROUNDED = replace(EIGHT_BITS, direction="quantized", causal=False)


def measured(folder, case, *names):
    session = Session(results.new_run("fp8", CPU, commit="abc"), CPU, folder / "rows.jsonl")
    return {each.provider: each for each in run.run_cell(case, [PROVIDERS[n] for n in names], session, rounds=2)}


def test_both_ways_are_timed_and_right(tmp_path):
    rows = measured(tmp_path, EIGHT_BITS, "flashtile-cpu-fp8", "flashtile-cpu-fp8-call", "flashtile-cpu")
    errors = {name: each.error for name, each in rows.items()}
    # What is rounded before has an output of 8 bits.
    assert 0.03 < errors["flashtile-cpu-fp8-call"] < errors["flashtile-cpu-fp8"] < 0.06
    assert errors["flashtile-cpu"] < 0.005 and all(each.tflops > 0 for each in rows.values())


@pytest.mark.parametrize("name", ["k_scale", "v"])
def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch, name):
    """A scale of one block in three that is off by a half, or one key in 16 in another's place, pass no check."""
    quantize = run.flashtile.quantize

    def faulty(*tensors, **keywords):
        found = quantize(*tensors, **keywords)
        x = getattr(found, name).clone()
        if name == "v":
            x.view(torch.uint8)[..., 1::8] = x.view(torch.uint8)[..., 2::8]
        else:
            x[..., 0] *= 1.5
        return replace(found, **{name: x})

    monkeypatch.setattr(run.flashtile, "quantize", faulty)
    found = measured(tmp_path, EIGHT_BITS, "flashtile-cpu-fp8")["flashtile-cpu-fp8"]
    assert found.median_ms is None and found.error.startswith("wrong: ") and found.error.endswith("limit 0.08")


def test_rounding_is_timed_beside_a_copy(tmp_path):
    rows = measured(tmp_path, ROUNDED, "flashtile-cpu")
    assert list(rows) == [table.ROUNDING, table.COPY]
    assert all(each.error is None and each.median_ms > 0 for each in rows.values())


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


def test_host_times_of_both_directions(command, monkeypatch):
    monkeypatch.setattr(host, "SMALL", SMALL)
    rows, printed = command(host, "--device cpu --providers flashtile,sdpa --rounds 2 --burst 2 --first-calls ,")
    found = {(r.case["direction"], r.provider) for r in rows}
    assert len(rows) == 2 * 2 * 2 and all(row.median_ms > 0 for row in rows) and "/ sdpa" in printed
    assert found == {(d, n) for d in calls.DIRECTIONS for n in ("flashtile", "sdpa")}


def test_the_loop_waits_for_the_device_once_a_sample(command, monkeypatch):
    waits, made = [], []
    monkeypatch.setattr(timing, "wait", waits.append)
    assert timing.loop_ms(lambda: made.append(1), CPU, 7) > 0
    assert len(made) == 7 and len(waits) == 2
    monkeypatch.setattr(loop, "CASES", {"cpu": [SMALL]})
    rows, printed = command(loop, "--device cpu --providers flashtile,sdpa,eager,fa3 --rounds 2")
    assert [r.suite for r in rows] == ["loop"] * 6 and all(r.error < 1e-5 and r.spread >= 0 for r in rows)
    assert "flashtile / fastest peer" in printed


@pytest.mark.slow
def test_two_checkouts_take_turns_and_each_row_is_of_its_own_sources(tmp_path, command, monkeypatch):
    other = tmp_path / "other"
    for name, ignored in (("src", "data"), ("benchmarks", "*.jsonl")):
        shutil.copytree(results.ROOT / name, other / name, ignore=shutil.ignore_patterns(ignored, "__pycache__"))
    monkeypatch.setattr(run, "suite", lambda name, dtype: [SMALL])
    options = f"cpu --against {other} --rounds 3 --burst-ms 0.5"
    (now, before), _ = command(run, options)
    assert (now.provider, before.provider) == ("flashtile-cpu", "flashtile-cpu@before")
    assert now.median_ms > 0 and before.median_ms > 0 and 0 <= now.error == before.error < 1e-5
    # Sources that are wrong: the other checkout's own, and no time for either.
    source = other / "benchmarks" / "providers.py"
    source.write_text(source.read_text() + "\nflashtile.attention = lambda q, k, v, **_: v * 1.01\n")
    now, before = command(run, options)[0][2:]
    assert before.error.startswith("RuntimeError: wrong: relative error") and now.error < 1e-5
    assert now.median_ms is before.median_ms is None
