"""The cells of the suite ``serving``: steps of a server, their tensors and their reference."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.caches import PartsReference
from benchmarks.cases import Case, Inputs
from benchmarks.checks import Reference

MEASURES = ("graph", "loop", "host")
_MIXED = random.Random(0)
_TINY = 2
# Step -> (queries, keys with the queries' own) of each sequence. The last ``_TINY`` are for the CPU.
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((1, 2048),) * 64,
    "decode-mixed": tuple((1, _MIXED.randint(64, 8192)) for _ in range(64)),
    "decode-prompt": (*((1, 2048),) * 63, (2048, 2048)),
    "decode-chunk": (*((1, 4096),) * 32, (1024, 16384)),
    "chunks": ((2048, 6144),) * 4,
    "prompts": ((500, 500),) * 16,
    "speculative": ((5, 4096),) * 32,
    "tiny": ((1, 40), (1, 7), (1, 33)),
    "tiny-prompt": ((1, 20), (5, 33), (12, 12)),
}
# (num_heads_q, num_heads_kv, head_dim)
_HEADS = ((32, 8, 128), (16, 2, 128), (64, 8, 64), (64, 8, 128), (8, 1, 128), (16, 8, 256))
# 0: no pages, an entry for each sequence.
PAGE_SIZES = (16, 64, 256, 1, 0)


@dataclass(frozen=True)
class StepCase:
    """One of ``STEPS``, causal, in bfloat16: packed queries over caches in pages or in entries.

    The variant ``dense`` is the same call with queries ``(batch, 1, heads, head_dim)``.
    """

    step: str
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    page_size: int
    variant: str = ""
    measure: str = "graph"

    dtype, copies = "bfloat16", 1

    @property
    def name(self) -> str:
        """A short name, such as ``d128-h32x8-chunks-page16``; ``--cells`` matches against it."""
        parts = [self.heads, self.step, self.cache, self.variant, self.measure if self.measure != "graph" else ""]
        return "-".join(filter(None, parts))

    @property
    def heads(self) -> str:
        """The heads, such as ``d128-h32x8``."""
        return f"d{self.head_dim}-h{self.num_heads_q}x{self.num_heads_kv}"

    @property
    def cache(self) -> str:
        """How keys lie, such as ``page16`` or ``contiguous``."""
        return f"page{self.page_size}" if self.page_size else "contiguous"

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        return STEPS[self.step]

    @property
    def key_bytes(self) -> float:
        """Bytes of a position of the cache."""
        return 4.0 * self.num_heads_kv * self.head_dim

    @property
    def bounds(self) -> list[int]:
        """``cu_seqlens_q``."""
        return list(accumulate((rows for rows, _ in self.sequences), initial=0))

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of keys, and of values: entries or pages, positions, heads, head_dim."""
        longest = max(keys for _, keys in self.sequences)
        entries = sum(math.ceil(keys / (self.page_size or longest)) for _, keys in self.sequences)
        return (entries, self.page_size or longest, self.num_heads_kv, self.head_dim)

    def calls(self, pool: Tensor) -> list[dict[str, Tensor]]:
        """The tensors of the one call, and its ``max_seqlen_q``, by the names of their arguments."""
        device, sequences = pool.device, self.sequences
        make = torch.Generator(device=device).manual_seed(0)
        q = torch.randn(self.bounds[-1], self.num_heads_q, self.head_dim, generator=make, device=device).bfloat16()
        tensors: dict[str, Any] = {"q": q}
        if self.variant == "dense":
            tensors["q"] = q[:, None]
        else:
            tensors["cu_seqlens_q"] = torch.tensor(self.bounds, dtype=torch.int32, device=device)
            tensors["max_seqlen_q"] = max(rows for rows, _ in sequences)
        tensors["cache_seqlens"] = torch.tensor([keys for _, keys in sequences], dtype=torch.int32, device=device)
        if self.page_size:
            counts = [math.ceil(keys / self.page_size) for _, keys in sequences]
            pages = torch.randperm(sum(counts), generator=make, device=device).int().split(counts)
            tensors["page_table"] = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
        size = math.prod(self.cache_shape)
        k, v = (x.view(self.cache_shape) for x in pool[: 2 * size].split(size))
        return [{**tensors, "k_cache": k, "v_cache": v}]

    def reference(self, tensors: dict[str, Tensor]) -> Reference:
        """What a call's results are judged by."""
        return StepReference(self, tensors)


class StepReference(PartsReference):
    """Float64 results of one key head of every sequence, another each, and the allowed error."""

    def __init__(self, case: StepCase, tensors: dict[str, Tensor]) -> None:
        group, first = case.num_heads_q // case.num_heads_kv, random.Random(case.name).randrange(case.num_heads_kv)
        parts: list[tuple[Any, Reference]] = []
        for b, (seqlen_q, seqlen_k) in enumerate(case.sequences):
            head = (first + b) % case.num_heads_kv
            heads = slice(head * group, (head + 1) * group)
            # Queries and results of one sequence with a batch of one, whether packed or dense.
            packed = (None, slice(*case.bounds[b : b + 2]), heads)
            rows = (slice(b, b + 1), slice(None), heads) if case.variant == "dense" else packed
            k, v = (_keys(tensors, f"{name}_cache", b, head)[None, :seqlen_k, None] for name in "kv")
            q = tensors["q"][rows]
            one = Case("forward", case.dtype, 1, seqlen_q, seqlen_k, group, 1, case.head_dim, causal=True)
            parts.append((rows, Reference(one, Inputs(q, k, v, q, None))))
        super().__init__(parts)


def _keys(tensors: dict[str, Tensor], name: str, sequence: int, head: int) -> Tensor:
    """All that one sequence's pages or entry hold of one head, ``(positions, head_dim)``."""
    rows = tensors[name][:, :, head]
    return rows[tensors["page_table"][sequence].long()].flatten(0, 1) if "page_table" in tensors else rows[sequence]


def groups(measure: str, device: str = "cuda") -> list[tuple[StepCase, ...]]:
    """The cells; cells with one query a sequence have their dense variant too."""
    tiny = device == "cpu"
    steps = list(STEPS)[-_TINY:] if tiny else list(STEPS)[:-_TINY]
    found: list[tuple[StepCase, ...]] = []
    for heads, step, size in itertools.product(((4, 2, 16),) if tiny else _HEADS, steps, PAGE_SIZES):
        plain = StepCase(step, *heads, size, measure=measure)
        single = all(rows == 1 for rows, _ in plain.sequences)
        found.append((plain, replace(plain, variant="dense")) if single else (plain,))
    return found
