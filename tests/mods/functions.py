"""Functions that users may write, score mods and mask mods by name, with what they capture for a call's sizes."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from flashtile.mods import source


@dataclass(frozen=True, eq=False)
class Sizes:
    """Of a call, for what its functions capture."""

    batch: int
    heads: int
    rows: int
    keys: int
    dtype: torch.dtype
    make: torch.Generator
    device: str = "cpu"

    def normal(self, *shape: int) -> Tensor:
        """A learned tensor."""
        drawn = torch.randn(shape, generator=self.make).to(self.device, self.dtype)
        return drawn.requires_grad_()

    def below(self, most: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers."""
        return torch.randint(0, most, shape, generator=self.make).to(self.device, dtype)

    @property
    def longest(self) -> int:
        """Rows or keys, whichever is more."""
        return max(self.rows, self.keys, 1)


@dataclass(frozen=True, eq=False)
class Made:
    """A function and the tensors that it captures and that have a gradient.

    ``plain`` is for references the same function of one that reads what has changed since its first call.
    """

    function: Callable[..., Any]
    leaves: tuple[Tensor, ...] = field(default=())
    plain: Callable[..., Any] | None = None


def squared(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: score * score * 0.25)


def times_two(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: score * 2)


def distance(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: score - 0.03 * (q - kv).abs() / (h + 1))


def capped(s: Sizes) -> Made:
    cap = 3.0
    return Made(lambda score, b, h, q, kv: cap * torch.tanh((score + 0.1 * (q - kv)) / cap))


