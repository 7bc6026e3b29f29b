"""``supports``: whether a call over a cache can run, asked without tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from flashtile.api.cached import completed
from flashtile.call import cached_arguments, cached_problem
from flashtile.call.arguments import integer
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import compute_capability as capability_of
from flashtile.core.errors import InvalidInputError, UnsupportedError, shown
from flashtile.ops import dispatch

# What a call may have besides -> the options and tensors that stand for it.
_BESIDES: dict[str, tuple[dict[str, Any], dict[str, torch.Size]]] = {
    "window_size": ({"window_size": (1, 0)}, {}),
    "attention_chunk": ({"attention_chunk": 1}, {}),
    "softcap": ({"softcap": 1.0}, {}),
    "alibi_slopes": ({}, {"alibi_slopes": torch.Size([1])}),
    "sinks": ({}, {"sinks": torch.Size([1])}),
    "causal": ({"causal": False}, {}),
    "tree_mask": ({}, {}),
    "slot_mapping": ({}, {}),
}


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
        besides: What else the calls have, of "window_size", "attention_chunk", "softcap", "alibi_slopes", "sinks",
            "causal" (by sequence), "tree_mask" and "slot_mapping".
        device: Where they would run.
        compute_capability: The GPU's, such as ``(9, 0)``; by default ``device``'s.

    Returns:
        The answer, which is true or false and holds the reasons.

    Raises:
        InvalidInputError: A ValueError that names the argument.
    """
    unknown = [each for each in besides if each not in _BESIDES]
    if unknown:
        raise InvalidInputError("besides", f"has {shown(unknown[0])}, must be of {', '.join(_BESIDES)}")
    place = torch.device(device)
    if place.type == "cuda" and compute_capability is None and not torch.cuda.is_available():
        raise InvalidInputError("compute_capability", "is None, but torch finds no GPU here")
    rows, wide = integer("page_size", page_size, 0) or 1, head_dim if head_dim_v is None else head_dim_v

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    kind, index = dtype if cache_dtype is None else cache_dtype, torch.int32
    tensors: dict[str, Any] = {
        "out": None, "q": empty(1, 1, integer("head_dim", head_dim)), "k_cache": empty(1, rows, 1, head_dim, of=kind),
        "v_cache": empty(1, rows, 1, integer("head_dim_v", wide), of=kind), "cache_seqlens": empty(1, of=index),
        "cu_seqlens_q": empty(2, of=index), "page_table": empty(1, 1, of=index) if page_size else None,
    }  # fmt: skip
    options: dict[str, Any] = {"window_size": None, "softcap": 0.0, "causal": True, "attention_chunk": None}
    for each in besides:
        given, shapes = _BESIDES[each]
        options |= given
        tensors |= {name: empty(*shape, of=torch.float32) for name, shape in shapes.items()}
    if "causal" in besides:
        tensors["causal"] = empty(1, of=torch.bool)
    if "tree_mask" in besides:
        tensors["tree_mask"] = empty(1, 1, of=torch.int64)
    if "slot_mapping" in besides:
        tensors |= {"k": empty(1, 1, head_dim), "v": empty(1, 1, wide), "slot_mapping": empty(1, of=torch.int64)}
    plain = 1, None, None, options["softcap"], False, None, options["attention_chunk"], False
    read = cached_arguments.read(options["causal"], options["window_size"], False, plain)
    problem = cached_problem.problem_of(completed(CacheTensors(**tensors)), read).but(
        device_type=place.type,
        compute_capability=capability_of(place) if compute_capability is None else tuple(compute_capability),
    )
    try:
        chosen = dispatch.select(problem, "decode").name
    except UnsupportedError:
        chosen = None
    return Support(chosen, {name: dispatch.reasons(name, problem, "decode") for name in dispatch.NAMES})
