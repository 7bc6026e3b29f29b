"""Instructions that compute: every lane for itself, registers to register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.decode import Decoder, builder
from tests.ptx.machine import LANES, Step, Warp
from tests.ptx.text import WIDTHS, Instruction, PtxError

Array = NDArray[Any]
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
TINY = np.float32(2.0**-126)
f4, u4 = np.float32, np.uint32


def bf16_to_f32(x: Array) -> Array:
    """uint16 bits to float32 values."""
    return (x.astype(u4) << u4(16)).view(f4)


def f32_to_bf16(x: Array) -> Array:
    """float32 values to uint16 bits, to nearest even."""
    bits = x.view(u4)
    rounded = (bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)
    return np.where(np.isnan(x), u4(0x7FFF), rounded).astype(np.uint16)


def flushed(x: Array) -> Array:
    """Subnormal numbers as zeros."""
    return np.where(np.abs(x) < TINY, np.copysign(f4(0), x), x)


def as_type(kind: str) -> Callable[[Array], Array]:
    """What makes values of a register's bits."""
    width = WIDTHS[kind]
    if kind == "f32":
        return lambda x: x.view(f4)
    if kind == "f64":
        return lambda x: x.view(np.float64)
    if kind == "f16":
        return lambda x: x.view(np.float16)
    if kind == "bf16":
        return bf16_to_f32
    if kind[0] == "s":
        return lambda x: x.view(_SIGNED[width])
    return lambda x: x


def to_bits(kind: str) -> Callable[[Array], Array]:
    """What makes a register's bits of values."""
    if kind == "bf16":
        return f32_to_bf16
    if kind == "pred":
        return lambda x: x
    unsigned = _UNSIGNED[WIDTHS[kind]]
    return lambda x: x.view(unsigned)


def step(d: Decoder, target: str, function: Callable[..., Array], sources: list[int]) -> Step:
    """Writes what a function of registers gives."""
    to = d.register(target)

    def write(warp: Warp, value: Array) -> None:
        if warp.mask is None:
            warp.values[to] = value
        else:
            warp.put(to, value)

    if len(sources) == 1:
        (a,) = sources

        def one(warp: Warp) -> None:
            write(warp, function(warp.values[a]))

        return one
    if len(sources) == 2:
        a, b = sources

        def two(warp: Warp) -> None:
            v = warp.values
            value = function(v[a], v[b])
            if warp.mask is None:
                v[to] = value
            else:
                warp.put(to, value)

        return two

    def many(warp: Warp) -> None:
        v = warp.values
        write(warp, function(*[v[s] for s in sources]))

    return many


