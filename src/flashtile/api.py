"""The public functions. Each names its arguments, has them checked, and calls one operator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile import dispatch, ops, states
from flashtile.arguments import band_of, check_numbers, check_tensors, window_bounds
from flashtile.errors import InvalidInputError
from flashtile.problem import Tensors, check_values


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(softmax_scale * q @ k^T) @ v``, in memory linear in the sequence lengths.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``; float16, bfloat16, float32, or float64 on the CPU.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``; num_heads_q is a multiple of num_heads_kv.
        v: ``(batch, seqlen_k, num_heads_kv, head_dim_v)``.
        causal: Row i keeps keys ``j <= i + seqlen_k - seqlen_q``: the last query sees the last key.
        window_size: ``(left, right)``: row i keeps ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q +
            right``, ends inclusive; -1 or None leaves a side unbounded. ``causal`` overrides the right bound.
        softmax_scale: Factor of the scores; ``head_dim ** -0.5`` by default.
        softcap: c > 0 replaces the scaled scores by ``c * tanh(scores / c)``.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)`` float32; adds
            ``-slope * |i + seqlen_k - seqlen_q - j|``. Has no gradient.
        attn_mask: bool, broadcastable to ``(batch, num_heads_q, seqlen_q, seqlen_k)``; True keeps.
        attn_bias: Any float dtype, broadcastable likewise; added to the scores; has a gradient.
        sinks: ``(num_heads_q,)``: a logit in each row's denominator that has no value; has a gradient.
        dropout_p: Probability with which each attention probability is dropped; the rest is scaled by ``1/(1-p)``.
            Drawn from PyTorch's generator, so ``torch.manual_seed`` repeats it.
        deterministic: The backward returns the same bits every time. The forward always does.
        return_lse: Also return the log-sum-exp of the scores.
        backend: Run exactly this one, or raise its reasons; None takes the first that can.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)`` in q's dtype, or ``(out, lse)`` with lse
        ``(batch, num_heads_q, seqlen_q)`` float32 (float64 for float64 inputs), natural log, sinks included. A row that
        keeps no key has out 0 and lse -inf, or the sink.

    Raises:
        InvalidInputError: A ValueError that names the argument.
        UnsupportedError: No backend can, with the reasons of each.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; Dao 2023, arXiv:2307.08691.
    """
    return _attention(
        Tensors(q, k, v, alibi_slopes, attn_mask, attn_bias, sinks),
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
        backend=backend,
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences packed one after another: sequence b never sees another one.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``.
        k: ``(total_k, num_heads_kv, head_dim)``.
        v: ``(total_k, num_heads_kv, head_dim_v)``.
        cu_seqlens_q: ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q.
            Rows behind the last bound belong to nobody: out 0, lse -inf.
        cu_seqlens_k: ``(batch + 1,)`` int32, the same for k and v.
        max_seqlen_q: Longest query sequence. Left out, no device is asked for it: GPU kernels then launch for the
            bound total_q, which costs empty programs where the batch is large.
        max_seqlen_k: Longest key sequence, likewise.
        causal: As in ``attention``, by the lengths of each sequence.
        window_size: As in ``attention``.
        softmax_scale: As in ``attention``.
        softcap: As in ``attention``.
        alibi_slopes: As in ``attention``.
        attn_mask: As in ``attention`` with ``(batch, num_heads_q, max_seqlen_q, max_seqlen_k)``; a sequence uses its
            top left corner.
        attn_bias: Likewise.
        sinks: As in ``attention``.
        dropout_p: As in ``attention``.
        deterministic: As in ``attention``.
        return_lse: As in ``attention``.
        backend: As in ``attention``.

    Returns:
        out ``(total_q, num_heads_q, head_dim_v)``, or ``(out, lse)`` with lse ``(num_heads_q, total_q)``.

    Raises:
        InvalidInputError: A ValueError that names the argument.
        UnsupportedError: No backend can, with the reasons of each.
    """
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens is None:
            raise InvalidInputError(name, "is None, must be an int32 tensor of shape (batch + 1,)")
    return _attention(
        Tensors(q, k, v, alibi_slopes, attn_mask, attn_bias, sinks, cu_seqlens_q, cu_seqlens_k),
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
        backend=backend,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def _attention(
    tensors: Tensors,
    *,
    causal: bool,
    window_size: Sequence[int | None] | None,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    backend: str | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    check_tensors(tensors)
    left, right = window_bounds(window_size)
    make = _make_options if torch.compiler.is_compiling() else _options
    options = make(
        causal,
        left,
        right,
        softmax_scale,
        softcap,
        dropout_p,
        deterministic,
        return_lse,
        backend,
        max_seqlen_q,
        max_seqlen_k,
        *_wanted_gradients(tensors),
    )
    if dropout_p > 0:
        state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=tensors.q.device)
        tensors = dataclasses.replace(tensors, rng_state=state)
    out, lse = ops.attention(tensors, options)
    return (out, lse) if return_lse else out


def _wanted_gradients(t: Tensors) -> tuple[bool, bool]:
    """Whether any input, and whether the bias, needs a gradient."""
    if not torch.is_grad_enabled():
        return False, False
    bias = t.attn_bias is not None and t.attn_bias.requires_grad
    inputs = t.q.requires_grad or t.k.requires_grad or t.v.requires_grad
    return inputs or bias or (t.sinks is not None and t.sinks.requires_grad), bias


def _make_options(
    causal: bool,
    left: int | None,
    right: int | None,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    backend: str | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    needs_grad: bool,
    bias_grad: bool,
) -> ops.Options:
    """Checks the plain arguments and puts them into the operator's order."""
    check_numbers(
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    band = band_of(causal, (left, right))
    if backend is not None:
        dispatch.check_name(backend)
    return ops.Options(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        window_left=band.left,
        window_right=band.right,
        softmax_scale=None if softmax_scale is None else float(softmax_scale),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        deterministic=deterministic,
        needs_grad=needs_grad,
        bias_grad=bias_grad,
        backend=backend or "",
    )


# Typed, since True == 1 == 1.0 and only one of them is right in each place.
_options = functools.lru_cache(maxsize=4096, typed=True)(_make_options)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over two disjoint sets of keys into attention over their union.

    The operation is associative and commutative, and ``(0, -inf)`` is its empty state, so keys may be split anywhere
    and merged in any order. Differentiable in all four arguments.

    Args:
        out_a: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or ``(total_q, num_heads_q, head_dim_v)``.
        lse_a: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``, natural log.
        out_b: Like out_a.
        lse_b: Like lse_a.

    Returns:
        out in out_a's dtype and lse in lse_a's, shapes as given.

    Raises:
        InvalidInputError: If the shapes do not fit one another.

    Source: docs/algorithm.md, "The monoid"; Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    _check_states(out_a, lse_a, out_b, lse_b)
    out, lse = states.merge(out_a.transpose(-2, -3), lse_a, out_b.transpose(-2, -3), lse_b)
    return out.transpose(-2, -3).to(out_a.dtype), lse


def _check_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(name, f"is a {type(tensor).__name__}, must be a torch.Tensor")
        if not tensor.dtype.is_floating_point:
            raise InvalidInputError(name, f"dtype is {tensor.dtype}, must be a float dtype")
        if tensor.device != out_a.device:
            raise InvalidInputError(name, f"is on {tensor.device}, but out_a is on {out_a.device}")
    if out_a.dim() not in (3, 4):
        raise InvalidInputError("out_a", f"has {out_a.dim()} dimensions, must have 4, or 3 for packed sequences")
    *lead, seqlen, heads, _ = out_a.shape
    for name, tensor, shape in (
        ("lse_a", lse_a, (*lead, heads, seqlen)),
        ("out_b", out_b, tuple(out_a.shape)),
        ("lse_b", lse_b, (*lead, heads, seqlen)),
    ):
        if tuple(tensor.shape) != shape:
            raise InvalidInputError(name, f"has shape {tuple(tensor.shape)}, must be {shape} to match out_a")


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str | None = None,
) -> str:
    """Says which backend and tiles a call would run with, and why the other backends would not.

    Takes the arguments of ``attention``, or with cu_seqlens those of ``attention_varlen``, and refuses what they
    refuse. Nothing is computed.

    Returns:
        A few lines of text.
    """
    tensors = Tensors(q, k, v, alibi_slopes, attn_mask, attn_bias, sinks, cu_seqlens_q, cu_seqlens_k)
    check_tensors(tensors)
    options = _make_options(
        causal,
        *window_bounds(window_size),
        softmax_scale,
        softcap,
        dropout_p,
        deterministic,
        False,
        backend,
        max_seqlen_q,
        max_seqlen_k,
        *_wanted_gradients(tensors),
    )
    problem = options.problem(tensors)
    if problem.varlen and problem.device_type == "cpu":
        check_values(problem, tensors)
    return dispatch.explain(problem, backend)


def backends() -> tuple[str, ...]:
    """The names of all backends, fastest first; whether one can run a call is for ``explain`` to say."""
    return dispatch.NAMES


def support_table() -> str:
    """What each backend supports, as a Markdown table printed from the declared capabilities."""
    return dispatch.support_table()
