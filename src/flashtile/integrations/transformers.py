"""flashtile as the attention of Hugging Face transformers.

``enable(model)`` switches a model; docs/transformers.md says what is translated and what is refused. Two functions are
registered with transformers: ``mask``, which a model calls once per forward, and ``attention``, which each layer calls.
A layer's mask says what it attends to, as in transformers' own eager attention, so a layer that does not pass on its
window is still served correctly. Without a mask, the layer's own ``is_causal`` and ``sliding_window`` count.

Source: transformers 5.23, ``masking_utils`` and ``integrations/sdpa_attention``.
"""

from __future__ import annotations

import contextvars
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.import_utils import is_tracing

import flashtile
from flashtile.api.prepare import explained
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.integrations import _transformers_paged as paged
from flashtile.integrations import _transformers_ranks as ranks
from flashtile.integrations._calls import Calls
from flashtile.integrations._transformers_mask import LazyMask, mask
from flashtile.integrations._transformers_ranks import over_ranks as over_ranks

NAME = "tile_attention"  # transformers takes every name with "flash" in it for one of its own kernels
calls = Calls("transformers", on_run=lambda call, tensors: _explain(call, tensors))

# Keywords that models pass to every layer without an effect: the mask contains the meaning of token types.
HARMLESS = {
    "cache_position", "layer_idx", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict", "seq_idx", "token_type_ids", "use_cache",
}  # fmt: skip
_UNDERSTOOD = {
    "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "is_causal", "max_length_k", "max_length_q",
    "position_bias", "position_ids", "s_aux", "scaling", "sliding_window", "softcap",
}  # fmt: skip
_REFUSED = {
    "block_table": "there is no paged cache beside it",
    "cache": "is not the paged cache of continuous batching",
    "head_mask": "whole heads cannot be masked",
    "output_attentions": "attention weights are never formed; switch to attn_implementation='eager' for them",
}

# The last position_ids without packed sequences, and its version then.
_looked_at: tuple[weakref.ref[Tensor], int] | None = None
_explained: contextvars.ContextVar[Counter[str] | None] = contextvars.ContextVar("_explained", default=None)


def enable(model: PreTrainedModel | None = None, *, continuous_batching: bool = False) -> str:
    """Registers flashtile with transformers and, if a model is given, switches the model to it.

    Args:
        model: The model to switch, with all its parts. ``model.set_attn_implementation("sdpa")`` switches it back.
        continuous_batching: Serve also ``generate_batch`` and other continuous batching, under a name for which
            transformers makes no masks there.

    Returns:
        The name for ``from_pretrained(..., attn_implementation=name)``.

    Raises:
        UnsupportedError: The attention of a part of the model cannot be replaced. Nothing was switched then.
    """
    name = paged.NAME if continuous_batching else NAME
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    if continuous_batching:
        paged.introduce()
    if model is not None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        parts = [part for part in modules if isinstance(part, PreTrainedModel)]
        fixed = sorted({type(part).__name__ for part in parts if not _is_replaceable(part)})
        if not parts:
            raise UnsupportedError(f"a {type(model).__name__} is no PreTrainedModel and holds none to switch")
        if fixed:
            raise UnsupportedError(f"transformers cannot replace the attention of {', '.join(fixed)}")
        for part in parts:
            if continuous_batching:
                paged.list_for(part)
            part.set_attn_implementation(name)
    return name


