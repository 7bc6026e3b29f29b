"""``supports``: whether a call over a cache can run, asked without tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from flashtile.api.keywords import asked_of
from flashtile.api.prepare import over_cache
from flashtile.call import cached_problem
from flashtile.call.arguments import integer
from flashtile.call.cached_arguments import EIGHT_BITS
from flashtile.call.problem import compute_capability as capability_of
from flashtile.core.errors import InvalidInputError, UnsupportedError, shown
from flashtile.masks import Intervals
from flashtile.ops import dispatch


class Support(NamedTuple):
    """The answer of ``supports``; false where no backend runs such calls.

    Attributes:
        backend: The one that would run them.
        reasons: For each backend, why it cannot; empty for one that can.
    """

    backend: str | None
    reasons: dict[str, list[str]]

    def __bool__(self) -> bool:
        return self.backend is not None


def _any_scores(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5


def _any_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 2 == 0


def supports(
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    page_size: int = 0,
    besides: Collection[str] = (),
    device: torch.device | str = "cuda",
    compute_capability: tuple[int, int] | None = None,
) -> Support:
    """Says whether ``attention_with_kvcache`` runs packed calls of a kind, and with which backend.

    Args:
        head_dim: Width of queries and keys.
        head_dim_v: Width of values, head_dim by default.
        dtype: The queries' dtype.
        cache_dtype: The cache's dtype, dtype by default.
        page_size: Rows of a page; 0 for a cache without pages.
        besides: What else the calls have, by the names of ``attention_with_kvcache``'s arguments: "window_size",
            "attention_chunk", "softcap", "alibi_slopes", "sinks", "causal" (by sequence), "tree_mask", "k" (new keys),
            "slot_mapping", "rotary_cos", "qv", "cache_leftpad", "cache_batch_idx", "page_indptr", "block_mask",
            "score_mod", "mask_mod", "batch_invariant", "return_max_scores", "selected" and "selected_slots".
        device: Where they would run.
        compute_capability: The GPU's, such as ``(9, 0)``; by default ``device``'s.

    Returns:
        The answer, which is true or false and holds the reasons.

    Raises:
        InvalidInputError: A ValueError that names the argument.
    """
    empty, index = functools.partial(torch.empty, device="meta"), torch.int32
    wide = head_dim if head_dim_v is None else head_dim_v
    integer("head_dim", head_dim), integer("head_dim_v", wide)
    slopes, one, words = empty(1, dtype=torch.float32), empty(1, dtype=index), empty(1, 1, dtype=torch.int64)
    turns = empty(1, head_dim // 2, dtype=torch.float32)
    new = {"k": empty(1, 1, head_dim, dtype=dtype), "v": empty(1, 1, wide, dtype=dtype)}
    known: dict[str, dict[str, Any]] = {
        "window_size": {"window_size": (1, 0)}, "attention_chunk": {"attention_chunk": 1}, "softcap": {"softcap": 1.0},
        "alibi_slopes": {"alibi_slopes": slopes}, "sinks": {"sinks": slopes},
        "causal": {"causal": empty(1, dtype=torch.bool)}, "tree_mask": {"tree_mask": words}, "k": new,
        "slot_mapping": {**new, "slot_mapping": words[0]}, "batch_invariant": {"batch_invariant": True},
        "rotary_cos": {**new, "rotary_cos": turns, "rotary_sin": turns}, "qv": {"qv": empty(1, 1, wide, dtype=dtype)},
        "cache_leftpad": {"cache_leftpad": one}, "cache_batch_idx": {"cache_batch_idx": one},
        "page_indptr": {"page_table": None, "page_indptr": empty(2, dtype=index), "page_indices": one},
        "block_mask": {"block_mask": Intervals(empty(1, 1, 1, 2, dtype=index), None)},
        "score_mod": {"score_mod": _any_scores}, "mask_mod": {"mask_mod": _any_mask},
        "return_max_scores": {"return_max_scores": True}, "selected": {"selected": empty(1, 1, dtype=index)},
        "selected_slots": {"selected_slots": empty(1, 1, dtype=index)},
    }  # fmt: skip
    unknown = [each for each in besides if each not in known]
    if unknown:
        raise InvalidInputError("besides", f"has {shown(unknown[0])}, must be of {', '.join(known)}")
    place = torch.device(device)
    if place.type == "cuda" and compute_capability is None and not torch.cuda.is_available():
        raise InvalidInputError("compute_capability", "is None, but torch finds no GPU here")
    rows, kind = integer("page_size", page_size, 0) or 1, cache_dtype or dtype
    keywords: Any = {
        "k_cache": empty(1, rows, 1, head_dim, dtype=kind), "v_cache": empty(1, rows, 1, wide, dtype=kind),
        "cache_seqlens": one, "cu_seqlens_q": empty(2, dtype=index),
        "page_table": empty(1, 1, dtype=index) if page_size else None,
    }  # fmt: skip
    if kind in EIGHT_BITS:
        keywords |= {"k_scale": slopes, "v_scale": slopes}
    for each in besides:
        keywords |= known[each]
    sides = (empty(1, 1, head_dim, dtype=dtype), keywords.pop("k", None), keywords.pop("v", None))
    tensors, options = over_cache(*asked_of("supports", sides, keywords))
    problem = cached_problem.problem_of(tensors, options).but(
        device_type=place.type,
        compute_capability=capability_of(place) if compute_capability is None else tuple(compute_capability),
    )
    try:
        chosen = dispatch.select(problem, "decode").name
    except UnsupportedError:
        chosen = None
    return Support(chosen, {name: dispatch.reasons(name, problem, "decode") for name in dispatch.NAMES})
