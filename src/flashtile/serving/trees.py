"""Converts servers' draft trees to the words that ``flashtile.attention_with_kvcache(tree_mask=)`` takes.

Words are ``(batch, T)`` int64, with T up to 64: bit u of row t says whether draft row t sees draft key u. Nothing here
reads a tensor's contents on the host, so a CUDA graph may capture it. Unfit tensors raise InvalidInputError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call import cached_arguments
from flashtile.call.arguments import check_tensor, integer
from flashtile.call.cached_arguments import check_tree_rows, tree_pairs
from flashtile.core.errors import InvalidInputError

_INTEGERS = (torch.int32, torch.int64)


def tree_words(mask: Tensor) -> Tensor:
    """The words of a mask, bool ``(batch, T, T)``: True where a row sees a key, which is an ancestor's or its own."""
    return _checked("mask", cached_arguments.tree_words("mask", mask), 2, torch.int64)


def tree_depths(words: Tensor) -> Tensor:
    """The depth of each row, ``(batch, T)`` int32: the number of its ancestors.

    A draft token has the position ``length before the drafts + depth``.
    """
    return tree_pairs(_checked("words", words, 2, torch.int64), words.shape[-1]).sum(-1, dtype=torch.int32) - 1


def tree_from_parents(parents: Tensor) -> Tensor:
    """The words of trees from ``(batch, T)`` integers: each row's parent row, or -1 for a root.

    Rows may be in any order, and there may be several roots.
    """
    rows = _checked("parents", parents, 2, *_INTEGERS).shape[1]
    number = torch.arange(rows, device=parents.device)
    seen = (parents[..., None] == number) | (number[:, None] == number)
    for _ in range(max(rows - 1, 1).bit_length()):  # each round doubles the number of generations that are seen
        seen = torch.matmul(seen.float(), seen.float()) > 0
    return cached_arguments.tree_words("parents", seen)


def tree_from_flashinfer(mask: Tensor, qo_indptr: Tensor, kv_lens: Tensor, rows: int) -> Tensor:
    """The words of FlashInfer's ``packed_custom_mask`` or ``custom_mask``.

    Each request has a mask of its queries times its keys, row by row. As many of its last keys as it has queries are
    read: all keys before these must be visible.

    Args:
        mask: ``packed_custom_mask``, uint8, 8 pairs in a byte, the lowest bit first, with each request starting at a
            new byte; or ``custom_mask``, bool.
        qo_indptr: ``(batch + 1,)`` integers, bounds of the requests' queries.
        kv_lens: ``(batch,)`` integers, keys of each request, drafts included.
        rows: T, at least the number of drafts of each request.
    """
    _checked("mask", mask, 1, torch.uint8, torch.bool)
    queries = _checked("qo_indptr", qo_indptr, 1, *_INTEGERS).long().diff()
    return _of_pairs(mask, queries, _checked("kv_lens", kv_lens, 1, *_INTEGERS).long(), rows)


def tree_from_sglang(mask: Tensor, rows: int, seq_lens: Tensor | None = None) -> Tensor:
    """The words of SGLang's ``tree_mask``, in each of its modes.

    Args:
        mask: A flat tensor. FULL_MASK: bool, for each request its drafts times all its keys; needs seq_lens. QLEN_ONLY:
            bool, drafts times drafts. QLEN_ONLY_BITPACKING: uint8, uint16 or uint32, one number for each draft.
        rows: ``draft_token_num``.
        seq_lens: ``(batch,)`` integers, keys of each request before the drafts; None unless the mode is FULL_MASK.
    """
    if seq_lens is not None:
        _checked("mask", mask, 1, torch.bool)
        before = _checked("seq_lens", seq_lens, 1, *_INTEGERS).long()
        return _of_pairs(mask, torch.full_like(before, rows), before + rows, rows)
    _checked("mask", mask, 1, torch.bool, torch.uint8, torch.uint16, torch.uint32)
    check_tree_rows("rows", integer("rows", rows))
    each = rows * rows if mask.dtype == torch.bool else rows
    if mask.numel() % each:
        raise InvalidInputError("mask", f"has {mask.numel()} elements, must be a multiple of {each} for {rows} rows")
    return (
        cached_arguments.tree_words("mask", mask.view(-1, rows, rows))
        if mask.dtype == torch.bool
        else mask.view(-1, rows).long()
    )


def tree_from_vllm(bias: Tensor, batch: int) -> Tensor:
    """The words of vLLM's ``tree_attn_bias`` ``(T, T)`` (0 where a row sees a key, else -inf), ``batch`` times."""
    _checked("bias", bias, 2, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return cached_arguments.tree_words("bias", (bias == 0)[None]).repeat(integer("batch", batch, 0), 1)


def _of_pairs(mask: Tensor, queries: Tensor, keys: Tensor, rows: int) -> Tensor:
    """The words of requests with these queries and keys; their pairs follow one another in a mask of bits or bools."""
    check_tree_rows("rows", integer("rows", rows))
    packed, pairs = mask.dtype == torch.uint8, queries * keys
    sizes = (pairs + 7) // 8 * 8 if packed else pairs
    number = torch.arange(rows, device=mask.device)
    first, queries, keys = (x[:, None, None] for x in (sizes.cumsum(0) - sizes, queries, keys))
    row, key = number[:, None], keys - queries + number
    inside = (row < queries) & (number < queries) & (key >= 0)
    at = torch.where(inside, first + row * keys + key, 0)
    found = mask[at // 8] >> (at % 8) & 1 != 0 if packed else mask[at]
    return cached_arguments.tree_words("mask", found & inside)


def _checked(name: str, x: Tensor, rank: int, *dtypes: torch.dtype) -> Tensor:
    check_tensor(name, x)
    if x.dtype not in dtypes or x.dim() != rank:
        must = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise InvalidInputError(name, f"is {x.dtype} of {x.dim()} dimensions, must be {must} of {rank}")
    if rank == 2:
        check_tree_rows(name, x.shape[1])
    return x
