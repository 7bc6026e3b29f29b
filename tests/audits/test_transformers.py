"""Models of transformers: nothing is found as they come, and faults as people make them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from transformers.models.llama import modeling_llama

import flashtile
from flashtile.audits import Audit
from flashtile.compat import flash_attn_2
from flashtile.integrations.transformers import NAME, enable

_SIZES = dict(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
_GEMMA = dict(**_SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=8)


def model_of(kind: str, way: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    name = {"T5": "T5ForConditionalGeneration", "Bert": "BertForMaskedLM"}.get(kind, f"{kind}ForCausalLM")
    if way == NAME:
        enable()
    return getattr(transformers, name)._from_config(config, attn_implementation=way).eval()


def ids(rows: int = 24) -> Tensor:
    return torch.randint(2, 100, (2, rows), generator=torch.Generator().manual_seed(0))


def padded(left: bool) -> dict[str, Tensor]:
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, slice(0, 7) if left else slice(-7, None)] = 0
    return {"input_ids": ids() * mask, "attention_mask": mask}


def kinds(found: Audit) -> set[str]:
    return {each.kind for each in found.findings}


_WAYS = ("sdpa", "eager", NAME)
_MODELS = (
    ("Llama", _SIZES, {"causal"}, _WAYS),
    ("Mistral", dict(**_SIZES, sliding_window=8), {"causal, window of 8 keys"}, _WAYS),
    ("Qwen2", dict(**_SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
     {"causal", "causal, window of 8 keys"}, _WAYS),
    ("Gemma2", _GEMMA, {"causal", "causal, window of 8 keys"}, ("eager", NAME)),
    ("OPT", dict(vocab_size=100, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                 word_embed_proj_dim=64), {"causal"}, _WAYS),
    ("GPTNeo", dict(vocab_size=100, hidden_size=64, num_layers=2, num_heads=4, window_size=8,
                    attention_types=[[["global", "local"], 1]]), {"causal", "causal, window of 8 keys"}, ("eager",)),
    ("Bloom", dict(vocab_size=100, hidden_size=64, n_layer=2, n_head=4), {"causal"}, ("eager",)),
    ("T5", dict(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4), {"all", "causal"}, _WAYS),
)  # fmt: skip
_CASES = [(kind, settings, masks, way) for kind, settings, masks, ways in _MODELS for way in ways]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "settings", "masks", "way"), _CASES, ids=[f"{each[0]}-{each[3]}" for each in _CASES])
def test_nothing_is_found_as_models_come(kind: str, settings: dict[str, Any], masks: set[str], way: str) -> None:
    model = model_of(kind, way, **settings)
    for left in (None, True, False):
        given = {"input_ids": ids()} if left is None else padded(left)
        more = {"decoder_input_ids": ids(9)} if kind == "T5" else {}
        found = flashtile.audit(model, given | more)
        assert found.findings == ()
        assert left is not None or {call.mask for call in found.calls} == masks
        assert all(call.errors is not None for call in found.calls) and len(found.calls) >= 2
        name = {"sdpa": "scaled_dot_product_attention (", "eager": "softmax, written", NAME: "flashtile.attention"}[way]
        assert all(call.function.startswith(name) for call in found.calls)


def _ones_off(model: Any) -> dict[str, Tensor]:
    """A mask of four dimensions that somebody made."""
    return {"input_ids": ids(), "attention_mask": torch.ones(24, 24).tril(1).bool().expand(2, 1, 24, 24)}


def _turned(x: Tensor, count: int) -> Tensor:
    return x.repeat(1, count, 1, 1)


def _wide_window(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any) -> Any:
    """transformers' sliding_window taken for the keys before a row's own."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    window = (others["sliding_window"], 0)
    return flash_attn_2.flash_attn_func(q, k, v, causal=True, window_size=window, softmax_scale=others["scaling"]), None


def _always_dropped(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any) -> Any:
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, 0.1, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _scaled(model: Any) -> dict[str, Tensor]:
    model.model.layers[1].self_attn.scaling = 1 / 16
    return {"input_ids": ids()}


def _no_mask(model: Any) -> dict[str, Tensor]:
    model.config.pad_token_id = 0
    return {"input_ids": padded(left=True)["input_ids"]}


@pytest.mark.parametrize(("kind", "way", "given", "words"), [
    ("mask", "sdpa", _ones_off, "rows see 1 key after their own: the causal mask is one row off"),
    ("window", "wide", None, "rows see 9 keys up to their own, the model's config says 8: off by one"),
    ("scale", "eager", _scaled, "scores are scaled by 0.0625 where 0.25 was expected"),
    ("heads", "eager", None, "query head h reads key head h % 2"),
    ("dropout", "dropped", None, "dropout of 0.1"),
    ("padding", "sdpa", _no_mask, "17 of 17 rows of real tokens see keys of padding"),
])  # fmt: skip
def test_planted_faults_are_named(
    kind: str, way: str, given: Callable[[Any], dict[str, Tensor]] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "wide", _wide_window)
    monkeypatch.setitem(AttentionInterface._global_mapping, "dropped", _always_dropped)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "dropped", sdpa_mask)
    if kind == "heads":
        monkeypatch.setattr(modeling_llama, "repeat_kv", _turned)
    model = model_of(*(("Mistral", way) if kind == "window" else ("Llama", way)), **_SIZES, **(
        {"sliding_window": 8} if kind == "window" else {}
    ))  # fmt: skip
    found = flashtile.audit(model, given(model) if given else {"input_ids": ids()})
    assert kinds(found) == {kind}
    layers = {"model.layers.1.self_attn"} if kind == "scale" else {f"model.layers.{n}.self_attn" for n in range(2)}
    assert {each.layer for each in found.findings} - {""} == layers
    assert all(words in each.text for each in found.findings if each.layer)


def _hidden(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """Causal attention that is neither a function with a name nor a product around a softmax."""
    out = torch.zeros_like(q)
    for b, i, h in itertools.product(*map(range, q.shape[:3])):
        if real[b, i]:
            keys, values = (x[b, : i + 1, h * k.shape[2] // q.shape[2]][real[b, : i + 1]] for x in (k, v))
            weights = (keys @ q[b, i, h] * q.shape[-1] ** -0.5).exp()
            out[b, i, h] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize(("factor", "pads"), [(1.0, False), (1.0, True), (1.5, True)])
def test_a_kernel_behind_the_interface_is_compared(factor: float, pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
        real = torch.ones(query.shape[0], query.shape[2]).bool() if mask is None else mask.bool()
        return _hidden(*(x.transpose(1, 2) for x in (query, key, value)), real) * factor, None

    monkeypatch.setitem(AttentionInterface._global_mapping, "own", own)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "own", flash_attention_mask)
    given = {name: x[:, 4:13] for name, x in padded(left=True).items()} if pads else ids(9)
    found = flashtile.audit(model_of("Llama", "own", **_SIZES), given)
    assert [call.function for call in found.calls] == ["tests.own"] * 2
    assert kinds(found) == (set() if factor == 1 else {"error"})
    assert found.calls[0].kept is not None and found.calls[0].kept.share < (0.5 if pads else 0.6)
