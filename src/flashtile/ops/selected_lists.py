"""Lists of the blocks that data have chosen, for rows and for keys: an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.mods.block_mask import selected_lists
from flashtile.ops.lists import has_triton
from flashtile.ops.operation import LIBRARY

_Lists = tuple[Tensor, Tensor, Tensor, Tensor]


def _on_cpu(indices: Tensor, counts: Tensor | None, keys: int) -> _Lists:
    return selected_lists(indices, counts, keys)


def _on_gpu(indices: Tensor, counts: Tensor | None, keys: int) -> _Lists:
    """By kernels, if there are any for it."""
    from flashtile.backends.portable import selected_lists as kernels

    if not has_triton() or kernels.why_not(indices, keys):
        return selected_lists(indices, counts, keys)
    return kernels.selected_lists(indices, counts, keys)


def _fake(indices: Tensor, counts: Tensor | None, keys: int) -> _Lists:
    *shape, most = indices.shape
    count = torch.sym_max(shape[0] * shape[1] * shape[2] * most, 1)
    sizes = (*shape, 3), (count,), (*shape[:2], keys, 3), (count,)
    made = [indices.new_empty(size, dtype=torch.int32) for size in sizes]
    return made[0], made[1], made[2], made[3]


# The arguments and results of ``block_mask.selected_lists``.
LIBRARY.define(
    "selected_lists(Tensor indices, Tensor? counts, SymInt keys)"
    " -> (Tensor row_blocks, Tensor row_items, Tensor key_blocks, Tensor key_items)"
)
LIBRARY.impl("selected_lists", _on_cpu, "CPU")
LIBRARY.impl("selected_lists", _on_gpu, "CUDA")
torch.library.register_fake("flashtile::selected_lists", _fake, lib=LIBRARY)
OPERATOR = torch.ops.flashtile.selected_lists.default
