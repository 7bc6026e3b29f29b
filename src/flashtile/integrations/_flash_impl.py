"""flashtile as an implementation of PyTorch's flash attention operators.

``torch.nn.attention.activate_flash_attention_impl`` replaces PyTorch's CUDA kernels by these functions. PyTorch's
autograd formulas, its fakes and its choice among kernels stay. Arguments and results have the operators' forms, with
the sizes, dtypes and strides that ``torch/_meta_registrations.py`` promises. lse is the natural log.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.compat import _private as flash_attn
from flashtile.core.errors import UnsupportedError
from flashtile.integrations._calls import Calls


def forward(calls: Calls, *given: Any, scale: float | None = None, **others: Any) -> tuple[Tensor, ...]:
    """``_flash_attention_forward``.

    Positional arguments are query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal and
    return_debug_mask; tensors are ``(batch, seqlen, num_heads, head_dim)``, or ``(total, num_heads, head_dim)`` with
    cum_seq_q and cum_seq_k.
    """
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug = given
    window, slopes = _window(others), others.pop("alibi_slopes", None)
    for name, unknown in {**others, "return_debug_mask": debug or None}.items():
        if unknown is not None:
            raise UnsupportedError(f"{name} of PyTorch's flash attention is {unknown!r}, which is not supported here")
    plain: Any = (dropout_p, scale, is_causal, *window, 0.0, slopes, False)
    if cum_seq_q is None:
        out, lse, empty, state = flash_attn._flash_attn_forward(query, key, value, *plain)
    else:
        bounds = (cum_seq_q, cum_seq_k, max_q, max_k)
        out, lse, empty, state = flash_attn._flash_attn_varlen_forward(query, key, value, *bounds, *plain)
    calls.serve()
    return _like(query, out), lse, state.view(torch.uint64), state.new_zeros(()).view(torch.uint64), empty


def forward_into(calls: Calls, out: Tensor, *given: Any, **others: Any) -> Tensor:
    """``_flash_attention_forward_no_dropout_inplace``: writes out, and returns lse."""
    found, lse, *_ = forward(calls, *given, **others)
    out.copy_(found)
    return lse


def backward(calls: Calls, *given: Any, scale: float | None = None, **others: Any) -> tuple[Tensor, ...]:
    """``_flash_attention_backward``: the gradients of query, key and value."""
    dout, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, state, _ = given
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = state.view(torch.int64)
    plain: Any = (dropout_p, scale, is_causal, *_window(others), 0.0, None, deterministic, state)
    grads = tuple(torch.empty_like(x) for x in (query, key, value))
    tensors: Any = (dout, query, key, value, out, lse, *grads)
    if cum_seq_q is None:
        flash_attn._flash_attn_backward(*tensors, *plain)
    else:
        bounds: Any = (cum_seq_q, cum_seq_k, max_q, max_k)
        flash_attn._flash_attn_varlen_backward(*tensors, *bounds, *plain)
    return grads


def sdpa_forward(calls: Calls, *given: Any, scale: float | None = None) -> tuple[Any, ...]:
    """``_scaled_dot_product_flash_attention``.

    Positional arguments are query, key and value ``(batch, num_heads, seqlen, head_dim)`` and, with defaults,
    dropout_p, is_causal and return_debug_mask.
    """
    query, key, value, *plain = given
    plain += (0.0, False, False)[len(plain) :]
    sizes = (query.shape[2], key.shape[2])
    inside = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *others = forward(calls, *inside, None, None, *sizes, *plain, scale=scale)
    return _like(query, out.transpose(1, 2)), lse, None, None, *sizes, *others


def sdpa_backward(calls: Calls, *given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    """``_scaled_dot_product_flash_attention_backward``."""
    inside, (lse, _, _, *plain) = (x.transpose(1, 2) for x in given[:5]), given[5:]
    grads = backward(calls, *inside, lse, None, None, *plain, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def _window(others: dict[str, Any]) -> tuple[int, int]:
    """Removes the window's sides from the keywords and returns them; -1 is unbounded."""
    left, right = (others.pop(f"window_size_{side}", None) for side in ("left", "right"))
    return -1 if left is None else left, -1 if right is None else right


def _like(query: Tensor, out: Tensor) -> Tensor:
    promised = torch.empty_like(query)
    return out if out.stride() == promised.stride() else promised.copy_(out)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_into,
    "_flash_attention_backward": backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}


class Handle:
    """Keeps the functions registered for tensors of one kind of device; ``remove`` restores PyTorch's own."""

    def __init__(self, calls: Calls, key: str = "CUDA") -> None:
        self._library = torch.library.Library("aten", "IMPL", key)
        for name, function in FUNCTIONS.items():
            if hasattr(torch.ops.aten, name):  # not every release has all of them
                self._library.impl(name, functools.partial(function, calls))

    def remove(self) -> None:
        self._library._destroy()
