"""The error of 8-bit attention: of each choice, over lengths, and for one key among many that matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flashtile.api.quantize import quantize
from flashtile.backends.cpu.rounding import rounded
from flashtile.call.blocks import as_columns, joined
from flashtile.call.quantized import E4M3, Choices, Inputs, Quantized, Scales, record
from flashtile_lab.fp8.emulation import Sums, emulated

Kind = Literal["normal", "outliers", "biased"]


class Choice(NamedTuple):
    """A way to make 8-bit tensors by ``quantize``, or float16 ones."""

    name: str
    scales: Scales | None = "block"  # None is float16
    rotate: bool = True
    smooth_k: bool = False
    room: float = 1.0  # by how much scales are larger than they need be, without rotation and smoothing alone
    published: float | None = None  # the root of the mean squared error that the paper has, if it has one


# Shah et al. 2024, arXiv:2407.08608, table 3: normal numbers, of which one in a thousand has another one added, ten
# times as large. The paper does not give the shape.
PAPER = (
    Choice("float16", None, False, published=1.9e-4),
    Choice("one scale a tensor", "tensor", False, published=2.4e-2),
    Choice("blocks and rotation", "block", True, published=9.1e-3),
    Choice("rotation, no blocks", "tensor", True, published=9.3e-3),
    Choice("blocks, no rotation", "block", False, published=2.4e-2),
    Choice("the same, scales larger by a tenth", "block", False, room=1.1, published=2.4e-2),
)
CHOICES = (
    Choice("float16", None, False),
    *(
        Choice(f"{scales}{', rotated' * rotate}{', smoothed' * smooth}", scales, rotate, smooth)
        for scales in ("tensor", "head", "block")
        for rotate in (False, True)
        for smooth in (False, True)
    ),
)


@dataclass(frozen=True)
class Error:
    """The error of one choice."""

    choice: Choice
    rmse: float  # root of the mean squared distance from attention in float64 over the tensors as given
    relative: float  # the same over the root of the mean square of the exact output


def generated(
    kind: Kind, seqlen_q: int, seqlen_k: int, num_heads: int = 1, head_dim: int = 128, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64, ``(1, seqlen, num_heads, head_dim)``.

    ``"normal"`` ones are N(0, 1); ``"outliers"`` N(0, 1) + N(0, 100) * Bernoulli(0.001), as in the paper; ``"biased"``
    ones N(0, 1), and one feature in 16 of k has another number of N(0, 100) added, one for all keys.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rows(seqlen: int) -> Tensor:
        x = normal(1, seqlen, num_heads, head_dim)
        if kind == "outliers":
            x += 10 * normal(*x.shape) * (torch.rand(x.shape, generator=generator) < 0.001)
        return x

    q, k, v = rows(seqlen_q), rows(seqlen_k), rows(seqlen_k)
    if kind == "biased":
        k[..., ::16] += 10 * normal(1, 1, num_heads, k[..., ::16].shape[-1])
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention in float64, head by head."""
    group, out = q.shape[2] // k.shape[2], torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            scores = q[b, :, h].double() @ k[b, :, h // group].double().T * q.shape[-1] ** -0.5
            if causal:
                scores.masked_fill_(hidden, -torch.inf)
            out[b, :, h] = torch.softmax(scores, dim=-1) @ v[b, :, h // group].double()
    return out


def half(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention of tensors rounded to float16, with probabilities and output rounded to float16 too."""
    q, k, v = (x.half().float().movedim(-2, -3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.empty(*q.shape[:-1], v.shape[-1], device=q.device)
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1 + k.shape[-2] - q.shape[-2])
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h].mT * q.shape[-1] ** -0.5
        if causal:
            scores.masked_fill_(hidden, -torch.inf)
        probs = (scores - scores.amax(-1, keepdim=True)).exp()
        out[:, h] = probs.half().float() @ v[:, h] / probs.sum(-1, keepdim=True)
    return out.half().movedim(-3, -2)


def quantized_by(choice: Choice, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
    """The 8-bit tensors of a choice."""
    assert choice.scales is not None
    q, k, v = q.float(), k.float(), v.float()
    if choice.room == 1.0:
        return quantize(q, k, v, scales=choice.scales, rotate=choice.rotate, smooth_k=choice.smooth_k)
    codes, scales = zip(*(rounded(x, None, choice.scales, choice.room) for x in (q, k, v)), strict=True)
    outs = [joined(codes[0], None, q.shape[1]), joined(codes[1], None, k.shape[1]), as_columns(codes[2])]
    outs = [x.contiguous().view(E4M3) for x in outs]
    return record(Inputs(q, k, v), Choices(choice.scales, False, False), (None, None), outs, list(scales), None)


def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choices: Sequence[Choice] = CHOICES,
    *,
    causal: bool = False,
    attend: Callable[[Quantized], Tensor] | None = None,
) -> list[Error]:
    """The error of each choice against float64 attention of the same tensors.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, any float dtype.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``.
        v: The same with head_dim_v.
        choices: What to measure.
        causal: As in ``attention``; no more queries than keys then.
        attend: Attention of a ``Quantized``; by default ``emulated``.
    """
    want, found = exact(q, k, v, causal), []
    size = want.square().mean().sqrt()
    for choice in choices:
        if choice.scales is None:
            out = half(q, k, v, causal)
        else:
            made = quantized_by(choice, q, k, v)
            out = emulated(made, causal=causal) if attend is None else attend(made)
        rmse = (out.double() - want).square().mean().sqrt()
        found.append(Error(choice, rmse.item(), (rmse / size).item()))
    return found


def growth(
    lengths: Sequence[int], sums: Sequence[Sums] = ("block", "one"), device: torch.device | str = "cpu"
) -> list[list[float]]:
    """The relative error for each number of keys and each way to add products; normal tensors, one scale a head."""
    rows = []
    for length in lengths:
        q, k, v = (x.to(device) for x in generated("normal", 32, length, 2))
        want, made = exact(q, k, v), quantize(q.float(), k.float(), v.float(), scales="head")
        outs = [emulated(made, sums=each) for each in sums]
        rows.append([((out.double() - want).norm() / want.norm()).item() for out in outs])
    return rows


def needle(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_keys: int = 131_072,
    *,
    queries: int = 64,
    head_dim: int = 128,
    weight: float = 0.7,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Among many keys, one for each query that matters: the share of queries whose output is nearest to its value.

    ``attend`` is attention of q, k and v, ``(1, rows, 1, head_dim)``. Keys are normal but for those that matter, which
    lie at all depths and have a probability of about ``weight``; all others share the rest.
    """
    q, k, v = generated("normal", queries, num_keys, 1, head_dim, seed)
    places = torch.linspace(0, num_keys - 1, queries).long()
    # The others' exponentials have a mean of exp(1/2).
    score = torch.tensor(num_keys * weight / (1 - weight)).log() + 0.5
    k[0, places] = q[0] * (score * head_dim**0.5 / q[0].square().sum(-1, keepdim=True))
    out = attend(*(x.to(device, dtype) for x in (q, k, v)))
    nearest = (out[0, :, 0].double().cpu() @ v[0, :, 0].T).argmax(-1)
    return (nearest == places).double().mean().item()


def needles(device: torch.device | str = "cpu") -> dict[str, float]:
    """``needle`` for float64, for 8-bit attention with sums of blocks, and with one sum of all keys."""
    ways = {
        "float64": exact,
        "8 bits": lambda *qkv: emulated(quantize(*qkv), sums="block"),
        "8 bits, one accumulator": lambda *qkv: emulated(quantize(*qkv, scales="head"), sums="one"),
    }
    return {name: needle(attend, queries=32, device=device) for name, attend in ways.items()}
