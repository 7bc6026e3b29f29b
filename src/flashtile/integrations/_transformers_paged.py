"""transformers' continuous batching: layers with keys and values in transformers' paged cache.

It batches continuously with a few implementations of its own, and with names that contain "flash"; if a 2 or a 3
follows, it also makes tables of pages. It loads the functions for such a name from a package or from the hub, so our
name is added to its loader.

Source: transformers 5.23, ``generation/continuous_batching`` and ``modeling_flash_attention_utils``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as loader

import flashtile
from flashtile.core.errors import UnsupportedError

NAME = "flashtile_3"
# Further keywords that transformers passes to each layer; the last two are its bookkeeping of logits.
KEYWORDS = {"block_table", "cache", "read_index", "write_index", "logits_indices", "logits_processor_args"}


def introduce() -> None:
    """Adds our name to transformers' loader."""
    if not hasattr(loader, "_lazy_imports"):
        raise UnsupportedError("continuous_batching: this release of transformers loads implementations in another way")
    if not isinstance(loader._lazy_imports, _Loader):
        loader._lazy_imports = _Loader(loader._lazy_imports)


def list_for(part: PreTrainedModel) -> None:
    """Adds our name to the list of implementations that a part of a model takes, if it has such a list."""
    listed = getattr(part, "_compatible_flash_implementations", None)
    if listed is not None and NAME not in listed:
        part._compatible_flash_implementations = [*listed, NAME]


class _Loader:
    """transformers' loader, which returns flashtile's versions of flash-attn's functions for our name."""

    def __init__(self, others: Any) -> None:
        self._others = others
        functools.update_wrapper(self, others)

    def __call__(self, implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if implementation != NAME:
            return self._others(implementation, *args, **kwargs)
        from flashtile.compat import flash_attn_2 as ours

        attention = ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache
        return *attention, loader._pad_input, loader._unpad_input


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    """A layer's attention over transformers' cache; its new keys and values are written there.

    Args:
        module: The layer; ``layer_idx`` names its place in the cache.
        q: ``(1, num_heads_q, total_q, head_dim)``: the rows of all requests, one after another.
        k: ``(1, num_heads_kv, total_q, head_dim)``.
        v: ``(1, num_heads_kv, total_q, head_dim_v)``.
        given: The keywords of the layer's call; lengths of keys are dictionaries by kind of layer.

    Returns:
        ``(1, total_q, num_heads_q, head_dim_v)``.
    """
    if module.training and given.get("dropout"):
        raise UnsupportedError("dropout: continuous batching is for inference; call model.eval()")
    window = given.get("sliding_window")
    options = {
        "causal": True if given.get("is_causal") is None else given["is_causal"],
        "window_size": (window - 1, 0) if window else None,
        "softmax_scale": given.get("scaling"),
        "softcap": given.get("softcap") or 0.0,
        "sinks": None if given.get("s_aux") is None else given["s_aux"].detach(),
    }
    with torch.no_grad():
        pages = _pages(module.layer_idx, given)
        if pages is None:
            return _gathered(module.layer_idx, q, k, v, given, options)[None]
        return _over_pages(q, k, v, given, options | pages)[None]


def _pages(layer_idx: Any, given: dict[str, Any]) -> dict[str, Tensor] | None:
    """A layer's pages and each request's page table; None if pages are not in order, or if none is read."""
    cache, table = given["cache"], given.get("block_table")
    allocator = cache.layer_to_allocator[layer_idx]
    if table is None and not allocator.supports_block_table:
        return None  # a window's keys are in a ring buffer
    if table is not None:
        table = table[allocator.index]
    else:
        slots, size = given["read_index"][allocator.index], allocator.tokens_per_page
        if slots.numel() == 0:
            return None
        # slots holds the place of every key, request after request, and so the place of each page's first key.
        starts = given["cu_seq_lens_k"][allocator.layer_type][:-1, None]
        longest = given["max_length_k"][allocator.layer_type]
        firsts = starts + torch.arange(0, longest, size, device=slots.device)
        table = (slots[firsts.clamp_(max=slots.numel() - 1)] // size).to(torch.int32)
    k_cache, v_cache = allocator.get_cache_for_block_table(layer_idx)
    lengths = given["cu_seq_lens_k"][allocator.layer_type].to(torch.int32).diff()
    return {"k_cache": k_cache, "v_cache": v_cache, "page_table": table, "lengths": lengths}


def _over_pages(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Attention over pages, ``(total_q, num_heads_q, head_dim_v)``; the same call appends new keys and values."""
    lengths, bounds = options.pop("lengths"), given["cu_seq_lens_q"].to(torch.int32)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    if given["max_length_q"] == 1 and len(q) == len(lengths):
        # One row each. Requests that only fill a graph have no keys, so their length before is -1 and nothing is
        # appended.
        options["cache_seqlens"] = lengths - 1
        out = flashtile.attention_with_kvcache(q[:, None], k=k[:, None], v=v[:, None], **options)
        return out[:, 0]
    options |= {"cache_seqlens": lengths - bounds.diff(), "cu_seqlens_q": bounds, "max_seqlen_q": given["max_length_q"]}
    return flashtile.attention_with_kvcache(q, k=k, v=v, **options)


def _gathered(
    layer_idx: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """Attention, ``(total_q, num_heads_q, head_dim_v)``, over seen keys that transformers copies out of its cache."""
    k, v = given["cache"].update(key_states=k, value_states=v, layer_idx=layer_idx, kwargs=given)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    bounds = given["cu_seq_lens_q"].to(torch.int32), given["cu_seq_lens_k"]
    return flashtile.attention_varlen(q, k, v, *bounds, given["max_length_q"], given["max_length_k"], **options)
