"""The rows of a cache that queries see, from their lists of keys: one launch, a program for each query."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Plan, empty
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.selected import Reach, Selected

_kernels = device_code("flashtile.backends.portable.selected_kernel")
# Elements of a list, and bounds of packed queries, that a program looks at at once, at most.
_BLOCK, _SEARCH = 1024, 1024


class Lists(NamedTuple):
    """The lists of a launch.

    Attributes:
        ptr: int32 (queries, most).
        rows: Where the rows go, int32 (queries, most).
        counts: Where their numbers go, int32 (queries,).
        most: Elements of a list.
        BLOCK: Elements that are looked at at once.
    """

    ptr: Any
    rows: Any
    counts: Any
    most: Any
    BLOCK: Any


class Places(NamedTuple):
    """Where the keys of sequences are, and which of them queries may see.

    Attributes:
        lengths: int32 (batch,).
        cu_seqlens: int32 (batch + 1,), None for ``seqlen_q`` queries of each sequence.
        table: int32, pages (batch, pages of a sequence), or those of all sequences with ``indptr``; None for entries.
        indptr: int32 (batch + 1,) or None.
        entries: int32 (batch,), None where sequence b has entry b.
        leftpad: int32 (batch,) or None.
        causal: bool (batch,) or None.
        left: As in ``Reach``, like right, capacity, page_size and step.
        right: See there.
        capacity: See there.
        page_size: See there.
        step: See there.
        batch: Sequences.
        seqlen_q: Queries of each, unless packed.
        stride_table: Of a sequence in the table, 0 without it.
        SEARCH: Bounds that are looked at at once.
    """

    lengths: Any
    cu_seqlens: Any
    table: Any
    indptr: Any
    entries: Any
    leftpad: Any
    causal: Any
    left: Any
    right: Any
    capacity: Any
    page_size: Any
    step: Any
    batch: Any
    seqlen_q: Any
    stride_table: Any
    SEARCH: Any


class Slots(NamedTuple):
    """Where slots are.

    Attributes:
        slots: How many the cache has.
        page_size: As in ``Reach``.
        step: See there.
        cu_seqlens: int32 (batch + 1,) of packed queries, or None.
        batch: Sequences.
    """

    slots: Any
    page_size: Any
    step: Any
    cu_seqlens: Any
    batch: Any


class Sizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        slots: Rows of the cache.
        batch: Sequences.
        seqlen_q: Queries of each, unless packed.
        stride_table: Of a sequence in a page table, 0 without one.
    """

    slots: int
    batch: int
    seqlen_q: int
    stride_table: int


def compacted(t: CacheTensors, given: Selected, reach: Reach) -> tuple[Tensor, Tensor]:
    """As ``call.selected.compacted``."""
    lists = given.lists.contiguous()
    made: dict[str, Any] = {"lists": lists}
    shape, aligned = (t.q.shape[:-2].numel(), lists.shape[-1]), lists.data_ptr() % 16 == 0
    named = {"cu_seqlens": t.cu_seqlens_q}
    slots, batch = t.k_cache.shape[0] * t.k_cache.shape[1], t.cache_seqlens.shape[0]
    if given.slots is None:
        named |= {
            "lengths": t.cache_seqlens, "table": t.page_table if t.page_indices is None else t.page_indices,
            "indptr": t.page_indptr, "entries": t.cache_batch_idx, "leftpad": t.cache_leftpad,
            "causal": None if t.causal is None else t.causal.view(torch.int8),
        }  # fmt: skip
    layouts = tuple((name, pointer(x, name)) for name, x in named.items())
    stride = 0 if t.page_table is None else t.page_table.stride(0)
    sizes = Sizes(slots, batch, 1 if t.cu_seqlens_q is not None else t.q.shape[1], stride)
    plan = _plan(shape, lists.device, aligned, reach, layouts, sizes)
    made |= named
    found = plan.run(None, made)
    return found["rows"], found["counts"]


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int],
    device: torch.device,
    aligned: bool,
    reach: Reach,
    layouts: tuple[tuple[str, Pointer | None], ...],
    sizes: Sizes,
) -> Plan:
    memory = {"rows": empty(device, shape, torch.int32), "counts": empty(device, shape[:1], torch.int32)}
    launch = launch_of(shape, aligned, reach, layouts, sizes)
    return Plan(device, lambda *_: (memory, {launch.kernel.__name__: launch}))


def launch_of(
    shape: tuple[int, int],
    aligned: bool,
    reach: Reach,
    layouts: tuple[tuple[str, Pointer | None], ...],
    sizes: Sizes,
) -> Launch:
    """The launch over queries.

    Args:
        shape: Queries, and elements of a list.
        aligned: Whether the lists are on 16 bytes.
        reach: See there.
        layouts: The tensors among the fields of ``Places``, by name; of ``Slots``, for lists of these.
        sizes: See there.
    """
    queries, most = shape
    block = min(_BLOCK, max(16, 1 << max(most - 1, 0).bit_length()))
    operands = Pointer(torch.int32, "lists", 0, aligned), Pointer(torch.int32, "rows"), Pointer(torch.int32, "counts")
    arguments: dict[str, Any] = {"lists": Lists(*operands, most, block)}
    tensors = dict(layouts)
    if "lengths" in tensors:
        search = min(_SEARCH, max(16, 1 << max(sizes.batch - 1, 0).bit_length()))
        own = {"batch": sizes.batch, "seqlen_q": sizes.seqlen_q, "stride_table": sizes.stride_table, "SEARCH": search}
        arguments["places"] = Places(**tensors, **reach._asdict(), **own)
        kernel = _kernels.of_positions
    else:
        arguments["places"] = Slots(sizes.slots, max(reach.page_size, 1), reach.step, **tensors, batch=sizes.batch)
        kernel = _kernels.of_slots
    return Launch(kernel, queries, arguments, {"num_warps": 4, "num_stages": 1})
