"""Merges two attention states on a GPU in one pass over their outputs, as ``flashtile.core.states.merge``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Plan, empty

_kernels = device_code("flashtile.backends.gpu.decode.states")
_ROWS = 16
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class StateTensors(NamedTuple):
    """Contiguous out (batch, seqlen, num_heads, DIM) of any float dtype, and lse (batch, num_heads, seqlen) float32."""

    out: Any
    lse: Any


class StateSizes(NamedTuple):
    """Sizes of the states.

    Attributes:
        rows: batch times seqlen times num_heads.
        BLOCK_DIM: A power of two, at least DIM.
        ROWS: That a program merges.
    """

    rows: Any
    seqlen: Any
    num_heads: Any
    DIM: Any
    BLOCK_DIM: Any
    ROWS: Any


def can_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> bool:
    """Whether the kernel takes these: not float64, contiguous, on 16 bytes, fewer than 2^31 rows."""
    every = (out_a, lse_a, out_b, lse_b)
    return (
        out_a.dtype in _FLOATS
        and out_b.dtype in _FLOATS
        and lse_a.dtype == lse_b.dtype == torch.float32
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in every)
        and 0 < lse_a.numel() < 2**31
        and out_a.numel() > 0
    )


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Out in out_a's dtype, and lse, of what ``can_merge`` accepts."""
    plan = _plan(out_a.shape, lse_a.shape, out_a.dtype, out_b.dtype, out_a.device)
    made = plan.run(None, {"a": out_a, "lse_a": lse_a, "b": out_b, "lse_b": lse_b})
    return made["merged"], made["lse_merged"]


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size, lse_shape: torch.Size, dtype_a: torch.dtype, dtype_b: torch.dtype, device: torch.device
) -> Plan:
    *_, seqlen, num_heads, dim = shape
    rows, states = shape.numel() // dim, {"a": dtype_a, "b": dtype_b, "merged": dtype_a}
    arguments: dict[str, Any] = {
        name: StateTensors(Pointer(dtype, name), Pointer(torch.float32, f"lse_{name}"))
        for name, dtype in states.items()
    }
    arguments["shape"] = StateSizes(rows, seqlen, num_heads, dim, max(16, 1 << (dim - 1).bit_length()), _ROWS)
    launch = Launch(_kernels.merge_states, -(-rows // _ROWS), arguments, {"num_warps": 4, "num_stages": 1})
    memory = {"merged": empty(device, shape, dtype_a), "lse_merged": empty(device, lse_shape)}
    return Plan(device, lambda *_: (memory, {"merge_states": launch}))
