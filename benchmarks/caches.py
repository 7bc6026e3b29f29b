"""The cells of the suite ``decode``, their tensors, with caches as views of one pool, and their reference."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs
from benchmarks.checks import Outputs, Reference

MEASURES = ("graph", "cold", "loop", "host")
# Caches that are called in turn hold four times the L2 cache of an H200 (60 MB), so none is found there again.
COLD_BYTES = 4 * 60 * 10**6
# Variant -> queries of a sequence, page size (0: no pages).
VARIANTS = {"": (1, 0), "page16": (1, 16), "page1": (1, 1), "fp8": (1, 0), "q4": (4, 0), "append": (1, 0)}
# The scale of 8-bit values. A power of two: products with it are the bfloat16 values that references read.
_SCALE = 1 / 16
_LENGTHS, _LONGEST_MIXED, _BATCHES = (1024, 4096, 8192, 32768, 131072), 32768, (1, 8, 64, 128)
# (num_heads_q, num_heads_kv, head_dim)
_HEADS = (
    (32, 8, 128), (64, 8, 128), (16, 2, 128), (71, 1, 128), (32, 32, 128),
    (64, 8, 64), (71, 1, 64), (16, 8, 256), (32, 8, 256),
)  # fmt: skip
# Heads, batch and length of a plain cell -> the variants that are timed in its rounds.
_ALL = tuple(VARIANTS)[1:]
_VARIED = {(heads, *sizes): _ALL for heads in _HEADS[:2] + _HEADS[5:8:2] for sizes in ((1, 1024), (64, 4096))}
_VARIED |= {(_HEADS[0], *sizes): _ALL for sizes in ((1, 32768), (8, 8192), (8, 32768), (128, 8192))}


@dataclass(frozen=True)
class DecodeCase:
    """One kind of call over a cache, in bfloat16.

    ``seqlen_k`` is the number of keys of a sequence, new ones included; with ``mixed`` lengths are random up to it. Of
    ``VARIANTS``, append rotates and writes the query's key, and fp8 has a cache in float8_e4m3fn.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch: int
    seqlen_k: int
    mixed: bool = False
    variant: str = ""
    measure: str = "graph"

    dtype = "bfloat16"

    @property
    def name(self) -> str:
        """A short name, such as ``d128-h32x8-b8-k8k-page16``; ``--cells`` matches against it."""
        length = f"k{self.seqlen_k // 1024}k" if self.seqlen_k % 1024 == 0 else f"k{self.seqlen_k}"
        parts = [f"d{self.head_dim}", f"h{self.num_heads_q}x{self.num_heads_kv}", f"b{self.batch}"]
        parts += ["mixed" if self.mixed else length, self.variant, self.measure if self.measure != "graph" else ""]
        return "-".join(filter(None, parts))

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence."""
        return VARIANTS[self.variant][0]

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of keys, and of values: entries or pages, positions, heads, head_dim."""
        size = VARIANTS[self.variant][1] or self.seqlen_k
        return (self.batch * math.ceil(self.seqlen_k / size), size, self.num_heads_kv, self.head_dim)

    @property
    def lengths(self) -> list[int]:
        """Keys of each sequence, new ones included."""
        draw = random.Random(self.batch)
        return [draw.randint(1, self.seqlen_k) if self.mixed else self.seqlen_k for _ in range(self.batch)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache; a call reads the share of its lengths."""
        return 2 * math.prod(self.cache_shape) * (1 if self.variant == "fp8" else 2)

    @property
    def copies(self) -> int:
        """The number of caches that calls take in turn."""
        return math.ceil(COLD_BYTES / self.cache_bytes) if self.measure == "cold" else 1

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence."""
        return [(self.seqlen_q, n) for n in self.lengths]

    @property
    def key_bytes(self) -> float:
        """Bytes of a position of the cache."""
        return self.cache_bytes / math.prod(self.cache_shape[:2])

    def gb_per_s(self, median_ms: float) -> float:
        """The rate at which keys and values are read."""
        return sum(self.lengths) * self.key_bytes / (median_ms * 1e6)

    def calls(self, pool: Tensor) -> list[dict[str, Tensor]]:
        """The tensors of ``copies`` calls by the names of their arguments."""
        return make_calls(self, pool)

    def reference(self, tensors: dict[str, Tensor]) -> Reference:
        """What a call's results are judged by."""
        return DecodeReference(self, tensors)


def groups(measure: str, most_gb: float, device: str = "cuda") -> list[tuple[DecodeCase, ...]]:
    """The plain cells, each with the variants that are timed in its rounds.

    Caches over ``most_gb`` are left out; of ``cold`` what is over ``COLD_BYTES`` anyway, of ``host`` the longer ones.
    """
    if device == "cpu":
        tiny = DecodeCase(4, 2, 16, 2, 64, measure=measure)
        return [tuple(replace(tiny, variant=each) for each in VARIANTS), (replace(tiny, batch=3, mixed=True),)]
    found: list[tuple[DecodeCase, ...]] = []
    for heads in _HEADS:
        for batch, length in itertools.product(_BATCHES, _LENGTHS):
            variants = ("", *_VARIED.get((heads, batch, length), ()))
            found.append(tuple(DecodeCase(*heads, batch, length, False, each, measure) for each in variants))
            if length == _LONGEST_MIXED and batch > 1:
                found.append((DecodeCase(*heads, batch, length, True, "", measure),))
    tokens = _LENGTHS[0] if measure == "host" else math.inf
    most = min(most_gb * 1e9, COLD_BYTES if measure == "cold" else math.inf)
    return [each for each in found if each[0].cache_bytes <= most and each[0].batch * each[0].seqlen_k <= tokens]


def draw_pool(cases: Iterable[Any], device: torch.device) -> Tensor:
    """As many normal numbers as the largest case needs. To draw each cell's would take longer than to time it."""
    most = max((case.copies * 2 * math.prod(case.cache_shape) for case in cases), default=0)
    return torch.empty(most, dtype=torch.bfloat16, device=device).normal_()


def make_calls(case: DecodeCase, pool: Tensor) -> list[dict[str, Tensor]]:
    """The tensors of ``case.copies`` calls, which differ in their caches alone, by the names of their arguments."""
    device, dim, lead = pool.device, case.head_dim, (case.batch, case.seqlen_q)
    make = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).bfloat16()

    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    tensors = {"q": draw(*lead, case.num_heads_q, dim), "cache_seqlens": lengths}
    size = math.prod(case.cache_shape)
    caches = list(pool[: 2 * case.copies * size].split(size))
    if VARIANTS[case.variant][1]:
        pages = torch.randperm(case.cache_shape[0], generator=make, device=device)
        tensors["page_table"] = pages.view(case.batch, -1).int()
    if case.variant == "append":
        angles = torch.arange(case.seqlen_k, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, dim // 2).to(device)
        tensors |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
        tensors |= {"cache_seqlens": lengths - 1, **{name: draw(*lead, case.num_heads_kv, dim) for name in "kv"}}
        caches = [x.clone() for x in caches]  # they are written
    if case.variant == "fp8":
        caches = [(x / _SCALE).to(torch.float8_e4m3fn) for x in caches]
        tensors |= {f"{name}_scale": torch.full((case.num_heads_kv,), _SCALE, device=device) for name in "kv"}
    views = [x.view(case.cache_shape) for x in caches]
    return [{**tensors, "k_cache": k, "v_cache": v} for k, v in zip(views[::2], views[1::2], strict=True)]


class PartsReference(Reference):
    """The references of parts of an output, by their indices in it, and the largest error allowed in one."""

    def __init__(self, parts: list[tuple[Any, Reference]]) -> None:
        self._parts, self.limit = parts, max(part.limit for _, part in parts)

    def error(self, outputs: Outputs) -> float:
        """The largest relative error of the parts; NaN if any element of the whole output is not finite."""
        if not bool(torch.isfinite(outputs[0]).all()):
            return math.nan
        return max(part.error((outputs[0][rows],)) for rows, part in self._parts)


class DecodeReference(PartsReference):
    """Float64 results of the first, the last and a middle (sequence, key head) of a call, and the allowed error."""

    def __init__(self, case: DecodeCase, tensors: dict[str, Tensor]) -> None:
        heads, group = case.num_heads_kv, case.num_heads_q // case.num_heads_kv
        last = case.batch * heads - 1
        parts: list[tuple[Any, Reference]] = []
        for index in sorted({0, random.Random(case.name).randint(0, last), last}):
            sequence, head = divmod(index, heads)
            rows = (slice(sequence, sequence + 1), slice(None), slice(head * group, (head + 1) * group))
            q, k, v = _one_head(case, tensors, rows[0], head)
            one = Case("forward", case.dtype, 1, case.seqlen_q, k.shape[1], group, 1, case.head_dim, causal=True)
            parts.append((rows, Reference(one, Inputs(q[:, :, rows[2]], k, v, q[:, :, rows[2]], None))))
        super().__init__(parts)


def _one_head(case: DecodeCase, tensors: dict[str, Tensor], one: slice, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of one sequence, and keys and values of one head of it, rotated, in bfloat16, with a batch of one."""
    q, before = tensors["q"][one], int(tensors["cache_seqlens"][one])
    found = []
    for name in "kv":
        rows = tensors[f"{name}_cache"][:, :, head]
        rows = rows[tensors["page_table"][one].long()].flatten(1, 2) if "page_table" in tensors else rows[one]
        keys = rows[:, :before, None].bfloat16() * (_SCALE if case.variant == "fp8" else 1)
        found.append(torch.cat([keys, tensors[name][one, :, head, None]], dim=1) if name in tensors else keys)
    if case.variant == "append":
        cos, sin = (tensors[f"rotary_{name}"][before].float() for name in ("cos", "sin"))
        for rows in (q := q.clone(), found[0][:, before:]):
            low, high = rows.float().chunk(2, dim=-1)
            rows.copy_(torch.cat([low * cos - high * sin, low * sin + high * cos], dim=-1))
    return q, found[0], found[1]
