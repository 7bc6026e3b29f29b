"""Dropout's keep mask, bitwise equal to ``flashtile.core.philox``."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
_MULTIPLY = tl.constexpr(0xD256D193)
_WEYL = tl.constexpr(0x9E3779B9)
_WIDE_PRODUCT = tl.constexpr("{ .reg .b64 both; mul.wide.u32 both, $2, 0xD256D193; mov.b64 {$1, $0}, both; }")


@triton.jit
def philox_key_of(call, b, h):
    """(key, a, b) for a head of a sequence; () without dropout. b may be past the last packed sequence."""
    if call.mods.dropout.rng_state_ptr is None:
        return ()
    else:
        head = b * call.heads.num_q + h
        if call.mods.dropout.origins_ptr is not None:
            head = tl.load(call.mods.dropout.origins_ptr + tl.minimum(b, call.queries.count - 1) * 6) + h
        seed, offset = tl.load(call.mods.dropout.rng_state_ptr), tl.load(call.mods.dropout.rng_state_ptr + 1)
        head, zero = head.to(tl.uint32), (head * 0).to(tl.uint32)
        key, a, b, _ = tl.philox_impl(
            zero, zero, head, offset.to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32), ROUNDS
        )
        return (key, a, b)


@triton.jit
def words(philox_key, rows, keys, PTX: tl.constexpr):
    """The two words of each counter. rows and keys are results of ``without_8``, and broadcast."""
    key, a, b = philox_key[0], philox_key[1] ^ rows.to(tl.uint32), philox_key[2] ^ keys.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        upper, lower = product(a, PTX)
        a, b = upper ^ key ^ b, lower
        key = (key + _WEYL).to(tl.uint32)
    return a, b


@triton.jit
def product(a, PTX: tl.constexpr):
    """The upper and the lower word of a times Philox's multiplier."""
    if PTX:
        return wide_product(a)
    else:
        both = a.to(tl.uint64) * _MULTIPLY
        return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def wide_product(a):
    """``product`` in one instruction; the compiler by itself would use two."""
    return tl.inline_asm_elementwise(_WIDE_PRODUCT, "=r,=r,r", [a], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)


@triton.jit
def without_8(places):
    """Numbers without their bit of value 8; the bits above it move down."""
    return ((places >> 4) << 3) | (places & 7)


@triton.jit
def keep_tile(dropout, philox_key, b, row, key, M: tl.constexpr, N: tl.constexpr):
    """Which probabilities are kept, bool, for M rows from ``row`` and N keys from ``key``, all multiples of 16."""
    limit = dropout.threshold.to(tl.uint32, bitcast=True)
    if dropout.origins_ptr is not None or M == 16 or N == 16:
        rows, keys = row + tl.arange(0, M)[:, None], key + tl.arange(0, N)[None, :]
        if dropout.origins_ptr is not None:
            at = dropout.origins_ptr + b * 6
            rows = tl.load(at + 1) + tl.load(at + 2) * rows
            keys = tl.load(at + 3) + tl.load(at + 4) * keys
        # Each pair evaluates its own counter and takes half a word, since neighbours in a part need not be neighbours
        # in the whole. Also, from numbers that are joined and masked by bytes, Triton 3.6 and 3.7 make operands with
        # eight neighbours per thread along the sum: a sum over 16 is then in half of a warp's threads, and again in the
        # other half, where it is added twice.
        first, second = words(philox_key, without_8(rows), without_8(keys), dropout.PTX)
        word = tl.where((rows & 8) == 0, first, second)
        kept = tl.where((keys & 8) == 0, word << 16, word) >= limit
    else:
        rows, keys = row // 2 + tl.arange(0, M // 2)[:, None], key // 2 + tl.arange(0, N // 2)[None, :]
        first, second = words(philox_key, rows, keys, dropout.PTX)
        halves = tl.join(tl.join(first << 16, second << 16), tl.join(first, second))  # [.., row's 8, key's 8]
        eights = halves.reshape(M // 16, 8, N // 16, 8, 2, 2).permute(0, 4, 1, 2, 5, 3)
        kept = eights.reshape(M, N) >= limit
    return kept
