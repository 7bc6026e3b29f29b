"""``quantize``, the public function."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import get_args

import torch
from torch import Tensor

from flashtile.backends.cpu.rounding import quantized
from flashtile.call.arguments import Options, check_tensor, checked, fields_of, flag, integer
from flashtile.call.axes import Axes, checked_kinds
from flashtile.call.cached_arguments import TENSORS
from flashtile.call.problem import Problem, Tensors, check_values
from flashtile.call.quantized import Choices, Inputs, Quantized, Scales, check_widths
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, shown
from flashtile.ops import plans

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_values_of = fields_of(field.name for field in dataclasses.fields(Inputs))


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
    out_scale: Tensor | None = None,
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
        smooth_k: Take the mean of its keys off each sequence's k, which softmax does not see; where there are more than
            1,024, the mean of 1,024, spread evenly. Not for a call with a softcap: its scores would no longer differ by
            a constant from the true ones.
        cu_seqlens_q: ``(batch + 1,)`` int32 if the sequences are packed: b has rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q: The longest packed queries, if known.
        max_seqlen_k: The longest packed keys, if known.
        rotary_cos: ``(seqlen_rotary, rotary_dim / 2)``, float32 or q's dtype: rotates key j by the angles of position
            j and query i by the angles of ``i + seqlen_k - seqlen_q``, each counted in its own sequence. Features from
            rotary_dim on are unchanged, and so are rows at positions that it does not have.
        rotary_sin: Like rotary_cos.
        rotary_interleaved: Rotates pairs of features (2i, 2i + 1); otherwise ``(i, i + rotary_dim / 2)``.
        seed: The seed of the random signs.
        out_scale: float32 ``(1,)``: the output of calls with the record is divided by it and rounded to 8 bits (e4m3),
            what is past 448 to 448, as a next layer in 8 bits takes it.

    Returns:
        The record. Its output dtype is float16 for float16 tensors, else bfloat16, without an ``out_scale``.

    Raises:
        InvalidInputError: Naming the argument that does not fit.

    Source: Shah et al. 2024, arXiv:2407.08608, section 3.3 (blocks, rotation); Zhang et al. 2024, arXiv:2411.10958
    (smoothing).
    """
    given = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin, out_scale)
    choices, lengths = Choices(scales, rotate, smooth_k, rotary_interleaved, seed), (max_seqlen_q, max_seqlen_k)
    if _is_traced(given):
        _problem(given, choices, lengths)
        with torch.no_grad():
            return quantized(given, choices, lengths)
    try:
        key = "quantize", choices, lengths, *[None if x is None else plans.layout(x) for x in _values_of(given)]
        found: _Planned | None = plans.kept.get(key)
    except (AttributeError, RuntimeError, TypeError):
        _problem(given, choices, lengths)  # names what is no tensor, or has no strides, or what has no hash
        raise
    if found is None:
        found = plans.keep(key, _Planned(given, choices, lengths))
    return found(given, lengths)


Lengths = tuple[int | None, int | None]


class _Planned:
    """Calls with the same layouts and choices, which have been checked."""

    __slots__ = ("_checks", "_choices", "_plan", "_problem")

    def __init__(self, given: Inputs, choices: Choices, lengths: Lengths) -> None:
        self._problem, self._choices = _problem(given, choices, lengths), choices
        self._checks, self._plan = self._problem.varlen and self._problem.device_type == "cpu", None
        sizes = (given.q.numel(), given.k.numel(), given.v.numel())
        if self._problem.device_type == "cuda" and all(sizes) and importlib.util.find_spec("triton"):
            from flashtile.backends.portable.rounding.launch import QuantizePlan

            self._plan = QuantizePlan(given, choices)

    def __call__(self, given: Inputs, lengths: Lengths) -> Quantized:
        if torch.is_grad_enabled():
            _refuse_gradients(given)
        if self._checks or (settings.CHECK.raw() and settings.CHECK.enabled()):
            check_values(self._problem, _tensors(given))
        if self._plan is not None:
            return self._plan(given, lengths)
        with torch.no_grad():
            return quantized(given, self._choices, lengths)


def _is_traced(given: Inputs) -> bool:
    """Whether the call must consist of PyTorch's operations: under tracing, a dispatch mode or a transform."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(isinstance(x, Tensor) and (type(x) is not Tensor or x.is_meta) for x in (given.q, given.k, given.v))
    )


def _tensors(given: Inputs) -> Tensors:
    return Tensors(given.q, given.k, given.v, cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_k=given.cu_seqlens_k)


def _refuse_gradients(given: Inputs) -> None:
    for name in ("q", "k", "v"):
        if getattr(given, name).requires_grad:
            must = "8-bit tensors have no gradient: detach it, or call attention(precision='fp8')"
            raise InvalidInputError(name, f"requires grad, but {must}")


def _problem(given: Inputs, choices: Choices, lengths: Lengths) -> Problem:
    """Checks all but the values of bounds."""
    if choices.scales not in get_args(Scales):
        raise InvalidInputError("scales", f"is {shown(choices.scales)}, must be 'block', 'head' or 'tensor'")
    for name in ("rotate", "smooth_k", "rotary_interleaved"):
        flag(name, getattr(choices, name))
    integer("seed", choices.seed, 0)
    longest = checked(max_seqlen_q=lengths[0], max_seqlen_k=lengths[1])
    problem = Problem.of(_tensors(given), Options(**longest))
    check_widths({"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v})
    if problem.dtype not in _DTYPES:
        raise InvalidInputError("q", f"dtype is {problem.dtype}, must be bfloat16, float16 or float32")
    if torch.is_grad_enabled():
        _refuse_gradients(given)
    _check_rotary(given, problem)
    return problem


_ROTARY = {name: TENSORS[name] for name in ("rotary_cos", "rotary_sin")}


def _check_rotary(given: Inputs, problem: Problem) -> None:
    cos, sin = given.rotary_cos, given.rotary_sin
    if cos is None and sin is None:
        return
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, x)
    assert cos is not None and sin is not None
    for name, (row, x) in checked_kinds(given, _ROTARY).items():
        Axes({}).bind(name, x, row)
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
