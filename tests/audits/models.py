"""A small model in which one thing can be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile
from flashtile.compat import flash_attn_2

WAYS = ("sdpa", "written", "einsum", "flash", "flashtile")
PAD = 0


@dataclass(frozen=True)
class Plan:
    """How attention is computed and what is wrong: rows see ``later`` and ``wider`` keys too many after and before."""

    way: str = "sdpa"
    window: int | None = None
    later: int = 0
    wider: int = 0
    scale: float | None = None
    interleaved: bool = False
    dropout: bool = False
    sees_padding: bool = False


class Attention(nn.Module):
    is_causal = True

    def __init__(self, plan: Plan, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> None:
        super().__init__()
        self.plan, self.heads, self.kv_heads, self.dim = plan, heads, kv_heads, dim
        self.sliding_window = plan.window
        self.q_proj, self.o_proj = (nn.Linear(heads * dim, heads * dim) for _ in range(2))
        self.kv_proj = nn.Linear(heads * dim, 2 * kv_heads * dim)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        plan, (batch, rows, _) = self.plan, x.shape
        q = self.q_proj(x).view(batch, rows, self.heads, self.dim)
        k, v = self.kv_proj(x).view(batch, rows, 2, self.kv_heads, self.dim).unbind(2)
        scale = plan.scale or self.dim**-0.5
        before = None if plan.window is None else plan.window - 1 + plan.wider
        dropout_p = 0.1 if self.training or plan.dropout else 0.0
        if plan.way in ("flash", "flashtile"):
            window = (-1 if before is None else before, plan.later)
            function = flash_attn_2.flash_attn_func if plan.way == "flash" else flashtile.attention
            out = function(q, k, v, window_size=window, softmax_scale=scale, dropout_p=dropout_p)
            return self.o_proj(out.flatten(2))
        i, j = torch.arange(rows, device=x.device)[:, None], torch.arange(rows, device=x.device)
        keep = j <= i + plan.later
        keep = keep if before is None else keep & (j >= i - before)
        if real is not None and not plan.sees_padding:
            keep = keep & real[:, None, None]
        groups = self.heads // self.kv_heads
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat(1, groups, 1, 1) if plan.interleaved else y.repeat_interleave(groups, 1) for y in (k, v))
        if plan.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, keep, dropout_p, scale=scale)
        elif plan.way == "written":
            probs = (q @ k.transpose(-1, -2) * scale).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1)
            out = F.dropout(probs, dropout_p) @ v
        else:
            q = q * scale
            bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
            scores = torch.einsum("bhid,bhjd->bhij", q, k) + bias
            out = torch.einsum("bhij,bhjd->bihd", F.dropout(F.softmax(scores, dim=-1), dropout_p), v).transpose(1, 2)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Some layers of attention between an embedding and logits; the plan is for the last of them."""

    def __init__(self, plan: Plan, layers: int = 2, vocabulary: int = 50, width: int = 64) -> None:
        super().__init__()
        good = Plan(plan.way, plan.window)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Attention(good if n < layers - 1 else plan) for n in range(layers)])
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(width))
        self.eval()

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        real = None if attention_mask is None else attention_mask.bool()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, real)
        return self.head(x)


def tokens(batch: int = 2, rows: int = 20) -> Tensor:
    return torch.randint(1, 50, (batch, rows), generator=torch.Generator().manual_seed(1))


def left_padded(batch: int = 2, rows: int = 20, pads: int = 5) -> dict[str, Tensor]:
    mask = torch.ones(batch, rows, dtype=torch.int64)
    mask[-1, :pads] = 0
    return {"tokens": tokens(batch, rows) * mask, "attention_mask": mask}
