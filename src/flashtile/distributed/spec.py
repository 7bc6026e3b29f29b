"""Records of a call over ranks: the call, the tensors that its backward needs, and its gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashtile.call.arguments import Options, Tensors
from flashtile.core.masks import Band
from flashtile.distributed.exchange import Ranks
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout


class Spec(NamedTuple):
    """A call without its tensors.

    Attributes:
        ranks: The ranks that share the call.
        layout: The layout of queries and keys.
        comm: One of ``COMMS``.
        lengths_q: Queries of each document of the whole. A dense call is one document.
        lengths_k: Keys of each document.
        inferred: For each of the two lengths, whether it is this rank's rows times the ranks, because no length was
            given.
        packed: Whether documents are packed.
        options: The call's options.
        with_lse: Whether lse is returned.
        intervals: The pairs that an interval mask keeps.
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
        """The call's mask."""
        return self.options.band

    def rows(self, q: Tensor) -> int:
        """The number of rows of one sequence in a tensor, or of all documents."""
        return q.shape[0 if self.packed else 1]


class Saved(NamedTuple):
    """The tensors that the backward needs, packed; if heads are exchanged, with this rank's heads."""

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
        """The call's tensors, without those that its functions read."""
        return Tensors(**{name: getattr(self, name) for name in self._fields[3:]})


def saved_of(out: Tensor, lse: Tensor, sinks: Tensor | None, t: Tensors) -> Saved:
    """The tensors of a call to save for its backward."""
    return Saved(out, lse, sinks, *(getattr(t, name) for name in Saved._fields[3:]))


class Whole(NamedTuple):
    """The gradients of a rank's call.

    Attributes:
        dq: Gradient of the rank's rows.
        dk: Gradient of the rank's keys.
        dv: Gradient of the rank's values.
        dsinks: Gradient of sinks, over all ranks' rows and on every rank, like the following ones.
        dbias: Gradient of attn_bias.
        doperands: Gradients of the tensors that score_mod reads.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    dbias: Tensor | None
    doperands: tuple[Tensor | None, ...]
