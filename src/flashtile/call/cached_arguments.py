"""The table of a cached call's arguments, in the rows of ``flashtile.call.arguments``; and the words of draft trees.

A word of 64 bits is a row of a tree: bit u says whether it sees draft key u. It sees itself and its ancestors. Its
depth is the number of its ancestors; it stands that much after the keys before the drafts, whatever its index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from flashtile.call import arguments
from flashtile.call.arguments import FLOAT8 as FLOAT8
from flashtile.call.arguments import FLOAT32, INT32, Argument, check_tensor
from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.core.sizes import holds

# Rows of a draft tree: the bits of a word.
MOST_TREE_ROWS = 64
EIGHT_BITS = (FLOAT8, torch.float8_e5m2)
_CACHE = (EIGHT_BITS, "float8_e4m3fn, float8_e5m2")
_WORDS = ((torch.int64,), "bool (batch, T, T) or int64 words (batch, T)")
_BOOL = ((torch.bool,), "bool")
_SLOTS = ((torch.int64, torch.int32), "int64 or int32")
_QV = Argument("Queries of values.", "batch seqlen_q num_heads_q head_dim_v", None, "rows")
_ROW_SCALE = Argument(
    "Of 8-bit values, by row and 128 columns.", "entries capacity num_heads_kv v_blocks", FLOAT32, "any"
)
_BY_POSITION = Argument("Rotations.", "seqlen_rotary rotary_dim/2", FLOAT32, "rows", like_q=True)


@dataclass(eq=False)
class CacheTensors:
    """The tensors of one cached call; absent ones are None. Treat it as immutable.

    The names of the caches' axes are for a call without pages: with page_table or page_indices they are ``pages
    page_size`` in place of ``entries capacity``. New keys are packed if cu_seqlens_k_new is given.
    """

    out: Annotated[Tensor, Argument("Written.", "batch seqlen_q num_heads_q head_dim_v", layout="any")]
    q: Annotated[Tensor, arguments.TENSORS["q"]]
    k_cache: Annotated[Tensor, Argument("Keys.", "entries capacity num_heads_kv head_dim", _CACHE, "any", like_q=True)]
    v_cache: Annotated[
        Tensor, Argument("Values.", "entries capacity num_heads_kv head_dim_v", _CACHE, "any", like_q=True)
    ]
    cache_seqlens: Annotated[Tensor, Argument("Lengths before appending.", "batch", INT32)]
    page_table: Annotated[Tensor | None, Argument("Pages.", "batch max_pages", INT32, "rows")] = None
    cache_batch_idx: Annotated[Tensor | None, Argument("Entries.", "batch", INT32)] = None
    cache_leftpad: Annotated[Tensor | None, Argument("First keys.", "batch", INT32)] = None
    k: Annotated[Tensor | None, Argument("New keys.", "batch seqlen_new num_heads_kv head_dim", None, "rows")] = None
    v: Annotated[Tensor | None, Argument("New values.", "batch seqlen_new num_heads_kv head_dim_v", None, "rows")] = (
        None
    )
    rotary_cos: Annotated[Tensor | None, _BY_POSITION] = None
    rotary_sin: Annotated[Tensor | None, _BY_POSITION] = None
    rotary_seqlens: Annotated[Tensor | None, Argument("First positions.", "batch", INT32)] = None
    k_scale: Annotated[Tensor | None, Argument("Of 8-bit keys.", "[entries] num_heads_kv", FLOAT32)] = None
    v_scale: Annotated[Tensor | None, Argument("Of 8-bit values.", "[entries] num_heads_kv", FLOAT32)] = None
    cu_seqlens_q: Annotated[Tensor | None, Argument("Bounds of packed queries.", "batch+1", INT32)] = None
    cu_seqlens_k_new: Annotated[Tensor | None, Argument("Bounds of packed keys.", "batch+1", INT32)] = None
    alibi_slopes: Annotated[Tensor | None, arguments.TENSORS["alibi_slopes"]] = None
    sinks: Annotated[Tensor | None, arguments.TENSORS["sinks"]] = None
    tree_mask: Annotated[Tensor | None, Argument("Words of draft trees.", "batch draft_rows", _WORDS)] = None
    slot_mapping: Annotated[Tensor | None, Argument("Where new keys go.", "batch seqlen_new", _SLOTS)] = None
    causal: Annotated[Tensor | None, Argument("Which sequences are causal.", "batch", _BOOL)] = None
    page_indptr: Annotated[Tensor | None, Argument("Bounds of page_indices.", "batch+1", INT32)] = None
    page_indices: Annotated[Tensor | None, Argument("Pages, one sequence's after another's.", "total_pages", INT32)] = (
        None
    )
    qv: Annotated[Tensor | None, _QV] = None

    row_keys: Annotated[Tensor | None, arguments.TENSORS["row_keys"]] = None
    key_rows: Annotated[
        Tensor | None, replace(arguments.TENSORS["key_rows"], axes="batch num_heads_q mask_keys ends")
    ] = None
    row_scale: Annotated[Tensor | None, _ROW_SCALE] = None
    operands: Annotated[tuple[Tensor, ...] | None, arguments.TENSORS["operands"]] = None
    numbers: Annotated[tuple[float, ...] | None, arguments.TENSORS["numbers"]] = None

    @property
    def in_pages(self) -> bool:
        """Whether the caches are pages."""
        return self.page_table is not None or self.page_indices is not None


class CacheOptions(NamedTuple):
    """The non-tensor arguments of one cached call, checked."""

    window_left: Annotated[int | None, arguments.OPTIONS["window_left"]] = None
    window_right: Annotated[int | None, arguments.OPTIONS["window_right"]] = None
    max_seqlen_q: Annotated[int | None, arguments.OPTIONS["max_seqlen_q"]] = None
    max_seqlen_k: Annotated[int | None, arguments.OPTIONS["max_seqlen_k"]] = None
    softmax_scale: Annotated[float | None, arguments.OPTIONS["softmax_scale"]] = None
    softcap: Annotated[float, arguments.OPTIONS["softcap"]] = 0.0
    rotary_interleaved: Annotated[bool, Argument("Pairs (2i, 2i + 1).", check=arguments.flag)] = False
    backend: Annotated[str, arguments.OPTIONS["backend"]] = ""
    attention_chunk: Annotated[int | None, arguments.OPTIONS["attention_chunk"]] = None
    mirrored: Annotated[bool, arguments.OPTIONS["mirrored"]] = False
    return_max_scores: Annotated[bool, arguments.OPTIONS["return_max_scores"]] = False
    batch_invariant: Annotated[str, arguments.OPTIONS["batch_invariant"]] = ""
    mods: Annotated[tuple[str, ...], arguments.OPTIONS["mods"]] = ()
    counted_by: Annotated[str, arguments.OPTIONS["counted_by"]] = ""

    @property
    def band(self) -> Band:
        """The bounds of windows, of causality and of chunks."""
        return Band(self.window_left, self.window_right, self.attention_chunk)


TENSORS = arguments.table(CacheTensors)
# Makes the options of a call from its keywords, of the others those from max_seqlen_q on.
read = arguments.reader(CacheOptions)


def first_of(intervals: Tensor | None, b: int, length: int) -> Tensor | None:
    """Sequence b's intervals of its first elements; elements that a mask is too short for have empty ones."""
    if intervals is None:
        return None
    given = intervals if intervals.shape[0] == 1 else intervals[b : b + 1]
    missing = length - given.shape[2]
    if given.shape[2] == 1 or missing <= 0:
        return given if given.shape[2] == 1 else given[:, :, :length]
    return torch.cat((given, given.new_zeros(*given.shape[:2], missing, 2)), dim=2)


