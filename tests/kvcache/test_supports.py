"""``supports`` answers as a call does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError

E4M3 = torch.float8_e4m3fn


def test_backends_of_a_gpu() -> None:
    pytest.importorskip("triton")
    hopper = flashtile.supports(128, page_size=16, compute_capability=(9, 0))
    assert hopper and hopper.backend == "hopper" and hopper.reasons["hopper"] == [] and hopper.reasons["cpu"]
    older = flashtile.supports(128, page_size=16, compute_capability=(8, 0), besides=["softcap", "sinks"])
    assert older.backend == "portable" and "9.0" in older.reasons["hopper"][0]
    by_sequence = flashtile.supports(64, page_size=1, besides=["causal", "slot_mapping"], compute_capability=(9, 0))
    trees = flashtile.supports(64, cache_dtype=torch.float8_e5m2, besides=["tree_mask"], compute_capability=(9, 0))
    assert by_sequence.backend == trees.backend == "hopper"
    none = flashtile.supports(2048, compute_capability=(9, 0))
    assert not none and none.backend is None and all(none.reasons.values())


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", [1, 24, 64, 2048])
def test_the_cpu_does_what_it_says(head_dim: int, cache_dtype: Any, page_size: int) -> None:
    found = flashtile.supports(
        head_dim, head_dim_v=16, dtype=torch.float32, cache_dtype=cache_dtype, page_size=page_size,
        besides=["window_size", "alibi_slopes", "sinks"], device="cpu",
    )  # fmt: skip
    caches = [torch.ones(2, page_size or 8, 1, dim).to(cache_dtype or torch.float32) for dim in (head_dim, 16)]
    given: dict[str, Any] = dict(cache_seqlens=1, window_size=(2, 0), alibi_slopes=torch.ones(1), sinks=torch.ones(1))
    given |= {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)}
    if page_size:
        given["page_table"] = torch.tensor([[1]], dtype=torch.int32)
    try:
        flashtile.attention_with_kvcache(torch.ones(3, 1, head_dim), *caches, **given)
    except UnsupportedError as error:
        assert not found and found.reasons == error.reasons
    else:
        assert found.backend == "cpu"


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("head_dim", {"head_dim": 0}), ("head_dim_v", {"head_dim_v": -1}), ("page_size", {"page_size": 1.5}),
        ("besides", {"besides": ["bias"]}), ("q", {"dtype": torch.int32}), ("k_cache", {"cache_dtype": torch.int8}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(argument: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        flashtile.supports(**{"head_dim": 64, "device": "cpu"} | given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InvalidInputError, match="compute_capability: is None, but torch finds no GPU here"):
        flashtile.supports(64)
