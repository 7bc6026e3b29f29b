"""Models by name, and the calls that training and serving them makes, for which kernels are built ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Name, query heads, key heads, head_dim, mask, window, softcap, sinks. A model with two kinds of layers has two lines;
# 576:512 are latent rows, which are keys as a whole and values by their first 512 columns.
_TABLE = """
llama3-8b      32  8   128     causal
llama3-70b     64  8   128     causal
llama3-1b      32  8   64      causal
qwen3-0.6b     16  8   128     causal
qwen3-8b       32  8   128     causal
qwen2-0.5b     14  2   64      causal
qwen2-7b       28  4   128     causal
mistral-7b     32  8   128     causal 4096
phi3-mini      32  32  96      causal
gemma2-9b      16  8   256     causal 4096 50
gemma2-9b      16  8   256     causal -    50
gemma3-4b      8   4   256     causal 1024
gemma3-4b      8   4   256     causal
gpt-oss-20b    64  8   64      causal 128  - sinks
gpt-oss-20b    64  8   64      causal -    - sinks
deepseek-v3    128 128 192:128 causal
deepseek-v3    128 1   576:512 causal
gpt2           12  12  64      causal
bert-base      12  12  64      full
vit-l          16  16  64      full
flux           24  24  128     full
"""


class LayerShape(NamedTuple):
    """One kind of attention layer.

    Attributes:
        heads_q: Query heads.
        heads_kv: Key and value heads.
        head_dim: Width of q and k.
        causal: Whether query i sees keys up to its own.
        window: The number of keys before its own that a query sees, None for all.
        softcap: The cap, 0 for none.
        head_dim_v: Width of v; 0 if it is k's.
        sinks: Whether each head has a sink.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool
    window: int | None = None
    softcap: float = 0.0
    head_dim_v: int = 0
    sinks: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether values are the keys' first columns, which only rows of a cache are."""
        return self.heads_kv == 1 and 0 < self.head_dim_v < self.head_dim


def models() -> dict[str, tuple[LayerShape, ...]]:
    """The layers of each model, by the model's name."""
    found: dict[str, tuple[LayerShape, ...]] = {}
    for line in _TABLE.split("\n"):
        if words := line.split():
            name, of_q, of_kv, dims, kind, window, cap, sinks = (*words, *"---")[:8]
            dim, _, dim_v = dims.partition(":")
            keys, most = None if window == "-" else int(window), 0.0 if cap == "-" else float(cap)
            plain = int(of_q), int(of_kv), int(dim), kind == "causal"
            found[name] = (*found.get(name, ()), LayerShape(*plain, keys, most, int(dim_v or 0), sinks == "sinks"))
    return found


class Uses(NamedTuple):
    """The uses of a layer.

    Attributes:
        dtype: Dtype of q, k and v.
        dense: Whether there are calls with sequences of one length.
        packed: Whether there are calls with packed sequences.
        backward: Whether these calls have a backward.
        pages: For each server, the rows of a cache's page, or 0 for a cache without pages; empty for no serving.
        cache_dtype: Dtype of the cache.
        appends: Whether a server's steps write their keys; some servers write keys beforehand. May hold both.
        lengths: Rows of a sequence, and of a prompt's chunk; empty for all lengths that need kernels of their own.
        batches: Numbers of sequences, also in a server's step; empty likewise.
        precision: ``"fp8"`` for forwards that round to 8 bits, instead of forwards in dtype and their backwards.
    """

    dtype: torch.dtype
    dense: bool = True
    packed: bool = True
    backward: bool = True
    pages: tuple[int, ...] = ()
    cache_dtype: torch.dtype | None = None
    appends: tuple[bool, ...] = (False, True)
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    precision: str | None = None


