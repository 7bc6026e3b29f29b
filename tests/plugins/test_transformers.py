"""transformers' continuous batching with flashtile, against its own ``generate`` with eager attention."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from transformers.generation.continuous_batching import initialization

import flashtile
from flashtile import UnsupportedError
from flashtile.integrations import _transformers_paged as paged
from flashtile.integrations.transformers import calls, enable
from tests.plugins import models

HOW = hf.GenerationConfig(max_new_tokens=models.NEW_TOKENS, do_sample=False, pad_token_id=0)


eager = functools.cache(models.eager)


def together(model: Any, **changes: Any) -> list[list[int]]:
    """What it writes to all of them together, in steps of 128 tokens at most."""
    settings = dict(page_size=32, num_blocks=256, max_batch_tokens=128, default_compile_level=0, use_cuda_graph=False)
    batching = hf.ContinuousBatchingConfig(auto_switch_to_flash=False, **settings | changes)
    found = model.generate_batch(models.prompts(), generation_config=HOW, continuous_batching_config=batching)
    return [each.generated_tokens for _, each in sorted(found.items(), key=lambda x: int(x[0].rpartition("_")[2]))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(models.CONFIGS))
def test_the_tokens_are_those_of_eager_attention(name: str) -> None:
    model = models.make(name)
    enable(model, continuous_batching=True)
    calls.clear()
    with mock.patch.object(flashtile, "attention_with_kvcache", wraps=flashtile.attention_with_kvcache) as over_pages:
        got = together(model)
    assert got == eager(name)
    assert len({token for tokens in got for token in tokens}) > 40
    assert calls.served > over_pages.call_count
    # Windows' keys are in a ring, which transformers copies out.
    assert (over_pages.call_count > 0) == (name != "mistral")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(models.CONFIGS))
def test_attention_decides(name: str) -> None:
    """What the comparison is worth: scores that are a tenth smaller change what follows every prompt."""
    model = models.make(name)
    enable(model, continuous_batching=True)
    for part in model.modules():
        if hasattr(part, "scaling"):
            part.scaling *= 0.9
    assert not any(a == b for a, b in zip(together(model), eager(name), strict=True))


def test_tables_of_pages() -> None:
    """transformers makes them on CUDA alone, for steps of single tokens."""
    model = models.make("llama")
    enable(model, continuous_batching=True)
    kept, tables = paged._pages, 0

    def pages(layer_idx: int, given: dict[str, Any]) -> Any:
        nonlocal tables
        tables += given["block_table"] is not None
        return kept(layer_idx, given)

    everywhere = mock.patch.object(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    with everywhere, mock.patch.object(paged, "_pages", pages):
        assert together(model, max_blocks_per_request=16) == eager("llama")
    assert tables > 0


def test_the_switched_model_runs_otherwise_too() -> None:
    model, tokens = models.make("mistral"), torch.tensor([models.prompts()[2]])
    want = eager("mistral")[2]
    enable(model, continuous_batching=True)
    padded = torch.nn.functional.pad(tokens, (4, 0))
    seen = torch.nn.functional.pad(torch.ones_like(tokens), (4, 0))
    got = model.generate(padded, attention_mask=seen, generation_config=HOW)
    assert got[0, padded.shape[1] :].tolist() == want


def test_the_loader_keeps_other_names() -> None:
    name = enable(continuous_batching=True)
    loader = paged.loader._lazy_imports
    assert enable(continuous_batching=True) == name and paged.loader._lazy_imports is loader
    with pytest.raises(ImportError):
        loader("flash_attention_3")


def test_another_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(paged.loader, "_lazy_imports")
    with pytest.raises(UnsupportedError, match="continuous_batching: this release of transformers"):
        enable(continuous_batching=True)


def test_dropout_is_refused() -> None:
    module = torch.nn.Module().train()
    with pytest.raises(UnsupportedError, match="dropout: continuous batching is for inference"):
        paged.attend(module, *[torch.ones(1, 2, 3, 8)] * 3, {"dropout": 0.1})
