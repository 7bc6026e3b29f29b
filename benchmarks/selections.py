"""The cells of the suite ``selected``, their tensors and lists, and their references."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import DIRECTIONS, Case, Direction, Inputs
from benchmarks.checks import Outputs
from benchmarks.session import NotTimedError

# For normal numbers attention in bfloat16 errs by 0.003, its gradients by 0.006.
LIMIT = 0.02
# Rows of a chunk in float64; columns of a latent row's keys, and of its values; queries that are checked.
_CHUNK, _DIM, _DIM_V, _LOOKED_AT = 512, 576, 512, 16


@dataclass(frozen=True)
class BlockCell:
    """One sequence in which each block of ``rows`` rows sees ``top`` blocks of ``keys`` keys, by ``list_heads`` lists.

    The lists are random; ``kind`` vsa-near prefers blocks nearby, and a causal block of rows always sees its own.
    """

    kind: str
    direction: Direction
    seqlen: int
    heads: int
    heads_kv: int
    rows: int
    keys: int
    top: int
    list_heads: int
    causal: bool
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """``--cells`` matches against it."""
        return f"{self.direction}-{self.kind}"

    @property
    def case(self) -> Case:
        """The same attention without lists."""
        sizes = 1, self.seqlen, self.seqlen, self.heads, self.heads_kv, self.head_dim
        return Case(self.direction, self.dtype, *sizes, causal=self.causal)


@dataclass(frozen=True)
class TokenCell:
    """Queries at the end of ``batch`` sequences over latent rows, each with ``top`` keys, its own or earlier ones.

    Pages of 64 rows lie in a random order; ``paged`` False is one plain cache.
    """

    kind: str
    batch: int
    queries: int
    heads: int
    seqlen: int
    top: int
    paged: bool
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """``--cells`` matches against it."""
        return self.kind

    @property
    def flops(self) -> float:
        """Floating-point operations of two products."""
        return 2.0 * self.batch * self.queries * self.heads * self.top * (_DIM + _DIM_V)

    @property
    def selected_bytes(self) -> int:
        """Bytes of the latent rows that queries name, each as often as it is named."""
        return 2 * self.batch * self.queries * self.top * _DIM


# Kind -> seqlen, heads, heads_kv, rows, keys, top, list_heads, causal.
_Kinds = dict[str, tuple[int, int, int, int, int, int, int, bool]]
_BLOCKS: _Kinds = {
    "vsa-random": (109632, 7, 7, 64, 64, 64, 7, False),
    "vsa-near": (109632, 7, 7, 64, 64, 64, 7, False),
    "kept-8": (32768, 16, 16, 64, 64, 64, 16, False),
    "kept-16": (32768, 16, 16, 64, 64, 32, 16, False),
    "kept-32": (32768, 16, 16, 64, 64, 16, 16, False),
    "wide-16": (32768, 16, 16, 128, 128, 16, 16, False),
    "moba": (32768, 32, 8, 64, 512, 8, 32, True),
    "nsa": (32768, 64, 4, 1, 64, 16, 4, True),
}
_BLOCKS_OF_CPU: _Kinds = {
    "vsa-random": (512, 2, 2, 64, 64, 2, 2, False),
    "vsa-near": (512, 2, 2, 64, 64, 2, 2, False),
    "kept-8": (512, 2, 2, 64, 64, 1, 2, False),
    "wide-16": (512, 2, 2, 128, 128, 1, 2, False),
    "moba": (512, 4, 2, 64, 128, 3, 4, True),
    "nsa": (256, 4, 2, 1, 64, 2, 2, True),
}


def cells(device: str) -> list[BlockCell | TokenCell]:
    """All of them; on a CPU fewer and small ones."""
    small = device == "cpu"
    kinds = _BLOCKS_OF_CPU if small else _BLOCKS
    found: list[BlockCell | TokenCell] = [BlockCell(kind, each, *kinds[kind]) for kind in kinds for each in DIRECTIONS]
    batch, seqlen, top, prompt = (2, 256, 32, 8) if small else (64, 32768, 2048, 4096)
    for heads in (8, 16, 64, 128):
        found += [TokenCell(f"dsa-h{heads}-q{q}", batch, q, heads, seqlen, top, True) for q in (1, 2)]
    return [*found, TokenCell("dsa-prefill", 1, prompt, 128, seqlen, top, False)]


def chosen_blocks(cell: BlockCell, device: torch.device) -> Tensor:
    """``(1, list_heads, blocks_q, top)`` int32: the blocks of keys for each block of rows, -1 where there are fewer."""
    draw = torch.Generator(device=device).manual_seed(1)
    i, j = (torch.arange(cell.seqlen // size, device=device) for size in (cell.rows, cell.keys))
    score = torch.rand((1, cell.list_heads, len(i), len(j)), generator=draw, device=device)
    if cell.kind == "vsa-near":
        score -= (i[:, None] - j).abs() / (len(j) / 8)
    if cell.causal:
        own = ((i + 1) * cell.rows - 1)[:, None] // cell.keys
        score = score.masked_fill(j > own, -torch.inf).masked_fill(j == own, torch.inf)
    best = score.topk(cell.top, dim=-1)
    return best.indices.masked_fill(best.values == -torch.inf, -1).int()


def kept_blocks(cell: BlockCell, indices: Tensor) -> Tensor:
    """The same as booleans, ``(list_heads, blocks_q, blocks_k)``."""
    blocks = cell.seqlen // cell.keys
    kept = torch.zeros((*indices.shape[1:3], blocks + 1), dtype=torch.bool, device=indices.device)
    return kept.scatter_(-1, indices[0].where(indices[0] >= 0, blocks).long(), True)[..., :blocks]


def kept_pairs(cell: BlockCell, kept: Tensor) -> int:
    """(query, key) pairs over all query heads that the lists and a causal mask keep."""
    i, j = (torch.arange(n, device=kept.device) for n in (cell.seqlen, kept.shape[2]))
    seen = (i[:, None] + 1 - j * cell.keys).clamp(0, cell.keys) if cell.causal else torch.full_like(j, cell.keys)
    of_block = seen.expand(cell.seqlen, -1).unflatten(0, (-1, cell.rows)).sum(1)
    return sum(int(of_block[one].sum()) for one in kept) * (cell.heads // cell.list_heads)


def token_inputs(cell: TokenCell, device: torch.device) -> dict[str, Tensor]:
    """The tensors by the names of their arguments; values are a view of the keys, selected positions are sorted."""
    draw = torch.Generator(device=device).manual_seed(1)
    normal, n = functools.partial(torch.randn, generator=draw, device=device, dtype=torch.bfloat16), cell.seqlen
    lengths = torch.full((cell.batch,), n, dtype=torch.int32, device=device)
    score = torch.rand((cell.batch, cell.queries, n), generator=draw, device=device)
    own = torch.arange(n - cell.queries, n, device=device)[:, None]
    best = score.masked_fill_(torch.arange(n, device=device) > own, -torch.inf).topk(cell.top, dim=-1).indices
    found = {"q": normal(cell.batch, cell.queries, cell.heads, _DIM), "cache_seqlens": lengths}
    found |= {"selected": best.sort(dim=-1).values.int()}
    pages = cell.batch * n // 64
    cache = normal(pages, 64, 1, _DIM) if cell.paged else normal(cell.batch, n, 1, _DIM)
    if cell.paged:
        found["page_table"] = torch.randperm(pages, generator=draw, device=device).int().view(cell.batch, -1)
    return found | {"k_cache": cache, "v_cache": cache[..., :_DIM_V]}


def judged(outputs: Outputs, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error of pairs of a result and its float64; ``NotTimedError`` if it is over LIMIT."""
    if not all(bool(x.isfinite().all()) for x in outputs):
        raise NotTimedError("wrong: not finite")
    worst = max(float((got.double() - exact).norm() / exact.norm()) for got, exact in pairs)
    if not worst <= LIMIT:
        raise NotTimedError(f"wrong: relative error {worst:.3g}, limit {LIMIT}")
    return worst