def _is_replaceable(part: PreTrainedModel) -> bool:
    """Whether a part's attention uses the interface, and its masks are made for more than eager attention."""
    declared = (part._supports_sdpa, part._supports_flash_attn, part._supports_flex_attn)
    has_attention = any("Attention" in type(module).__name__ for module in part.modules())
    return part._can_set_attn_implementation() and (any(declared) or not has_attention)


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Runs ``model(*args, **kwargs)`` without gradients, and describes the runs of its attention calls.

    Returns:
        For each kind of call the number of calls and the text of ``flashtile.explain``.
    """
    found: Counter[str] = Counter()
    token = _explained.set(found)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        _explained.reset(token)
    return "\n".join(f"{count} x {text}" for text, count in found.items()) or "no attention call reached flashtile"


def _explain(call: Any, tensors: Any) -> None:
    """Describes a call that ran in traced code, if ``explain`` runs the model."""
    if (found := _explained.get()) is not None:
        found[explained(call.options.backend, tensors.q.device, [(call.problem, tensors, None)])] += 1


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LazyMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers.

    Args:
        module: The layer; ``is_causal`` and ``training`` are read.
        query: ``(batch, num_heads_q, seqlen_q, head_dim)``.
        key: ``(batch, num_heads_kv, seqlen_k, head_dim)``.
        value: ``(batch, num_heads_kv, seqlen_k, head_dim_v)``.
        attention_mask: What ``mask`` made, or a tensor of four dimensions, bool, or float and added to the scores.
        **kwargs: See docs/transformers.md.

    Returns:
        ``(batch, seqlen_q, num_heads_q, head_dim_v)``, and None for the attention weights.

    Raises:
        InvalidInputError: A keyword or mask without the form that transformers gives it.
        UnsupportedError: A keyword has a meaning that flashtile does not have, or is unknown.
    """
    if isinstance(kwargs.get("cache"), PagedAttentionCache):
        _refuse_unknown({name: value for name, value in kwargs.items() if name not in paged.KEYWORDS})
        calls.serve()
        return paged.attend(module, query, key, value, kwargs), None
    _refuse_unknown(kwargs)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    bias, bounds = kwargs.get("position_bias"), _bounds_given(kwargs)
    options: dict[str, Any] = {
        "softmax_scale": kwargs.get("scaling"),
        "softcap": kwargs.get("softcap") or 0.0,
        "sinks": kwargs.get("s_aux"),
        "dropout_p": (kwargs.get("dropout") or 0.0) if module.training else 0.0,
        "deterministic": bool(kwargs.get("deterministic")) or torch.are_deterministic_algorithms_enabled(),
    }
    if ranks.current() is not None or getattr(attention_mask, "shared", None) is not None:
        return _over_ranks(q, k, v, attention_mask, kwargs, options), None
    written: Tensor | None = None
    if bounds is None and q.shape[1] == k.shape[1]:
        _refuse_packed_positions(kwargs.get("position_ids"), attention_mask)
    if attention_mask is None:
        options |= _without_mask(module, q, k, bounds, kwargs)
    elif isinstance(attention_mask, LazyMask):
        lazy = attention_mask
        if tuple(lazy.shape[2:]) != (q.shape[1], k.shape[1]):
            shape = f"{q.shape[1]} queries and {k.shape[1]} keys"
            raise InvalidInputError("attention_mask", f"has shape {tuple(lazy.shape)}, but the layer has {shape}")
        takes_more = bounds is not None or bias is not None or options["dropout_p"] or torch.is_grad_enabled()
        if lazy.lengths is not None and not takes_more:
            return _over_cache(q, k, v, lazy, options), None
        bounds = bounds or lazy.bounds()
        fits = bias is lazy.keys is lazy.lengths is None and lazy.seqlen_k == k.shape[1]
        if bounds is None and not lazy.packed and lazy.lengths is None:
            if lazy.seqlen_k < k.shape[1]:
                k, v = k[:, : lazy.seqlen_k], v[:, : lazy.seqlen_k]
                bias = None if bias is None else bias[..., : lazy.seqlen_k]
            options["attn_mask"] = None if lazy.keys is None else lazy.keys[:, None, None, :]
        elif bounds is None or not fits:
            written = lazy.dense()
        if written is None:
            options |= {"causal": lazy.causal, "window_size": lazy.window, "attention_chunk": lazy.chunk}
    elif attention_mask.dim() != 4 or not (attention_mask.dtype is torch.bool or attention_mask.is_floating_point()):
        found = f"{attention_mask.dtype} of {attention_mask.dim()} dimensions"
        raise InvalidInputError("attention_mask", f"is {found} at the layer, must be bool or float of 4")
    else:
        written = attention_mask
    if written is not None and written.dtype.is_floating_point:
        bias = written if bias is None else bias + written
    elif written is not None:
        options["attn_mask"] = written
    if written is not None and bounds is not None:
        same = _same_sequence(q, k, bounds)
        options["attn_mask"] = options["attn_mask"] & same if "attn_mask" in options else same
        bounds = None
    return _run(q, k, v, bounds, options | {"attn_bias": bias}), None


def _over_cache(q: Tensor, k: Tensor, v: Tensor, lazy: LazyMask, options: dict[str, Any]) -> Tensor:
    """A layer's attention over the filled part of a static cache."""
    calls.serve()
    over: dict[str, Any] = {name: options[name] for name in ("softmax_scale", "softcap", "sinks")}
    over |= {"cache_seqlens": lazy.lengths, "cache_leftpad": lazy.leftpad}
    if not torch.compiler.is_compiling() and (found := _explained.get()) is not None:
        found[flashtile.explain(q, k_cache=k, v_cache=v, **over)] += 1
    out = flashtile.attention_with_kvcache(q, k, v, **over, **calls.carried())
    assert isinstance(out, Tensor)  # lse was not asked for
    return out


