"""The public functions. Each collects its arguments, has them checked, and calls one operator."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

# Loaded later, the package would take the place of ``flashtile.backends``, the function.
from flashtile import backends as _backends  # noqa: F401
from flashtile.api.cached import attention_with_kvcache as attention_with_kvcache
from flashtile.api.keywords import (
    Asked,
    DenseKeywords,
    PackedKeywords,
    counter_of,
    masked_by,
    options_of,
    refuse_functions,
)
from flashtile.call.arguments import Grads, Options, Plain, Tensors, check_tensor, is_dtensor, read, refuse_mixed
from flashtile.call.prepared import autocast, autocast_is_on
from flashtile.call.quantized import Quantized
from flashtile.core import states
from flashtile.core.errors import InvalidInputError
from flashtile.core.sizes import differ
from flashtile.masks import Intervals
from flashtile.mods.block_mask import BlockMask
from flashtile.ops import dispatch, dropout, flops, operation, plans, selected_dense, sharding, transforms
from flashtile.ops import into as ops_into
from flashtile.ops import operators as ops

transforms.register()
operation.REGISTERS += [flops.register, sharding.register, plans.hide_backends]


@overload
def attention(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None,
    *, return_lse: Literal[False] = False, return_max_scores: Literal[False] = False, **others: Unpack[DenseKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None,
    *, return_lse: Literal[True], return_max_scores: Literal[False] = False, **others: Unpack[DenseKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None,
    *, return_lse: bool, return_max_scores: Literal[False] = False, **others: Unpack[DenseKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None,
    *, return_lse: Literal[False] = False, return_max_scores: Literal[True], **others: Unpack[DenseKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None,
    *, return_lse: Literal[True], return_max_scores: Literal[True], **others: Unpack[DenseKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None,
    *, return_lse: bool, return_max_scores: bool, **others: Unpack[DenseKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def attention(
    q: Tensor | Quantized,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *_more: Any,
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
    attention_chunk: int | None = None,
    block_mask: Intervals | BlockMask | Any | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    backend: str | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    return_max_scores: bool = False,
    selected: Tensor | None = None,
    **_unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, ``softmax(softmax_scale * q @ k^T) @ v``, in memory linear in the sequence lengths.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``; float16, bfloat16, float32, or float64 on the CPU. Or a
            ``Quantized`` in place of q, k and v, without a gradient, slopes, mask, bias or dropout.
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
        attn_bias: float16 to float64, broadcastable to the same shape; added to the scores; has a gradient.
        sinks: ``(num_heads_q,)``: a logit per head that joins each row's denominator, without a value; has a gradient.
        dropout_p: Probability with which each attention probability is dropped; the rest is scaled by ``1/(1-p)``.
            Drawn from PyTorch's generator, so ``torch.manual_seed`` repeats it.
        deterministic: The backward returns the same bits every time. The forward always does.
        attention_chunk: c > 0: a row sees the keys of its own chunk alone, ``floor(p / c) * c <= j < floor(p / c) * c +
            c`` with ``p = i + seqlen_k - seqlen_q``, and of these what ``causal`` and ``window_size`` leave; 0 or
            None for no chunks.
        block_mask: Intervals of keys for each row, or of rows for each key: what ``flashtile.masks`` makes, e.g.
            ``flashtile.masks.documents(ids)``. Keys that no row of a block keeps are not visited. Or lists of blocks,
            ``flashtile.create_block_mask`` or PyTorch's ``BlockMask``, with the function that they were made of: blocks
            that they leave out are not visited, and those that they call full are kept without asking it.
        return_lse: Also return the log-sum-exp of the scores.
        precision: "fp8" rounds bfloat16 or float16 q, k and v to 8 bits, as ``quantize`` does, for the forward alone.
        backend: The backend to use, or an error with its reasons if it cannot; None takes the first that can.
        score_mod: ``f(score, b, h, q_idx, kv_idx)``, as of FlexAttention: what it returns takes a scaled score's place,
            before any softcap, slopes and bias. It is traced; tensors that it captures have gradients.
        mask_mod: ``f(b, h, q_idx, kv_idx)``: keeps a pair where it returns True, besides all other masks.
        return_max_scores: Also return the largest score that each row keeps, after everything that changes scores;
            sinks do not count. Has no gradient. For QK-clip: docs/training.md.
        selected: ``(batch, seqlen_q, most)`` int32: the keys that each query sees, as of ``attention_with_kvcache``;
            causal and window_size cut further. A list must name no key twice. Goes with sinks, softcap and
            deterministic; has a first derivative alone.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)`` in q's dtype, or ``(out, lse)`` with lse
        ``(batch, num_heads_q, seqlen_q)`` float32 (float64 for float64 inputs), natural log, sinks included. A row that
        keeps no key has out 0 and lse -inf, or the sink. With return_max_scores a tensor like lse is the last result,
        ``(out, max_scores)`` or ``(out, lse, max_scores)``: -inf for a row that keeps no key, and NaN for one that
        keeps a score of NaN or infinity.

    Raises:
        InvalidInputError: A ValueError that names the argument.
        UnsupportedError: No backend can run the call; lists the reasons of each.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; Dao 2023, arXiv:2307.08691.
    """
    global _last
    counted_by = counter_of("attention", _more, _unknown) if _more or _unknown else ""
    if selected is not None:
        plain = Plain(
            softmax_scale, softcap, dropout_p, deterministic, backend, attention_chunk, False, (), return_max_scores
        )
        masked = _NOT_MASKED[0] if block_mask is None else masked_by(block_mask, mask_mod, q, k).tensors
        tensors = Tensors(q, k, v, alibi_slopes, attn_mask, attn_bias, sinks, **masked)  # type: ignore[arg-type]
        asked = Asked(precision, causal, window_size, return_lse, plain, functions=(score_mod, mask_mod))
        return _over_selected(tensors, asked, selected)
    alone = Tensors(q, k, v)  # type: ignore[arg-type]
    if not operation.is_watched(alone.q, alone.k, alone.v) and not autocast_is_on():
        # Most calls have the keywords of the one before. Compared by identity, since True == 1, but for the scale: each
        # layer of a model has its own number.
        options, causal_, window_, scale_, softcap_, dropout_, deterministic_, backend_, chunk_ = _last
        if (
            causal is causal_ and window_size is window_ and softcap is softcap_
            and (softmax_scale is scale_ or (type(softmax_scale) is type(scale_) is float and softmax_scale == scale_))
            and dropout_p is dropout_ and deterministic is deterministic_ and backend is backend_
            and attention_chunk is chunk_
            and alibi_slopes is attn_mask is attn_bias is sinks is None
            and block_mask is None and score_mod is None and mask_mod is None
            and precision is None and return_max_scores is False and return_lse is False
            and options.grads == (
                (alone.q.requires_grad, alone.k.requires_grad, alone.v.requires_grad, False, False, ())
                if _has_grads() else _NO_GRADS
            )
        ):  # fmt: skip
            return ops.attention_again(options, alone)
    masked, mirrored, listed = _NOT_MASKED
    if block_mask is not None:
        masked, mirrored, listed, mask_mod = masked_by(block_mask, mask_mod, q, k)
    tensors = Tensors(q, k, v, alibi_slopes, attn_mask, attn_bias, sinks, **masked)  # type: ignore[arg-type]
    numbers = softmax_scale, softcap, dropout_p, deterministic, backend, attention_chunk
    plain = Plain(*numbers, mirrored, listed, return_max_scores, False)
    if not (precision is None and score_mod is None and mask_mod is None and not listed) or isinstance(q, Quantized):
        others = False, (None, None), (score_mod, mask_mod)
        return _less_common(
            tensors, Asked(precision, causal, window_size, return_lse, plain, *others), None, block_mask
        )
    options = read(tensors, causal, window_size, return_lse, plain)
    is_usual = (window_size is None or type(window_size) is tuple) and not return_max_scores
    if is_usual and not options.dropout_p and not _is_compiling():
        _last = options, causal, window_size, *numbers
    return _run(tensors, options._replace(counted_by=counted_by) if counted_by else options, return_lse)


