import pytest
import torch

from benchmarks import results, varlen
from benchmarks.cases import Case

LENGTHS = varlen.draw_lengths(65536, 16, 16384, varlen.SEED)
PACKED = Case(
    "forward", "bfloat16", len(LENGTHS), max(LENGTHS), max(LENGTHS), 16, 16, 128, causal=True, lengths=LENGTHS
)


def test_lengths_fill_the_tokens_within_their_bounds_and_repeat():
    assert sum(LENGTHS) == 65536 and (len(LENGTHS), min(LENGTHS), max(LENGTHS)) == (30, 18, 15897)
    assert LENGTHS == varlen.draw_lengths(65536, 16, 16384, varlen.SEED) != varlen.draw_lengths(65536, 16, 16384, 1)
    for seed in range(50):
        found = varlen.draw_lengths(1000, 7, 300, seed)
        assert sum(found) == 1000 and min(found) >= 7


def test_the_dense_match_has_the_same_work():
    dense = varlen.dense_like(PACKED)
    assert dense.lengths is None and dense.seqlen_q % 128 == 0
    assert dense.batch * dense.seqlen_q == pytest.approx(65536, rel=0.01)
    assert dense.flops() == pytest.approx(PACKED.flops(), rel=0.01)
    even = Case("forward", "bfloat16", 4, 256, 256, 2, 2, 64, lengths=(256,) * 4)
    assert varlen.dense_like(even).flops() == even.flops()


def test_the_command_times_both_batches_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    small = ["--device", "cpu", "--tokens", "300", "--shortest", "5", "--longest", "100", "--hidden", "32"]
    options = ["--head-dims", "16", "--masks", "causal", "--dtype", "float32", "--rounds", "2", "--burst-ms", "0.5"]
    assert varlen.main([*small, *options, "--out", str(out), "--commit", "abc"]) == 0
    rows = results.read([out])
    assert len(rows) == 2 * 2 * 2
    assert all(0 <= r.error < 2e-5 and r.median_ms > 0 for r in rows)
    assert len(varlen.ratios(rows)) == 4
    assert "packed / dense" in capsys.readouterr().out


def test_it_says_what_it_needs(capsys):
    if not torch.cuda.is_available():
        assert varlen.main([]) == 2
        assert "needs a CUDA device" in capsys.readouterr().err
