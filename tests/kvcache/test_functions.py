"""score_mod, mask_mod and intervals over a cache, on the CPU."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError, masks, mods
from tests.kvcache.functions import HUGE, KINDS, LENGTHS, error, huge_error


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_they_count_from_the_first_query_and_the_first_key(name: str, kind: str, packed: bool) -> None:
    assert error(LENGTHS[name], kind, "cpu", packed=packed) < 1e-5


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("value", HUGE)
def test_scores_as_huge_as_float32_has_them(value: float, sinks: bool) -> None:
    assert huge_error(value, "cpu", page_size=16 * sinks, packed=value == -1e9, sinks=sinks) < 1e-5


def test_what_goes_with_no_cache_is_refused() -> None:
    q, cache = torch.randn(1, 2, 2, 16), torch.randn(1, 20, 2, 16)
    tree = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    slope = torch.ones(2, requires_grad=True)
    lists = flashtile.create_block_mask(mods.causal, None, None, 2, 20)
    for given, text in (
        ({"block_mask": lists}, "block_mask: is of type BlockMask"),
        ({"tree_mask": tree, "mask_mod": mods.causal}, "tree_mask: is given with score_mod or mask_mod"),
        ({"tree_mask": tree, "block_mask": masks.rows(0, torch.tensor(9))}, "tree_mask: is given with block_mask"),
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score * slope[h]}, "score_mod: requires grad"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=text):
            flashtile.attention_with_kvcache(q, cache, cache.clone(), cache_seqlens=9, **given)
    with pytest.raises(UnsupportedError, match="a function of the user's"):
        flashtile.attention_with_kvcache(
            q.half(), cache.half(), cache.half(), cache_seqlens=9, mask_mod=mods.dilated(3), backend="hopper"
        )
    said = flashtile.explain(q, k_cache=cache, v_cache=cache, cache_seqlens=9, mask_mod=mods.dilated(3), backend="cpu")
    assert "mask_mod" in said