class SelectedReference:
    """Float64 results of the first key head and the last, with their query heads; ``kept`` None is without lists."""

    def __init__(self, cell: BlockCell, inputs: Inputs, kept: Tensor | None) -> None:
        self.cell, self.kept, self.group = cell, kept, cell.heads // cell.heads_kv
        self.exact = {h: self._of_head(h, inputs) for h in sorted({0, cell.heads_kv - 1})}

    def check(self, outputs: Outputs) -> float:
        """The largest relative error of a result."""
        pairs = []
        for h, exact in self.exact.items():
            for n, (got, want) in enumerate(zip(outputs, exact, strict=True)):
                own = slice(h * self.group, (h + 1) * self.group) if n == 0 else slice(h, h + 1)
                pairs.append((got[0, :, own], want))
        return judged(outputs, pairs)

    def _keeps(self, head: int, rows: slice) -> Tensor:
        """``(rows, seqlen)`` bool."""
        cell, device = self.cell, self.device
        i, j = torch.arange(rows.start, rows.stop, device=device), torch.arange(cell.seqlen, device=device)
        keep = (i[:, None] >= j) if cell.causal else torch.ones((len(i), len(j)), dtype=torch.bool, device=device)
        if self.kept is None:
            return keep
        lists = self.kept[head * cell.list_heads // cell.heads]
        return keep & lists[i // cell.rows].repeat_interleave(cell.keys, 1)

    def _of_head(self, h: int, inputs: Inputs) -> list[Tensor]:
        """Results ``(seqlen, heads, head_dim)``: out, or dq, dk and dv; by chunks of rows."""
        self.device, cell = inputs.q.device, self.cell
        heads = slice(h * self.group, (h + 1) * self.group)
        q, dout = (x[0, :, heads].double() for x in (inputs.q, inputs.dout))
        k, v = (x[0, :, h].double() for x in (inputs.k, inputs.v))
        first, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for one in range(self.group):
            for start in range(0, cell.seqlen, _CHUNK):
                rows = slice(start, min(start + _CHUNK, cell.seqlen))
                score = q[rows, one] @ k.T * cell.head_dim**-0.5
                probs = score.masked_fill_(~self._keeps(heads.start + one, rows), -torch.inf).softmax(-1)
                out = probs @ v
                if cell.direction == "forward":
                    first[rows, one] = out
                    continue
                delta = (out * dout[rows, one]).sum(-1, keepdim=True)
                dv += probs.T @ dout[rows, one]
                dscore = (dout[rows, one] @ v.T).sub_(delta).mul_(probs).mul_(cell.head_dim**-0.5)
                first[rows, one] = dscore @ k
                dk += dscore.T @ q[rows, one]
        return [first] if cell.direction == "forward" else [first, dk[:, None], dv[:, None]]


def token_pairs(cell: TokenCell, given: dict[str, Tensor], out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Results and their float64 for all heads of some queries, the first and the last among them."""
    places = range(cell.batch * cell.queries)
    some = {places[0], places[-1], *random.Random(cell.name).choices(places, k=_LOOKED_AT)}
    found = []
    for b, i in (divmod(place, cell.queries) for place in sorted(some)):
        at = given["selected"][b, i].long()
        if cell.paged:
            rows = given["k_cache"][given["page_table"][b, at // 64].long(), at % 64, 0].double()
        else:
            rows = given["k_cache"][b, at, 0].double()
        probs = (given["q"][b, i].double() @ rows.T * _DIM**-0.5).softmax(-1)
        found.append((out[b, i], probs @ rows[:, :_DIM_V]))
    return found
