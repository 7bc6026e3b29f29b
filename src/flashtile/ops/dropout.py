"""The state of dropout's random numbers, which no recomputation may draw anew: gradients would be of other ones.

Partitioners of ``torch.compile`` recompute what a backward needs and nobody tells them to save: under a low
``activation_memory_budget`` PyTorch's own random operators too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.core.errors import UnsupportedError
from flashtile.ops.operation import LIBRARY


def drawn(q: Tensor) -> Tensor:
    """A Philox seed and offset, ``(2,)`` int64 on q's device, from PyTorch's generator."""
    if not torch.compiler.is_compiling():
        return _randint(q)
    if torch._C._are_functorch_transforms_active():
        # What random numbers are under vmap is what it knows of PyTorch's operator alone.
        if torch._functorch.config.activation_memory_budget < 1:
            raise UnsupportedError("dropout_p: torch.compile of a transform with an activation_memory_budget below 1")
        return _randint(q)
    # Each draw takes a new tensor, so that a search for common subexpressions does not make one of two draws.
    like = torch.empty(2, dtype=torch.int64, device=q.device)
    state: Tensor = torch.ops.flashtile.dropout_state(like)
    return state


def _randint(like: Tensor) -> Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=like.device)


def _marked(keyset: Any, like: Tensor) -> Tensor:
    """The operator under autograd: where a graph is made of it, tells partitioners what to do with its node."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    meta: dict[str, Any] = traceback.current_meta
    # Where torch.utils.checkpoint has marked it, its recomputation finds the generator's state as it was.
    marks = traceback.has_preserved_node_meta() and "recompute" not in meta
    if marks:
        # With a budget of 0 only inputs are saved, whatever is asked.
        meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE if _budget(meta) == 0 else CheckpointPolicy.MUST_SAVE
    try:
        with torch._C._AutoDispatchBelowAutograd():
            state: Tensor = torch.ops.flashtile.dropout_state.default.redispatch(
                keyset & torch._C._after_autograd_keyset, like
            )
            return state
    finally:
        if marks:
            del meta["recompute"]


def _budget(meta: dict[str, Any]) -> float:
    """The share of activations that a partitioner may save, of a region or of all."""
    from torch._functorch import config

    custom = meta.get("custom")
    region = custom.get("_region_activation_memory_budget") if isinstance(custom, dict) else None
    return config.activation_memory_budget if region is None else region


LIBRARY.define("dropout_state(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("dropout_state", _randint, _device)
LIBRARY.impl("dropout_state", _marked, "Autograd", with_keyset=True)
torch.library.register_fake("flashtile::dropout_state", torch.empty_like, lib=LIBRARY)
