"""The table of a quantized call's arguments, in the rows of ``flashtile.arguments``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from flashtile import arguments
from flashtile.arguments import FLOAT8, FLOAT32, Argument, fields_of
from flashtile.errors import InvalidInputError, shown

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

    ``quantization.record`` says how v lies in memory and which block a scale is of. Axes of scales may be 1, where one
    scale serves all; a packed call has ``num_heads_kv head_dim_v columns``, ``num_heads blocks`` and ``num_heads_q
    total_q`` in place of the axes of v, of scales and of shift.
    """

    q: Annotated[Tensor, Argument("Queries.", "Tensor", "batch seqlen_q num_heads_q head_dim", _E4M3)]
    k: Annotated[Tensor, Argument("Keys.", "Tensor", "batch seqlen_k num_heads_kv head_dim", _E4M3)]
    v: Annotated[Tensor, Argument("Values.", "Tensor", "batch num_heads_kv head_dim_v columns", _E4M3)]
    q_scale: Annotated[Tensor, Argument("Of blocks of q.", "Tensor", "batch num_heads_q blocks_q", FLOAT32)]
    k_scale: Annotated[Tensor, Argument("Of blocks of k.", "Tensor", "batch num_heads_kv blocks_k", FLOAT32)]
    v_scale: Annotated[Tensor, Argument("Of blocks of v.", "Tensor", "batch num_heads_kv blocks_k", FLOAT32)]
    shift: Annotated[
        Tensor | None, Argument("q times the mean key taken off.", "Tensor?", "batch num_heads_q seqlen_q", FLOAT32)
    ] = None
    sinks: Annotated[Tensor | None, arguments.TENSORS["sinks"]] = None
    cu_seqlens_q: Annotated[Tensor | None, arguments.TENSORS["cu_seqlens_q"]] = None
    cu_seqlens_k: Annotated[Tensor | None, arguments.TENSORS["cu_seqlens_k"]] = None


@dataclass(frozen=True)
class QuantizedOptions:
    """The non-tensor arguments of one quantized call, checked; hashable, with the hash cached."""

    window_left: Annotated[int | None, arguments.OPTIONS["window_left"]] = None
    window_right: Annotated[int | None, arguments.OPTIONS["window_right"]] = None
    max_seqlen_q: Annotated[int | None, arguments.OPTIONS["max_seqlen_q"]] = None
    max_seqlen_k: Annotated[int | None, arguments.OPTIONS["max_seqlen_k"]] = None
    dtype: Annotated[torch.dtype, Argument("Of the output.", "ScalarType", check=_out_dtype)] = torch.bfloat16
    softmax_scale: Annotated[float | None, arguments.OPTIONS["softmax_scale"]] = None
    softcap: Annotated[float, arguments.OPTIONS["softcap"]] = 0.0
    backend: Annotated[str, arguments.OPTIONS["backend"]] = ""

    @functools.cached_property
    def _hash(self) -> int:
        return hash(option_values(self))

    def __hash__(self) -> int:
        return self._hash


TENSORS, OPTIONS = arguments.table(QuantizedTensors), arguments.table(QuantizedOptions)
tensor_values, option_values = fields_of(TENSORS), fields_of(OPTIONS)


def flatten(tensors: QuantizedTensors, options: QuantizedOptions) -> tuple[Any, ...]:
    """The arguments of the operator, in the order of its schema."""
    return *tensor_values(tensors), *option_values(options)


def unflatten(args: Sequence[Any]) -> tuple[QuantizedTensors, QuantizedOptions]:
    """The inverse of ``flatten``."""
    return QuantizedTensors(*args[: len(TENSORS)]), QuantizedOptions(*args[len(TENSORS) :])


def read(
    causal: object, window_size: Sequence[int | None] | None, return_lse: object, plain: tuple[object, ...]
) -> QuantizedOptions:
    """Makes the options of a call from its keywords; ``plain`` holds those from max_seqlen_q on, in that order.

    The same arguments give the same object, unless one is unhashable.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    left, right = (None, None) if window_size is None else arguments.window_bounds(window_size)
    if torch.compiler.is_compiling():
        return _make(causal, return_lse, left, right, *plain)
    try:
        return _made(causal, return_lse, left, right, *plain)
    except TypeError:  # a list or a symbolic number, which have no hash
        return _make(causal, return_lse, left, right, *plain)


def _make(causal: object, return_lse: object, *plain: object) -> QuantizedOptions:
    causal, _ = arguments.flag("causal", causal), arguments.flag("return_lse", return_lse)
    left, right, *others = (row.check(name, x) for (name, row), x in zip(OPTIONS.items(), plain, strict=True))
    return QuantizedOptions(left, 0 if causal else right, *others)


# Typed, since True == 1 == 1.0, but each argument accepts only one of these types.
_made = functools.lru_cache(maxsize=4096, typed=True)(_make)
