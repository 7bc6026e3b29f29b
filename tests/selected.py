"""Random calls over blocks that an index tensor names, judged by the formula in float64 with a mask of all pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.masks import selected_blocks
from tests.rule import assert_close

# Blocks of rows and keys.
ANY = ((64, 64), (16, 64), (1, 16), (20, 33), (128, 64))
OF_PORTABLE = ((64, 64), (16, 64), (48, 16), (64, 32))
OF_HOPPER = ((64, 64), (64, 64), (128, 64), (64, 128), (192, 64), (128, 128))
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class SelectedCall:
    """A call.

    Attributes:
        indices: As of ``selected_blocks``, with repeated blocks, and numbers that name none.
        counts: Likewise, or None.
        block_size: Rows and keys of a block.
        lengths: Rows and keys of each sequence; the mask is for ``longest``.
        longest: Rows and keys.
        packed: Whether sequences are packed.
        heads: Query heads and key heads.
        inputs: q, k, v and dout of all sequences, one after another.
        causal: Whether ``causal`` is set.
        left: The left bound of a window.
        deterministic: As of ``attention``.
    """

    indices: Tensor
    counts: Tensor | None
    block_size: tuple[int, int]
    lengths: list[tuple[int, int]]
    longest: tuple[int, int]
    packed: bool
    heads: tuple[int, int]
    inputs: tuple[Tensor, ...]
    causal: bool
    left: int | None
    deterministic: bool

    def __str__(self) -> str:
        about = self.inputs[0].dtype, tuple(self.inputs[0].shape), self.indices.shape, self.block_size, self.lengths
        return f"{about} {self.heads} {self.causal} {self.left} {self.packed} {self.deterministic}"


def drawn(
    seed: int, sizes: tuple[tuple[int, int], ...], dtypes: tuple[torch.dtype, ...], longest: int, dims: tuple[int, ...]
) -> SelectedCall:
    """The call of a seed, with blocks of one of ``sizes`` and sequences of at most ``longest`` rows and keys."""
    pick, made = random.Random(seed), torch.Generator().manual_seed(seed)
    size, dtype, dim, kv_heads, group = (
        pick.choice(each) for each in (sizes, dtypes, dims, (1, 2, 3), (1, 1, 2, 4))
    )  # fmt: skip
    heads, batch, rows = kv_heads * group, pick.choice((1, 2)), pick.randint(1, longest)
    keys = pick.choice((rows, pick.randint(1, longest)))
    packed = pick.random() < 0.35
    lengths = [(rows, keys)] * batch
    if packed:
        lengths = [(n, n if rows == keys else pick.randint(0, keys)) for n in (pick.randint(1, rows), rows)[:batch]]
    of_keys, most = -(-keys // size[1]), pick.randint(1, -(-keys // size[1]) + 2)
    shape = pick.choice((1, batch)), pick.choice((1, kv_heads, heads)), -(-rows // size[0]), most
    indices = torch.randint(-1, of_keys + 2, shape, generator=made, dtype=torch.int32)
    counts = torch.randint(0, most + 1, shape[:3], generator=made) if pick.random() < 0.5 else None
    totals = [sum(n) for n in zip(*lengths, strict=True)]
    inputs = tuple(
        torch.randn(n, h, dim, generator=made).to(dtype)
        for n, h in ((totals[0], heads), (totals[1], kv_heads), (totals[1], kv_heads), (totals[0], heads))
    )
    left = pick.choice((None, None, None, pick.randint(0, 2 * longest // 3)))
    return SelectedCall(
        indices, counts, size, lengths, (rows, keys), packed, (heads, kv_heads), inputs, pick.random() < 0.4, left,
        pick.random() < 0.3,
    )  # fmt: skip


def dense_inputs(call: SelectedCall) -> tuple[Tensor, ...]:
    """Random inputs of as many sequences as a call has, all of the longest length."""
    draw = torch.Generator().manual_seed(1)
    (rows, keys), batch = call.longest, len(call.lengths)
    return tuple(
        torch.randn(batch * n, *x.shape[1:], generator=draw).to(x.dtype)
        for x, n in zip(call.inputs, (rows, keys, keys, rows), strict=True)
    )


def kept_pairs(call: SelectedCall) -> Tensor:
    """What lists keep, ``(batch or 1, heads or 1, rows, keys)`` bool."""
    (of_rows, of_keys), (rows, keys), found = call.block_size, call.longest, call.indices.long()
    if call.counts is not None:
        found = torch.where(torch.arange(found.shape[3]) < call.counts[..., None], found, -1)
    blocks = torch.arange(-(-keys // of_keys))
    named = (found[..., None] == blocks).any(3)
    return named.repeat_interleave(of_rows, 2).repeat_interleave(of_keys, 3)[:, :, :rows, :keys]


def by_formula(call: SelectedCall, dtype: torch.dtype) -> dict[str, Tensor]:
    """Out and the gradients by the formula, computed in a dtype."""
    q, k, v = (x.detach().cpu().to(dtype).requires_grad_() for x in call.inputs[:3])
    (heads, kv_heads), outs, row, key = call.heads, [], 0, 0
    kept = kept_pairs(call).expand(len(call.lengths), -1, -1, -1)
    kept = kept.repeat_interleave(heads // kept.shape[1], 1)
    for b, (rows, keys) in enumerate(call.lengths):
        own, k_own, v_own = q[row : row + rows], k[key : key + keys], v[key : key + keys]
        k_own, v_own = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_own, v_own))
        i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
        keep = kept[b, :, :rows, :keys]
        keep = keep & (j <= i) if call.causal else keep
        keep = keep if call.left is None else keep & (j >= i - call.left)
        scores = torch.einsum("ihd,jhd->hij", own, k_own) * q.shape[-1] ** -0.5
        # A row without keys has probabilities of 0.
        has_keys = keep.any(-1, keepdim=True)
        probs = torch.where(has_keys, scores.masked_fill(~keep, -torch.inf), 0.0).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", torch.where(has_keys, probs, 0.0), v_own))
        row, key = row + rows, key + keys
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, (q, k, v), call.inputs[3].cpu().to(dtype))
    return dict(zip(RESULTS, (out.detach(), *grads), strict=True))


def found(call: SelectedCall, device: str = "cpu", backend: str | None = None) -> list[Tensor]:
    """(out, dq, dk, dv) of the public functions."""
    leaves = [x.to(device).requires_grad_() for x in call.inputs[:3]]
    counts = None if call.counts is None else call.counts.to(device)
    (rows, keys), indices = call.longest, call.indices.to(device)
    mask = selected_blocks(indices, counts, call.block_size, seqlen_q=rows, seqlen_k=keys)
    keywords: dict[str, Any] = {
        "causal": call.causal, "window_size": (call.left, None), "deterministic": call.deterministic,
        "block_mask": mask, "backend": backend,
    }  # fmt: skip
    if call.packed:
        bounds = (torch.tensor([0, *(n[side] for n in call.lengths)]).cumsum(0).int().to(device) for side in range(2))
        out = flashtile.attention_varlen(*leaves, *bounds, rows, keys, **keywords)
    else:
        dense = (x.unflatten(0, (len(call.lengths), -1)) for x in leaves)
        out = flashtile.attention(*dense, **keywords).flatten(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, call.inputs[3].to(device))]


def judge(call: SelectedCall, device: str = "cpu", backend: str | None = None) -> None:
    """Asserts the error rule for out and the gradients."""
    got = dict(zip(RESULTS, (x.cpu() for x in found(call, device, backend)), strict=True))
    if call.longest[1] <= 1 or (call.causal and call.left == 0):
        # Of one key a row gradients of scores are sums that cancel to 0, of which the rule says nothing.
        got = {name: got[name] for name in ("out", "dv")}
    dtype = call.inputs[0].dtype
    try:
        assert_close(got, lambda: by_formula(call, torch.float64), by_formula(call, dtype), dtype)
    except AssertionError as error:
        raise AssertionError(f"{error}: {call}") from error
