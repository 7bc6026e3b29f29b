"""flash-attn's private functions that other libraries call: forward and backward without autograd.

Context-parallel libraries call these, and communicate in between. They map onto flashtile's operators. Only this module
and ``_s_dmask`` use more than the public functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import Options, Plain, Tensors, grads_of, read
from flashtile.compat import _descaled, _kvcache, _s_dmask
from flashtile.compat._arguments import bound, length, names, refuse
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.ops import dropout
from flashtile.ops import operators as ops

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]

# flash-attn's switch for its own Triton kernels on AMD devices; they are not used here.
USE_TRITON_ROCM = False


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The keys of a block. The block's largest score scales S_dmask; here a block holds a whole row."""
    return _s_dmask.BLOCK_SIZE_N


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward alone.

    q is ``(batch, seqlen_q, num_heads_q, head_dim)``, k and v ``(batch, seqlen_k, num_heads_kv, head_dim)``; a negative
    side of the window is unbounded.

    Returns:
        out; lse ``(batch, num_heads_q, seqlen_q)`` float32; S_dmask as in ``flash_attn_2``, empty unless return_softmax
        is True and dropout_p is not 0; and the ``(2,)`` int64 state of dropout for the backward, zeros without
        dropout.
    """
    plain = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    tensors = Tensors(q, k, v, alibi_slopes)
    return _forward(tensors, _options(tensors, plain), return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward alone over packed sequences; lse ``(num_heads_q, total_q)``, else as ``_flash_attn_forward``.

    ``block_table`` is as in ``flash_attn_2.flash_attn_varlen_func``; with it ``seqused_k`` ``(batch,)`` int32 replaces
    the lengths in cu_seqlens_k, which may be None. Without it ``seqused_k`` says how many keys of each sequence, from
    its first, take part. With ``num_splits`` of 1 the keys of a sequence are in one part, and its bits are its own:
    ``batch_invariant=True``. ``leftpad_k`` and ``num_splits`` over 1 are refused. ``zero_tensors`` requests that rows
    of no sequence be 0, which they always are.
    """
    refuse("leftpad_k", leftpad_k, "padding before the keys is not supported here")
    if num_splits > 1:
        raise UnsupportedError(f"num_splits > 1 is not supported over packed sequences, this is {num_splits}")
    if block_table is not None:
        meaning = (softmax_scale, causal, (bound(window_size_left), bound(window_size_right)), softcap, alibi_slopes)
        bounds, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        _kvcache.refuse_dropout(dropout_p)
        return _in_pages((q, k, v), bounds, longest, seqused_k, block_table, meaning, num_splits == 1)
    _kvcache.refuse_pages(q, k, v, "block_table is missing")
    if seqused_k is not None:
        k, v, cu_seqlens_k = _descaled.keys_used_first(k, v, cu_seqlens_k, seqused_k)
    tensors = Tensors(q, k, v, alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    plain = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    options = _options(tensors, plain, False, (max_seqlen_q, max_seqlen_k), num_splits == 1)
    return _forward(tensors, options, return_softmax)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The backward alone, which writes into dq, dk and dv.

    out and softmax_lse may cover more keys than k and v hold; the gradients are then the contribution of k and v's
    keys.

    dout and out are ``(batch, seqlen_q, num_heads_q, head_dim)``, softmax_lse ``(batch, num_heads_q, seqlen_q)``; dq,
    dk and dv are like q, k and v with any strides, or None if not needed; rng_state is what the forward returned,
    needed with dropout. All else is as in the forward.

    Returns:
        The row sums of ``dout * out``, ``(batch, num_heads_q, seqlen_q)`` float32, not padded.
    """
    plain = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    tensors = Tensors(q, k, v, alibi_slopes)
    options = _options(tensors, plain, deterministic)
    return _backward(dout, out, softmax_lse, (dq, dk, dv), tensors, options, rng_state)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The backward alone over packed sequences; lse ``(num_heads_q, total_q)``, else as ``_flash_attn_backward``.

    ``zero_tensors`` requests that the gradients of rows of no sequence be 0, which they always are.
    """
    tensors = Tensors(q, k, v, alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    plain = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    options = _options(tensors, plain, deterministic, (max_seqlen_q, max_seqlen_k))
    return _backward(dout, out, softmax_lse, (dq, dk, dv), tensors, options, rng_state)


# flash-attn wraps its functions as operators of torch.library; diffusers calls them by these names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


@torch.no_grad()
def _options(
    tensors: Tensors,
    plain: tuple[float, float, bool, int, int, float],
    deterministic: bool = False,
    lengths: tuple[int | Tensor | None, int | Tensor | None] = (None, None),
    batch_invariant: bool = False,
) -> Options:
    """The options of a call; ``plain`` is dropout_p, softmax_scale, causal, both sides of the window and softcap."""
    dropout_p, softmax_scale, causal, left, right, softcap = plain
    longest = (length("max_seqlen_q", lengths[0]), length("max_seqlen_k", lengths[1]))
    numbers = Plain(softmax_scale, softcap, dropout_p, deterministic, batch_invariant=batch_invariant)
    return read(tensors, causal, (bound(left), bound(right)), False, numbers, longest)


def _in_pages(
    tensors: tuple[Tensor, ...],
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int | Tensor, int | Tensor],
    seqused_k: Tensor | None,
    block_table: Tensor,
    options: tuple[Any, ...],
    batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    used = _kvcache.used(tensors[0], bounds[1], longest[1]) if seqused_k is None else seqused_k
    with names(**{} if seqused_k is None else {"cu_seqlens_k": "seqused_k"}):
        out, lse = _kvcache.paged(tensors, bounds[0], used, longest[0], block_table, options, batch_invariant)
    return out, lse, out.new_empty(0), torch.zeros(2, dtype=torch.int64, device=out.device)


@torch.no_grad()
def _forward(tensors: Tensors, options: Options, return_softmax: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if return_softmax and options.dropout_p > 0:
        return _s_dmask.attention(tensors, options)
    q = tensors.q
    if options.dropout_p > 0:
        rng_state = dropout.drawn(q)
        tensors = dataclasses.replace(tensors, rng_state=rng_state)
    else:
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    out, lse = ops.attention(tensors, options)
    return out, lse, out.new_empty(0), rng_state


@torch.no_grad()
def _backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: tuple[Tensor | None, ...],
    tensors: Tensors,
    options: Options,
    rng_state: Tensor | None,
) -> Tensor:
    q, v = tensors.q, tensors.v
    rows = (*q.shape[:-1], v.shape[-1])
    heads_first = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name, tensor, shape in (("dout", dout, rows), ("out", out, rows), ("softmax_lse", lse, heads_first)):
        if tuple(tensor.shape) != shape:
            raise InvalidInputError(name, f"has shape {tuple(tensor.shape)}, must be {shape}")
    targets = tuple(zip(("dq", "dk", "dv"), wanted, (q, tensors.k, v), strict=True))
    for name, target, like in targets:
        if target is not None and target.shape != like.shape:
            raise InvalidInputError(name, f"has shape {tuple(target.shape)}, must be {tuple(like.shape)}")
    if options.dropout_p > 0:
        if rng_state is None:
            raise InvalidInputError("rng_state", "is None, but dropout_p is not 0: give what the forward returned")
        tensors = dataclasses.replace(tensors, rng_state=rng_state)
    options = options._replace(grads=grads_of("grads", [target is not None for target in wanted]))
    gradients = torch.ops.flashtile.attention_backward(
        dout, None, out.contiguous(), lse.contiguous(), *ops.REGULAR.flatten(tensors, options)
    )
    for (_, target, _), gradient in zip(targets, gradients[:3], strict=True):
        if target is not None:
            target.copy_(gradient)
    wide = torch.promote_types(dout.dtype, torch.float32)
    return (dout.to(wide) * out.to(wide)).sum(dim=-1).transpose(-1, -2).contiguous()