def by_distance(s: Sizes) -> Made:
    table = s.normal(s.heads, max(s.longest // 2, 1))
    return Made(lambda score, b, h, q, kv: score + table[h, (q - kv).abs()], (table,))


def buckets(s: Sizes) -> Made:
    table, most = s.normal(32, s.heads), 16

    def t5(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        apart = (q - kv).abs()
        far = 8 + (torch.log(apart.clamp(min=1) / 8) * 2).floor().to(torch.int32)
        bucket = torch.where(apart < 8, apart, far.clamp(max=most - 1))
        return score + table[torch.where(kv > q, bucket + most, bucket), h]

    return Made(t5, (table,))


def bias(s: Sizes) -> Made:
    table = s.normal(s.batch, s.heads, s.rows or 1, s.keys or 1)
    return Made(lambda score, b, h, q, kv: score + table[b, h, q, kv], (table,))


def bias_turned(s: Sizes) -> Made:
    table = s.normal(s.heads, s.keys or 1, s.rows or 1)
    return Made(lambda score, b, h, q, kv: score + table[h, kv, q], (table,))


def by_row_and_key(s: Sizes) -> Made:
    rows, keys = s.normal(s.heads, s.rows or 1), s.normal(s.batch, s.keys or 1)
    return Made(lambda score, b, h, q, kv: score + rows[h, q] * keys[b, kv], (rows, keys))


def learned_temperature(s: Sizes) -> Made:
    temperature, shift = s.normal(s.heads), s.normal()
    return Made(lambda score, b, h, q, kv: score * temperature[h].exp() + shift, (temperature, shift))


def read_twice(s: Sizes) -> Made:
    table = s.normal(s.heads, s.longest)
    return Made(lambda score, b, h, q, kv: score + table[h, q] - 0.5 * table[h, kv], (table,))


def graphormer(s: Sizes) -> Made:
    spatial, distances = s.normal(s.heads, 6), s.below(6, s.batch, s.rows or 1, s.keys or 1, dtype=torch.int64)
    return Made(lambda score, b, h, q, kv: score + spatial[h, distances[b, q, kv]], (spatial,))


def gated(s: Sizes) -> Made:
    gate = s.normal(s.batch, s.heads)

    def function(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(kv % 3 == 0, score, torch.nn.functional.silu(score) * torch.sigmoid(gate[b][h]))

    return Made(function, (gate,))


def flips(s: Sizes, add: bool = True) -> Made:
    return Made(lambda score, b, h, q, kv: score + torch.sin(0.1 * q) if add else score)


def quotient(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: score + (q / (1 + kv)).clamp(max=4.0) - (q // (1 + kv)) * 0.125)


def identity(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: score)


def constant(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: torch.where(kv % 2 == 0, (h * 0.5 + kv * 0.125).to(score.dtype), score))


def large_1e9(s: Sizes) -> Made:
    return Made(lambda score, b, h, q, kv: torch.where((q % 4 == 1) | (kv % 3 == 0), -1e9, score))


def large_lowest(s: Sizes) -> Made:
    table, lowest = s.normal(s.heads), torch.finfo(torch.float32).min

    def padded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where((q % 5 == 2) | (kv % 4 == 0), lowest, score + table[h])

    return Made(padded, (table,))


class Held:
    """Has a number that changes."""

    value: Any = 0

    def read(self) -> Any:
        return self.value

    def __getitem__(self, index: int) -> Any:
        return self.value


def changing(s: Sizes, first: float, then: float) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What reads a number from something drawn, and what changes it from ``first`` to ``then``."""
    held, of_class, items, table = Held(), type("OfClass", (), {"value": first}), [first], {"value": first}
    held.value, array, last = first, np.array([first]), collections.deque([first])
    drawn: list[tuple[Callable[[], Any], Callable[[], None]]] = [
        (lambda: held.value, lambda: setattr(held, "value", then)),
        (lambda: held.read(), lambda: setattr(held, "value", then)),
        (lambda: held[0], lambda: setattr(held, "value", then)),
        (lambda: getattr(held, "value"), lambda: setattr(held, "value", then)),  # noqa: B009
        (lambda: of_class.value, lambda: setattr(of_class, "value", then)),
        (lambda: items[-1], lambda: items.append(then)),
        (lambda: table["value"], lambda: table.update(value=then)),
        (lambda: array[0].item(), lambda: array.fill(then)),
        (lambda: last[0], lambda: last.appendleft(then)),
    ]
    return drawn[int(torch.randint(len(drawn), (), generator=s.make))]


def held_scale(s: Sizes) -> Made:
    read, change = changing(s, 0.25, 1.5)

    def scaled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * read() - 0.01 * (q - kv).abs()

    source(scaled)
    change()
    return Made(scaled, plain=lambda score, b, h, q, kv: score * 1.5 - 0.01 * (q - kv).abs())


SCORES: dict[str, Callable[[Sizes], Made]] = {
    f.__name__: f
    for f in (
        squared, times_two, distance, capped, by_distance, buckets, bias, bias_turned, by_row_and_key,
        learned_temperature, read_twice, graphormer, gated, flips, quotient, identity, constant,
        large_1e9, large_lowest,


        held_scale,
    )
}  # fmt: skip


def causal(s: Sizes) -> Made:
    return Made(lambda b, h, q, kv: q >= kv)


def window(s: Sizes) -> Made:
    width = 9
    return Made(lambda b, h, q, kv: (q - kv <= width) & (kv - q < 3))


def documents(s: Sizes) -> Made:
    docs = (torch.arange(s.longest) // 13).to(s.device, torch.int32)
    return Made(and_masks(causal(s).function, lambda b, h, q, kv: docs[q] == docs[kv]))


def prefix(s: Sizes) -> Made:
    length = s.below(s.longest + 1, s.batch)
    return Made(or_masks(causal(s).function, lambda b, h, q, kv: kv < length[b]))


def dilated(s: Sizes) -> Made:
    return Made(functools.partial(lambda step, b, h, q, kv: (q - kv) % step == 0, 3))


def neighbourhood(s: Sizes) -> Made:
    width = 7
    return Made(lambda b, h, q, kv: ((q % width - kv % width).abs() <= 1) & ((q // width - kv // width).abs() <= 1))


def heads_differ(s: Sizes) -> Made:
    return Made(lambda b, h, q, kv: ((h % 2 == 0) | (q >= kv)) & (kv != 1 + b))


def random_pairs(s: Sizes) -> Made:
    keep = torch.rand(s.rows or 1, s.keys or 1, generator=s.make).to(s.device) < 0.6
    return Made(lambda b, h, q, kv: keep[q, kv])


def chunks(s: Sizes) -> Made:
    return Made(lambda b, h, q, kv: q // 11 == kv // 11)


def held_window(s: Sizes) -> Made:
    read, change = changing(s, 2, 9)

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q - kv).abs() <= read()) | (kv < 2)

    source(within)
    change()
    return Made(within, plain=lambda b, h, q, kv: ((q - kv).abs() <= 9) | (kv < 2))


def nothing(s: Sizes) -> Made:
    return Made(lambda b, h, q, kv: kv < 0)


MASKS: dict[str, Callable[[Sizes], Made]] = {
    f.__name__: f
    for f in (
        causal, window, documents, prefix, dilated, neighbourhood, heads_differ, random_pairs, chunks, nothing,
        held_window,
    )
}  # fmt: skip
