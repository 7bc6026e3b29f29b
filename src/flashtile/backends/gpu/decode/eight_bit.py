"""e4m3 and e5m2 keys and values: as float16 operands of products, and their scales."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(codes):
    """e4m3 codes in uint16 as float16, 2^-8 times their values: the two formats differ in the exponent's bias alone."""
    half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), half)


@triton.jit
def halves(pairs, scales):
    """The first and the second number of int16 pairs, as float16, of a cache with ``CacheScales``.

    An e5m2 number is the upper byte of a float16 one.
    """
    if scales.E5M2:
        if scales.BITS:
            codes = pairs.to(tl.uint16, bitcast=True)
            first, second = (codes << 8).to(tl.float16, bitcast=True), (codes & 0xFF00).to(tl.float16, bitcast=True)
        else:
            first, second = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 moved;
                shl.b32 moved, $2, 8;
                and.b32 $0, moved, 0xFF00FF00;
                and.b32 $1, $2, 0xFF00FF00;
                }
                """,
                "=r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    elif scales.BITS:
        codes = pairs.to(tl.uint16, bitcast=True)
        first, second = decoded(codes & 0xFF), decoded(codes >> 8)
    else:
        # One register holds two pairs. Its bytes 0 and 2 are first numbers, 1 and 3 second ones.
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            .reg .b16 firsts, seconds;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second


@triton.jit
def power_of_rows(q, q_odd):
    """For each row a power of two that brings its largest element between 1 and 2.

    Divided by it, bfloat16 elements are float16 ones, exactly but for those below 2^-14 of their row's largest: their
    error is 2^-25 of it.
    """
    top = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_odd.to(tl.float32)), 1))
    return tl.exp2(tl.floor(tl.log2(tl.where(top > 0.0, top, 1.0))))


@triton.jit
def scaled(q, power):
    """Rows divided by their powers of two, as float16."""
    return (q.to(tl.float32) / power[:, None]).to(tl.float16)


@triton.jit
def scale_of(scale, place, call):
    """The factor of all keys (or values) of an item, float32; scales that differ from page to page are left out."""
    factor = 1.0
    if call.cache.scales.BITS and not call.cache.scales.E5M2:
        factor = 256.0
    if scale.ptr is not None and not call.cache.scales.BY_PAGE:
        factor *= tl.load(scale.ptr + tl.cast(place.entry, tl.int64) * scale.stride_b + place.h_kv)
    return factor


@triton.jit
def page_scales(scale, page, h_kv, inside):
    """The scale of every key of a block, [BLOCK_N] float32; 0 for those not ``inside``."""
    at = scale.ptr + page * scale.stride_b + h_kv
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def by_rows(codes, base, place, inside, rows, LIKE: tl.constexpr):
    """A block of values from e4m3 bytes and their scales by row and 128 columns, rounded to LIKE.

    Args:
        codes: [BLOCK_N, BLOCK_DV].
        base: Address of the first row's scales.
        place: As ``kernel.place_block`` says.
        inside: [BLOCK_N].
        rows: ``Rows`` of the scales.
        LIKE: A dtype.
    """
    page, first_row, row = place
    if len(page.shape) == 0:
        at = base + (first_row + row) * rows.stride_row
    else:
        at = base + page * rows.stride_b + row.to(tl.int64) * rows.stride_row
    col = tl.arange(0, codes.shape[1])[None, :]
    factor = tl.load(at, mask=inside, other=0.0)[:, None]
    for i in tl.static_range(1, rows.DIM):
        factor = tl.where(col >= 128 * i, tl.load(at + i, mask=inside, other=0.0)[:, None], factor)
    return (decoded(codes.to(tl.uint16)).to(tl.float32) * 256.0 * factor).to(LIKE)


@triton.jit
def joined(acc, acc_odd, EIGHT_BIT: tl.constexpr):
    """A state's columns in their order."""
    return tl.interleave(acc, acc_odd) if EIGHT_BIT else acc
