"""transformers over sequences that ranks share: a model's masks and layers within ``over_ranks``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile import distributed
from flashtile.core.errors import InvalidInputError, UnsupportedError


class Shared:
    """One sequence, or packed documents, over the ranks of a mesh.

    Attributes:
        keywords: The keywords of ``distributed.attention`` that all layers share.
        longest: The number of rows of the whole.
    """

    def __init__(
        self, mesh: DeviceMesh, seqlen: int | None, cu_seqlens: Tensor | Sequence[int] | None, layout: Any, comm: str
    ) -> None:
        self._rows = distributed.positions(mesh, layout, seqlen=seqlen, cu_seqlens=cu_seqlens)
        self.keywords: dict[str, Any] = {"mesh": mesh, "layout": layout, "comm": comm}
        self.is_packed = cu_seqlens is not None
        name, value = ("seqlen", seqlen) if cu_seqlens is None else ("cu_seqlens", cu_seqlens)
        self.keywords |= {f"{name}_q": value, f"{name}_k": value}
        self.longest = int(seqlen if cu_seqlens is None else cu_seqlens[-1])  # type: ignore[arg-type]
        self._seen: tuple[weakref.ref[Tensor], int] | None = None

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Refuses positions other than the rank's, such as a model makes if it is given none.

        The positions are checked once for all layers, since the check waits for the device.
        """
        if position_ids is None:
            return
        version = 0 if position_ids.is_inference() else position_ids._version
        if self._seen is not None and self._seen[0]() is position_ids and self._seen[1] == version:
            return
        if position_ids.shape[-1:] != self._rows.shape or not bool((position_ids == self._rows.to(position_ids)).all()):
            raise InvalidInputError(
                "position_ids", "are not those of this rank's rows: pass distributed.positions(mesh, ...)[None]"
            )
        self._seen = weakref.ref(position_ids), version

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """The layer's attention. With packed documents the batch is one."""
        if not self.is_packed:
            found: Tensor = distributed.attention(q, k, v, **self.keywords, **options)
            return found
        if q.shape[0] != 1:
            raise InvalidInputError("input_ids", f"has a batch of {q.shape[0]}, must be 1 with cu_seqlens")
        found = distributed.attention(q[0], k[0], v[0], **self.keywords, **options)
        return found[None]


# The entered sequences, the innermost last. Masks are made inside; layers take the sequence from their mask, also if a
# checkpoint repeats them later. A list, since torch.compile cannot trace context variables.
_entered: list[Shared] = []


def current() -> Shared | None:
    """The innermost entered sequence."""
    return _entered[-1] if _entered else None


@contextlib.contextmanager
def over_ranks(
    mesh: DeviceMesh,
    *,
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: distributed.Layout = "zigzag",
    comm: str = "auto",
) -> Iterator[None]:
    """Within this context, models that ``enable`` switched run over sequences that are spread over ranks.

    It holds for all threads of the process. Give the model this rank's rows of every tensor with a row for each token,
    by ``distributed.shard``; give it ``position_ids`` by ``distributed.positions``, and no attention_mask and no cache.
    A loss that predicts the next token takes the token from ``shift_labels``, since another rank may have the next row.

    Args:
        mesh: As in ``distributed.attention``.
        seqlen: Rows of the whole sequence; or
        cu_seqlens: bounds of packed documents, with a batch of one.
        layout: As in ``distributed.attention``.
        comm: As in ``distributed.attention``.

    Raises:
        InvalidInputError: Names the argument that does not fit.
    """
    _entered.append(Shared(mesh, seqlen, cu_seqlens, layout, comm))
    try:
        yield
    finally:
        _entered.pop()


def refuse(what: str) -> UnsupportedError:
    """The error for a feature that sequences over ranks do not have."""
    return UnsupportedError(f"{what}: not supported for sequences over ranks (over_ranks)")


def whole_mask() -> Tensor:
    """Refuses to write out a mask of a sequence over ranks."""
    raise refuse("a mask that is written out, or not known")
