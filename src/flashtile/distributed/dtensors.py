"""DTensors that are sharded along the rows: their local tensors are the shards of a mesh's ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flashtile.call.arguments import is_dtensor
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.distributed.exchange import ranks_of

_TENSORS = ("q", "k", "v", "alibi_slopes", "attn_mask", "attn_bias", "sinks")


def run(attention: Callable[..., Any], *, mesh: DeviceMesh, **given: Any) -> Any:
    """Calls ``attention`` with the local tensors of DTensors, and returns DTensors.

    q, k and v are sharded along their rows over the dimensions of ``mesh``, in the layout's order; ``mesh`` may be a
    part of their mesh. Over the other dimensions they are sharded along batch or heads, or replicated.

    Raises:
        InvalidInputError: q, k and v are placed in another way, or differently.
        UnsupportedError: There is dropout, and batch or heads are sharded.
    """
    q, v, packed = given["q"], given["v"], given["cu_seqlens_q"] is not None
    rows = 0 if packed else 1
    for name in "kv":
        if not (is_dtensor(given[name]) and is_dtensor(q)) or given[name].placements != q.placements:
            raise InvalidInputError(name, f"is placed as {_shown(given[name])}, but q as {_shown(q)}")
    along = [i for i, placed in enumerate(q.placements) if placed.is_shard(rows)]
    if any(placed.is_partial() for placed in q.placements):
        raise InvalidInputError("q", f"is placed as {_shown(q)}, must be sharded or replicated")
    if tuple(_members(q.device_mesh, along)) != ranks_of(mesh).members:
        raise InvalidInputError("q", f"is placed as {_shown(q)}, must be sharded along dimension {rows} over mesh")
    others = [placed for i, placed in enumerate(q.placements) if i not in along]
    if given.get("dropout_p") and any(placed.is_shard() for placed in others):
        raise UnsupportedError(
            "dropout_p: of DTensors whose batch or heads are sharded; a shard does not know its place"
        )
    if not packed:
        given |= {"seqlen_q": q.shape[1], "seqlen_k": given["k"].shape[1]}
    local = {name: x.to_local() if name in _TENSORS and is_dtensor(x) else x for name, x in given.items()}
    found = attention(mesh=mesh, **local)
    out = _placed(found[0] if given.get("return_lse") else found, q, q.placements, (*q.shape[:-1], v.shape[-1]))
    if not given.get("return_lse"):
        return out
    # The dimensions of rows and heads are swapped in lse.
    places = [type(p)(p.dim if p.dim < rows else 2 * rows + 1 - p.dim) if p.is_shard() else p for p in q.placements]
    return out, _placed(found[1], q, places, (*q.shape[:rows], q.shape[rows + 1], q.shape[rows]))


def _placed(x: Any, like: Any, placements: Any, shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor

    strides = [1]
    for length in shape[:0:-1]:
        strides.insert(0, strides[0] * max(length, 1))
    size = torch.Size(shape)
    return DTensor.from_local(x, like.device_mesh, placements, run_check=False, shape=size, stride=tuple(strides))


def _shown(x: Any) -> str:
    return str(tuple(x.placements)) if is_dtensor(x) else "no DTensor"


def _members(mesh: DeviceMesh, along: list[int]) -> list[int]:
    """The ranks along some dimensions of a mesh, with this process's coordinates in the other dimensions."""
    here = mesh.get_coordinate()
    index = tuple(slice(None) if i in along else here[i] for i in range(mesh.ndim)) if here else ()
    return mesh.mesh[index].flatten().tolist() if along else []
