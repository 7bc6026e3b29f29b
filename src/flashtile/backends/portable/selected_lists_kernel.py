"""The kernels of ``selected_lists``.

Lists of rows are sorted in registers. For a key's list its rows are needed in order: the first kernel sets a bit for
each pair of blocks, an atomic operation with the same result in any order; the second counts each key's bits; and the
third reads them again, in the order of rows, where the lists of the keys before are known to end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_lists(chosen, bits, written):
    """Sorts LISTS lists of rows, without what is named again or is no block, and marks them in the keys' bits."""
    LISTS: tl.constexpr = chosen.LISTS
    PLACES: tl.constexpr = chosen.PLACES
    most, keys = chosen.stride_list, chosen.keys
    line, place = tl.program_id(0) * LISTS + tl.arange(0, LISTS), tl.arange(0, PLACES)[None, :]
    exists = line < chosen.lists
    start = line.to(tl.int64) * most
    at, inside = start[:, None] + place, exists[:, None] & (place < most)
    counted = inside
    if chosen.counts is not None:
        counted &= place < tl.load(chosen.counts + line, mask=exists, other=0)[:, None]
    given = tl.load(chosen.indices + at, mask=counted, other=-1)
    block = tl.sort(tl.where((given >= 0) & (given < keys), given, keys).to(tl.int32), 1)
    # [LISTS, PLACES] int32, sorted; ``keys`` stands for no block.
    before = tl.gather(block, tl.broadcast_to(tl.maximum(place - 1, 0), [LISTS, PLACES]), 1)
    is_new = (block < keys) & ((place == 0) | (block != before))
    rank = tl.cumsum(is_new.to(tl.int32), 1)
    count = tl.max(rank, 1)
    tl.store(written.items + (start[:, None] + (rank - 1)), block, mask=is_new)
    tl.store(written.items + at, tl.zeros([LISTS, PLACES], tl.int32) + keys, mask=inside & (place >= count[:, None]))
    bounds = written.blocks + line.to(tl.int64) * 3
    tl.store(bounds, start.to(tl.int32), mask=exists)
    tl.store(bounds + 1, start.to(tl.int32), mask=exists)
    tl.store(bounds + 2, (start + count).to(tl.int32), mask=exists)

    group, row = (line // chosen.rows).to(tl.int64), line % chosen.rows
    own = bits.ptr + group * bits.stride_group + row // 32
    word = own[:, None] + (block - bits.first).to(tl.int64) * bits.stride_key
    is_marked = is_new & (block >= bits.first) & (block < bits.first + bits.keys)
    # Not a broadcast tensor: the interpreter would read past the end of one.
    mark = tl.full([LISTS, PLACES], 1, tl.int32) << (row % 32)[:, None]
    tl.atomic_or(word, mark, mask=is_marked, sem="relaxed")


@triton.jit
def ones(x):
    """How many bits of each word are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_words(bits, group, key, first):
    """WORDS words of KEYS keys, from word ``first`` on, uint32; ``key`` is counted from the bits' first."""
    word = first + tl.arange(0, bits.WORDS)[None, :]
    at = bits.ptr + tl.cast(group, tl.int64) * bits.stride_group + key.to(tl.int64)[:, None] * bits.stride_key + word
    found = tl.load(at, mask=(key < bits.keys)[:, None] & (word < bits.stride_key), other=0)
    return found.to(tl.uint32, bitcast=True)


@triton.jit
def count_rows(chosen, bits, written):
    """Stores how many rows name each of KEYS keys of a group.

    The first item is a block even if no list has it: kernels read it where a list is empty, and use it for nothing.
    """
    KEYS: tl.constexpr = bits.KEYS
    chunks = (bits.keys + KEYS - 1) // KEYS
    group, key = tl.program_id(0) // chunks, tl.program_id(0) % chunks * KEYS + tl.arange(0, KEYS)
    count = tl.zeros([KEYS, bits.WORDS], tl.int32)
    for first in range(0, bits.words, bits.WORDS):
        count += ones(load_words(bits, group, key, first))
    at = bits.totals + tl.cast(group, tl.int64) * chosen.keys + bits.first + key
    tl.store(at, tl.sum(count, 1), mask=key < bits.keys)
    if (tl.program_id(0) == 0) & (bits.first == 0):
        tl.store(written.items, 0)


@triton.jit
def key_lists(chosen, bits, written):
    """Stores the lists of KEYS keys of a group: their rows, in order."""
    KEYS: tl.constexpr = bits.KEYS
    WORDS: tl.constexpr = bits.WORDS
    chunks = (bits.keys + KEYS - 1) // KEYS
    group, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    group = tl.cast(group, tl.int64)
    totals, stop = bits.totals + group * chosen.keys, bits.first + chunk * KEYS
    before = tl.zeros([1024], tl.int32)
    for first in range(0, stop, 1024):
        other = first + tl.arange(0, 1024)
        before += tl.load(totals + other, mask=other < stop, other=0)
    key = chunk * KEYS + tl.arange(0, KEYS)
    is_key = key < bits.keys
    count = tl.load(totals + bits.first + key, mask=is_key, other=0)
    start = group * chosen.rows * chosen.stride_list + tl.sum(before, 0) + (tl.cumsum(count, 0) - count)
    bounds = written.blocks + (group * chosen.keys + bits.first + key) * 3
    tl.store(bounds, start.to(tl.int32), mask=is_key)
    tl.store(bounds + 1, start.to(tl.int32), mask=is_key)
    tl.store(bounds + 2, (start + count).to(tl.int32), mask=is_key)

    done = tl.zeros([KEYS], tl.int32)
    for first in range(0, bits.words, WORDS):
        left = load_words(bits, group, key, first)
        here = ones(left)
        place = done[:, None] + (tl.cumsum(here, 1) - here)
        row = (first + tl.arange(0, WORDS)[None, :]) * 32
        # One bit of each word at a time, the lowest one that is left.
        for _ in range(tl.max(tl.max(here, 1), 0)):
            others = left & (left - 1)
            bit = ((left ^ others).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(written.items + (start[:, None] + place), row + bit, mask=left != 0)
            left = others
            place += 1
        done += tl.sum(here, 1)
