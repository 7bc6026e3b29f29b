"""An attention call as an audit sees it, read from the arguments of each function that computes attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

# Numbers that masks add to a score, to cut a key, are below this one.
CUT = -1e4
_Numbers = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class SeenCall:
    """A call's tensors and what it asks for. A row is a query; ``own`` is the place of its own token among the keys.

    Attributes:
        function: What was called, and which kernel ran.
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``; packed sequences are one sequence of ``ids``.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``.
        v: ``(batch, seqlen_k, num_heads_kv, head_dim_v)``.
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, what the call returned.
        softmax_scale: Factor of the scores; None if only ``scores`` tell it.
        factor: By what queries and keys had been multiplied before.
        left: Most keys that a row sees before its own; None is unbounded.
        right: Most keys after its own.
        chunk: As ``attention_chunk`` in ``flashtile.attention``.
        own: int64 ``(batch or 1, seqlen_q)``.
        ids: The sequence of each row and of each key, ``(batch or 1, seqlen)`` both; a key of -1 belongs to none.
        mask: bool, broadcastable to ``(batch, num_heads_q, seqlen_q, seqlen_k)``, True keeps.
        blocks: Booleans of blocks of rows and keys that may be kept, and of those that are full, with a block's size.
        bias: As the mask, added to the scores.
        scores: What the softmax read, for attention that is written out: ``(batch, num_heads_q, seqlen_q, seqlen_k)``.
        score_dtype: The dtype of the products of queries and keys.
        aligned: Whether rows and keys count from the same token, so that ``own`` says what it means.
        unknown: Why the result cannot be compared; empty if it can be.
    """

    function: str
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    own: Tensor
    softmax_scale: float | None = None
    factor: float = 1.0
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    ids: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    blocks: tuple[Tensor, Tensor, tuple[int, int]] | None = None
    bias: Tensor | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    dropout_p: float = 0.0
    scores: Tensor | None = None
    score_dtype: torch.dtype = torch.float32
    aligned: bool = True
    unknown: str = ""

    def but(self, **changes: Any) -> SeenCall:
        """The call with other values."""
        return replace(self, **changes)


def own_rows(seqlen_q: int, seqlen_k: int, device: torch.device, first_key: bool = False) -> Tensor:
    """The place of each row's token: the last row is at the last key, or the first row at the first key."""
    return (torch.arange(seqlen_q, device=device) + (0 if first_key else seqlen_k - seqlen_q))[None]


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: _Numbers) -> dict[str, Any]:
    """A call's arguments by name, with the defaults of those that are not given."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments | given.arguments.get("kwargs", {})


def of_sdpa(given: _Numbers, out: Tensor, factor: float) -> SeenCall:
    """A call of PyTorch's ``scaled_dot_product_attention``."""
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    causal = bool(given["is_causal"])
    materialize = getattr(mask, "_materialize", None)
    if materialize is not None:  # a CausalBias
        mask = materialize(q.device)
    shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]) if not given["enable_gqa"] else q.shape[:-2]
    q, out = (_by_heads(x.expand(*shape, *x.shape[-2:])) for x in (q, out))
    k, v = (_by_heads(x if given["enable_gqa"] else x.expand(*shape, *x.shape[-2:])) for x in (k, v))
    if mask is not None and mask.dim() < 4:
        # A batch of three dimensions has no heads.
        mask = mask[:, None] if mask.dim() == 3 and len(shape) < 2 else mask[(None,) * (4 - mask.dim())]
    return SeenCall(
        "scaled_dot_product_attention", q, k, v, out,
        own=own_rows(q.shape[1], k.shape[1], q.device, first_key=causal),
        softmax_scale=_scale(given["scale"], q), factor=factor, right=0 if causal else None,
        dropout_p=given["dropout_p"], aligned=q.shape[1] == k.shape[1], **_mask_or_bias(mask),
    )  # fmt: skip


