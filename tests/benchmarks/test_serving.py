"""The suite of a server's steps: its cells, its reference, how both sides are called, and what gets no time."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import flashtile
from benchmarks import caches, decode, results, serving, steps, table
from benchmarks.providers import PROVIDERS
from benchmarks.steps import StepCase
from tests.benchmarks.test_decode import flash_attention_3
from tests.benchmarks.test_run import session_of

CPU = torch.device("cpu")
TINY = steps.groups("loop", "cpu")
EVERY = [case for group in TINY for case in group]
PACKED = StepCase("tiny-prompt", 4, 2, 16, 16, measure="loop")


def call_of(case):
    (tensors,) = case.calls(caches.draw_pool([case], CPU))
    return tensors


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_the_reference_is_what_the_call_means_and_sees_every_sequence(case):
    tensors = call_of(case)
    wide = {name: x.double() if name in ("q", "k_cache", "v_cache") else x for name, x in tensors.items()}
    exact, reference = flashtile.attention_with_kvcache(**wide), case.reference(tensors)
    assert reference.error((exact,)) < 1e-12 < reference.limit < 0.02
    assert reference.error((flashtile.attention_with_kvcache(**tensors),)) <= reference.limit
    for last in (x - 1 for x in case.bounds[1:]):
        wrong = exact.clone()
        wrong.view(-1, *wrong.shape[-2:])[last] *= 1.2
        assert reference.error((wrong,)) > reference.limit
    wrong[0, ..., 0] = torch.nan
    assert not reference.error((wrong,)) <= reference.limit


def test_the_cells_are_those_that_the_suite_is_to_show():
    groups = steps.groups("graph")
    plain, single = {group[0] for group in groups}, ("decode", "decode-mixed")
    assert len(plain) == len(groups) == 7 * 5 * 6 and all(StepCase(**vars(case)) == case for case in plain)
    assert {case.page_size for case in plain} == {0, 1, 16, 64, 256}
    heads = {"d128-h32x8", "d128-h64x8", "d128-h16x2", "d128-h8x1", "d64-h64x8", "d256-h16x8"}
    assert {case.heads for case in plain} == heads
    assert max(2 * 2 * math.prod(case.cache_shape) for case in plain) < 20e9
    assert {group[0] for group in groups if len(group) == 2} == {case for case in plain if case.step in single}
    assert all(group[1].variant == "dense" for group in groups if len(group) == 2)
    sums = {name: tuple(map(sum, zip(*of, strict=True))) for name, of in steps.STEPS.items()}
    assert sums["decode"] == (64, 131072) and sums["decode-prompt"] == (63 + 2048, 131072)
    assert sums["decode-chunk"] == (32 + 1024, 32 * 4096 + 16384) and sums["speculative"] == (160, 131072)
    assert sums["chunks"] == (8192, 24576) and sums["prompts"] == (8000, 8000)
    mixed = [keys for _, keys in steps.STEPS["decode-mixed"]]
    assert len({*mixed}) > 50 and 64 <= min(mixed) < 500 and 7500 < max(mixed) <= 8192
    assert sum(mixed) == 297132, "the seed is fixed"


def test_pages_lie_in_any_order_and_hold_no_more_than_the_keys():
    case = StepCase("tiny-prompt", 4, 2, 16, 16)
    tensors = call_of(case)
    assert tensors["k_cache"].shape == (2 + 3 + 1, 16, 2, 16) and tensors["page_table"].shape == (3, 3)
    used = [tensors["page_table"][b, j].item() for b, n in enumerate((2, 3, 1)) for j in range(n)]
    assert sorted(used) == list(range(6)) != used
    assert tensors["cu_seqlens_q"].tolist() == [0, 1, 6, 18] and tensors["max_seqlen_q"] == 12
    assert tensors["k_cache"].data_ptr() != tensors["v_cache"].data_ptr()
    whole = call_of(StepCase("tiny-prompt", 4, 2, 16, 0))
    assert whole["k_cache"].shape == (3, 33, 2, 16) and "page_table" not in whole


def test_the_command_checks_times_and_compares(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--rounds", "2", "--burst-ms", "0.1", "--out", str(out), "--commit", "abc"]
    options += ["--providers", "flashtile-cpu,fa3"]
    assert serving.main(options) == 0
    rows = results.read([out])
    assert [table.case_of(row) for row in rows] == EVERY and {row.suite for row in rows} == {"serving"}
    assert all(row.median_ms > 0 and 0 < row.error < 0.01 and row.commit == "abc" for row in rows)
    printed = capsys.readouterr().out
    times = {case: row.median_ms for case, row in zip(EVERY, rows, strict=True)}
    (plain, dense), name = TINY[0], "d16-h4x2-tiny-page16-dense-loop"
    line = next(x.split() for x in printed.splitlines()[::-1] if x.startswith(name))
    assert line == [name, f"{times[dense] / times[plain]:.2f}"]
    assert serving.main([*options, "--resume", "--cells", "*page16*"]) == 0
    assert len(results.read([out])) == len(rows), "the cells are there"
    assert serving.main([*options, "--cells", "*contiguous-dense*"]) == 0
    assert len(results.read([out])) == len(rows) + 2, "a dense call brings its packed one"
    assert serving.main(["--list", "--cells", "d64-h64x8-decode-page16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "d64-h64x8-decode-page16", "d64-h64x8-decode-page16-dense",
    ]  # fmt: skip


def forgetful():
    """Writes the last sequence's rows in its first call alone, and returns the same memory again."""
    kept = []

    def call(whole, **tensors):
        out = whole(**tensors)
        kept.append(out)
        kept[0][:-12] = out[:-12]
        return kept[0]

    return call


