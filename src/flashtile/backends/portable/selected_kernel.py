"""The kernels of ``selected``: which keys of a query's list it sees, and in which rows of the cache they are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_positions(lists, places):
    """Stores one query's rows: its list names positions of its sequence."""
    n = tl.program_id(0)
    b, i, count = n, 0, 1
    exists = True
    if places.cu_seqlens is not None:
        b = 0
        for start in range(0, places.batch, places.SEARCH):
            at = start + tl.arange(0, places.SEARCH)
            ends = tl.load(places.cu_seqlens + 1 + at, mask=at < places.batch, other=2147483647)
            b += tl.sum((ends <= n).to(tl.int32), 0)
        exists = b < places.batch
        begin = tl.load(places.cu_seqlens + b, mask=exists, other=0)
        count = tl.load(places.cu_seqlens + b + 1, mask=exists, other=0) - begin
        i = n - begin
    else:
        b, i, count = n // places.seqlen_q, n % places.seqlen_q, places.seqlen_q
    length = tl.cast(tl.load(places.lengths + b, mask=exists, other=0), tl.int64)
    own = length + i - count
    first, stop = tl.cast(0, tl.int64), tl.minimum(length, places.capacity)
    if places.leftpad is not None:
        first = tl.maximum(first, tl.load(places.leftpad + b, mask=exists, other=0))
    if places.left is not None:
        first = tl.maximum(first, own - places.left)
    if places.right is not None:
        stop = tl.minimum(stop, own + places.right + 1)
    if places.causal is not None:
        each = tl.load(places.causal + b, mask=exists, other=0) != 0
        stop = tl.where(each, tl.minimum(stop, own + 1), stop)
    begin = tl.cast(b, tl.int64) * places.stride_table
    if places.indptr is not None:
        begin += tl.load(places.indptr + b, mask=exists, other=0)
    entry = b
    if places.entries is not None:
        entry = tl.load(places.entries + b, mask=exists, other=0)
    found = 0
    for start in range(0, lists.most, lists.BLOCK):
        at = start + tl.arange(0, lists.BLOCK)
        j = tl.load(lists.ptr + tl.cast(n, tl.int64) * lists.most + at, mask=at < lists.most, other=-1)
        keep = (j >= first) & (j < stop)
        if places.table is not None:
            page = tl.load(places.table + begin + j // places.page_size, mask=keep, other=0)
            row = page * places.step + j % places.page_size
        else:
            row = entry * places.step + j
        found = _stored(lists, n, at, keep, row, found)
    tl.store(lists.counts + n, found)


@triton.jit
def of_slots(lists, places):
    """Stores one query's rows: its list names slots of the cache."""
    n = tl.program_id(0)
    slots = places.slots
    if places.cu_seqlens is not None:
        slots = tl.where(n < tl.load(places.cu_seqlens + places.batch), slots, 0)
    found = 0
    for start in range(0, lists.most, lists.BLOCK):
        at = start + tl.arange(0, lists.BLOCK)
        slot = tl.load(lists.ptr + tl.cast(n, tl.int64) * lists.most + at, mask=at < lists.most, other=-1)
        keep = (slot >= 0) & (slot < slots)
        row = slot // places.page_size * places.step + slot % places.page_size
        found = _stored(lists, n, at, keep, row, found)
    tl.store(lists.counts + n, found)


@triton.jit
def _stored(lists, n, at, keep, row, found):
    """Stores rows that are kept after the ``found`` ones before, and 0 from the end on; returns how many there are."""
    kept = keep.to(tl.int32)
    before = found + tl.cumsum(kept, 0) - kept
    place = tl.where(keep, before, lists.most - 1 - (at - before))
    tl.store(
        lists.rows + tl.cast(n, tl.int64) * lists.most + place,
        tl.where(keep, row, 0).to(tl.int32),
        mask=at < lists.most,
    )
    return found + tl.sum(kept, 0)
