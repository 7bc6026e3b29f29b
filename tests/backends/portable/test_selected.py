"""The kernels that find the rows of selected keys, against the same in PyTorch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashtile.backends.portable import selected as by_kernel
from flashtile.call import latent, selected
from flashtile.call.cached_arguments import read
from flashtile.call.cached_problem import problem_of
from flashtile.call.selected import Selected
from flashtile.core import settings
from tests.kvcache.cases import build
from tests.selections import SELECTED, lists_for

pytestmark = pytest.mark.skipif(not settings.TRITON_INTERPRET.enabled(), reason="needs Triton's interpreter")

_CASES = (
    "steps", "entries", "leftpad", "window_both", "not_causal", "wider_v", "heads_first", "between", "pages_of_1",
    "pages_of_3", "pages_leftpad", "packed", "packed_spare", "packed_window", "causal_each", "ragged_of_1",
    "ragged_leftpad", "window_causal_each", "latent_steps", "empty", "no_rows", "no_batch", "packed_no_sequences",
)  # fmt: skip


@pytest.mark.one_in(7)
@pytest.mark.parametrize("most", [0, 1, 13, 40])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", [name for name in _CASES if name in SELECTED])
def test_rows_are_those_of_pytorch(name: str, slots: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a list takes several steps, and the bounds of packed queries do."""
    monkeypatch.setattr(by_kernel, "_BLOCK", 16)
    monkeypatch.setattr(by_kernel, "_SEARCH", 2)
    by_kernel._plan.cache_clear()
    case, call = SELECTED[name], build(SELECTED[name], torch.float32)
    lists = lists_for(call, most, slots=slots)
    given = Selected(None, lists) if slots else Selected(lists, None)
    window = None if slots else case.window
    longest = None if slots else call.keywords.get("max_seqlen_k")
    plain = call.keywords.get("max_seqlen_q"), longest, None, 0.0, False, None, None, False, False, False
    options = read(case.causal and not case.causal_each, window, True, plain)
    t = latent.split(call.tensors)
    if slots:
        t.causal = t.cache_leftpad = t.cache_batch_idx = None
    t = selected.to_check(t, given)
    reach = selected.reach_of(t, options, problem_of(t, options), given)
    rows, counts = selected.compacted(t, given, reach)
    got, got_counts = by_kernel.compacted(t, given, reach)
    assert rows.dtype == got.dtype == counts.dtype == got_counts.dtype == torch.int32
    assert torch.equal(counts, got_counts) and torch.equal(rows, got)
    past = torch.arange(most) >= counts[:, None]
    assert not rows[past].any()
    if most == 40 and name in ("steps", "entries", "pages_of_3", "packed_window", "latent_steps"):
        assert counts.max() > 16
