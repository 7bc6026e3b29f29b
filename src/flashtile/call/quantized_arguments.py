"""The table of a quantized call's arguments, in the rows of ``flashtile.call.arguments``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.call import arguments
from flashtile.call.arguments import FLOAT8, FLOAT32, Argument, Options, fields_of
from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.masks import Band

_E4M3 = ((FLOAT8,), "float8_e4m3fn")
OUT_DTYPES = (torch.bfloat16, torch.float16)


def _out_dtype(name: str, value: Any) -> torch.dtype:
    if value not in OUT_DTYPES:
        raise InvalidInputError(name, f"is {shown(value)}, must be torch.bfloat16 or torch.float16")
    found: torch.dtype = value
    return found


@dataclass(eq=False)
class QuantizedTensors:
    """The tensors of one quantized call, those of a ``Quantized`` and sinks; absent ones are None. Immutable.

    ``call.blocks`` says how v lies in memory and which block a scale is of. Axes of scales may be 1, where one
    scale serves all; a packed call has ``num_heads_kv head_dim_v columns``, ``num_heads blocks`` and ``num_heads_q
    total_q`` in place of the axes of v, of scales and of shift.
    """

    q: Annotated[Tensor, Argument("Queries.", "batch seqlen_q num_heads_q head_dim", _E4M3)]
    k: Annotated[Tensor, Argument("Keys.", "batch seqlen_k num_heads_kv head_dim", _E4M3)]
    v: Annotated[Tensor, Argument("Values.", "batch num_heads_kv head_dim_v columns", _E4M3)]
    q_scale: Annotated[Tensor, Argument("Of blocks of q.", "batch num_heads_q blocks_q", FLOAT32)]
    k_scale: Annotated[Tensor, Argument("Of blocks of k.", "batch num_heads_kv blocks_k", FLOAT32)]
    v_scale: Annotated[Tensor, Argument("Of blocks of v.", "batch num_heads_kv blocks_k", FLOAT32)]
    shift: Annotated[
        Tensor | None, Argument("q times the mean key taken off.", "batch num_heads_q seqlen_q", FLOAT32)
    ] = None
    sinks: Annotated[Tensor | None, arguments.TENSORS["sinks"]] = None
    cu_seqlens_q: Annotated[Tensor | None, arguments.TENSORS["cu_seqlens_q"]] = None
    cu_seqlens_k: Annotated[Tensor | None, arguments.TENSORS["cu_seqlens_k"]] = None
    out_scale: Annotated[Tensor | None, Argument("Divides an output in 8 bits.", "one", FLOAT32)] = None


class QuantizedOptions(NamedTuple):
    """The non-tensor arguments of one quantized call, checked."""

    window_left: Annotated[int | None, arguments.OPTIONS["window_left"]] = None
    window_right: Annotated[int | None, arguments.OPTIONS["window_right"]] = None
    max_seqlen_q: Annotated[int | None, arguments.OPTIONS["max_seqlen_q"]] = None
    max_seqlen_k: Annotated[int | None, arguments.OPTIONS["max_seqlen_k"]] = None
    dtype: Annotated[torch.dtype, Argument("Of an output of 16 bits.", check=_out_dtype)] = torch.bfloat16
    softmax_scale: Annotated[float | None, arguments.OPTIONS["softmax_scale"]] = None
    softcap: Annotated[float, arguments.OPTIONS["softcap"]] = 0.0
    backend: Annotated[str, arguments.OPTIONS["backend"]] = ""

    @property
    def band(self) -> Band:
        """The bounds of windows and of causality."""
        return Band(self.window_left, self.window_right)


TENSORS = arguments.table(QuantizedTensors)
tensor_values = fields_of(TENSORS)


def options_of(o: Options, dtype: torch.dtype) -> QuantizedOptions:
    """The options of a quantized call whose output has a dtype, from those of a regular one.

    Raises:
        InvalidInputError: The dtype is neither bfloat16 nor float16.
    """
    return _make(o, dtype) if torch.compiler.is_compiling() else _made(o, dtype)


def _make(o: Options, dtype: torch.dtype) -> QuantizedOptions:
    return QuantizedOptions(
        o.window_left, o.window_right, o.max_seqlen_q, o.max_seqlen_k, _out_dtype("dtype", dtype), o.softmax_scale,
        o.softcap, o.backend,
    )  # fmt: skip


_made = functools.lru_cache(maxsize=4096)(_make)
