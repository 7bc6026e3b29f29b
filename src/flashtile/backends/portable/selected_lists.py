"""Lists of the blocks that data have chosen, made by three launches: see ``selected_lists_kernel``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.host import Launcher, run
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code

_kernels = device_code("flashtile.backends.portable.selected_lists_kernel")
# Numbers of a list, at most: a program sorts a list in its registers.
MOST = 2048


class Limits(NamedTuple):
    """What launches keep within.

    Attributes:
        tile: Numbers that a program sorts, or words of bits that it reads, at once; a list may have more.
        bits: Bytes of bits. Where all would take more, they are made for some blocks of keys after others.
    """

    tile: int = 1024
    bits: int = 2**27


_LIMITS = Limits()


class Chosen(NamedTuple):
    """The blocks of keys that blocks of rows name.

    Attributes:
        indices: int32 or int64, (lists, most): numbers of blocks of keys.
        counts: int32 or int64, (lists,): how many of them count; None for all.
        lists: Blocks of rows of all groups.
        rows: Blocks of rows of a group.
        stride_list: Numbers of a list, most of the shapes above.
        keys: Blocks of keys.
        LISTS: Lists that a program takes.
        PLACES: A power of two, at least as large.
    """

    indices: Any
    counts: Any
    lists: Any
    rows: Any
    stride_list: Any
    keys: Any
    LISTS: Any
    PLACES: Any


class RowBits(NamedTuple):
    """Which blocks of rows name each block of keys ``first ... first + keys - 1``.

    Attributes:
        ptr: int32 (groups, span, stride_key): bit i of word w says whether rows 32 w + i name the key; zeros before.
        first: The first of the blocks of keys.
        keys: Their number, at most the span.
        words: Words of a key that have bits.
        stride_group: Words from one group's to the next's.
        stride_key: Words from one key's to the next's.
        totals: int32 (groups, all keys): how many blocks of rows name each key.
        KEYS: Keys that a program takes.
        WORDS: Words of each that it reads at once.
    """

    ptr: Any
    first: Any
    keys: Any
    words: Any
    stride_group: Any
    stride_key: Any
    totals: Any
    KEYS: Any
    WORDS: Any


class MadeLists(NamedTuple):
    """Lists, all int32: ``BlockMask``'s tensors of one side.

    Attributes:
        blocks: (lists, 3).
        items: (groups * rows * most,).
    """

    blocks: Any
    items: Any


def why_not(indices: Tensor, keys: int) -> str | None:
    """Why no kernel makes these lists, or None."""
    if not indices.numel() or not keys:
        return "there is nothing to list"
    most = indices.shape[3]
    return f"lists have {most} numbers, kernels take at most {MOST}" if most > MOST else None


def selected_lists(indices: Tensor, counts: Tensor | None, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``flashtile.mods.block_mask.selected_lists``, for what ``why_not`` has no reason against.

    Nothing waits for the device. Kernels mark in bits which rows name each key: a bit for each pair of blocks, of at
    most 128 MiB at once.
    """
    indices, counts = indices.contiguous(), None if counts is None else counts.contiguous()
    batch, heads, rows, most = indices.shape
    empty = functools.partial(torch.empty, dtype=torch.int32, device=indices.device)
    made = {
        "indices": indices,
        "row_blocks": empty(batch, heads, rows, 3),
        "row_items": empty(indices.numel()),
        "key_blocks": empty(batch, heads, keys, 3),
        "key_items": empty(indices.numel()),
        "totals": empty(batch * heads, keys),
    }
    if counts is not None:
        made["counts"] = counts
    words, spans = _launchers(
        (batch * heads, rows, most), keys, pointer(indices, "indices"), pointer(counts, "counts"), indices.device,
        _LIMITS,
    )  # fmt: skip
    made["bits"] = empty(words)
    for launchers in spans:
        made["bits"].zero_()
        run(launchers, None, made)
    return made["row_blocks"], made["row_items"], made["key_blocks"], made["key_items"]


@functools.lru_cache(maxsize=256)
def _launchers(
    sizes: tuple[int, int, int], keys: int, indices: Pointer, counts: Pointer | None, device: torch.device,
    limits: Limits,
) -> tuple[int, list[list[Launcher]]]:  # fmt: skip
    """Words of bits, and the launchers for each span of keys."""
    names = ("indices", "counts", "row_blocks", "row_items", "key_blocks", "key_items", "totals", "bits")
    words, spans = span_launches(sizes, keys, indices, counts, limits)
    there = dict.fromkeys(names, True)
    return words, [[Launcher(each, device, None, there) for each in launches.values()] for launches in spans]


def span_launches(
    sizes: tuple[int, int, int], keys: int, indices: Pointer, counts: Pointer | None, limits: Limits = _LIMITS
) -> tuple[int, list[dict[str, Launch]]]:
    """Words of bits, and for each span of keys its launches by name, in order; bits are zeroed before each.

    Args:
        sizes: Groups, blocks of rows of a group, and numbers of a list.
        keys: Blocks of keys.
        indices: The numbers.
        counts: How many of each list's count, or None.
        limits: What they keep within.
    """
    groups, rows, most = sizes
    used = -(-rows // 32)
    stride = -(-used // 16) * 16
    span = max(1, min(keys, limits.bits // (groups * stride * 4)))
    places = max(4, 1 << (most - 1).bit_length())
    tile = min(next((size for size in (16, 64) if size >= used), 512), limits.tile)
    chosen = Chosen(indices, counts, groups * rows, rows, most, keys, max(1, limits.tile // places), places)
    lists = [MadeLists(Pointer(torch.int32, f"{side}_blocks"), Pointer(torch.int32, f"{side}_items"))
             for side in ("row", "key")]  # fmt: skip
    bits, totals = (Pointer(torch.int32, name) for name in ("bits", "totals"))
    options = {"num_warps": 4, "num_stages": 1}
    spans = []
    for first in range(0, keys, span):
        count = min(span, keys - first)
        given = RowBits(bits, first, count, used, span * stride, stride, totals, limits.tile // tile, tile)
        programs = groups * -(-count // given.KEYS)
        by_rows = {"num_warps": max(4, places // 256), "num_stages": 1}
        arguments = {"chosen": chosen, "bits": given}
        spans.append({
            "row_lists": Launch(
                _kernels.row_lists, -(-chosen.lists // chosen.LISTS), {**arguments, "written": lists[0]}, by_rows
            ),
            "count_rows": Launch(_kernels.count_rows, programs, {**arguments, "written": lists[1]}, options),
            "key_lists": Launch(_kernels.key_lists, programs, {**arguments, "written": lists[1]}, options),
        })  # fmt: skip
    return groups * span * stride, spans