def tree_words(name: str, mask: object) -> Tensor:
    """The words ``(batch, T)`` int64 of a tree mask: bool ``(batch, T, T)``, or words, which are returned as they are.

    Raises:
        InvalidInputError: Naming the argument, if it is neither.
    """
    check_tensor(name, mask)
    assert isinstance(mask, Tensor)
    if mask.dtype != torch.bool:
        return mask
    if mask.dim() != 3 or holds(mask.shape[1] != mask.shape[2]):
        raise InvalidInputError(name, f"has shape {tuple(mask.shape)}, must be (batch, T, T) if it is bool")
    check_tree_rows(name, mask.shape[1])
    return (mask.long() << torch.arange(mask.shape[2], device=mask.device)).sum(-1)


def check_tree_rows(name: str, rows: int) -> None:
    """Refuses a tree of more rows than a word has bits."""
    if holds(rows > MOST_TREE_ROWS):
        raise InvalidInputError(name, f"is of trees of {rows} rows, at most {MOST_TREE_ROWS} are supported")


def tree_pairs(words: Tensor, rows: int) -> Tensor:
    """What the first ``rows`` rows of trees see of one another: ``(..., T)`` words as bool ``(..., rows, rows)``."""
    return (words[..., :rows, None] >> torch.arange(rows, device=words.device)) & 1 != 0


def check_tree(name: str, words: Tensor, rows: int, sequence: int) -> None:
    """Refuses words ``(T,)`` if their first rows are no tree: a row that does not see itself, a cycle, or a gap.

    Raises:
        InvalidInputError: Naming the first row that is wrong.
    """
    seen = tree_pairs(words, rows)

    def refuse(where: Tensor, text: str) -> None:
        if where.any():
            t, u = where.nonzero()[0].tolist()
            raise InvalidInputError(name, f"sequence {sequence}: {text.format(t=t, u=u)}")

    itself = torch.eye(rows, dtype=torch.bool, device=words.device)
    refuse(itself & ~seen, "row {t} does not see itself, so its own bit is missing")
    refuse(seen & seen.T & ~itself, "rows {t} and {u} see each other, which is a cycle")
    further = (seen.float() @ seen.float() > 0) & ~seen
    refuse(further, "row {t} does not see row {u}, an ancestor of one that it sees")
