"""Which blocks a mask function keeps: found tile by tile on the device; an operator where code is traced."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.call.functions import Function
from flashtile.mods.block_mask import FULL, PARTIAL
from flashtile.mods.graph import parse
from flashtile.ops.operation import LIBRARY

# Pairs that are evaluated at once where no kernel does it.
_MOST_PAIRS = 2**22


@functools.cache
def has_triton() -> bool:
    """Whether there are kernels."""
    return importlib.util.find_spec("triton") is not None


def kinds_of(
    function: Function | None,
    groups: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    span: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Whether blocks of rows ``span`` are 0, ``PARTIAL`` or ``FULL``: ``(B * H, rows, blocks_k)`` int8."""
    find: Callable[..., Tensor] = evaluated
    if device.type == "cuda" and has_triton() and function is not None:
        from flashtile.backends.portable.lists import kinds as find
    return find(function, groups, lengths, block_size, span, device)


@torch.no_grad()
def evaluated(
    function: Function | None,
    groups: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    span: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """What ``kinds_of`` returns, by PyTorch."""
    (batch, heads), (seqlen_q, seqlen_k), (of_rows, of_keys) = groups, lengths, block_size
    blocks_k = -(-seqlen_k // of_keys)
    kinds = torch.zeros(batch, heads, span[1] - span[0], blocks_k, dtype=torch.int8, device=device)
    wide = max(1, _MOST_PAIRS // (of_rows * of_keys))
    # What a function does not look at is evaluated once for all.
    used = set() if function is None else {node.op for node in function.graph.nodes}
    at_b, at_h = ([(slice(n, n + 1), n) for n in range(size)] if name in used else [(slice(None), 0)]
                  for name, size in (("b", batch), ("h", heads)))  # fmt: skip
    for m, n in itertools.product(range(*span), range(0, blocks_k, wide)):
        stop = min(n + wide, blocks_k)
        i = torch.arange(m * of_rows, (m + 1) * of_rows, device=device)[:, None]
        j = torch.arange(n * of_keys, stop * of_keys, device=device)
        exists = (i < seqlen_q) & (j < seqlen_k)
        for (bs, b), (hs, h) in itertools.product(at_b, at_h):
            keep = exists
            if function is not None:
                here = {"b": torch.tensor(b, device=device), "h": torch.tensor(h, device=device), "i": i, "j": j}
                keep = exists & function.values([function.graph.result], here, torch.float32)[0]
            kept = keep.reshape(of_rows, stop - n, of_keys).sum((0, 2))
            found = torch.where(kept == of_rows * of_keys, FULL, torch.where(kept > 0, PARTIAL, 0))
            kinds[bs, hs, m - span[0], n:stop] = found.to(torch.int8)
    return kinds.flatten(0, 1)


def _block_kinds(
    like: Tensor, operands: Sequence[Tensor] | None, numbers: Sequence[float] | None, text: str, groups: Sequence[int],
    lengths: Sequence[int], block_size: Sequence[int],
) -> Tensor:  # fmt: skip
    """``kinds_of`` all blocks of rows, ``(B, H, blocks_q, blocks_k)``, on the device of ``like``."""
    function = Function(parse(text), tuple(operands or ()), tuple(numbers or ()), 0) if text else None
    (b, h), (seqlen_q, seqlen_k), (of_rows, of_keys) = groups, lengths, block_size
    span = 0, -(-seqlen_q // of_rows)
    found = kinds_of(function, (b, h), (seqlen_q, seqlen_k), (of_rows, of_keys), span, like.device)
    return found.unflatten(0, (b, h))


def _fake(
    like: Tensor, operands: Sequence[Tensor] | None, numbers: Sequence[float] | None, text: str, groups: Sequence[int],
    lengths: Sequence[int], block_size: Sequence[int],
) -> Tensor:  # fmt: skip
    blocks = (-(-length // block) for length, block in zip(lengths, block_size, strict=True))
    return like.new_empty((*groups, *blocks), dtype=torch.int8)


# Tensors and numbers are what a function reads (AOTInductor makes None of an empty list). text is its graph's, empty
# for one that keeps all.
LIBRARY.define(
    "block_kinds(Tensor like, Tensor[]? operands, float[]? numbers, str text, SymInt[] groups, SymInt[] lengths,"
    " int[] block_size) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("block_kinds", _block_kinds, _device)
torch.library.register_fake("flashtile::block_kinds", _fake, lib=LIBRARY)
