"""A quantized call: the table of its arguments, in the rows of ``flashtile.call.arguments``, and its ``Problem``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.call import arguments
from flashtile.call.arguments import FLOAT8, FLOAT32, Argument, Options, fields_of
from flashtile.call.axes import Axes, checked_kinds, is_packed, packed_lengths
from flashtile.call.blocks import BLOCK, num_blocks
from flashtile.call.problem import Problem, checked_problem
from flashtile.call.quantized import check_widths
from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.masks import Band
from flashtile.core.sizes import holds

_E4M3 = ((FLOAT8,), "float8_e4m3fn")
OUT_DTYPES = (torch.bfloat16, torch.float16)


def _out_dtype(name: str, value: Any) -> torch.dtype:
    if value not in OUT_DTYPES:
        raise InvalidInputError(name, f"is {shown(value)}, must be torch.bfloat16 or torch.float16")
    found: torch.dtype = value
    return found


@dataclass(eq=False)
class QuantizedTensors:
    """The tensors of one quantized call, a ``Quantized``'s and sinks; absent ones are None. Immutable.

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
    """The options of a quantized call with an output in this dtype, from a regular call's.

    Raises:
        InvalidInputError: The dtype is neither bfloat16 nor float16.
    """
    return QuantizedOptions(
        o.window_left, o.window_right, o.max_seqlen_q, o.max_seqlen_k, _out_dtype("dtype", dtype), o.softmax_scale,
        o.softcap, o.backend,
    )  # fmt: skip


def problem_of(tensors: QuantizedTensors, options: QuantizedOptions) -> Problem:
    """Checks the tensors of a quantized call against one another and records the call.

    Its ``dtype`` is float8_e4m3fn, and so is its ``out_dtype`` with an ``out_scale``; else that is the options'.

    Raises:
        InvalidInputError: Naming the argument that does not match.
        UnsupportedError: The call is traced by ``torch.jit.trace``.
    """
    t, o, sizes = tensors, options, _check_tensors(tensors, options)
    if t.shift is not None and o.softcap:
        raise InvalidInputError(
            "softcap", "does not go with keys whose mean was taken off: quantize with smooth_k=False"
        )
    out_dtype = o.dtype if t.out_scale is None else FLOAT8
    return checked_problem(t, o, sizes, (t.k, t.v), out_dtype=out_dtype)


def scale_strides(scale: Tensor) -> tuple[int, int, int]:
    """Strides, in elements, of a contiguous scale by sequence, head and block; 0 where one serves all.

    The batch of a packed call has none: the first block of sequence b is number ``cu_seqlens[b] // BLOCK + b``.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True)]
    batch, head, block = strides if len(strides) == 3 else (0, *strides)
    return batch, head, block


# A packed call's axes in place of a dense one's.
_PACKED = {"batch seqlen": "total", "batch num_heads": "num_heads", "num_heads_q seqlen_q": "num_heads_q total_q"}


def _check_tensors(t: QuantizedTensors, o: QuantizedOptions) -> dict[str, int]:
    """Checks dtypes, devices and shapes; returns sizes by axis name."""
    axes, found = Axes(_PACKED if is_packed(t) else {}), checked_kinds(t, TENSORS)
    packed, sizes = axes.bind_sides(t, found, (o.max_seqlen_q, o.max_seqlen_k)), axes.sizes
    check_widths(sizes)
    blocks_q, blocks_k = num_blocks(t.q.shape[-3], t.cu_seqlens_q), num_blocks(t.k.shape[-3], t.cu_seqlens_k)
    if holds(sizes["columns"] != blocks_k * BLOCK):
        must = f"must have {blocks_k * BLOCK}: whole blocks of {BLOCK} keys"
        raise InvalidInputError("v", f"has {sizes['columns']} columns, {must}")
    batch = () if packed else (sizes["batch"],)
    _check_scale("q_scale", t.q_scale, (*batch, sizes["num_heads_q"], blocks_q))
    _check_scale("k_scale", t.k_scale, (*batch, sizes["num_heads_kv"], blocks_k))
    _check_scale("v_scale", t.v_scale, (*batch, sizes["num_heads_kv"], blocks_k))
    if t.out_scale is not None and t.out_scale.shape != (1,):
        raise InvalidInputError("out_scale", f"has shape {tuple(t.out_scale.shape)}, must have (1,)")
    for name in ("shift", "sinks"):
        if name in found:
            axes.bind(name, found[name][1], found[name][0])
    return sizes


def _check_scale(name: str, scale: Tensor, full: tuple[int, ...]) -> None:
    """Refuses a scale if its shape is neither one for each block nor 1 where it serves several."""
    shape = tuple(scale.shape)
    wrong = (holds(have != 1) and holds(have != size) for have, size in zip(shape, full, strict=False))
    if len(shape) != len(full) or any(wrong):
        axes = "(batch, num_heads, blocks)" if len(full) == 3 else "(num_heads, blocks)"
        must = f"must be {full}, {axes}, or 1 where one scale serves several"
        raise InvalidInputError(name, f"has shape {shape}, {must}")


def check_values(problem: Problem, tensors: QuantizedTensors) -> None:
    """Checks that scales are finite and positive, and the values of cu_seqlens.

    On a GPU this waits for the device, so callers run it only when ``FLASHTILE_CHECK`` is set.

    Raises:
        InvalidInputError: Naming the tensor or the length that is wrong.
    """
    for name in ("q_scale", "k_scale", "v_scale", "out_scale"):
        if (scale := getattr(tensors, name)) is None:
            continue
        wrong = scale[~((scale > 0) & scale.isfinite())]
        if wrong.numel():
            raise InvalidInputError(name, f"has {wrong[0].item()}, must be positive and finite")
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        packed_lengths("q", tensors.cu_seqlens_q, tensors.q.shape[0], problem.seqlen_q)
        packed_lengths("k", tensors.cu_seqlens_k, tensors.k.shape[0], problem.seqlen_k)
