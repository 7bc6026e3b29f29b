"""Part one of the demo: how far flashtile and PyTorch are from attention computed in float64.

Inputs are rounded to their dtype first and all methods get the same ones, so the errors are those of the arithmetic
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile import reference
from flashtile.call.arguments import Grads, Options, band_of
from flashtile.call.problem import Problem, Tensors
from flashtile.core.errors import UnsupportedError

HEAD_DIM = 64
NUM_HEADS = 4


@dataclass(frozen=True)
class Case:
    """A combination of features; those with a direction in their nature are causal."""

    name: str
    num_heads_kv: int = NUM_HEADS
    keywords: Mapping[str, Any] = field(default_factory=dict)  # causal, window_size and softcap of the call
    extras: tuple[str, ...] = ()  # the tensors that the call takes besides q, k and v
    sdpa: str = ""  # how PyTorch's own function says it; standard attention stands in the place of what it has not


CASES = (
    Case("full", sdpa="SDPA"),
    Case("causal", keywords={"causal": True}, sdpa="SDPA"),
    Case("grouped heads", num_heads_kv=2, keywords={"causal": True}, sdpa="SDPA"),
    Case("window of 32", keywords={"causal": True, "window_size": (31, 0)}, sdpa="by mask"),
    Case("boolean mask", extras=("attn_mask",), sdpa="SDPA"),
    Case("bias with gradient", extras=("attn_bias",), sdpa="SDPA"),
    Case("ALiBi", keywords={"causal": True}, extras=("alibi_slopes",)),
    Case("softcap and sinks", keywords={"causal": True, "softcap": 15.0}, extras=("sinks",)),
    Case("packed sequences", keywords={"causal": True}, extras=("cu_seqlens_q", "cu_seqlens_k")),
)


@dataclass(frozen=True)
class Row:
    """What one case in one dtype showed.

    Errors are the largest ones, relative to the largest element of the exact tensor; those of gradients are of the
    worst gradient. A case passes if flashtile's are at most twice those of standard attention in the same dtype, plus
    one unit of rounding.
    """

    case: str
    dtype: str
    flashtile_out: float
    flashtile_grad: float
    pytorch_out: float
    pytorch_grad: float
    pytorch: str  # which PyTorch computation its errors belong to
    passed: bool
    refused: str = ""  # why no backend runs the case here, if so; the errors are then nan


def rows(device: torch.device, dtypes: tuple[torch.dtype, ...], seqlen: int) -> Iterator[Row]:
    """Checks every case in every dtype, one row at a time."""
    for index, case in enumerate(CASES):
        for dtype in dtypes:
            yield _row(case, dtype, device, seqlen, seed=index)


def _row(case: Case, dtype: torch.dtype, device: torch.device, seqlen: int, seed: int) -> Row:
    tensors, dout = _inputs(case, dtype, device, seqlen, seed)
    keywords = case.keywords
    band = band_of(keywords.get("causal", False), keywords.get("window_size"))
    problem = Problem.of(tensors, Options(
        window_left=band.left, window_right=band.right, softcap=keywords.get("softcap", 0.0),
        grads=Grads(True, True, True),
    ))  # fmt: skip
    exact = _with_gradients(tensors, dout, lambda t: reference.attention(problem, t)[0])
    standard = _with_gradients(tensors, dout, lambda t: reference.attention(problem, t, dtype)[0])
    pytorch = _with_gradients(tensors, dout, lambda t: _sdpa(t, problem)) if case.sdpa else standard
    name = str(dtype).removeprefix("torch.")
    label = case.sdpa or "not SDPA"
    try:
        ours = _with_gradients(tensors, dout, lambda t: _flashtile(t, case))
    except UnsupportedError as error:
        why = " ".join(str(error).split())
        return Row(case.name, name, *(float("nan"),) * 2, *_errors(pytorch, exact), label, passed=True, refused=why)
    found, allowed = _errors(ours, exact), _errors(standard, exact)
    floor = torch.finfo(dtype).eps
    passed = all(error <= 2 * limit + floor for error, limit in zip(found, allowed, strict=True))
    return Row(case.name, name, *found, *_errors(pytorch, exact), label, passed)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, seqlen: int, seed: int) -> tuple[Tensors, Tensor]:
    """The tensors of a case, drawn on the CPU so that every device gets the same ones, and a gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    packed = "cu_seqlens_q" in case.extras

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    lead = (seqlen,) if packed else (2, seqlen)
    q, dout = randn(*lead, NUM_HEADS, HEAD_DIM), randn(*lead, NUM_HEADS, HEAD_DIM)
    k, v = randn(*lead, case.num_heads_kv, HEAD_DIM), randn(*lead, case.num_heads_kv, HEAD_DIM)
    bounds = torch.tensor([0, seqlen // 7, seqlen // 2, seqlen], dtype=torch.int32, device=device)
    made: dict[str, Any] = {
        "attn_mask": (torch.rand(2, 1, seqlen, seqlen, generator=draw) < 0.7).to(device),
        "attn_bias": randn(1, NUM_HEADS, seqlen, seqlen),
        "alibi_slopes": 2.0 ** -torch.arange(1.0, NUM_HEADS + 1, device=device),
        "sinks": randn(NUM_HEADS),
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds,
    }
    return Tensors(2 * q, k, v, **{name: made[name] for name in case.extras}), dout


def _flashtile(t: Tensors, case: Case) -> Tensor:
    keywords = {**case.keywords, **{name: getattr(t, name) for name in case.extras}}
    call = flashtile.attention_varlen if t.cu_seqlens_q is not None else flashtile.attention
    out = call(t.q, t.k, t.v, **keywords)
    assert isinstance(out, Tensor)
    return out


def _sdpa(t: Tensors, problem: Problem) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with a window told as a mask."""
    mask = t.attn_bias if t.attn_mask is None else t.attn_mask
    causal = problem.band.right == 0
    if problem.band.left is not None:
        mask, causal = problem.band.dense(problem.seqlen_q, problem.seqlen_k, device=t.q.device), False
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=problem.group_size > 1)
    return out.transpose(1, 2)


def _with_gradients(tensors: Tensors, dout: Tensor, call: Any) -> list[Tensor]:
    """The output and the gradients of every input that has one, in float64."""
    names = [n for n in ("q", "k", "v", "attn_bias", "sinks") if getattr(tensors, n) is not None]
    leaves = {name: getattr(tensors, name).detach().requires_grad_() for name in names}
    out = call(replace(tensors, **leaves))
    grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return [x.detach().double() for x in (out, *grads)]


def _errors(found: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """The relative error of the output, and the largest one among the gradients."""
    relative = [float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, exact, strict=True)]
    return relative[0], max(relative[1:])
