"""Requests, and two plain loops that serve a ``CharGPT``: recomputing everything, and SDPA over a static cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile_lab.examples.char_gpt import Block, CharGPT


class Request:
    """A prompt, behind the tokens of its prefix, and what is written after it: ``count`` tokens."""

    def __init__(self, prompt: Sequence[int], count: int, seed: int = 0, prefix: Request | None = None) -> None:
        self.prefix = prefix
        self.tokens: list[int] = [*(prefix.tokens if prefix else ()), *prompt]
        self.count, self.length = count, len(self.tokens) + count
        self.random = random.Random(seed)
        self.sequence = -1  # its own in the server's cache, while it runs


def choose(logits: Tensor, requests: Sequence[Request], temperature: float = 0.8) -> list[int]:
    """Samples each request's next token from logits ``(requests, vocab_size)``, by its own random numbers."""
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
    drawn = torch.tensor([each.random.random() for each in requests], dtype=torch.float64).view(-1, 1)
    return (cumulative < drawn.to(logits.device) * cumulative[:, -1:]).sum(dim=-1).tolist()


@torch.inference_mode()
def recompute(model: CharGPT, requests: Sequence[Request]) -> None:
    """Writes one request after another, with a forward over all of its tokens for each new one."""
    for request in requests:
        while len(request.tokens) < request.length:
            tokens = torch.tensor([request.tokens], device=model.head.weight.device)
            request.tokens += choose(model(tokens)[:, -1], [request])


class StaticCache:
    """Keys and values ``(batch, num_heads, capacity, head_dim)`` of each layer, attended to whole under a mask."""

    def __init__(self, model: CharGPT, batch: int, capacity: int) -> None:
        config, weight = model.config, model.head.weight
        shape = config.num_layers, batch, config.num_heads, capacity, config.d_model // config.num_heads
        self._model = model
        self._k, self._v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after tokens ``(batch, seqlen)`` at positions ``(batch, seqlen)``."""
        seen = torch.arange(self._k.shape[3], device=tokens.device) <= positions[:, None, :, None]
        layers = range(self._k.shape[0])
        return self._model(tokens, [partial(self._attend, layer, positions, seen) for layer in layers])

    def _attend(self, layer: int, positions: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotate = cast(Block, self._model.blocks[layer]).rotate
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, positions), rotate(k, positions), v))
        rows = positions[:, None, :, None].expand(k.shape)
        self._k[layer].scatter_(2, rows, k)
        self._v[layer].scatter_(2, rows, v)
        return F.scaled_dot_product_attention(q, self._k[layer], self._v[layer], attn_mask=seen).transpose(1, 2)


@torch.inference_mode()
def static_cache(model: CharGPT, requests: Sequence[Request], max_batch: int = 16) -> None:
    """Writes ``max_batch`` requests at a time, prompts padded to the longest, until the last of them is finished."""
    for start in range(0, len(requests), max_batch):
        batch, device = requests[start : start + max_batch], model.head.weight.device
        cache = StaticCache(model, len(batch), max(each.length for each in batch))
        longest = max(len(each.tokens) for each in batch)
        # A prompt's padding leaves keys at positions that are written again before they are seen.
        rows = torch.tensor([each.tokens + [0] * (longest - len(each.tokens)) for each in batch], device=device)
        logits = cache.forward(rows, torch.arange(longest, device=device).expand_as(rows))
        logits = logits[range(len(batch)), [len(each.tokens) - 1 for each in batch]]
        while writing := [i for i, each in enumerate(batch) if len(each.tokens) < each.length]:
            chosen = choose(logits[writing], [batch[i] for i in writing])
            for i, token in zip(writing, chosen, strict=True):
                batch[i].tokens.append(token)
            newest = torch.tensor([each.tokens[-1:] for each in batch], device=device)
            positions = torch.tensor([[len(each.tokens) - 1] for each in batch], device=device)
            logits = cache.forward(newest, positions)[:, 0]