def of_flash(given: _Numbers, out: Tensor, name: str, factor: float) -> SeenCall:
    """A call with the arguments that flash-attn's functions share with flashtile's; packed with cu_seqlens."""
    q, k, v = (given.get(key) for key in "qkv")
    unknown = next((key for key in _NOT_READ if given.get(key) is not None), "")
    if unknown or not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return _unread(out, name, unknown or "its arguments")
    if q.dtype.itemsize == 1:
        return _unread(out, name, "8 bits")
    ids, own, aligned = None, own_rows(q.shape[-3], k.shape[-3], q.device), q.shape[-3] == k.shape[-3]
    if given.get("cu_seqlens_q") is not None:
        q, k, v, out = (x[None] for x in (q, k, v, out))
        ids, own = _of_packed(q.shape[1], k.shape[1], given["cu_seqlens_q"], given["cu_seqlens_k"])
        aligned = True
    return _banded(SeenCall(name, q, k, v, out, own, ids=ids, factor=factor, aligned=aligned), given)


def of_cache(given: _Numbers, out: Tensor, name: str, factor: float) -> SeenCall:
    """A call over a cache, which is not compared."""
    return _unread(out, name, "a cache")


def _unread(out: Tensor, name: str, reason: str) -> SeenCall:
    """A call that is listed and not compared."""
    out = out.reshape(-1, *out.shape[-3:])
    return SeenCall(name, out, out, out, out, own_rows(1, 1, out.device), unknown=reason)


def of_flex(given: _Numbers, out: Tensor, name: str, factor: float) -> SeenCall:
    """A call of PyTorch's ``flex_attention``."""
    q, k, v, out = (x.transpose(1, 2) for x in (given["query"], given["key"], given["value"], out))
    own = own_rows(q.shape[1], k.shape[1], q.device)
    call = SeenCall(name, q, k, v, out, own, _scale(given.get("scale"), q), factor)
    changes = _listed(given.get("block_mask"), q.shape[1], k.shape[1]) | {"score_mod": given.get("score_mod")}
    return call.but(aligned=q.shape[1] == k.shape[1], **changes)


def of_varlen(given: _Numbers, out: Tensor, name: str, factor: float) -> SeenCall:
    """A call of PyTorch's ``varlen_attn``."""
    names = {"query": "q", "key": "k", "value": "v", "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k"}
    renamed = {names.get(key, key): value for key, value in given.items()}
    return of_flash(renamed | {"softmax_scale": given.get("scale")}, out, name, factor)


def of_transformers(given: _Numbers, out: Tensor, name: str, factor: float) -> SeenCall:
    """A call of an attention function of transformers that itself calls nothing that is known."""
    q, k, v = (given[key].transpose(1, 2) for key in ("query", "key", "value"))
    module, mask, out = given["module"], given.get("attention_mask"), out.reshape(*q.shape[:3], -1)
    call = SeenCall(name, q, k, v, out, own_rows(q.shape[1], k.shape[1], q.device), _scale(given.get("scaling"), q))
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = given.get("sliding_window")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        call = call.but(**_mask_or_bias(mask))
    else:
        call = call.but(right=0 if causal else None, left=window - 1 if window else None)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            # Rows of padding are left out of the call.
            real = mask.bool()[:, None, -k.shape[1] :]
            call = call.but(mask=real[:, :, -q.shape[1] :, None] & real[:, :, None])
        elif mask is not None:
            call = call.but(unknown=f"a mask of type {type(mask).__name__}")
    training = isinstance(module, nn.Module) and module.training
    dropout = (given.get("dropout") or 0.0) if training else 0.0
    return call.but(
        factor=factor, softcap=given.get("softcap") or 0.0, sinks=given.get("s_aux"), dropout_p=dropout,
        aligned=q.shape[1] == k.shape[1],
    )  # fmt: skip


# Arguments that change the result and are not read here.
_NOT_READ = (
    "block_table", "k_descale", "precision", "q_descale", "q_v", "qv", "selected", "seqused_k", "seqused_q",
    "v_descale",
)  # fmt: skip
# What counts from a packed sequence's own first row.
_OF_POSITIONS = ("bias", "mask", "chunk", "score_mod", "mask_mod")


