"""The suite of latent rows: its cells, its reference, and what a run says."""

import pytest
import torch

import flashtile
from benchmarks import caches, latent, mla, results, table
from benchmarks.latent import LatentCase

CPU = torch.device("cpu")
TINY = latent.groups("loop", "cpu")
EVERY = [case for group in TINY for case in group]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_the_reference_is_what_the_call_means_and_sees_its_sequences(case):
    (tensors,) = case.calls(caches.draw_pool([case], CPU))
    assert tensors["v_cache"].data_ptr() == tensors["k_cache"].data_ptr()
    cache = (latent._columns(tensors["k_cache"]) if case.variant == "fp8" else tensors["k_cache"]).double()
    wide = tensors | {"q": tensors["q"].double(), "k_cache": cache, "v_cache": cache[..., :512]}
    exact, reference = flashtile.attention_with_kvcache(**wide), case.reference(tensors)
    assert reference.error((exact,)) < 1e-12 < reference.limit < 0.02
    assert reference.error((flashtile.attention_with_kvcache(**tensors),)) <= reference.limit
    for b in (0, -1):
        wrong = exact.clone()
        wrong[b] *= 1.2
        assert reference.error((wrong,)) > reference.limit
    wrong[0, 0, 0, 0] = torch.nan
    assert not reference.error((wrong,)) <= reference.limit


def test_the_cells_are_those_that_the_suite_is_to_show():
    plain = [group[0] for group in latent.groups("graph")]
    assert all(LatentCase(**vars(case)) == case for case in plain) and len(plain) == 3 * 7 + 2 * 4
    assert {(case.num_heads_q, case.seqlen_q) for case in plain} == {(16, 1), (64, 1), (128, 1), (64, 2), (128, 2)}
    sizes = {(1, 8192), (1, 65536), (16, 4096), (64, 4096), (128, 4096), (128, 8192), (64, 0)}
    assert {(case.batch, case.seqlen_k) for case in plain} == sizes
    mixed = LatentCase(16, 1, 64, 0).lengths
    assert len({*mixed}) > 50 and min(mixed) >= 256 and max(mixed) <= 8192
    eight = {case for group in latent.groups("graph") for case in group if case.variant == "fp8"}
    assert {(case.num_heads_q, case.batch) for case in eight} == {(h, b) for h in (16, 128) for b in (1, 64, 128)}
    assert LatentCase(16, 1, 64, 4096, "fp8").gb_per_s(1.0) == pytest.approx(64 * 4096 * 656 / 1e6)
    assert LatentCase(16, 1, 64, 4096).gb_per_s(1.0) == pytest.approx(64 * 4096 * 1152 / 1e6)


def test_the_command_checks_times_and_compares(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--rounds", "2", "--burst-ms", "0.1", "--out", str(out), "--commit", "abc"]
    assert mla.main(options) == 0
    rows = results.read([out])
    assert [table.case_of(row) for row in rows] == EVERY and {row.suite for row in rows} == {"mla"}
    assert all(row.median_ms > 0 and 0 < row.error < 0.01 for row in rows)
    assert "h16-q1-b2-tiny-page16-loop" in capsys.readouterr().out
