"""DTensor: the shardings of a call that need no communication.

Sequences are independent, and so are heads; rows and keys are not. Along each dimension of the mesh a call is therefore
replicated, or its batch or its heads are sharded, with each key head where its query heads are. DTensor redistributes
tensors that arrive in another way.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashtile.call.arguments import GRADIENTS
from flashtile.core.errors import UnsupportedError
from flashtile.ops import operators as ops
from flashtile.ops.operation import Operator

# Output, or gradient or tangent -> the tensor that it is like.
_LIKE = {**{d: name for name, d in GRADIENTS.items()}, "dout": "out", "dlse": "lse"}


def _axis(along: str, name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension of a tensor that belongs to the batch or the heads; None where it has none or broadcasts it."""
    rank = len(shape)
    if name in ("cu_seqlens_q", "cu_seqlens_k", "rng_state", "origins", "row_items", "key_items"):
        return None
    if name in ("alibi_slopes", "sinks"):
        return rank - 1 if along == "heads" else 0 if rank == 2 else None
    if name in ("attn_mask", "attn_bias", "row_keys", "key_rows", "row_blocks", "key_blocks"):
        axis = rank - (3 if along == "heads" else 4)
        return axis if axis >= 0 and shape[axis] > 1 else None
    return rank - 2 if along == "heads" else 0


class _Call:
    """A call of an operator on DTensors, from which its shardings follow; ``given`` are specs or plain values."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        q, k = given["q"], given["k"]
        self.packed, self.mesh = q.ndim == 3, q.mesh
        self.heads_q, self.heads_kv = q.shape[-2], k.shape[-2]
        shapes = {name: tuple(x.shape) for name, x in given.items() if hasattr(x, "placements")}
        # lse without the dimension that its gradient lacks.
        self.shapes = {"out": tuple(q.shape), **shapes, "lse": tuple(q.shape[:-1])}

    def ways(self) -> list[str]:
        """What may be sharded."""
        ways = ["nothing"] if self.packed else ["nothing", "batch"]
        groups = (self.heads_q,) if self.heads_kv == 1 else (self.heads_q, self.heads_kv)
        return [*ways, "heads"] if all(self._divides(heads) for heads in groups) else ways

    def _divides(self, heads: int) -> bool:
        """Whether every part of the mesh that is not larger gets the same number of heads."""
        sizes = tuple(self.mesh.shape)
        parts = (math.prod(c) for n in range(1, len(sizes) + 1) for c in itertools.combinations(sizes, n))
        return all(heads % part == 0 for part in parts if part <= heads)

    def axis(self, way: str, name: str) -> int | None:
        """The dimension of a tensor that is sharded."""
        like = _LIKE.get(name, name)
        if way == "nothing" or like not in self.shapes:
            return None
        if way == "heads" and like in ("k", "v") and self.heads_kv == 1:
            return None  # all query heads use the one key head
        return _axis(way, like, self.shapes[like])


def _shardings(tensor: ModuleType, operator: Operator) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The shardings of an operator, as ``register_sharding`` asks for them."""

    def acceptable(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        call = _Call(operator.named(args))
        return [(outputs(call, way), inputs(call, way)) for way in call.ways()]

    def inputs(call: _Call, way: str) -> list[Any]:
        placements = []
        for name, x in call.given.items():
            axis = call.axis(way, name)
            placed = tensor.Replicate() if axis is None else tensor.Shard(axis)
            placements.append(placed if hasattr(x, "placements") else None)
        return placements

    def outputs(call: _Call, way: str) -> list[Any]:
        wanted = (*call.given["grads"], False) if operator is ops.BACKWARD else (True, True)
        placements = []
        for name, is_wanted in zip(operator.results, wanted, strict=True):  # of operands there are none
            axis = call.axis(way, name)
            if way == "nothing" or not is_wanted:
                placements.append(tensor.Replicate())
            else:  # the gradient of what all shards use is the sum of theirs
                placements.append(tensor.Partial() if axis is None else tensor.Shard(axis))
        return placements

    return acceptable


def refuse_dropout(q: Any) -> None:
    """Raises for a DTensor.

    Which elements are dropped depends on the place in the batch and among the heads, which a shard does not know.
    """
    if hasattr(q, "placements"):
        raise UnsupportedError("dropout_p: dropout of DTensors is not supported; call attention on local tensors")


def register() -> None:
    """Tells DTensor about the operators, once it has been imported."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        _register(tensor)


@functools.cache
def _register(tensor: ModuleType) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for operator in (ops.FORWARD, ops.BACKWARD, ops.JVP):
        register_sharding(operator.overload)(_shardings(tensor, operator))
