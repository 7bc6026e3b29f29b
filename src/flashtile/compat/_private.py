"""flash-attn's private functions that other libraries call: forward and backward without autograd.

Context-parallel libraries run their own communication between these. They map onto flashtile's operators, so this
module alone reaches below the public functions.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flashtile import ops
from flashtile.arguments import band_of, check_numbers, check_tensors
from flashtile.compat._arguments import bound, length, refuse
from flashtile.errors import InvalidInputError, UnsupportedError
from flashtile.problem import Tensors

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
]

# flash-attn's switch for its own Triton kernels on AMD devices; those are not these.
USE_TRITON_ROCM = False

_NO_PROBS = "with dropout it asks for the dense (seqlen_q, seqlen_k) matrix, which is never made"


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The key block by which S_dmask is scaled; flashtile returns no S_dmask, so there is none.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError("_get_block_size_n: it serves to decode S_dmask, which is never made")


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

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``.
        v: ``(batch, seqlen_k, num_heads_kv, head_dim)``.
        dropout_p: Probability of dropping.
        softmax_scale: Factor of the scores.
        causal: Bottom-right causal mask.
        window_size_left: Keys before a row's own, negative for all.
        window_size_right: Keys after it, negative for all.
        softcap: Cap of the scores, 0 for none.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)`` float32.
        return_softmax: Must be False with dropout.

    Returns:
        out, lse ``(batch, num_heads_q, seqlen_q)`` float32, an empty tensor, and the ``(2,)`` int64 state of dropout
        for the backward (zeros without dropout).
    """
    tensors = Tensors(q, k, v, alibi_slopes)
    options = _options(tensors, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return _forward(tensors, options, return_softmax)


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

    ``block_table``, ``leftpad_k``, ``seqused_k`` and ``num_splits`` over 1 are refused. ``zero_tensors`` asks that rows
    of no sequence be 0, which they always are.
    """
    refuse("block_table", block_table, "paged keys and values are not supported here")
    refuse("leftpad_k", leftpad_k, "padding before the keys is not supported here")
    refuse("seqused_k", seqused_k, "using a part of each sequence is not supported here")
    if num_splits > 1:
        raise UnsupportedError(f"num_splits > 1 is not supported over packed sequences, this is {num_splits}")
    tensors = Tensors(q, k, v, alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = _options(tensors, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return _forward(tensors, _with_lengths(options, max_seqlen_q, max_seqlen_k), return_softmax)


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

    out and softmax_lse may be those of more keys than k and v hold: then the gradients are the share of these keys.

    Args:
        dout: ``(batch, seqlen_q, num_heads_q, head_dim)``.
        q: As in the forward, like k and v.
        k: Likewise.
        v: Likewise.
        out: Like dout.
        softmax_lse: ``(batch, num_heads_q, seqlen_q)``.
        dq: Like q, any strides; None for not wanted.
        dk: Like k.
        dv: Like v.
        dropout_p: As in the forward, like all up to alibi_slopes.
        softmax_scale: Likewise.
        causal: Likewise.
        window_size_left: Likewise.
        window_size_right: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: Ask for repeatable bits.
        rng_state: What the forward returned; needed with dropout.

    Returns:
        The row sums of ``dout * out``, ``(batch, num_heads_q, seqlen_q)`` float32, not padded.
    """
    tensors = Tensors(q, k, v, alibi_slopes)
    options = _options(tensors, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    options = dataclasses.replace(options, deterministic=deterministic)
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

    ``zero_tensors`` asks that the gradients of rows of no sequence be 0, which they always are.
    """
    tensors = Tensors(q, k, v, alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = _options(tensors, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    options = dataclasses.replace(_with_lengths(options, max_seqlen_q, max_seqlen_k), deterministic=deterministic)
    return _backward(dout, out, softmax_lse, (dq, dk, dv), tensors, options, rng_state)


def _options(
    tensors: Tensors,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> ops.Options:
    check_tensors(tensors)
    check_numbers(softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p)
    band = band_of(causal, (bound(window_size_left), bound(window_size_right)))
    return ops.Options(
        window_left=band.left,
        window_right=band.right,
        softmax_scale=softmax_scale,
        softcap=float(softcap),
        dropout_p=float(dropout_p),
    )


def _with_lengths(options: ops.Options, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor) -> ops.Options:
    return dataclasses.replace(
        options,
        max_seqlen_q=length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=length("max_seqlen_k", max_seqlen_k),
    )


@torch.no_grad()
def _forward(tensors: Tensors, options: ops.Options, return_softmax: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if return_softmax and options.dropout_p > 0:
        raise UnsupportedError(f"return_softmax: {_NO_PROBS}")
    q = tensors.q
    if options.dropout_p > 0:
        rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
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
    options: ops.Options,
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
    gradients = torch.ops.flashtile.attention_backward(
        dout,
        None,
        out.contiguous(),
        lse.contiguous(),
        *(getattr(tensors, field.name) for field in dataclasses.fields(tensors)),
        *(getattr(options, field.name) for field in dataclasses.fields(options)),
    )
    for (_, target, _), gradient in zip(targets, gradients[:3], strict=True):
        if target is not None:
            target.copy_(gradient)
    wide = torch.promote_types(dout.dtype, torch.float32)
    return (dout.to(wide) * out.to(wide)).sum(dim=-1).transpose(-1, -2).contiguous()