# Together, these numbers reach each class of tiles: most share their kernels. ``tests/archive/test_wheel.py`` draws
# other numbers, which must need no further kernels.
_LENGTHS = (
    16, 64, 68, 100, 134, 161, 200, 270, 289, 442, 512, 576, 613, 766, 1000, 1050, 1088, 1400, 2048, 2049, 3000, 8192,
)  # fmt: skip
_BATCHES = (1, 2, 4, 8, 32, 64)
_STEPS = (1, 4, 8, 16, 32, 64, 200, 256)
# Rows of each sequence in a step: a token, or as many as were drafted.
_ROWS = (1, 2, 4, 8)
# The most rows of a packed sequence: drafted tokens, or a prompt's chunk beside sequences of one token.
_CHUNKS = (2, 4, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6000, 8192)
# The most keys of a sequence.
_CAPACITIES = (8192, 32768)

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def calls(shape: LayerShape, uses: Uses) -> Iterator[Call]:
    """The calls of a layer: a description, and the arguments of ``flashtile.warm_up`` on the meta device."""
    window = None if shape.window is None else (shape.window, 0 if shape.causal else shape.window)
    plain: dict[str, Any] = {"causal": shape.causal, "window_size": window, "softcap": shape.softcap}
    if shape.sinks:
        plain["sinks"] = torch.empty(shape.heads_q, device="meta")
    training = {**plain, "backward": uses.backward and uses.precision is None}
    if uses.precision is not None:
        training["precision"] = uses.precision
    what = f"{shape.heads_q}/{shape.heads_kv} x {shape.head_dim} {str(uses.dtype).removeprefix('torch.')}"
    for length in () if shape.is_latent else uses.lengths or _LENGTHS:
        for batch in uses.batches or _BATCHES:
            if uses.dense:
                yield f"{what}, {batch} x {length} rows", _qkv((batch, length), shape, uses.dtype), training
            if uses.packed:
                packing: dict[str, Any] = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), length)
                # One tensor for both, as for sequences that attend to themselves.
                packing |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _indices(batch + 1))
                rows = _qkv((batch * length,), shape, uses.dtype)
                yield f"{what}, packed {batch} x {length}", rows, training | packing
    # A layer with narrower values keeps latent rows in its cache.
    for size in uses.pages if shape.is_latent or not shape.head_dim_v else ():
        for batch, capacity, appends in itertools.product(uses.batches or _STEPS, _CAPACITIES, uses.appends):
            yield from _steps(what, shape, uses, plain, (size, batch, capacity), appends)


def _steps(
    what: str, shape: LayerShape, uses: Uses, plain: dict[str, Any], sizes: tuple[int, int, int], appends: bool
) -> Iterator[Call]:
    """A server's steps: some tokens of each sequence, or a chunk of a prompt beside sequences of one token."""
    (size, batch, capacity), kind = sizes, uses.cache_dtype or uses.dtype
    rows = (batch * capacity // size, size) if size else (batch, capacity)
    cache = torch.empty(*rows, shape.heads_kv, shape.head_dim, dtype=kind, device="meta")
    values = cache[..., : shape.head_dim_v] if shape.is_latent else torch.empty_like(cache)
    given = {**plain, "k_cache": cache, "v_cache": values, "cache_seqlens": _indices(batch)}
    if size:
        given["page_table"] = _indices(batch, capacity // size)
    if kind.itemsize == 1:
        given["k_scale"] = given["v_scale"] = 1.0
    most = 1 if shape.is_latent else 2  # a latent row's values are its key's
    what = f"{what} over {kind}, pages of {size}, {capacity} keys, " + "appending, " * appends
    for count in (1,) if uses.lengths else _ROWS:
        q, *new = _qkv((batch, count), shape, uses.dtype)
        yield f"{what}{batch} x {count}", (q, *new[: appends * most]), given
    for chunk in uses.lengths or _CHUNKS:
        q, *new = _qkv((batch - 1 + chunk,), shape, uses.dtype)
        packing = {"cu_seqlens_q": _indices(batch + 1), "max_seqlen_q": chunk}
        yield f"{what}{batch} with a chunk of {chunk}", (q, *new[: appends * most]), given | packing


def _qkv(rows: tuple[int, ...], shape: LayerShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    widths = shape.head_dim, shape.head_dim, shape.head_dim_v or shape.head_dim
    heads = shape.heads_q, shape.heads_kv, shape.heads_kv
    each = zip(heads, widths, strict=True)
    return tuple(torch.empty(*rows, n, width, dtype=dtype, device="meta") for n, width in each)


def _indices(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device="meta")
