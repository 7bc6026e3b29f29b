"""Draft trees of speculative decoding: a 64-bit word a row, bit u of which says whether the row sees draft key u.

A row sees itself and its ancestors, and its depth is their number; it stands at that depth after the keys before the
drafts, whatever its index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call.arguments import check_tensor
from flashtile.core.errors import InvalidInputError

# Rows of a tree: the bits of a word.
MOST_ROWS = 64


def words_of(name: str, mask: object) -> Tensor:
    """The words ``(batch, T)`` int64 of a tree mask: bool ``(batch, T, T)``, or words, which are returned as they are.

    Raises:
        InvalidInputError: Naming the argument, if it is neither.
    """
    check_tensor(name, mask)
    assert isinstance(mask, Tensor)
    if mask.dtype != torch.bool:
        return mask
    if mask.dim() != 3 or mask.shape[1] != mask.shape[2]:
        raise InvalidInputError(name, f"has shape {tuple(mask.shape)}, must be (batch, T, T) if it is bool")
    check_rows(name, mask.shape[1])
    return (mask.long() << torch.arange(mask.shape[2], device=mask.device)).sum(-1)


def check_rows(name: str, rows: int) -> None:
    """Refuses a tree of more rows than a word has bits."""
    if rows > MOST_ROWS:
        raise InvalidInputError(name, f"is of trees of {rows} rows, at most {MOST_ROWS} are supported")


def dense(words: Tensor, rows: int) -> Tensor:
    """What the first ``rows`` rows of trees see of one another: ``(..., T)`` words as bool ``(..., rows, rows)``."""
    return (words[..., :rows, None] >> torch.arange(rows, device=words.device)) & 1 != 0


def check_tree(name: str, words: Tensor, rows: int, sequence: int) -> None:
    """Refuses words ``(T,)`` whose first rows are no tree: a row that does not see itself, a cycle, or a gap.

    Raises:
        InvalidInputError: Naming the first row that is wrong.
    """
    seen = dense(words, rows)

    def refuse(where: Tensor, text: str) -> None:
        if where.any():
            t, u = where.nonzero()[0].tolist()
            raise InvalidInputError(name, f"sequence {sequence}: {text.format(t=t, u=u)}")

    itself = torch.eye(rows, dtype=torch.bool, device=words.device)
    refuse(itself & ~seen, "row {t} does not see itself, so its own bit is missing")
    refuse(seen & seen.T & ~itself, "rows {t} and {u} see each other, which is a cycle")
    further = (seen.float() @ seen.float() > 0) & ~seen
    refuse(further, "row {t} does not see row {u}, an ancestor of one that it sees")
