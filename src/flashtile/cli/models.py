"""Models by name, and the calls that training and serving them makes: what is built ahead for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Name, query heads, key heads, head_dim, causal, window, softcap. A model with two kinds of layers has two lines.
_TABLE = """
llama3-8b      32 8  128 causal
llama3-70b     64 8  128 causal
llama3-1b      32 8  64  causal
qwen3-0.6b     16 8  128 causal
qwen3-8b       32 8  128 causal
qwen2-0.5b     14 2  64  causal
mistral-7b     32 8  128 causal 4096
phi3-mini      32 32 96  causal
gemma2-9b      16 8  256 causal 4096 50
gemma2-9b      16 8  256 causal -    50
gemma3-4b      8  4  256 causal 1024
gemma3-4b      8  4  256 causal
gpt2           12 12 64  causal
bert-base      12 12 64  full
vit-l          16 16 64  full
flux           24 24 128 full
"""


class Shape(NamedTuple):
    """One kind of attention layer.

    Attributes:
        heads_q: Query heads.
        heads_kv: Key and value heads.
        head_dim: Width of q, k and v.
        causal: Whether query i sees keys up to its own.
        window: Keys before a query's own that it sees, None for all.
        softcap: The cap, 0 for none.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool
    window: int | None = None
    softcap: float = 0.0


def models() -> dict[str, tuple[Shape, ...]]:
    """The layers of each model, by its name."""
    found: dict[str, tuple[Shape, ...]] = {}
    for line in _TABLE.split("\n"):
        if words := line.split():
            name, of_q, of_kv, dim, kind, window, cap = (*words, "-", "-")[:7]
            keys = None if window == "-" else int(window)
            shape = Shape(int(of_q), int(of_kv), int(dim), kind == "causal", keys, 0.0 if cap == "-" else float(cap))
            found[name] = (*found.get(name, ()), shape)
    return found


class Uses(NamedTuple):
    """What a layer is used for.

    Attributes:
        dtype: Of q, k and v.
        dense: Whether sequences of one length are attended to.
        packed: Whether packed ones are.
        backward: Whether both have a backward.
        pages: Rows of a cache's page for each server to build for; empty for no serving.
        cache_dtype: Of the cache.
        batches: Sequences of a server's steps.
    """

    dtype: torch.dtype
    dense: bool = True
    packed: bool = True
    backward: bool = True
    pages: tuple[int, ...] = ()
    cache_dtype: torch.dtype | None = None
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)


# Lengths that between them reach each class of tiles; most of them share their kernels.
LENGTHS = (16, 100, 300, 512, 1000, 2048, 3000, 8192)
# Tokens of a server's step besides one for each sequence.
_CHUNKS = (0, 4, 128, 2048)

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def calls(shape: Shape, uses: Uses) -> Iterator[Call]:
    """The calls of a layer: what it is, and the arguments of ``flashtile.warm_up`` on the meta device."""
    window = None if shape.window is None else (shape.window, 0 if shape.causal else shape.window)
    plain: dict[str, Any] = {"causal": shape.causal, "window_size": window, "softcap": shape.softcap}
    training = {**plain, "backward": uses.backward}
    what = f"{shape.heads_q}/{shape.heads_kv} x {shape.head_dim} {str(uses.dtype).removeprefix('torch.')}"
    for length in LENGTHS:
        if uses.dense:
            yield f"{what}, {length} rows", _qkv((2, length), shape, uses.dtype), training
        if uses.packed and length > 16:
            bounds = {name: _indices(5) for name in ("cu_seqlens_q", "cu_seqlens_k")}
            longest = {"max_seqlen_q": length, "max_seqlen_k": length}
            yield f"{what}, packed {length}", _qkv((4 * length,), shape, uses.dtype), training | bounds | longest
    for size in uses.pages:
        for batch in uses.batches:
            for chunk in _CHUNKS:
                yield (
                    f"{what}, pages of {size}, batch {batch} + {chunk}",
                    *_step(shape, uses, plain, size, batch, chunk),
                )


def _step(
    shape: Shape, uses: Uses, plain: dict[str, Any], size: int, batch: int, chunk: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A server's step: one token of each sequence, and a chunk of a prompt."""
    capacity, kind = 8192, uses.cache_dtype or uses.dtype
    cache = torch.empty(batch * capacity // size, size, shape.heads_kv, shape.head_dim, dtype=kind, device="meta")
    given: dict[str, Any] = {
        **plain, "k_cache": cache, "v_cache": torch.empty_like(cache), "cache_seqlens": _indices(batch),
        "page_table": torch.empty(batch, capacity // size, dtype=torch.int32, device="meta"),
    }  # fmt: skip
    if not chunk:
        return (torch.empty(batch, 1, shape.heads_q, shape.head_dim, dtype=uses.dtype, device="meta"),), given
    rows = batch - 1 + chunk
    q = torch.empty(rows, shape.heads_q, shape.head_dim, dtype=uses.dtype, device="meta")
    return (q,), given | {"cu_seqlens_q": _indices(batch + 1), "max_seqlen_q": chunk}


def _qkv(rows: tuple[int, ...], shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads = shape.heads_q, shape.heads_kv, shape.heads_kv
    return tuple(torch.empty(*rows, n, shape.head_dim, dtype=dtype, device="meta") for n in heads)


def _indices(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device="meta")