_NO_GRADS, _is_compiling, _has_grads = Grads(), torch.compiler.is_compiling, torch.is_grad_enabled
# The first fields of ``keywords.Masked`` in a call without block_mask.
_NOT_MASKED: tuple[dict[str, Tensor | None], bool, tuple[int, ...]] = ({}, False, ())
# The options of a call without dropout, and the keywords that they were read from.
_last: tuple[Any, ...] = (Options(), object(), *[None] * 7)


@overload
def attention_varlen(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    *, return_lse: Literal[False] = False, return_max_scores: Literal[False] = False, **others: Unpack[PackedKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    *, return_lse: Literal[True], return_max_scores: Literal[False] = False, **others: Unpack[PackedKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    *, return_lse: bool, return_max_scores: Literal[False] = False, **others: Unpack[PackedKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    *, return_lse: Literal[False] = False, return_max_scores: Literal[True], **others: Unpack[PackedKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    *, return_lse: Literal[True], return_max_scores: Literal[True], **others: Unpack[PackedKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor | Quantized, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    *, return_lse: bool, return_max_scores: bool, **others: Unpack[PackedKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def attention_varlen(
    q: Tensor | Quantized,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *_more: Any,
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
    attention_chunk: int | None = None,
    block_mask: Intervals | BlockMask | Any | None = None,
    batch_invariant: bool | Literal["strict"] = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    precision: str | None = None,
    backend: str | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    return_max_scores: bool = False,
    **_unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Attention over sequences packed one after another; each sequence attends to itself only.

    q is ``(total_q, num_heads_q, head_dim)``, k ``(total_k, num_heads_kv, head_dim)``, v ``(total_k, num_heads_kv,
    head_dim_v)``. cu_seqlens_q and cu_seqlens_k are ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens_q[b]`` to
    ``cu_seqlens_q[b + 1]`` of q against rows ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]`` of k and v. Rows past the
    last bound belong to no sequence: out 0, lse -inf.

    max_seqlen_q and max_seqlen_k are the longest lengths. Without them GPU kernels launch for the bounds total_q and
    total_k, with no synchronisation, which costs empty programs where the batch is large.

    A ``Quantized`` of packed sequences in place of q, k and v has its own cu_seqlens and longest lengths.

    The keywords are ``attention``'s; causal, window_size, attention_chunk and alibi_slopes use each sequence's
    own lengths, and each uses the first rows and keys of block_mask, and the top left corner of attn_mask and attn_bias
    ``(batch, num_heads_q, max_seqlen_q, max_seqlen_k)``. To score_mod and mask_mod q_idx and kv_idx count from the
    sequence's own first row and key, and b is the sequence.

    out is where to write the output, in place of a new tensor: its shape, q's dtype, any strides, overlapping no other
    tensor of the call. As with PyTorch's out there is no gradient: it is refused where one is needed.

    With batch_invariant, True or "strict", a row's bits in the forward depend on its query, its keys and its position
    alone, not on how many rows of its sequence the call has. It does not go with dropout, lists of blocks or 8 bits,
    nor, on GPUs, with a bias or score_mod.

    Returns:
        out ``(total_q, num_heads_q, head_dim_v)``, or ``(out, lse)`` with lse ``(num_heads_q, total_q)``; with
        return_max_scores a tensor like lse is the last result, as of ``attention``.

    Raises:
        InvalidInputError: A ValueError that names the argument.
        UnsupportedError: No backend can run the call; lists the reasons of each.
    """
    counted_by = counter_of("attention_varlen", _more, _unknown) if _more or _unknown else ""
    masked, mirrored, listed = _NOT_MASKED
    if block_mask is not None:
        masked, mirrored, listed, mask_mod = masked_by(block_mask, mask_mod)
    tensors = Tensors(
        q, k, v, alibi_slopes, attn_mask, attn_bias, sinks, cu_seqlens_q, cu_seqlens_k, **masked  # type: ignore[arg-type]
    )  # fmt: skip
    numbers = softmax_scale, softcap, dropout_p, deterministic, backend, attention_chunk
    plain = Plain(*numbers, mirrored, listed, return_max_scores, batch_invariant)
    longest = (max_seqlen_q, max_seqlen_k)
    is_quantized = isinstance(q, Quantized)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens is None and not is_quantized:
            raise InvalidInputError(name, "is None, must be an int32 tensor of shape (batch + 1,)")
    if not (precision is None and score_mod is None and mask_mod is None) or is_quantized:
        asked = Asked(precision, causal, window_size, return_lse, plain, True, longest, (score_mod, mask_mod))
        return _less_common(tensors, asked, out)
    options = read(tensors, causal, window_size, return_lse, plain, longest)
    return _run(tensors, options._replace(counted_by=counted_by) if counted_by else options, return_lse, out)


def _less_common(
    tensors: Tensors, asked: Asked, out: Tensor | None = None, block_mask: object = None
) -> Tensor | tuple[Tensor, ...]:
    """A call in 8 bits, with functions of the user's, or with lists of blocks."""
    if asked.precision is not None or isinstance(tensors.q, Quantized):
        if out is not None:
            raise InvalidInputError("out", "is given, but calls in 8 bits make their own")
        refuse_functions(*asked.functions)
        found: Tensor | tuple[Tensor, Tensor] = quantized_calls().attend(tensors, asked)
        return found
    if block_mask is not None and asked.plain.listed and asked.plain.listed[0] % 16:  # rows of the smallest tile
        from flashtile.api import lists_of_rows  # what few programs need is not loaded by all

        if lists_of_rows.folds(block_mask, tensors, asked):
            found_of_groups: Tensor | tuple[Tensor, ...] = lists_of_rows.attend(attention, block_mask, tensors, asked)
            return found_of_groups
    return _run(tensors, options_of(tensors, asked), asked.return_lse, out)


def _over_selected(t: Tensors, asked: Asked, selected: Tensor) -> Tensor | tuple[Tensor, ...]:
    """A call where each query names the keys that it sees."""
    if asked.precision is not None or isinstance(t.q, Quantized):
        raise InvalidInputError("selected", "is given, but calls in 8 bits see all keys")
    options = options_of(t, asked)
    t = autocast(t, t.q.device.type) if autocast_is_on() else t
    out, lse = selected_dense.attend(t, options, selected)
    with_maxima = options.return_max_scores
    return states.asked_for(out, lse, asked.return_lse, with_maxima) if asked.return_lse or with_maxima else out


def quantized_calls() -> Any:
    """The calls in 8 bits: what few programs need is not loaded by all."""
    from flashtile.api import quantized as api

    return api


def _run(
    tensors: Tensors, options: Options, return_lse: bool, into: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    if autocast_is_on():
        tensors = autocast(tensors, tensors.q.device.type)
    if options.dropout_p > 0:
        sharding.refuse_dropout(tensors.q)
        tensors = dataclasses.replace(tensors, rng_state=dropout.drawn(tensors.q))
    if into is None:
        out, lse = ops.attention(tensors, options, return_lse or options.return_max_scores)
    else:
        check_tensor("out", into)
        if is_dtensor(into) or is_dtensor(tensors.q):
            raise InvalidInputError("out", "is given, but calls on DTensors make their own: call it on local tensors")
        given = (*vars(tensors).items(), ("out", into), *(("score_mod", x) for x in tensors.operands or ()))
        wanting = [name for name, x in given if isinstance(x, Tensor) and x.requires_grad]
        if torch.is_grad_enabled() and wanting:
            raise InvalidInputError("out", f"is given, but {wanting[0]} requires grad: use torch.no_grad()")
        out, lse = into, ops_into.attend(ops_into.IntoTensors(**vars(tensors), out=into), options)
    with_maxima = options.return_max_scores
    return states.asked_for(out, lse, return_lse, with_maxima) if return_lse or with_maxima else out


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    The operation is associative and commutative, and ``(0, -inf)`` is its empty state, so keys may be split anywhere
    and merged in any order. Differentiable in all four arguments.

    The weights of the two add up to 1. They are as exact as lse: float32 tells them to 1% near 1e5, and near 1e9 not
    how many keys a state has, so that two averages of such rows are merged as if they were of equally many.

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
    found = _merged_by_kernel(out_a, lse_a, out_b, lse_b)
    if found is not None:
        return found
    out, lse = states.merge(out_a.transpose(-2, -3), lse_a, out_b.transpose(-2, -3), lse_b)
    return out.transpose(-2, -3).to(out_a.dtype), lse


def _merged_by_kernel(*given: Tensor) -> tuple[Tensor, Tensor] | None:
    """The merged state from a kernel: on GPUs, where nothing watches the operations and no gradient is needed."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if not given[0].is_cuda or needs_grad or operation.is_watched(*given[:3]) or type(given[3]) is not Tensor:
        return None
    if not importlib.util.find_spec("triton"):
        return None
    from flashtile.backends.gpu.decode import merge

    return merge.merge(*given) if merge.can_merge(*given) else None


def _check_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in given.items():
        check_tensor(name, tensor)
        if not tensor.dtype.is_floating_point:
            raise InvalidInputError(name, f"dtype is {tensor.dtype}, must be a float dtype")
        if tensor.device != out_a.device:
            raise InvalidInputError(name, f"is on {tensor.device}, but out_a is on {out_a.device}")
    refuse_mixed(given)
    if out_a.dim() not in (3, 4):
        raise InvalidInputError("out_a", f"has {out_a.dim()} dimensions, must have 4, or 3 for packed sequences")
    *lead, seqlen, heads, _ = out_a.shape
    rows = (*lead, heads, seqlen)
    for name, tensor, shape in (("lse_a", lse_a, rows), ("out_b", out_b, tuple(out_a.shape)), ("lse_b", lse_b, rows)):
        if differ(tensor.shape, shape):
            raise InvalidInputError(name, f"has shape {tuple(tensor.shape)}, must be {shape} to match out_a")


def backends() -> tuple[str, ...]:
    """The names of all backends, fastest first; ``explain`` says which of them can run a call."""
    return dispatch.NAMES


def support_table() -> str:
    """A Markdown table of the features that each backend supports, made from the declared capabilities."""
    return dispatch.support_table()
