"""Runs a call of PyTorch's ``scaled_dot_product_attention`` with flashtile, or returns the reason why it cannot."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from flashtile.api.attention import attention
from flashtile.call.prepared import autocast_one
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.sizes import holds

_THEIR_NAMES = {"causal": "is_causal", "softmax_scale": "scale", "attn_bias": "attn_mask"}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# A tensor becomes one of the last two types while torch.compile or torch.export traces.
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **carried: Any,
) -> Tensor | str:
    """Runs the call, or returns the reason why it cannot. An invalid call is such a reason too.

    ``carried`` is what ``Calls.carried`` gives.
    """
    lower_right = False
    if is_causal_bias(attn_mask) and is_causal is False:
        bias: Any = attn_mask
        lower_right = bias.variant.name == "LOWER_RIGHT" and bias.seq_len_q != bias.seq_len_kv
        if not lower_right or (bias.seq_len_q, bias.seq_len_kv) == (query.shape[-2], key.shape[-2]):
            is_causal, attn_mask = not lower_right, None
    given: tuple[Tensor, ...] = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if reason := _foreign(given):
        return reason
    given = _autocast(given)
    query, key, value = given[:3]
    lead = _leading(query, key, value)
    reason = _unfit(given, lead, dropout_p, enable_gqa)
    if attn_mask is not None and not reason:
        attn_mask = given[-1]
        reason = "attn_mask together with is_causal" if is_causal else _unfit_mask(attn_mask, lead, query, key)
    if reason:
        return reason
    keywords: dict[str, Any] = {"causal": lower_right or is_causal, **carried}
    if is_causal and query.shape[-2] < key.shape[-2]:  # row i keeps keys up to i, so none sees the last keys
        key, value = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
    elif is_causal and query.shape[-2] > key.shape[-2]:  # the diagonal from the top left, counted from the bottom right
        keywords = {"window_size": (None, query.shape[-2] - key.shape[-2]), **carried}
    if attn_mask is not None:
        mask = _merged(attn_mask, lead) if attn_mask.dim() > 3 and len(lead) > 1 else attn_mask
        keywords["attn_mask" if mask.dtype is torch.bool else "attn_bias"] = mask
    q, k, v = (_merged(x if x.dim() > 2 else x[None], lead).transpose(1, 2) for x in (query, key, value))
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        out: Any = attention(q, k, v, softmax_scale=scale, dropout_p=dropout_p, deterministic=deterministic, **keywords)
    except InvalidInputError as error:
        return str(error.renamed(_THEIR_NAMES))
    except UnsupportedError as error:
        return "; ".join(str(error).splitlines())
    shape = (*lead, q.shape[2], q.shape[1], v.shape[3])
    return out.transpose(1, 2).reshape(shape[-max(query.dim(), key.dim(), value.dim()) :])


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is a ``torch.nn.attention.bias.CausalBias``; importing that module takes seconds."""
    return type(mask).__module__ == "torch.nn.attention.bias"


def _foreign(given: tuple[Tensor, ...]) -> str:
    """The reason why flashtile does not take the tensors' types; empty if it does."""
    shared = [type(x).__module__.startswith("torch.distributed.tensor") for x in given]
    if any(shared) and not all(shared):
        return "DTensors together with others"
    if any(shared) and _in_context_parallel():
        return "PyTorch's context_parallel, which has an order of rows and a ring of its own"
    for x in given:
        if type(x) not in _PLAIN and not any(shared):
            return f"a {type(x).__name__}, which is not a plain tensor"
        if x.is_nested or x.layout is not torch.strided:
            return "a nested or sparse tensor"
        if x.device != given[0].device:
            return "tensors on several devices"
    if given[0].device.type not in ("cpu", "cuda"):
        return f"tensors on {given[0].device.type}"
    return "traced by torch.jit" if torch.jit.is_tracing() else ""  # type: ignore[attr-defined]


@torch.compiler.assume_constant_result
def _in_context_parallel() -> bool:
    """Whether PyTorch's ``context_parallel`` runs attention over DTensors, which are loaded then."""
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def _autocast(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors as PyTorch's dispatcher would cast them."""
    device = given[0].device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(autocast_one(x, dtype) for x in given)


def _leading(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The dimensions before the heads, broadcast; (-1,) if they do not fit."""
    if query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        return tuple(query.shape[:-3])
    try:
        return tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        return (-1,)


def _unfit(given: tuple[Tensor, ...], lead: tuple[int, ...], dropout_p: float, enable_gqa: bool) -> str:
    query, key, value = given[:3]
    if query.dtype not in _FLOATS or not query.dtype == key.dtype == value.dtype:
        return f"dtypes {query.dtype}, {key.dtype}, {value.dtype}"
    if not (isinstance(dropout_p, (int, float)) and 0 <= dropout_p < 1):
        return f"dropout_p {dropout_p}"
    if lead == (-1,) or min(query.dim(), key.dim(), value.dim()) < 2:
        return _SHAPES
    heads, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    if 0 in (heads, heads_k, query.shape[-1], value.shape[-1]) or heads_k != heads_v:
        return _SHAPES
    if query.shape[-1] != key.shape[-1] or holds(key.shape[-2] != value.shape[-2]):
        return _SHAPES
    return "" if heads_k in (1, heads) or (enable_gqa and heads % heads_k == 0) else _SHAPES


_SHAPES = "query, key and value of shapes that do not fit together, or are empty"


def _unfit_mask(mask: Tensor, lead: tuple[int, ...], query: Tensor, key: Tensor) -> str:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"attn_mask of {mask.dtype}"
    rows = (*lead, query.shape[-3] if query.dim() > 2 else 1, query.shape[-2], key.shape[-2])
    if 2 <= mask.dim() <= len(rows):
        sizes = zip(mask.shape, rows[len(rows) - mask.dim() :], strict=True)
        if not any(holds(size != 1) and holds(size != whole) for size, whole in sizes):
            return ""
    return "attn_mask of a shape that does not fit"


def _merged(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """``(..., heads, rows, columns)``, broadcast to lead, as ``(batch, heads, rows, columns)``."""
    if len(lead) == 1 and x.shape[:-3] == lead:
        return x
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])
