"""``Quantized``: 8-bit queries, keys and values, their scales, and what was done to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from flashtile.call.arguments import FLOAT32, TENSORS, Argument, checked, table
from flashtile.call.axes import Axes, checked_kinds, is_packed
from flashtile.call.blocks import (
    as_blocks,
    as_columns,
    joined,
    num_blocks,
    scale_of_rows,
    sequence_of_blocks,
    split,
)
from flashtile.call.rotary import apply_rotary, row_positions
from flashtile.core.errors import InvalidInputError

E4M3 = torch.float8_e4m3fn
Scales = Literal["block", "head", "tensor"]


@dataclass(frozen=True, eq=False)
class Quantized:
    """8-bit queries, keys and values, as ``attention`` and ``attention_varlen`` take them in place of q, k and v.

    A number is its e4m3 value times the scale of its block: 128 rows of one head and sequence. Blocks of packed
    sequences lie as ``call.blocks`` says: there are ``total // 128 + batch``, and sequence b's begin at
    ``cu_seqlens[b] // 128 + b``.

    Attributes:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, packed ``(total_q, num_heads_q, head_dim)``, float8_e4m3fn,
            contiguous.
        k: The same with seqlen_k or total_k, and num_heads_kv.
        v: ``(batch, num_heads_kv, head_dim_v, columns)``, packed ``(num_heads_kv, head_dim_v, columns)``, of the same
            dtype, contiguous: V transposed, with 128 columns a block. Column p of each 16 columns holds key
            ``ORDER[p]``; columns that hold no key are 0.
        q_scale: float32 ``(batch, num_heads_q, blocks)``, packed ``(num_heads_q, blocks)``. Scales that are one for
            a head have the shape (batch, num_heads_q, 1) if dense, and one for a tensor (1, 1, 1), packed (1, 1).
        k_scale: The same with num_heads_kv and blocks of keys.
        v_scale: Like k_scale.
        shift: float32 ``(batch, num_heads_q, seqlen_q)``, packed ``(num_heads_q, total_q)``: what smoothing took off
            every score of a row, before softmax_scale; None where there was no smoothing.
        cu_seqlens_q: Bounds of packed queries, int32 ``(batch + 1,)``; None if dense.
        cu_seqlens_k: Bounds of packed keys.
        max_seqlen_q: The longest packed queries, if known.
        max_seqlen_k: The longest packed keys, if known.
        dtype: The output's, bfloat16 or float16, unless there is an out_scale.
        scales: ``"block"``, ``"head"`` or ``"tensor"``: what one scale is for.
        rotated: Whether q and k were rotated.
        smoothed: Whether the mean of k was taken off.
        seed: The seed of the rotation's signs.
        out_scale: float32 ``(1,)``: the output is float8_e4m3fn, attention's divided by this and cut to 448 either way;
            None for an output of 16 bits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    shift: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    dtype: torch.dtype = torch.bfloat16
    scales: Scales = "block"
    rotated: bool = False
    smoothed: bool = False
    seed: int = 0
    out_scale: Tensor | None = None

    def dequantized(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in float32, rows in their order; q and k as rotated and smoothed as they are.

        Returns:
            Tensors of the shapes that ``quantize`` was given.
        """
        rows_q, rows_k = self.q.shape[-3], self.k.shape[-3]
        q = self.q.float() * scale_of_rows(self.q_scale, self.cu_seqlens_q, rows_q)
        k = self.k.float() * scale_of_rows(self.k_scale, self.cu_seqlens_k, rows_k)
        v = joined(as_blocks(self.v.view(torch.uint8)), self.cu_seqlens_k, rows_k).contiguous().view(E4M3)
        return q, k, v.float() * scale_of_rows(self.v_scale, self.cu_seqlens_k, rows_k)

    @classmethod
    def from_fp8(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        out_scale: Tensor | None = None,
    ) -> Quantized:
        """The record of e4m3 tensors with FlashAttention-3's descales. V is copied, transposed; q and k are kept.

        Args:
            q: ``(batch, seqlen_q, num_heads_q, head_dim)``, packed ``(total_q, num_heads_q, head_dim)``, float8_e4m3fn.
            k: The same with seqlen_k or total_k, and num_heads_kv, which divides num_heads_q.
            v: Like k with head_dim_v, row-major.
            q_descale: ``(batch, num_heads_kv)`` float32, the scale of a group's queries; None is 1.
            k_descale: The same for keys.
            v_descale: The same for values.
            cu_seqlens_q: ``(batch + 1,)`` int32 if the sequences are packed.
            cu_seqlens_k: The same for keys.
            max_seqlen_q: The longest packed queries, if known.
            max_seqlen_k: The longest packed keys, if known.
            dtype: The output's, bfloat16 or float16.
            out_scale: As of ``Quantized``.

        Raises:
            InvalidInputError: Naming the argument that does not fit.
        """
        given = _Given(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k)
        sizes = _checked(given, max_seqlen_q, max_seqlen_k)
        check_widths(sizes)
        if dtype not in (torch.bfloat16, torch.float16):
            raise InvalidInputError("dtype", f"is {dtype}, must be torch.bfloat16 or torch.float16")
        scales = []
        for x, scale, bounds, heads in (
            (q, q_descale, cu_seqlens_q, sizes["num_heads_q"]),
            (k, k_descale, cu_seqlens_k, sizes["num_heads_kv"]),
            (v, v_descale, cu_seqlens_k, sizes["num_heads_kv"]),
        ):
            if scale is None:
                scale = torch.ones(sizes["batch"], sizes["num_heads_kv"], device=q.device)
            scale = scale.repeat_interleave(heads // sizes["num_heads_kv"], dim=1)
            scales.append(scale[..., None] if bounds is None else spread_scales(scale.T, bounds, x.shape[0]))
        q_scale, k_scale, v_scale = scales
        columns = as_columns(split(v.contiguous().view(torch.uint8), cu_seqlens_k)).view(E4M3)
        return cls(
            q.contiguous(), k.contiguous(), columns, q_scale, k_scale, v_scale, None, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, dtype, "head", out_scale=out_scale,
        )  # fmt: skip


def spread_scales(scale: Tensor, bounds: Tensor, rows: int) -> Tensor:
    """Scales of sequences ``(heads, batch)`` as scales of blocks ``(heads, blocks)``."""
    if scale.shape[1] == 0:
        return scale.new_ones(scale.shape[0], num_blocks(rows, bounds))
    return scale[:, sequence_of_blocks(bounds, rows)].contiguous()


def check_widths(sizes: dict[str, int]) -> None:
    """Refuses head_dims that the 8-bit kernels do not have.

    Raises:
        InvalidInputError: Naming q or v.
    """
    for name, axis in (("q", "head_dim"), ("v", "head_dim_v")):
        width = sizes[axis]
        if width % 16 or not 16 <= width <= 256:
            raise InvalidInputError(name, f"{axis} is {width}, must be a multiple of 16 and at most 256")


_FLOAT8 = ((E4M3,), "float8_e4m3fn")


@dataclass(eq=False)
class _Given:
    """The tensors that ``Quantized.from_fp8`` takes."""

    q: Annotated[Tensor, Argument("Queries.", "batch seqlen_q num_heads_q head_dim", _FLOAT8)]
    k: Annotated[Tensor, Argument("Keys.", "batch seqlen_k num_heads_kv head_dim", _FLOAT8)]
    v: Annotated[Tensor, Argument("Values.", "batch seqlen_k num_heads_kv head_dim_v", _FLOAT8)]
    q_descale: Annotated[Tensor | None, Argument("Of q.", "batch num_heads_kv", FLOAT32)]
    k_descale: Annotated[Tensor | None, Argument("Of k.", "batch num_heads_kv", FLOAT32)]
    v_descale: Annotated[Tensor | None, Argument("Of v.", "batch num_heads_kv", FLOAT32)]
    cu_seqlens_q: Annotated[Tensor | None, TENSORS["cu_seqlens_q"]]
    cu_seqlens_k: Annotated[Tensor | None, TENSORS["cu_seqlens_k"]]


_ROWS = table(_Given)


def _checked(given: _Given, *longest: int | None) -> dict[str, int]:
    found = checked_kinds(given, _ROWS)
    # The names of packed rows' axes keep descales' batch as it is.
    axes = Axes({f"batch seqlen_{side}": f"total_{side}" for side in "qk"} if is_packed(given) else {})
    axes.bind_sides(given, found, longest)
    checked(**dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True)))
    axes.bind_all(found)
    return axes.sizes


@dataclass(frozen=True)
class Choices:
    """What ``quantize`` is asked to do; its arguments of the same names."""

    scales: Scales = "block"
    rotate: bool = True
    smooth_k: bool = True
    rotary_interleaved: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors that ``quantize`` is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    out_scale: Tensor | None = None


def record(
    given: Inputs,
    choices: Choices,
    lengths: tuple[int | None, int | None],
    outs: list[Tensor],
    scales: list[Tensor],
    shift: Tensor | None,
) -> Quantized:
    """The record of a call, of what was made of q, k and v."""
    q, k, v = outs
    q_scale, k_scale, v_scale = scales
    dtype = torch.float16 if given.q.dtype == torch.float16 else torch.bfloat16
    return Quantized(
        q, k, v, q_scale, k_scale, v_scale, shift, given.cu_seqlens_q, given.cu_seqlens_k, *lengths, dtype,
        choices.scales, choices.rotate, choices.smooth_k, choices.seed, given.out_scale,
    )  # fmt: skip


def turned(given: Inputs, choices: Choices) -> tuple[Tensor, Tensor]:
    """The rows of q and k in float32, rotated by the angles of their positions if there are any."""
    q, k = given.q.float(), given.k.float()
    if given.rotary_cos is None:
        return q, k
    at_q, at_k = _positions(given)
    return _turned(q, at_q, given, choices), _turned(k, at_k, given, choices)


def _positions(given: Inputs) -> tuple[Tensor, Tensor]:
    """The position of each row of q and of k: the last query of a sequence is where its last key is."""
    rows_q, rows_k, device = given.q.shape[-3], given.k.shape[-3], given.q.device
    if given.cu_seqlens_q is None or given.cu_seqlens_k is None:
        return row_positions(rows_q, rows_k - rows_q, device=device), row_positions(rows_k, device=device)
    offsets = given.cu_seqlens_k.diff() - given.cu_seqlens_q.diff()
    at_q = row_positions(rows_q, offsets, given.cu_seqlens_q, device)
    return at_q, row_positions(rows_k, 0, given.cu_seqlens_k, device)


def _turned(x: Tensor, positions: Tensor, given: Inputs, choices: Choices) -> Tensor:
    """Rows rotated by the angles of their positions; those that the table does not have are left as they are."""
    assert given.rotary_cos is not None and given.rotary_sin is not None
    inside = ((positions >= 0) & (positions < given.rotary_cos.shape[0]))[:, None]
    at = torch.where(inside[:, 0], positions, 0)
    cos = torch.where(inside, given.rotary_cos.float()[at], 1.0)
    sin = torch.where(inside, given.rotary_sin.float()[at], 0.0)
    return apply_rotary(x, cos, sin, interleaved=choices.rotary_interleaved)
