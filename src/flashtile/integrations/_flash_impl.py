"""flashtile as an implementation of PyTorch's flash attention operators.

``torch.nn.attention.activate_flash_attention_impl`` replaces PyTorch's CUDA kernels by these functions. PyTorch's
autograd formulas, its fakes and its choice among kernels stay. Arguments and results have the operators' forms, with
the sizes, dtypes and strides that ``torch/_meta_registrations.py`` promises. lse is the natural log.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.compat import _private as flash_attn
from flashtile.core.errors import UnsupportedError
from flashtile.integrations._calls import Calls

_OF_PACKED = ("seqused_k", "block_table", "num_splits")


def forward(calls: Calls, *given: Any, scale: float | None = None, **others: Any) -> tuple[Tensor, ...]:
    """``_flash_attention_forward``, and its overload ``quantized``.

    Positional arguments are query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal and
    return_debug_mask; tensors are ``(batch, seqlen, num_heads, head_dim)``, or ``(total, num_heads, head_dim)`` with
    cum_seq_q and cum_seq_k. Three descales ``(batch, num_heads_kv)`` float32 follow in ``quantized``, for tensors of
    float8_e4m3fn, with which out is bfloat16 and has no gradient.

    Packed sequences have more keywords. seqused_k ``(batch,)`` int32: as many keys of each sequence, from its first,
    take part. block_table ``(batch, max_pages)`` int32: keys are ``(pages, page_size, num_heads_kv, head_dim)``.
    num_splits of 1: a sequence has the same bits in every batch; other numbers, which divide PyTorch's own work,
    define no result.

    With return_debug_mask and dropout the last result is flash-attn's S_dmask, negative where a pair was dropped. It
    takes the time and memory of the whole score matrix.
    """
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug, *descales = given
    window, slopes = _window(others), others.pop("alibi_slopes", None)
    seqused_k = block_table = num_splits = None
    if cum_seq_q is not None:
        seqused_k, block_table, num_splits = (others.pop(name, None) for name in _OF_PACKED)
    in_8_bits = query.dtype is torch.float8_e4m3fn or any(x is not None for x in descales)
    if in_8_bits:
        others |= {"dropout_p": dropout_p or None, "alibi_slopes": slopes}
        others |= {"block_table": block_table, "num_splits": num_splits}
    if in_8_bits or block_table is not None:
        others["return_debug_mask"] = debug or None
    for name, unknown in others.items():
        if unknown is not None:
            raise UnsupportedError(f"{name} of PyTorch's flash attention is {unknown!r}, which is not supported here")
    bounds: Any = (cum_seq_q, cum_seq_k, max_q, max_k)
    plain: Any = (dropout_p, scale, is_causal, *window, 0.0, slopes, debug)
    if in_8_bits:
        out, lse, dropped, state = _in_8_bits(given[:3], descales, bounds, seqused_k, (scale, is_causal, window))
    elif cum_seq_q is None:
        out, lse, dropped, state = flash_attn._flash_attn_forward(query, key, value, *plain)
    else:
        plain += (block_table, None, seqused_k, False, int(num_splits == 1))
        out, lse, dropped, state = flash_attn._flash_attn_varlen_forward(query, key, value, *bounds, *plain)
    calls.serve()
    return _like(query, out), lse, state.view(torch.uint64), state.new_zeros(()).view(torch.uint64), dropped


def _in_8_bits(
    tensors: Any, descales: list[Any], bounds: Any, seqused_k: Tensor | None, meaning: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """What flash-attn's private functions return; ``meaning`` are scale, is_causal and the window."""
    from flashtile.compat import flash_attn_3

    keywords: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=False))
    keywords |= dict(zip(("softmax_scale", "causal", "window_size"), meaning, strict=True), return_attn_probs=True)
    if bounds[0] is None:
        out, lse = flash_attn_3.flash_attn_func(*tensors, **keywords)
    else:
        keywords |= {"seqused_k": seqused_k}
        out, lse = flash_attn_3.flash_attn_varlen_func(*tensors, *bounds, **keywords)
    return out, lse, out.new_empty(0), torch.zeros(2, dtype=torch.int64, device=out.device)


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


def sdpa_forward(
    calls: Calls, *given: Any, scale: float | None = None, descales: tuple[Tensor | None, ...] = ()
) -> tuple[Any, ...]:
    """``_scaled_dot_product_flash_attention``.

    Positional arguments are query, key and value ``(batch, num_heads, seqlen, head_dim)`` and, with defaults,
    dropout_p, is_causal and return_debug_mask.
    """
    query, key, value, *plain = given
    plain += (0.0, False, False)[len(plain) :]
    sizes = (query.shape[2], key.shape[2])
    inside = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *others = forward(calls, *inside, None, None, *sizes, *plain, *descales, scale=scale)
    return _like(query, out.transpose(1, 2)), lse, None, None, *sizes, *others


def sdpa_quantized(calls: Calls, *given: Any, scale: float | None = None) -> tuple[Any, ...]:
    """``_scaled_dot_product_flash_attention.quantized``, which has three descales after the tensors."""
    return sdpa_forward(calls, *given[:3], *given[6:], scale=scale, descales=given[3:6])


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
    if out.shape != query.shape:  # values of another head_dim
        return out
    promised = torch.empty_like(query, dtype=out.dtype)
    return out if out.stride() == promised.stride() else promised.copy_(out)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": forward,
    "_flash_attention_forward.quantized": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_into,
    "_flash_attention_backward": backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention.quantized": sdpa_quantized,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
# What PyTorch calls where it chooses cuDNN in place of flash attention, in SDPA and in ``varlen_attn``.
CUDNN = ("_scaled_dot_product_cudnn_attention", "_cudnn_attention_forward")
_CUDNN_FIRST = (
    'activate_flash_attention_impl("flashtile"): on this GPU PyTorch asks cuDNN before flash attention, and cuDNN ran '
    "this call; flashtile gets what cuDNN declines. sdpa_kernel([SDPBackend.FLASH_ATTENTION, ...], set_priority=True) "
    "asks flash attention first, and flashtile.integrations.sdpa.use() takes all calls of "
    "scaled_dot_product_attention; flashtile.integrations.sdpa.calls counts them"
)


class Handle:
    """Keeps the functions registered for tensors of one kind of device; ``remove`` restores PyTorch's own.

    Meanwhile calls that PyTorch gives to cuDNN are counted as left, and the first one warns.
    """

    def __init__(self, calls: Calls, key: str = "CUDA") -> None:
        self._calls, self._warned = calls, False
        self._library = torch.library.Library("aten", "IMPL", key)
        for name, function in FUNCTIONS.items():
            packet, _, overload = name.partition(".")
            if hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):  # not every release has all
                self._library.impl(name, functools.partial(function, calls))
        for name in CUDNN:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                kernel = torch.library.get_kernel(f"aten::{name}", key)
                self._library.impl(name, functools.partial(self._leave, kernel), with_keyset=True)

    def _leave(self, kernel: Any, keys: Any, *given: Any, **others: Any) -> Any:
        self._calls.leave("PyTorch chose cuDNN's attention")
        # Without flash attention somebody chose, and the order is of no importance.
        if not self._warned and torch._C._get_flash_sdp_enabled():
            self._warned = True
            warnings.warn(_CUDNN_FIRST, stacklevel=2)
        return kernel.call_boxed(keys, *given, **others)

    def remove(self) -> None:
        self._library._destroy()
