"""What the GPU backends' records of a call have in common, made from a ``Problem`` and its tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import PACKED_ROWS, Dropout, Mod, Rows, SlopeTensor
from flashtile.backends.gpu.launch import Launch, Pointer, TensorMap, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.call.problem import AHEAD, Problem
from flashtile.core import philox

mods = device_code("flashtile.backends.gpu.device.mods")
# The two extra dimensions of a packed tensor's map, in elements: see PACKED_ROWS. The first stride times the
# coordinate PACKED_ROWS is 2**64 minus PACKED_ROWS rows, and addresses wrap.
_ANY = 0x7FFF0000
_WRAP = 2**34


def geometry(shape: tuple[int, ...], strides: tuple[int, ...], varlen: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor's map, in elements.

    A dimension of size 1 may come with any stride, and TMA takes multiples of 16 bytes only: head_dim is one.
    """
    if 1 in shape or strides[-1] != 1:
        head_dim = shape[-1]
        own = [head_dim if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
        strides = (*own[:-1], 1)
    if not varlen:
        return shape, strides
    row = strides[0]
    return (_ANY, _ANY, PACKED_ROWS, *shape[1:]), (_WRAP - row, row, row, strides[1], 1)


def rows_of(
    name: str, tensor: Tensor, block_dim: int, desc: TensorMap | tuple[TensorMap, ...] | None = None, vector: int = 1
) -> Rows:
    """The record of a tensor that is the operand ``name``; desc: as in ``Rows``."""
    strides = tensor.stride()
    batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    return Rows(pointer(tensor, name), desc, batch, row, head, tensor.shape[-1], block_dim, vector, len(strides) == 3)


def max_scores_of(problem: Problem) -> Pointer | None:
    """Where the largest scores go: after lse, so on any address; None for a call that does not ask for them."""
    return Pointer(torch.float32, "max_scores", aligned=False) if problem.max_scores else None


def score_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a mask or a bias over (batch, head, row, key), 0 where it broadcasts."""
    own = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (0,) * (4 - tensor.dim()) + tuple(own)


def indices(tensor: Tensor | None, operand: str) -> Pointer | None:
    """The ``Pointer`` to numbers of sequences or tokens: slices of a server's begin anywhere, and share a build."""
    return None if tensor is None else Pointer(tensor.dtype, operand, 0, aligned=False)


def named(**given: Mod | None) -> tuple[tuple[Mod, ...] | None, str]:
    """The mods among those given, in their order, and their names, for ``Mods``."""
    found = {name: mod for name, mod in given.items() if mod is not None}
    return tuple(found.values()) or None, " ".join(found)


def dropout_of(problem: Problem, rng_state: Tensor | None, origins: Pointer | None, has_ptx: bool) -> Dropout:
    """``Mods.dropout``; has_ptx: whether the target takes inline PTX."""
    p = problem.dropout_p
    limit = threshold_bits(philox.threshold(p))
    return Dropout(pointer(rng_state, "rng_state"), limit, 1.0 / (1.0 - p), origins, has_ptx)


def softcap_of(problem: Problem) -> Mod | None:
    """The mod of a softcap."""
    return Mod(mods.softcap, mods.softcap_linear, None, problem.softcap) if problem.softcap > 0 else None


def alibi_of(problem: Problem, slopes: Tensor | None) -> Mod | None:
    """The mod of ALiBi's slopes, by head or by sequence and head."""
    if slopes is None:
        return None
    stride, last = (problem.num_heads_q, len(slopes) - 1) if slopes.dim() == 2 else (0, 0)
    return Mod(mods.alibi, None, mods.slope_of_head, SlopeTensor(pointer(slopes, "alibi_slopes"), stride, last))


def table_launches(problem: Problem, t: Any) -> dict[str, Launch]:
    """What fills a call's table of distances, by name; none without a score mod."""
    if problem.score_function is None:
        return {}
    from flashtile.backends.gpu import functions

    return functions.table_launches(problem, t)


def functions_of(problem: Problem, t: Any) -> tuple[Mod | None, Mod | None]:
    """The user's score mod, with a table of distances where ``table_launches`` fills one, and mask mod."""
    if problem.score_function is None and problem.mask_function is None:
        return None, None
    from flashtile.backends.gpu.functions import mod_of, table_of
    from flashtile.call.functions import mask_function, score_function

    score, mask = score_function(problem, t), mask_function(problem, t)
    return mod_of(score, 0, table_of(problem)), mod_of(mask, 0 if score is None else len(score.numbers))


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a meta device's are the built-for GPU's or the current one's; 2 for an interpreter."""
    if device.type == "meta" and (gpu := AHEAD.get()) is not None:
        return int(gpu.multiprocessors)
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _multiprocessors(device) if device.type == "cuda" else 2


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_packed_tiles(total: int, num_sequences: int, block: int, rows_per_token: int = 1, spare: int = 0) -> int:
    """Programs that ``packed_tile`` needs to reach every row of a packed tensor."""
    return (total + (num_sequences + 1) * spare) * rows_per_token // block + num_sequences + 1


def threshold_bits(threshold: int) -> int:
    """``philox.threshold`` in the upper half of 32 bits, as the int32 of the same bits: one type for every value."""
    return (threshold << 16) - (2**32 if threshold >= 2**15 else 0)