def _banded(call: SeenCall, given: _Numbers) -> SeenCall:
    """The call with its causal, window and other settings, as flash-attn and flashtile name them."""
    window = given.get("window_size")
    left, right = (None, None) if window is None else (int(x) if x is not None and x >= 0 else None for x in window)
    sinks = given.get("sinks")
    changes: dict[str, Any] = {
        "softmax_scale": _scale(given.get("softmax_scale"), call.q),
        "left": left,
        "right": 0 if given.get("causal") else right,
        "chunk": given.get("attention_chunk") or None,
        "softcap": given.get("softcap") or 0.0,
        "slopes": given.get("alibi_slopes"),
        "sinks": given.get("learnable_sink") if sinks is None else sinks,
        "bias": _of_four(given.get("attn_bias")),
        "mask": _of_four(given.get("attn_mask")),
        "score_mod": given.get("score_mod"),
        "mask_mod": given.get("mask_mod"),
        "dropout_p": given.get("dropout_p") or 0.0,
    }
    if call.ids is not None and any(changes[name] is not None for name in _OF_POSITIONS):
        changes["unknown"] = "masks and functions that count from a packed sequence's own first row"
    if given.get("block_mask") is not None:
        changes |= _listed(given["block_mask"], call.q.shape[1], call.k.shape[1])
        if given.get("mask_mod") is not None or call.ids is not None:
            changes["unknown"] = "a block_mask beside mask_mod or packed rows"
    return call.but(**changes)


def _by_heads(x: Tensor) -> Tensor:
    """``(..., heads, rows, dim)`` as ``(batch, rows, heads, dim)``."""
    x = x[:, None] if x.dim() == 3 else x[None, None] if x.dim() == 2 else x.flatten(0, -4)
    return x.transpose(1, 2)


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _mask_or_bias(mask: Tensor | None) -> dict[str, Any]:
    if mask is None:
        return {}
    return {"mask" if mask.dtype == torch.bool else "bias": mask.flatten(0, -4)}


def _of_packed(rows: int, keys: int, cu_q: Tensor, cu_k: Tensor | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The sequence of each row and key, and the place of each row's own token."""
    cu_q, cu_k = cu_q.long(), (cu_q if cu_k is None else cu_k).long()
    at_q, at_k = (torch.arange(n, device=cu_q.device) for n in (rows, keys))
    ids_q, ids_k = torch.bucketize(at_q, cu_q[1:], right=True), torch.bucketize(at_k, cu_k[1:], right=True)
    last = ids_q.clamp(max=len(cu_q) - 2) + 1
    ids_k = torch.where(ids_k < len(cu_k) - 1, ids_k, -1)
    return (ids_q[None], ids_k[None]), (cu_k[last] - cu_q[last] + at_q)[None]


def _of_four(x: Tensor | None) -> Tensor | None:
    return x if x is None else x[(None,) * (4 - x.dim())]


def _listed(mask: Any, rows: int, keys: int) -> dict[str, Any]:
    """The fields for a block mask, PyTorch's or flashtile's, or for flashtile's intervals."""
    if mask is None:
        return {}
    if hasattr(mask, "row_keys"):
        return {"mask": _of_intervals(mask, rows, keys)}
    if hasattr(mask, "row_blocks"):
        partial, full = mask.dense()
        return {"blocks": (partial | full, full, mask.block_size), "mask_mod": mask.mask_mod}
    partial = _of_lists(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _of_lists(mask.full_kv_num_blocks, mask.full_kv_indices)
    return {"blocks": (partial | full, full, mask.BLOCK_SIZE), "mask_mod": mask.mask_mod}


def _of_lists(counts: Tensor, indices: Tensor) -> Tensor:
    """Lists of blocks of keys as booleans ``(batch, heads, blocks_q, blocks_k)``."""
    most = indices.shape[-1]
    is_listed = torch.arange(most, device=counts.device) < counts[..., None]
    found = torch.zeros(*indices.shape[:-1], most + 1, dtype=torch.bool, device=counts.device)
    return found.scatter(-1, torch.where(is_listed, indices, most).long(), True)[..., :most]


def _of_intervals(mask: Any, rows: int, keys: int) -> Tensor:
    kept: Any = True
    if (ends := mask.row_keys) is not None:
        j = torch.arange(keys, device=ends.device)
        kept = (ends[..., :1] <= j) & (j < ends[..., 1:])
    if (ends := mask.key_rows) is not None:
        i = torch.arange(rows, device=ends.device)[:, None]
        kept = kept & (ends[..., None, :, 0] <= i) & (i < ends[..., None, :, 1])
    return kept
