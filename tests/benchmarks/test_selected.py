"""Attention over keys that data select: cells on the CPU, what their results are compared with, and the report."""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace

import pytest
import torch

import flashtile
from benchmarks import results, selected, selections
from benchmarks.cases import make_inputs
from benchmarks.session import NotTimedError
from flashtile.core.errors import UnsupportedError

CPU = torch.device("cpu")
CELLS = {cell.name: cell for cell in selections.cells("cpu")}
BLOCKS = [name for name, cell in CELLS.items() if isinstance(cell, selections.BlockCell)]


def of_cell(name):
    cell = CELLS[name]
    indices = selections.chosen_blocks(cell, CPU)
    return cell, indices, selections.kept_blocks(cell, indices)


def pairs_by_definition(cell, indices):
    """``(heads, seqlen, seqlen)`` bool."""
    seen = torch.zeros(cell.heads, cell.seqlen, cell.seqlen, dtype=torch.bool)
    for h in range(cell.heads):
        for i, blocks in enumerate(indices[0, h * cell.list_heads // cell.heads].tolist()):
            for j in (block for block in blocks if block >= 0):
                seen[h, i * cell.rows : (i + 1) * cell.rows, j * cell.keys : (j + 1) * cell.keys] = True
    return seen.tril() if cell.causal else seen


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_cells_of_blocks(name, command):
    rows, printed = command(selected, f"--device cpu --rounds 1 --burst-ms 0.1 --cells {name}")
    rows = {row.provider: row for row in rows}
    assert list(rows) == list(selected.OF_BLOCKS) and "over dense" in printed
    for each in ("flashtile", "dense"):
        assert 0 < rows[each].error < selections.LIMIT and rows[each].tflops > 0
    assert rows["lists"].median_ms > 0 and rows["lists"].tflops is None
    assert all(rows[each].error.startswith("refused: ") for each in ("flashtile-portable", "flex", "fa3"))


@pytest.mark.parametrize("name", ["forward-vsa-near", "forward-moba", "forward-nsa"])
def test_lists_name_what_the_cell_says(name):
    cell, indices, kept = of_cell(name)
    assert indices.shape == (1, cell.list_heads, cell.seqlen // cell.rows, cell.top)
    seen = pairs_by_definition(cell, indices)
    assert selections.kept_pairs(cell, kept) == int(seen.sum())
    if cell.causal:
        # Every row sees itself, and only the first rows have fewer blocks than the others.
        assert bool(seen.diagonal(dim1=1, dim2=2).all())
        first = -(-cell.top * cell.keys // cell.rows)
        assert bool((indices[:, :, first:] >= 0).all()) and bool((indices[:, :, 0] < 0).any())
    else:
        assert len(indices.unique()) > cell.top and bool((indices.sort(-1).values.diff(dim=-1) > 0).all())


def test_blocks_nearby_are_preferred():
    cell = replace(CELLS["forward-vsa-near"], seqlen=4096, top=8)
    away = []
    for kind in ("vsa-near", "vsa-random"):
        indices = selections.chosen_blocks(replace(cell, kind=kind), CPU)
        away.append(float((indices - torch.arange(64)[:, None]).abs().float().mean()))
    assert away[0] < away[1] / 3


@pytest.mark.parametrize("name", ["forward-vsa-random", "forward-moba"])
def test_flexattention_has_the_same_pairs(name):
    cell, indices, kept = of_cell(name)
    mask, seen = selected.flex_mask(cell, kept), pairs_by_definition(cell, indices)
    assert mask.shape == (1, cell.list_heads, cell.seqlen, cell.seqlen)
    assert torch.equal(mask.to_dense()[0].bool(), kept)
    by_block = seen.unflatten(2, (-1, cell.keys)).unflatten(1, (-1, cell.rows)).transpose(2, 3)
    for h, blocks in enumerate(by_block):
        # What is full is whole, and what the function decides is cut.
        for i, whole in enumerate(blocks.all(-1).all(-1)):
            full = mask.full_kv_indices[0, h, i, : mask.full_kv_num_blocks[0, h, i]]
            assert sorted(full.tolist()) == whole.nonzero()[:, 0].tolist()
    i = torch.arange(cell.seqlen)
    by_mod = mask.mask_mod(torch.tensor(0), 0, i[:, None], i)
    blockwise = kept.repeat_interleave(cell.rows, 1).repeat_interleave(cell.keys, 2)
    assert torch.equal(blockwise & by_mod, seen)


@pytest.mark.parametrize("name", ["forward-moba", "backward-moba"])
def test_results_over_other_keys_are_not_timed(name):
    cell, indices, kept = of_cell(name)
    inputs = make_inputs(cell.case, CPU)
    right = selected.call_of(cell, "flashtile", inputs, indices, kept)()
    reference = selections.SelectedReference(cell, inputs, kept)
    assert 0 < reference.check(right) < selections.LIMIT
    one_less = torch.where(torch.arange(cell.top) == cell.top - 1, -1, indices)
    for wrong in (
        (*right[:-1], right[-1] * 1.05),
        selected.call_of(cell, "flashtile", inputs, one_less, selections.kept_blocks(cell, one_less))(),
        selected.call_of(cell, "dense", inputs, indices, kept)(),
        (*right[:-1], right[-1].index_fill(1, torch.tensor([7]), torch.nan)),
    ):
        with pytest.raises(NotTimedError, match="wrong: (relative error|not finite)"):
            reference.check(wrong)
    with pytest.raises(NotTimedError, match="wrong: lists of other blocks"):
        selected.call_of(cell, "lists", inputs, one_less, kept)


def attend_by_gathering(q, k_cache, v_cache, *, cache_seqlens, selected, causal, page_table=None):
    """The definition of a call with selected keys."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, length in enumerate(cache_seqlens.tolist()):
        k, v = (
            x[b if page_table is None else page_table[b].long()].reshape(-1, x.shape[-1]) for x in (k_cache, v_cache)
        )
        for i, at in enumerate(selected[b].long()):
            assert causal and len(at.unique()) == len(at) and int(at.max()) <= length - q.shape[1] + i
            score = q[b, i].float() @ k[at].float().T * q.shape[-1] ** -0.5
            out[b, i] = (score.softmax(-1) @ v[at].float()).to(q.dtype)
    return out


OPTIONS = "--device cpu --rounds 1 --burst-ms 0.1 --cells "
REFUSED = "refused: attention_with_kvcache has no keyword selected"


def without_last(*tensors, selected, **keywords):
    return attend_by_gathering(*tensors, selected=selected[..., :-1], **keywords)


def of_next_head(*tensors, selected, **keywords):
    return attend_by_gathering(*tensors, selected=selected, **keywords).roll(1, dims=2)


@pytest.mark.parametrize("name", ["dsa-h8-q2", "dsa-h64-q1", "dsa-prefill"])
def test_cells_of_keys(name, command, monkeypatch):
    monkeypatch.setattr(flashtile, "attention_with_kvcache", attend_by_gathering)
    right, printed = command(selected, OPTIONS + name)
    assert [row.provider for row in right] == list(selected.OF_TOKENS[: 2 if "h8" in name else 1])
    assert all(0 < row.error < selections.LIMIT and row.tflops > 0 for row in right) and "GB/s" in printed
    for fault in (without_last, of_next_head):
        monkeypatch.setattr(flashtile, "attention_with_kvcache", fault)
        rows = command(selected, OPTIONS + name)[0][-len(right) :]
        assert all(row.error.startswith("wrong: relative error") and row.median_ms is None for row in rows)


def unsupported(*tensors, selected=None, **keywords):
    raise UnsupportedError("on no device")


@pytest.mark.parametrize("name", ["dsa-h16-q2", "dsa-prefill"])
def test_a_library_without_the_keyword_refuses_and_one_that_has_it_does_not(name, command, monkeypatch):
    rows, _ = command(selected, OPTIONS + name)
    has_it = "selected" in inspect.signature(flashtile.attention_with_kvcache).parameters
    for row in rows:
        assert (row.error < selections.LIMIT) if has_it else row.error == REFUSED
    for fault, said in ((lambda q, **_: q, REFUSED), (unsupported, "failed: RuntimeError: on no device")):
        monkeypatch.setattr(flashtile, "attention_with_kvcache", fault)
        rows = command(selected, OPTIONS + name)[0][len(rows) :]
        assert {row.error for row in rows[-1:]} == {said}


def test_figures_beside_attention_without_lists():
    run = replace(results.new_run("selected", CPU, commit="abc"), device="NVIDIA H200")
    cell = asdict(CELLS["forward-kept-8"])
    rows = [
        run.row(cell, "flashtile", median_ms=2.0, tflops=100.0, error=0.003),
        run.row(cell, "dense", median_ms=10.0, tflops=160.0, error=0.003),
        run.row(cell, "fa3", median_ms=8.0, tflops=200.0, error=0.003),
        run.row(cell, "flex", error="failed: no tile"),
    ]
    text = selected.report(rows)
    assert text.splitlines()[2].split()[-6:] == ["100", "0.1250", "4.00", "0.50", "13%", "products"]
    assert text.endswith("forward kept-8: flex: failed: no tile")
