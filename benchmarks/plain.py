"""Attention in plain PyTorch: standard attention, and PyTorch's own function on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Direction, Inputs
from benchmarks.checks import Outputs

Call = Callable[[], Outputs]


class SdpaCpu:
    """PyTorch's scaled_dot_product_attention as a CPU user would best call it.

    A window needs a boolean mask of the whole score matrix; packed sequences are called one by one, which takes less
    work than one call under a mask.
    """

    name = "sdpa"

    def runs(self, direction: Direction) -> str:
        return "torch.nn.functional.scaled_dot_product_attention" + (
            " under autograd" if direction == "backward" else ""
        )

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"measured on the cpu only, not on {device.type}"

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.direction == "backward" and case.lengths is not None:
            return "no gradients over packed sequences"
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        grouped = case.num_heads_q != case.num_heads_kv
        if case.lengths is not None:
            packed = _split(inputs, case.lengths)
            return lambda: (
                torch.cat([_attend(q, k, v, is_causal=case.causal, enable_gqa=grouped) for q, k, v in packed]),
            )
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        square = case.seqlen_q == case.seqlen_k
        mask = None
        if case.window is not None or (case.causal and not square):
            mask = case.band.dense(case.seqlen_q, case.seqlen_k)
        features: dict[str, Any] = {"is_causal": case.causal and mask is None, "attn_mask": mask, "enable_gqa": grouped}
        if case.direction == "backward":
            return _autograd_call(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **features), q, k, v, inputs.dout
            )
        return lambda: to_bshd((F.scaled_dot_product_attention(q, k, v, **features),))


class Eager:
    """Standard attention: the whole score matrix in memory, in the input dtype."""

    name = "eager"

    def runs(self, direction: Direction) -> str:
        return "products, softmax and mask of PyTorch" + (" under autograd" if direction == "backward" else "")

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.lengths is not None:
            return "no packed sequences"
        scores = case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k * case.torch_dtype.itemsize
        need = scores * (4 if case.direction == "forward" else 8)
        free = _free_bytes(inputs.q.device)
        if need > free:
            return f"does not fit: {need / 2**30:.0f} GiB of scores, {free / 2**30:.0f} GiB free"
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        scale = case.head_dim**-0.5
        group = case.num_heads_q // case.num_heads_kv
        drop = None
        if not case.band.unbounded:
            drop = ~case.band.dense(case.seqlen_q, case.seqlen_k, device=q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:
                k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = (q * scale) @ k.transpose(-1, -2)
            if drop is not None:
                scores = scores.masked_fill_(drop, -torch.inf)
            return torch.softmax(scores, dim=-1) @ v

        if case.direction == "backward":
            return _autograd_call(attend, q, k, v, inputs.dout)
        return lambda: to_bshd((attend(q, k, v),))


def to_bshd(outputs: tuple[Tensor, ...]) -> Outputs:
    """Views in the layout of q, k and v of tensors ``(batch, heads, seqlen, head_dim)``."""
    return tuple(x.transpose(1, 2) for x in outputs)


def _autograd_call(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Call:
    """The backward alone of a differentiable function of (batch, heads, seqlen, head_dim) tensors."""
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out = attend(*leaves)
    dout = dout.transpose(1, 2)
    return lambda: to_bshd(torch.autograd.grad(out, leaves, dout, retain_graph=True))


def _attend(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **features)[0].transpose(0, 1)


def _split(inputs: Inputs, lengths: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """``(1, heads, seqlen, head_dim)`` views of q, k and v for every sequence."""
    parts = (x.split(lengths) for x in (inputs.q, inputs.k, inputs.v))
    return [tuple(x.transpose(0, 1)[None] for x in sequence) for sequence in zip(*parts, strict=True)]


def _free_bytes(device: torch.device) -> int:
    """Memory that an allocation could still get."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**32