def _divide(a: Array, b: Array) -> Array:
    """Towards zero; anything for a divisor of 0, as on the device."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a // safe
    wide = a.astype(np.int64), safe.astype(np.int64)
    magnitude = np.abs(wide[0]) // np.abs(wide[1])
    return np.where((wide[0] < 0) != (wide[1] < 0), -magnitude, magnitude).astype(a.dtype)


def _shift_left(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    shifted = a << np.minimum(n, bits - 1).astype(a.dtype)
    return np.where(n < bits, shifted, a.dtype.type(0))


def _shift_right(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))


# fmax and fmin give the operand that is no NaN, as max.f32 and min.f32 do.
_FLOATS: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.fmax, "min": np.fmin, "div": np.divide,
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rcp": lambda a: f4(1) / a, "ex2": np.exp2, "lg2": np.log2,
    "tanh": np.tanh, "rsqrt": lambda a: f4(1) / np.sqrt(a),
}  # fmt: skip
_INTEGERS: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum, "div": _divide,
    "rem": lambda a, b: (a - _divide(a, b) * b).astype(a.dtype), "neg": lambda a: (~a + a.dtype.type(1)),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "abs": np.abs,
}  # fmt: skip
_ROUNDING = {"rn", "ftz", "approx", "full"}


def _modifiers(i: Instruction, allowed: set[str]) -> set[str]:
    """Everything between the mnemonic and the type.

    Raises:
        PtxError: One of them is not allowed.
    """
    found = set(i.opcode[1:-1])
    if found - allowed:
        raise PtxError(f"modifiers {sorted(found - allowed)}")
    return found


@builder("add", "sub", "max", "min", "div", "rem", "neg", "abs", "sqrt", "rcp", "ex2", "lg2", "tanh", "rsqrt",
         "and", "or", "xor", "not")  # fmt: skip
def _plain(d: Decoder, i: Instruction) -> Step:
    kind = i.opcode[-1]
    sources = [d.operand(each, WIDTHS[kind]) for each in i.operands[1:]]
    if kind in ("f16x2", "bf16x2"):
        return _packed(d, i, kind, sources)
    if (kind[0] in "fb" and kind[1:].rstrip("x2").isdigit() and kind[0] == "f") or kind == "bf16":
        return step(d, i.operands[0], _float(i, kind), sources)
    found = _modifiers(i, {"relu"} if kind == "s32" and i.opcode[0] in ("max", "min") else set())
    function, typed, bits = _INTEGERS[i.opcode[0]], as_type(kind), to_bits(kind)
    if found:
        plain = function
        return step(d, i.operands[0], lambda *x: bits(np.maximum(plain(*map(typed, x)), np.int32(0))), sources)
    if kind[0] != "s":
        return step(d, i.operands[0], function, sources)
    return step(d, i.operands[0], lambda *x: bits(function(*map(typed, x))), sources)


def _float(i: Instruction, kind: str) -> Callable[..., Array]:
    found = _modifiers(i, _ROUNDING | {"NaN"})
    function, typed, bits = _FLOATS[i.opcode[0]], as_type(kind), to_bits(kind)
    if "NaN" in found:
        function = {"max": np.maximum, "min": np.minimum}[i.opcode[0]]
    if "ftz" in found:
        return lambda *x: bits(flushed(function(*(flushed(typed(each)) for each in x))))
    return lambda *x: bits(function(*map(typed, x)))


def _packed(d: Decoder, i: Instruction, kind: str, sources: list[int]) -> Step:
    """Two halves of a register, each on its own."""
    inner = _float(i, kind[:-2])

    def run(*x: Array) -> Array:
        halves = [each.view(np.uint16) for each in x]
        return np.ascontiguousarray(inner(*halves)).view(u4)

    return step(d, i.operands[0], run, sources)


@builder("mul", "mad", "fma")
def _multiply(d: Decoder, i: Instruction) -> Step:
    name, kind = i.opcode[0], i.opcode[-1]
    typed, bits, width = as_type(kind), to_bits(kind), WIDTHS[kind]
    wide = "wide" in i.opcode
    widths = [width, width, width * 2 if wide else width]
    sources = [d.operand(text, size) for text, size in zip(i.operands[1:], widths, strict=False)]
    if kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        return _multiply_floats(d, i, kind, sources)
    _modifiers(i, {"wide", "lo", "hi"})
    if wide:
        double = (_SIGNED if kind[0] == "s" else _UNSIGNED)[width * 2]
        unsigned = _UNSIGNED[width * 2]

        def product(a: Array, b: Array) -> Array:
            return (typed(a).astype(double) * typed(b).astype(double)).view(unsigned)
    elif "hi" in i.opcode:
        if width == 64:
            return _multiply_high_64(d, i, sources)
        double = np.int64 if kind[0] == "s" else np.uint64

        def product(a: Array, b: Array) -> Array:
            whole = typed(a).astype(double) * typed(b).astype(double)
            return bits((whole >> double(width)).astype(typed(a).dtype))
    else:
        product = np.multiply
    if name == "mul":
        return step(d, i.operands[0], product, sources)
    return step(d, i.operands[0], lambda a, b, c: product(a, b) + c, sources)


def _multiply_high_64(d: Decoder, i: Instruction, sources: list[int]) -> Step:
    if i.opcode != ("mul", "hi", "u64"):
        raise PtxError("high half of this product")

    def product(a: Array, b: Array) -> Array:
        return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], np.uint64)

    return step(d, i.operands[0], product, sources)


def _multiply_floats(d: Decoder, i: Instruction, kind: str, sources: list[int]) -> Step:
    found = _modifiers(i, {"rn", "ftz", "approx"})
    typed, bits = as_type(kind), to_bits(kind)
    if kind in ("f16x2", "bf16x2"):
        raise PtxError("packed products")
    if i.opcode[0] == "mul":

        def function(*x: Array) -> Array:
            return np.multiply(*x)
    else:

        def function(*x: Array) -> Array:
            # Twice rounded, which differs from once in one case of 2**29.
            return (x[0].astype(np.float64) * x[1] + x[2]).astype(x[0].dtype)

    if "ftz" in found:
        return step(d, i.operands[0], lambda *x: bits(flushed(function(*(flushed(typed(e)) for e in x)))), sources)
    return step(d, i.operands[0], lambda *x: bits(function(*map(typed, x))), sources)


@builder("shl", "shr")
def _shift(d: Decoder, i: Instruction) -> Step:
    kind = i.opcode[-1]
    sources = [d.operand(i.operands[1], WIDTHS[kind]), d.operand(i.operands[2], 32)]
    if i.opcode[0] == "shl":
        return step(d, i.operands[0], _shift_left, sources)
    typed, bits = as_type(kind), to_bits(kind)
    return step(d, i.operands[0], lambda a, n: bits(_shift_right(typed(a), n)), sources)


@builder("shf")
def _funnel(d: Decoder, i: Instruction) -> Step:
    _, side, mode, _ = i.opcode
    sources = [d.operand(text, 32) for text in i.operands[1:]]

    def run(low: Array, high: Array, n: Array) -> Array:
        n = (n & u4(31) if mode == "wrap" else np.minimum(n, u4(32))).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        return (both >> n if side == "r" else (both << n) >> np.uint64(32)).astype(u4)

    if side not in "lr" or mode not in ("wrap", "clamp"):
        raise PtxError("funnel shift")
    return step(d, i.operands[0], run, sources)


@builder("bfe")
def _extract(d: Decoder, i: Instruction) -> Step:
    if i.opcode[-1] not in ("u32", "s32", "u64", "s64"):
        raise PtxError("bit field of this type")
    signed, bits = i.opcode[-1][0] == "s", WIDTHS[i.opcode[-1]]
    sources = [d.operand(text, width) for text, width in zip(i.operands[1:], (bits, 32, 32), strict=True)]

    def run(a: Array, at: Array, count: Array) -> Array:
        at, count = at & u4(255), np.minimum(count & u4(255), u4(bits))
        found = _shift_right(a, at) & (_shift_left(np.ones_like(a), count) - a.dtype.type(1))
        if not signed:
            return found
        one = a.dtype.type(1)
        top = np.minimum(at + count - u4(1), u4(bits - 1))
        sign = _shift_right(a, top) & one
        return np.where((sign == 1) & (count > 0), found | ~(_shift_left(np.ones_like(a), count) - one), found)

    return step(d, i.operands[0], run, sources)


@builder("bfi")
def _insert(d: Decoder, i: Instruction) -> Step:
    if i.opcode[-1] != "b32":
        raise PtxError("bit field of this type")
    sources = [d.operand(text, 32) for text in i.operands[1:]]

    def run(a: Array, b: Array, at: Array, count: Array) -> Array:
        field = _shift_left(_shift_left(np.ones_like(a), count) - u4(1), at)
        return (b & ~field) | (_shift_left(a, at) & field)

    return step(d, i.operands[0], run, sources)


@builder("lop3")
def _logic(d: Decoder, i: Instruction) -> Step:
    table = int(i.operands[4], 0)
    sources = [d.operand(text, 32) for text in i.operands[1:4]]

    def run(a: Array, b: Array, c: Array) -> Array:
        value = np.zeros_like(a)
        for place in range(8):
            if table >> place & 1:
                value |= (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
        return value

    return step(d, i.operands[0], run, sources)


@builder("prmt")
def _permute(d: Decoder, i: Instruction) -> Step:
    if i.opcode != ("prmt", "b32"):
        raise PtxError("byte permutation mode")
    sources = [d.operand(text, 32) for text in i.operands[1:]]
    nothing = np.full(LANES, 0xFFFFFFFF, u4)

    def run(a: Array | None, b: Array | None, chosen: Array) -> Array:
        # Of words that are not used the compiler makes bytes out of registers that nobody wrote: NaN, as in memory.
        a, b = (nothing if x is None else x for x in (a, b))
        both = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
        value = np.zeros((LANES, 4), np.uint8)
        for place in range(4):
            pick = (chosen >> u4(4 * place)) & u4(15)
            byte = np.take_along_axis(both, (pick & u4(7)).astype(np.int64)[:, None], 1)[:, 0]
            value[:, place] = np.where(pick & u4(8), (byte.view(np.int8) >> 7).view(np.uint8), byte)
        return value.view(u4)[:, 0]

    return step(d, i.operands[0], run, sources)


@builder("popc", "clz", "brev")
def _bits(d: Decoder, i: Instruction) -> Step:
    if i.opcode[-1] != "b32":
        raise PtxError("bits of this type")
    scalar = {
        "popc": lambda x: x.bit_count(),
        "clz": lambda x: 32 - x.bit_length(),
        "brev": lambda x: int(f"{x:032b}"[::-1], 2),
    }[i.opcode[0]]
    source = d.operand(i.operands[1], 32)
    return step(d, i.operands[0], lambda a: np.array([scalar(int(x)) for x in a], u4), [source])
