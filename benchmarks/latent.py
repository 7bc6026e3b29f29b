"""The cells of the suite ``mla``, their tensors, with the cache as a view of a pool, and their reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.caches import PartsReference
from benchmarks.cases import Case, Inputs
from benchmarks.checks import Reference
from flashtile.serving import latent_rows

MEASURES = ("graph", "loop", "host")
_DIM, _DIM_V, _ROW_BYTES = 576, 512, 656
# Batch and keys of each sequence; 64 of random lengths up to 8k are the last.
_SIZES = ((1, 8192), (1, 65536), (16, 4096), (64, 4096), (128, 4096), (128, 8192), (64, 0))
# The sizes for which rows of 656 bytes are timed too, with 16 and 128 heads.
_EIGHT_BITS = ((1, 65536), (64, 4096), (128, 8192), (2, 70))
_HEADS = ((16, 1), (64, 1), (128, 1), (64, 2), (128, 2))
# The number of sequences with results that are checked.
_LOOKED_AT = 3


@dataclass(frozen=True)
class LatentCase:
    """One kind of call, in bfloat16; in the variant ``fp8`` over rows of 656 bytes.

    ``seqlen_k`` 0 stands for random lengths from 256 to 8192.
    """

    num_heads_q: int
    seqlen_q: int
    batch: int
    seqlen_k: int
    variant: str = ""
    measure: str = "graph"

    dtype, copies, head_dim, head_dim_v = "bfloat16", 1, _DIM, _DIM_V

    @property
    def name(self) -> str:
        """A short name, such as ``h128-q2-b16-k4k-page16``; ``--cells`` matches against it."""
        length = "mixed" if not self.seqlen_k else f"k{self.seqlen_k // 1024}k" if self.seqlen_k >= 1024 else "tiny"
        parts = [f"h{self.num_heads_q}", f"q{self.seqlen_q}", f"b{self.batch}", length, self.variant]
        return "-".join(filter(None, [*parts, self.measure if self.measure != "graph" else ""]))

    @property
    def lengths(self) -> list[int]:
        """Keys of each sequence."""
        draw = random.Random(self.batch)
        return [self.seqlen_k or draw.randint(256, 8192) for _ in range(self.batch)]

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return 16 if self.variant == "page16" else 64

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of latent rows: pages, rows, heads, columns."""
        return (sum(math.ceil(n / self.page_size) for n in self.lengths), self.page_size, 1, _DIM)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence."""
        return [(self.seqlen_q, n) for n in self.lengths]

    @property
    def key_bytes(self) -> float:
        """Bytes of a latent row."""
        return _ROW_BYTES if self.variant == "fp8" else 2 * _DIM

    def gb_per_s(self, median_ms: float) -> float:
        """The rate at which latent rows are read."""
        return sum(self.lengths) * self.key_bytes / (median_ms * 1e6)

    def calls(self, pool: Tensor) -> list[dict[str, Any]]:
        """The tensors of the one call by the names of their arguments; values are a view of the keys."""
        device, make = pool.device, torch.Generator(device=pool.device).manual_seed(0)
        shape = (self.batch, self.seqlen_q, self.num_heads_q, _DIM)
        q = torch.randn(*shape, generator=make, device=device).bfloat16()
        counts = [math.ceil(n / self.page_size) for n in self.lengths]
        pages = torch.randperm(sum(counts), generator=make, device=device).int().split(counts)
        cache = pool[: math.prod(self.cache_shape)].view(self.cache_shape)
        if self.variant == "fp8":
            cache = _in_eight_bits(cache, pool)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        tensors = {"q": q, "k_cache": cache, "v_cache": cache[..., :_DIM_V], "cache_seqlens": lengths}
        return [tensors | {"page_table": torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)}]

    def reference(self, tensors: dict[str, Tensor]) -> Reference:
        """What a call's results are judged by: some sequences', the last among them."""
        parts: list[tuple[Any, Reference]] = []
        for b in sorted({0, self.batch - 1, *random.Random(self.name).choices(range(self.batch), k=_LOOKED_AT - 2)}):
            n = self.lengths[b]
            pages = tensors["page_table"][b, : math.ceil(n / self.page_size)].long()
            k = tensors["k_cache"][pages]
            k = (_columns(k) if self.variant == "fp8" else k).flatten(0, 1)[None, :n]
            q, rows = tensors["q"][b : b + 1], slice(b, b + 1)
            one = Case("forward", self.dtype, 1, self.seqlen_q, n, self.num_heads_q, 1, _DIM, causal=True)
            parts.append((rows, Reference(one, Inputs(q, k, k[..., :_DIM_V], q[..., :_DIM_V], None))))
        return PartsReference(parts)


def _in_eight_bits(cache: Tensor, pool: Tensor) -> Tensor:
    """Latent rows as rows of 656 bytes, in the pool's second half, which no cell reads."""
    size = math.prod(cache.shape[:-1]) * _ROW_BYTES
    rows = pool[len(pool) // 2 :].view(torch.float8_e4m3fn)[:size].view(*cache.shape[:-1], _ROW_BYTES)
    for part, bits in zip(cache.split(4096), rows.view(torch.uint8).split(4096), strict=True):
        bits.copy_(latent_rows(part).view(torch.uint8))
    return rows


def _columns(rows: Tensor) -> Tensor:
    """The 576 numbers of rows of 656 bytes, in bfloat16."""
    bits = rows.view(torch.uint8)
    scales = bits[..., _DIM_V : _DIM_V + 16].contiguous().view(torch.float32)
    values = rows[..., :_DIM_V].float().unflatten(-1, (4, 128)) * scales[..., None]
    others = bits[..., _DIM_V + 16 :].contiguous().view(torch.bfloat16)
    return torch.cat([values.flatten(-2).bfloat16(), others], dim=-1)


def groups(measure: str, device: str = "cuda") -> list[tuple[LatentCase, ...]]:
    """The cells, each with its variant."""
    sizes = _SIZES if device != "cpu" else ((2, 70),)
    cases = [LatentCase(*heads, *size, measure=measure) for heads in _HEADS for size in sizes]
    if device == "cpu":
        cases = [case for case in cases if case.num_heads_q == 16]
    # One row of queries is what the small batches and the mixed ones are about.
    found = [case for case in cases if case.seqlen_q == 1 or (case.batch > 1 and case.seqlen_k)]
    eight = [case for case in found if case.seqlen_q == 1 and case.num_heads_q != 64 and _size(case) in _EIGHT_BITS]
    variants = {case: ("page16", "fp8") if case in eight else ("page16",) for case in found}
    return [(case, *(replace(case, variant=name) for name in names)) for case, names in variants.items()]


def _size(case: LatentCase) -> tuple[int, int]:
    return case.batch, case.seqlen_k