@pytest.mark.parametrize(
    "fault",
    [
        lambda whole, **tensors: whole(**tensors, causal=False),
        lambda whole, page_table, **tensors: whole(page_table=page_table.flip(1), **tensors),
        lambda whole, cache_seqlens, **tensors: whole(cache_seqlens=cache_seqlens - 1, **tensors),
        lambda whole, cu_seqlens_q, **tensors: whole(cu_seqlens_q=cu_seqlens_q.clamp(max=17), **tensors),
        forgetful(),
    ],
    ids=["mask", "pages", "lengths", "bounds", "unwritten"],
)
def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch, fault):
    whole = flashtile.attention_with_kvcache
    monkeypatch.setattr(flashtile, "attention_with_kvcache", lambda **tensors: fault(whole, **tensors))
    pool, session = caches.draw_pool([PACKED], CPU), session_of(tmp_path, "serving")
    (row,) = decode.run_group((PACKED,), [PROVIDERS["flashtile-cpu"]], session, pool, 2, 0.1)
    assert row.median_ms is None and row.error.startswith("wrong: relative error ")
    shown = table.cells([replace(row, case=row.case | {"measure": "graph"})])
    assert serving.steps_table(shown) == [["us (speed over fa3)", "tiny-prompt"], ["d16-h4x2 page16", "wrong"]]


def test_flash_attention_3_gets_the_same_step(tmp_path, monkeypatch):
    seen = flash_attention_3(monkeypatch)
    pool, session = caches.draw_pool(EVERY, CPU), session_of(tmp_path, "serving")
    rows = [row for group in TINY for row in decode.run_group(group, [PROVIDERS["fa3"]], session, pool, 2, 0.1)]
    assert len(rows) == len(EVERY) and all(row.median_ms > 0 and row.error < 0.01 for row in rows)
    assert seen == {(True, 0, most, whole) for most in (1, 12, None) for whole in (False, True)}
    refused = decode.run_group(TINY[0], [PROVIDERS["sdpa"]], session, pool, 2, 0.1)
    assert all(row.error.startswith("refused: ") for row in refused)


def test_kernels_are_compiled_ahead_by_ours_alone(monkeypatch, capsys):
    given = []

    def in_turn(function, work, workers, limit_s):
        given.append((workers, limit_s))
        yield from ((item, function(*item)) for item in work)

    called = []
    monkeypatch.setattr(serving, "side_by_side", in_turn)
    monkeypatch.setattr(serving, "call_once", lambda case, name, device: called.append((case, name)) or "failed: no")
    args = SimpleNamespace(device="cpu", budget_s=100.0, workers=3)
    serving.compile_ahead(args, TINY, [PROVIDERS["flashtile"], PROVIDERS["fa3"]])
    assert given == [(3, 50.0)] and len(called) == len(EVERY) and {*called} == {(case, "flashtile") for case in EVERY}
    assert capsys.readouterr().out.count("flashtile: failed: no") == len(EVERY)
    monkeypatch.undo()
    monkeypatch.setattr(serving, "side_by_side", in_turn)
    serving.compile_ahead(args, TINY, [PROVIDERS["flashtile-cpu"]])
    assert capsys.readouterr().out.startswith("compiled ahead in "), "the real calls go well"
