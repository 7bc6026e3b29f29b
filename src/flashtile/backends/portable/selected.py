"""The rows of a cache that queries see, from their lists of keys: one launch, a program for each query."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Memory, Plan, empty
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.selected import Reach, Selected

_kernels = device_code("flashtile.backends.portable.selected_kernel")
# Elements of a list, and bounds of packed queries, that a program looks at at once, at most.
_BLOCK, _SEARCH = 2048, 1024


class KeyLists(NamedTuple):
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


class KeyPlaces(NamedTuple):
    """Where the keys of sequences are, and which of them queries may see.

    Attributes:
        lengths: int32 (batch,).
        cu_seqlens: int32 (batch + 1,), None for ``seqlen_q`` queries of each sequence.
        table: int32, pages (batch, pages of a sequence), or with ``indptr`` all sequences' one after another; None for
            entries.
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
        stride_table: Elements from a sequence to the next in the table, 0 without it.
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
        stride_table: Elements from a sequence to the next in a page table, 0 without one.
    """

    slots: int
    batch: int
    seqlen_q: int
    stride_table: int


def compacted(t: CacheTensors, given: Selected, reach: Reach) -> tuple[Tensor, Tensor]:
    """As ``call.selected.compacted``."""
    lists = given.lists.contiguous()
    named = _tensors(t, given)
    found = _plan(lists.device, *_layout(t, lists, named), reach).run(None, {"lists": lists, **named})
    return found["rows"], found["counts"]


def launches(t: CacheTensors, given: Selected, reach: Reach) -> dict[str, Launch]:
    """The launch of a call by its kernel's name, whatever device the tensors are on."""
    launch = launch_of(*_layout(t, given.lists, _tensors(t, given)), reach)
    return {launch.kernel.__name__: launch}


def _tensors(t: CacheTensors, given: Selected) -> dict[str, Tensor | None]:
    """What a launch reads besides lists, by name."""
    named = {"cu_seqlens": t.cu_seqlens_q}
    if given.slots is None:
        named |= {
            "lengths": t.cache_seqlens, "table": t.page_table if t.page_indices is None else t.page_indices,
            "indptr": t.page_indptr, "entries": t.cache_batch_idx, "leftpad": t.cache_leftpad,
            "causal": None if t.causal is None else t.causal.view(torch.int8),
        }  # fmt: skip
    return named


def _layout(
    t: CacheTensors, lists: Tensor, named: dict[str, Tensor | None]
) -> tuple[tuple[int, int], bool, tuple[tuple[str, Pointer | None], ...], Sizes]:
    """The first arguments of ``launch_of``."""
    stride = 0 if t.page_table is None else t.page_table.stride(0)
    seqlen_q = 1 if t.cu_seqlens_q is not None else t.q.shape[1]
    sizes = Sizes(t.k_cache.shape[0] * t.k_cache.shape[1], t.cache_seqlens.shape[0], seqlen_q, stride)
    layouts = tuple((name, pointer(x, name)) for name, x in named.items())
    return (t.q.shape[:-2].numel(), lists.shape[-1]), lists.data_ptr() % 16 == 0, layouts, sizes


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, shape: tuple[int, int], *others: Any) -> Plan:
    def prepare(*_: Any) -> tuple[Memory, dict[str, Launch]]:
        memory = {"rows": empty(device, shape, torch.int32), "counts": empty(device, shape[:1], torch.int32)}
        return memory, {launch.kernel.__name__: launch}

    launch = launch_of(shape, *others)
    return Plan(device, prepare)


def launch_of(
    shape: tuple[int, int],
    aligned: bool,
    layouts: tuple[tuple[str, Pointer | None], ...],
    sizes: Sizes,
    reach: Reach,
) -> Launch:
    """The launch over queries.

    Args:
        shape: Queries, and elements of a list.
        aligned: Whether the lists are on 16 bytes.
        layouts: The tensors among the fields of ``KeyPlaces``, by name; of ``Slots``, for lists of these.
        sizes: See there.
        reach: See there.
    """
    queries, most = shape
    block = min(_BLOCK, max(16, 1 << max(most - 1, 0).bit_length()))
    operands = Pointer(torch.int32, "lists", 0, aligned), Pointer(torch.int32, "rows"), Pointer(torch.int32, "counts")
    arguments: dict[str, Any] = {"lists": KeyLists(*operands, most, block)}
    tensors = dict(layouts)
    if "lengths" in tensors:
        search = min(_SEARCH, max(16, 1 << max(sizes.batch - 1, 0).bit_length()))
        own = {"batch": sizes.batch, "seqlen_q": sizes.seqlen_q, "stride_table": sizes.stride_table, "SEARCH": search}
        arguments["places"] = KeyPlaces(**tensors, **reach._asdict(), **own)
        kernel = _kernels.of_positions
    else:
        arguments["places"] = Slots(sizes.slots, max(reach.page_size, 1), reach.step, **tensors, batch=sizes.batch)
        kernel = _kernels.of_slots
    return Launch(kernel, queries, arguments, {"num_warps": max(4, block // 256), "num_stages": 1})
