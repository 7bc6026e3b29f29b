"""``quantize``, the public function."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from flashtile import settings
from flashtile.arguments import Options, check_tensor, checked, flag, integer
from flashtile.errors import InvalidInputError
from flashtile.problem import Problem, Tensors, check_values
from flashtile.quantization.plain import Choices, Inputs, quantized
from flashtile.quantization.record import Quantized, Scales, check_widths

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scales: Scales = "block",
    rotate: bool = True,
    smooth_k: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    seed: int = 0,
) -> Quantized:
    """Rounds q, k and v to 8 bits (e4m3), for ``attention`` and ``attention_varlen``.

    In this order: q and k are rotated by position where cos and sin are given; the mean of k is taken off; q and k are
    rotated by a Hadamard matrix; each block of 128 rows is divided by its scale, its largest magnitude over 448. The
    arithmetic is float32 or close to it. No gradient: for training, ``attention`` has ``precision="fp8"``.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, packed ``(total_q, num_heads_q, head_dim)``; bfloat16, float16
            or float32. head_dim is a multiple of 16, at most 256.
        k: The same with seqlen_k or total_k, and num_heads_kv, which divides num_heads_q.
        v: Like k with head_dim_v, also a multiple of 16, at most 256.
        scales: What one scale is for: ``"block"``, 128 rows of a head; ``"head"``, a head of a sequence; ``"tensor"``.
        rotate: Rotate q and k by random signs and a Hadamard matrix over head_dim, which leaves q k^T as it is and
            spreads what is large in few features over all of them.
        smooth_k: Take the mean over its keys off each sequence's k, which softmax does not see. Not for a call with a
            softcap, whose scores would no longer differ by a constant from the true ones.
        cu_seqlens_q: ``(batch + 1,)`` int32 if the sequences are packed: b has rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q: The longest packed queries, if known.
        max_seqlen_k: The longest packed keys, if known.
        rotary_cos: ``(seqlen_rotary, rotary_dim / 2)``, float32 or q's dtype: rotates key j by the angles of position
            j and query i by those of ``i + seqlen_k - seqlen_q``, each counted in its own sequence. Features from
            rotary_dim on are unchanged, and so are rows at positions that it does not have.
        rotary_sin: Like rotary_cos.
        rotary_interleaved: Rotates pairs of features (2i, 2i + 1); otherwise ``(i, i + rotary_dim / 2)``.
        seed: Of the random signs.

    Returns:
        The record. Its output dtype is float16 for float16 tensors, else bfloat16.

    Raises:
        InvalidInputError: Naming the argument that does not fit.

    Source: Shah et al. 2024, arXiv:2407.08608, section 3.3 (blocks, rotation); Zhang et al. 2024, arXiv:2411.10958
    (smoothing).
    """
    if scales not in get_args(Scales):
        raise InvalidInputError("scales", f"is {scales!r}, must be 'block', 'head' or 'tensor'")
    given = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin)
    choices = Choices(
        scales, flag("rotate", rotate), flag("smooth_k", smooth_k), flag("rotary_interleaved", rotary_interleaved),
        integer("seed", seed, 0),
    )  # fmt: skip
    _check(given, checked(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k))
    with torch.no_grad():
        return quantized(given, choices, max_seqlen_q, max_seqlen_k)


def _check(given: Inputs, lengths: dict[str, Any]) -> None:
    tensors = Tensors(given.q, given.k, given.v, cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_k=given.cu_seqlens_k)
    problem = Problem.of(tensors, Options(**lengths))
    check_widths({"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v})
    if given.q.dtype not in _DTYPES:
        raise InvalidInputError("q", f"dtype is {given.q.dtype}, must be bfloat16, float16 or float32")
    for name in ("q", "k", "v"):
        if torch.is_grad_enabled() and getattr(given, name).requires_grad:
            raise InvalidInputError(
                name, "requires grad, but 8-bit tensors have no gradient: detach it, or call attention(precision='fp8')"
            )
    if problem.device_type == "cpu" or settings.CHECK.enabled():
        check_values(problem, tensors)
    _check_rotary(given, problem)


def _check_rotary(given: Inputs, problem: Problem) -> None:
    cos, sin = given.rotary_cos, given.rotary_sin
    if cos is None and sin is None:
        return
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, x)
        assert x is not None
        if x.dtype not in (torch.float32, given.q.dtype):
            raise InvalidInputError(name, f"dtype is {x.dtype}, must be float32 or q's {given.q.dtype}")
        if x.device != given.q.device:
            raise InvalidInputError(name, f"is on {x.device}, but q is on {given.q.device}")
        if x.dim() != 2:
            raise InvalidInputError(name, f"has {x.dim()} dimensions, must have 2: (seqlen_rotary, rotary_dim/2)")
    assert cos is not None and sin is not None
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        is_, other = (f"is {tuple(x.shape)} {x.dtype}" for x in (sin, cos))
        raise InvalidInputError("rotary_sin", f"{is_}, but rotary_cos {other}")
    if 2 * cos.shape[1] > problem.head_dim:
        raise InvalidInputError(
            "rotary_cos", f"turns {2 * cos.shape[1]} features, but q has head_dim {problem.head_dim}"
        )
    if not problem.varlen and cos.shape[0] < problem.seqlen_k:
        raise InvalidInputError("rotary_cos", f"has {cos.shape[0]} positions, but k has {problem.seqlen_k}")
    if not problem.varlen and problem.seqlen_q > problem.seqlen_k:
        lengths = f"{problem.seqlen_q} queries and {problem.seqlen_k} keys"
        raise InvalidInputError("rotary_cos", f"is given with {lengths}: the first queries would have no position")
