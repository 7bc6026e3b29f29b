"""What a call over ranks is, what its backward needs, and what that gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashtile.call.arguments import Options, Tensors
from flashtile.core.masks import Band
from flashtile.distributed.exchange import Ranks
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout


class Spec(NamedTuple):
    """A call but for its tensors.

    Attributes:
        ranks: Those that share it.
        layout: Of queries and keys.
        comm: One of ``COMMS``.
        lengths_q: Queries of each document of the whole; of a dense call its one length.
        lengths_k: Keys, likewise.
        inferred: Which of the two are this rank's rows times the ranks, since nothing else was said.
        packed: Whether documents are packed.
        options: Its options.
        with_lse: Whether lse is returned.
        intervals: What an interval mask keeps.
    """

    ranks: Ranks
    layout: Layout
    comm: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    inferred: tuple[bool, bool]
    packed: bool
    options: Options
    with_lse: bool
    intervals: Kept | None = None

    @property
    def band(self) -> Band:
        """Its mask."""
        return self.options.band

    def rows(self, q: Tensor) -> int:
        """Rows of a sequence in a tensor, or of all documents."""
        return q.shape[0 if self.packed else 1]


class Saved(NamedTuple):
    """What the backward needs: packed tensors, of this rank's heads where heads are exchanged."""

    out: Tensor
    lse: Tensor
    sinks: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    rng_state: Tensor | None
    attn_mask: Tensor | None
    attn_bias: Tensor | None
    row_keys: Tensor | None
    key_rows: Tensor | None

    @property
    def tensors(self) -> Tensors:
        """Those of the call without its functions."""
        return Tensors(**{name: getattr(self, name) for name in self._fields[3:]})


def saved_of(out: Tensor, lse: Tensor, sinks: Tensor | None, t: Tensors) -> Saved:
    """What to save of a call."""
    return Saved(out, lse, sinks, *(getattr(t, name) for name in Saved._fields[3:]))


class Whole(NamedTuple):
    """The gradients of a rank's call.

    Attributes:
        dq: Of its rows.
        dk: Of its keys.
        dv: Likewise.
        dsinks: Of all ranks' rows, on every rank, as what follows.
        dbias: Of attn_bias.
        doperands: Of what its score_mod reads.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    dbias: Tensor | None
    doperands: tuple[Tensor | None, ...]
