"""Draft trees in the forms of servers, as the words that ``flashtile.attention_with_kvcache(tree_mask=)`` takes.

Nothing here reads a tensor's contents on the host, so it may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call.arguments import check_tensor, integer
from flashtile.call.trees import check_rows, dense, words_of
from flashtile.core.errors import InvalidInputError


def tree_words(mask: Tensor) -> Tensor:
    """The words of trees: ``(batch, T)`` int64, bit u of row t says whether draft row t sees draft key u.

    Args:
        mask: bool ``(batch, T, T)``, T up to 64: each row's ancestors and itself.

    Raises:
        InvalidInputError: It is no such tensor.
    """
    return _checked("mask", words_of("mask", mask), 2, (torch.int64,))


def tree_depths(words: Tensor) -> Tensor:
    """The depth of each row of trees, ``(batch, T)`` int32: the number of its ancestors, itself not counted.

    A row's token stands at position ``length before the drafts + depth``.

    Args:
        words: See ``tree_words``.
    """
    return dense(_checked("words", words, 2, (torch.int64,)), words.shape[-1]).sum(-1, dtype=torch.int32) - 1


def tree_from_parents(parents: Tensor) -> Tensor:
    """The words of trees given by parents.

    Args:
        parents: ``(batch, T)`` int32 or int64: the row that is each row's parent, -1 for a root. Rows may be in any
            order, and there may be several roots.

    Raises:
        InvalidInputError: It is no such tensor.
    """
    _checked("parents", parents, 2, (torch.int32, torch.int64))
    rows = parents.shape[1]
    check_rows("parents", rows)
    number = torch.arange(rows, device=parents.device)
    seen = (parents[..., None] == number) | (number[:, None] == number)
    for _ in range(max(rows - 1, 1).bit_length()):  # each doubles how far up is seen
        seen = torch.matmul(seen.float(), seen.float()) > 0
    return words_of("parents", seen)


def tree_from_flashinfer(mask: Tensor, qo_indptr: Tensor, kv_lens: Tensor, rows: int) -> Tensor:
    """The words of FlashInfer's ``packed_custom_mask`` or ``custom_mask``.

    Of each request that is queries times keys, row by row; only the last keys, as many as queries, are read: what is
    before them must be visible.

    Args:
        mask: ``packed_custom_mask``, uint8, 8 pairs a byte, the lowest bit first, each request from a byte of its own
            on; or ``custom_mask``, bool.
        qo_indptr: ``(batch + 1,)`` int32, bounds of the requests' queries.
        kv_lens: ``(batch,)`` int32, keys of each request, drafts included.
        rows: T, at least the most drafts of a request.

    Raises:
        InvalidInputError: An argument is no such tensor.
    """
    _checked("mask", mask, 1, (torch.uint8, torch.bool))
    _checked("qo_indptr", qo_indptr, 1, (torch.int32, torch.int64))
    _checked("kv_lens", kv_lens, 1, (torch.int32, torch.int64))
    return _of_pairs(mask, qo_indptr.long().diff(), kv_lens.long(), _rows(rows))


def tree_from_sglang(mask: Tensor, rows: int, seq_lens: Tensor | None = None) -> Tensor:
    """The words of SGLang's ``tree_mask`` in each of its modes.

    Args:
        mask: Flat. FULL_MASK: bool, of each request its drafts times all its keys; goes with seq_lens. QLEN_ONLY: bool,
            drafts times drafts. QLEN_ONLY_BITPACKING: uint8, uint16 or uint32, a number a draft.
        rows: ``draft_token_num``.
        seq_lens: ``(batch,)``, keys of each request before the drafts; None unless the mode is FULL_MASK.

    Raises:
        InvalidInputError: An argument is no such tensor.
    """
    rows, kinds = _rows(rows), (torch.bool, torch.uint8, torch.uint16, torch.uint32)
    _checked("mask", mask, 1, kinds if seq_lens is None else kinds[:1])
    if seq_lens is not None:
        _checked("seq_lens", seq_lens, 1, (torch.int32, torch.int64))
        return _of_pairs(mask, torch.full_like(seq_lens, rows).long(), seq_lens.long() + rows, rows)
    each = rows * rows if mask.dtype == torch.bool else rows
    if mask.numel() % each:
        raise InvalidInputError("mask", f"has {mask.numel()} elements, must be a multiple of {each} for {rows} rows")
    return words_of("mask", mask.view(-1, rows, rows)) if mask.dtype == torch.bool else mask.view(-1, rows).long()


def tree_from_vllm(bias: Tensor, batch: int) -> Tensor:
    """The words of vLLM's ``tree_attn_bias``, the same tree for all sequences.

    Args:
        bias: ``(T, T)`` of floats: 0 where a row sees a key, -inf elsewhere.
        batch: Sequences.

    Raises:
        InvalidInputError: It is no such tensor.
    """
    _checked("bias", bias, 2, (torch.float32, torch.float16, torch.bfloat16, torch.float64))
    return words_of("bias", (bias == 0)[None]).repeat(integer("batch", batch, 0), 1)


def _of_pairs(mask: Tensor, queries: Tensor, keys: Tensor, rows: int) -> Tensor:
    """Of requests of so many queries and keys, whose pairs follow one another in a mask, bits or bools."""
    packed, pairs = mask.dtype == torch.uint8, queries * keys
    sizes = (pairs + 7) // 8 * 8 if packed else pairs
    first, number = sizes.cumsum(0) - sizes, torch.arange(rows, device=mask.device)
    first, queries, keys = (x[:, None, None] for x in (first, queries, keys))
    row, key = number[:, None], keys - queries + number
    inside = (row < queries) & (number < queries) & (key >= 0)
    at = torch.where(inside, first + row * keys + key, 0)
    found = mask[at // 8] >> (at % 8) & 1 != 0 if packed else mask[at]
    return words_of("mask", found & inside)


def _rows(rows: int) -> int:
    check_rows("rows", integer("rows", rows))
    return rows


def _checked(name: str, x: Tensor, rank: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    check_tensor(name, x)
    if x.dtype not in dtypes:
        must = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise InvalidInputError(name, f"dtype is {x.dtype}, must be {must}")
    if x.dim() != rank:
        raise InvalidInputError(name, f"has {x.dim()} dimensions, must have {rank}")
    if rank == 2:
        check_rows(name, x.shape[1])
    return x