def _over_ranks(q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """A layer's attention over the rows of all ranks."""
    if not isinstance(mask, LazyMask) or mask.shared is None:
        raise ranks.refuse("a layer without a mask, or with one that was not made within")
    for name in ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            raise ranks.refuse(name)
    mask.shared.check_positions(kwargs.get("position_ids"))
    calls.serve()
    return mask.shared.attend(q, k, v, options | {"causal": mask.causal, "window_size": mask.window})


def _without_mask(module: nn.Module, q: Tensor, k: Tensor, bounds: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords causal and window_size, if only the layer defines them."""
    is_causal, window = kwargs.get("is_causal"), kwargs.get("sliding_window")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if bounds is not None and kwargs.get("position_bias") is not None:
        raise UnsupportedError("position_bias: with cu_seq_lens_q and no mask it is not known where it belongs")
    if causal and bounds is None and 1 < q.shape[1] != k.shape[1]:
        raise UnsupportedError(f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys without a mask")
    return {"causal": causal, "window_size": (window - 1, window - 1) if window else None}


def _refuse_packed_positions(position_ids: Tensor | None, mask: Tensor | LazyMask | None) -> None:
    """Refuses positions of packed sequences together with a mask that does not separate the sequences.

    transformers looks for packed sequences only without an attention mask and a cache, and some models never do. Its
    own implementations disagree on such a call.
    """
    global _looked_at
    tells_apart = isinstance(mask, Tensor) or (isinstance(mask, LazyMask) and (mask.packed or mask.keys is not None))
    if position_ids is None or position_ids.dim() != 2 or tells_apart or is_tracing(position_ids):
        return
    # Checked once for all layers, since the check waits for the device.
    version = 0 if position_ids.is_inference() else position_ids._version
    if _looked_at is None or _looked_at[0]() is not position_ids or _looked_at[1] != version:
        if find_packed_sequence_indices(position_ids) is not None:
            raise UnsupportedError(
                "position_ids: are those of packed sequences, which the model's mask does not separate; pass "
                "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, or neither attention_mask nor a cache"
            )
        _looked_at = (weakref.ref(position_ids), version)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _UNDERSTOOD and name not in HARMLESS:
            unknown = "not known to flashtile.integrations.transformers; add it to HARMLESS there if it changes nothing"
            raise UnsupportedError(f"{name}: {_REFUSED.get(name, unknown)}")


def _bounds_given(kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The last four arguments of ``attention_varlen`` from the keywords that transformers has for them."""
    bounds: list[Any] = [kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")]
    for side, given in zip("qk", bounds, strict=True):
        if given is None and bounds != [None, None]:
            raise InvalidInputError(f"cu_seq_lens_{side}", "is None, but the other one is given")
    if bounds[0] is None:
        return None
    longest = [kwargs.get(f"max_length_{side}") for side in "qk"]
    # Reading a tensor would wait for the device, and flashtile needs no longest length.
    return *(x.to(torch.int32) for x in bounds), *(x if isinstance(x, int) else None for x in longest)


def _same_sequence(q: Tensor, k: Tensor, bounds: tuple[Any, ...]) -> Tensor:
    """True where a query and a key are in the same packed sequence, ``(batch, 1, seqlen_q, seqlen_k)``."""
    found = []
    for x, cu_seqlens in zip((q, k), bounds, strict=False):
        rows = torch.arange(x.shape[0] * x.shape[1], device=x.device, dtype=torch.int32)
        found.append(torch.bucketize(rows, cu_seqlens[1:], right=True).view(x.shape[:2]))
    ids_q, ids_k = found[0][:, None, :, None], found[1][:, None, None, :]
    return (ids_q == ids_k) & (ids_q < bounds[0].numel() - 1)


def _run(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Any, ...] | None, options: dict[str, Any]) -> Tensor:
    """One counted call of flashtile. With bounds all rows are one after another."""
    calls.serve()
    batch, packing = q.shape[0], {}
    if bounds is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), bounds, strict=True))
    if not torch.compiler.is_compiling() and (found := _explained.get()) is not None:
        found[flashtile.explain(q, k, v, **packing, **options)] += 1
    function: Any = flashtile.attention if bounds is None else flashtile.attention_varlen
    out = function(q, k, v, **packing, **options, **calls.carried())
    assert isinstance(out, Tensor)  # lse was not asked for
    return out if bounds is None else out.unflatten(0, (batch, -1))
