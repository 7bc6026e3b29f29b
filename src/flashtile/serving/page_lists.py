"""One list of all sequences' pages, in place of a page table: from FlashInfer's tensors, and to and from a table."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call.arguments import check_tensor, integer
from flashtile.core.errors import InvalidInputError


def pages_from_flashinfer(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> dict[str, Tensor]:
    """The keywords of ``flashtile.attention_with_kvcache`` for the pages of a FlashInfer batch.

    Args:
        indptr: ``(batch + 1,)`` int32, ``paged_kv_indptr``.
        indices: ``(total_pages,)`` int32, ``paged_kv_indices``.
        last_page_len: ``(batch,)`` int32, ``paged_kv_last_page_len``: keys in each sequence's last page.
        page_size: Rows of a page.

    Returns:
        page_indptr, page_indices and cache_seqlens. cache_seqlens counts all keys in the pages: if the call appends new
        keys, subtract them.

    Source: FlashInfer, docs.flashinfer.ai, "KV-Cache Layout".
    """
    for name, x in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        check_tensor(name, x)
    if indptr.shape != (last_page_len.shape[0] + 1,):
        must = f"must be {(last_page_len.shape[0] + 1,)}, one more than last_page_len has"
        raise InvalidInputError("indptr", f"has shape {tuple(indptr.shape)}, {must}")
    counts = indptr.diff()
    lengths = torch.where(counts > 0, (counts - 1) * integer("page_size", page_size) + last_page_len, 0)
    return {"page_indptr": indptr, "page_indices": indices, "cache_seqlens": lengths.to(torch.int32)}


def page_table_from_list(page_indptr: Tensor, page_indices: Tensor, max_pages: int) -> Tensor:
    """The page_table ``(batch, max_pages)`` int32 for a list of pages; -1 past a sequence's last page."""
    check_tensor("page_indptr", page_indptr)
    check_tensor("page_indices", page_indices)
    place = torch.arange(integer("max_pages", max_pages, 0), device=page_indptr.device)
    at, exists = page_indptr[:-1, None] + place, place < page_indptr.diff()[:, None]
    # An empty list of pages has nothing to look up.
    padded = torch.cat([page_indices, page_indices.new_full((1,), -1)])
    return torch.where(exists, padded[torch.where(exists, at, len(page_indices))], -1).to(torch.int32)


def page_list_from_table(page_table: Tensor, lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """page_indptr ``(batch + 1,)`` and page_indices ``(batch * max_pages,)`` for a page_table.

    Nothing waits for the device, so page_indices has the greatest possible length; entries past page_indptr[-1] are -1.

    Args:
        page_table: ``(batch, max_pages)`` int32.
        lengths: ``(batch,)`` int32: the keys of each sequence, with the keys that a call appends.
        page_size: Rows of a page.
    """
    check_tensor("page_table", page_table)
    check_tensor("lengths", lengths)
    size = integer("page_size", page_size)
    counts = (lengths.clamp(min=0) + size - 1) // size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    place = torch.arange(page_table.shape[1], device=page_table.device)
    exists = place < counts[:, None]
    # The target of each entry of the table. Entries without keys go to one extra place, which is cut off.
    at = torch.where(exists, indptr[:-1, None] + place, page_table.numel())
    indices = page_table.new_full((page_table.numel() + 1,), -1)
    indices[at.flatten()] = page_table.flatten()
    return indptr, indices[:-1]
