"""Instructions that move, convert, compare and choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.ptx.arithmetic import (
    _SIGNED,
    _UNSIGNED,
    Array,
    as_type,
    f4,
    f32_to_bf16,
    flushed,
    step,
    to_bits,
    u4,
)  # fmt: skip
from tests.ptx.decode import Decoder, builder
from tests.ptx.machine import WINDOW, Step, Warp
from tests.ptx.text import WIDTHS, Instruction, PtxError


def _same(x: Array) -> Array:
    return x


@builder("mov")
def _move(d: Decoder, i: Instruction) -> Step:
    target, source = i.operands
    width = WIDTHS[i.opcode[-1]]
    if source.startswith("{"):
        parts = [d.operand(name, width // len(d.vector(source))) for name in d.vector(source)]
        small, whole = _UNSIGNED[width // len(parts)], _UNSIGNED[width]
        return step(d, target, lambda *x: np.stack(x, 1).astype(small, copy=False).view(whole)[:, 0], parts)
    if target.startswith("{"):
        names = d.vector(target)
        small = _UNSIGNED[width // len(names)]
        to, origin = [d.register(name) for name in names], d.operand(source, width)

        def run(warp: Warp) -> None:
            pieces = warp.values[origin].view(small).reshape(-1, len(to))
            for place, index in enumerate(to):
                piece = pieces[:, place].copy()
                if warp.mask is None:
                    warp.values[index] = piece
                else:
                    warp.put(index, piece)

        return run
    return step(d, target, _same, [d.operand(source, width)])


@builder("cvta")
def _to_generic(d: Decoder, i: Instruction) -> Step:
    if i.opcode[-2] not in ("param", "global", "shared"):
        raise PtxError("address space")
    return step(d, i.operands[0], _same, [d.operand(i.operands[1], 64)])


@builder("mapa")
def _map(d: Decoder, i: Instruction) -> Step:
    """The address of the same place in another block of the cluster."""
    if i.opcode[1:] != ("shared::cluster", "u32"):
        raise PtxError("address space")
    sources = [d.operand(text, 32) for text in i.operands[1:]]
    return step(d, i.operands[0], lambda at, rank: (at % WINDOW + (rank + 1) * WINDOW).astype(u4), sources)


@builder("selp")
def _select(d: Decoder, i: Instruction) -> Step:
    width = WIDTHS[i.opcode[-1]]
    sources = [d.operand(i.operands[1], width), d.operand(i.operands[2], width), d.operand(i.operands[3], 1)]
    return step(d, i.operands[0], lambda a, b, p: np.asarray(np.where(p, a, b)), sources)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _comparison(name: str, floats: bool) -> Callable[[Any, Any], Any]:
    if not floats:
        return _COMPARE[name]
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in _COMPARE:
        # Ordered: false where there is a NaN, and only != is true then in numpy.
        plain = _COMPARE[name]
        return (lambda a, b: plain(a, b) & ~(np.isnan(a) | np.isnan(b))) if name == "ne" else plain
    plain = _COMPARE[name[:-1]]
    return lambda a, b: plain(a, b) | np.isnan(a) | np.isnan(b)


@builder("setp")
def _compare(d: Decoder, i: Instruction) -> Step:
    name, kind = i.opcode[1], i.opcode[-1]
    if kind in ("f16x2", "bf16x2"):
        return _compare_halves(d, i)
    others = [each for each in i.opcode[2:-1] if each != "ftz"]
    if len(others) > 1 or "|" in i.operands[0] or any(each not in ("and", "or", "xor") for each in others):
        raise PtxError("comparison")
    compare, typed = _comparison(name, kind in ("f16", "bf16", "f32", "f64")), as_type(kind)
    sources = [d.operand(text, WIDTHS[kind]) for text in i.operands[1:3]]
    if not others:
        return step(d, i.operands[0], lambda a, b: compare(typed(a), typed(b)), sources)
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[others[0]]
    last = i.operands[3]
    sources.append(d.operand(last.lstrip("!"), 1))
    flip = last.startswith("!")
    return step(d, i.operands[0], lambda a, b, p: combine(compare(typed(a), typed(b)), ~p if flip else p), sources)


def _compare_halves(d: Decoder, i: Instruction) -> Step:
    """Both halves of a register at once, into two predicates, the low half's first."""
    name, kind = i.opcode[1], i.opcode[2]
    targets = [d.register(each) for each in i.operands[0].split("|")]
    if len(i.opcode) != 3 or len(targets) != 2:
        raise PtxError("comparison")
    compare, typed = _comparison(name, True), as_type(kind[:-2])
    a, b = (d.operand(text, 32) for text in i.operands[1:3])

    def run(warp: Warp) -> None:
        left, right = (typed(np.ascontiguousarray(warp.values[n]).view(np.uint16)) for n in (a, b))
        found = compare(left, right).reshape(32, 2)
        for half, to in enumerate(targets):
            if warp.mask is None:
                warp.values[to] = found[:, half].copy()
            else:
                warp.put(to, found[:, half])

    return run


@builder("cvt")
def _convert(d: Decoder, i: Instruction) -> Step:
    to, origin = i.opcode[-2:]
    modifiers = set(i.opcode[1:-2])
    if to in ("bf16x2", "f16x2") and origin == "f32" and modifiers == {"rn"}:
        narrow = f32_to_bf16 if to == "bf16x2" else _to_f16
        pair = [d.operand(i.operands[1], 32), d.operand(i.operands[2], 32)]

        def pack(high: Array, low: Array) -> Array:
            return (narrow(high.view(f4)).astype(u4) << u4(16)) | narrow(low.view(f4))

        return step(d, i.operands[0], pack, pair)
    if to == "e4m3x2" and origin == "f32" and modifiers == {"rn", "satfinite"}:
        pair = [d.operand(i.operands[1], 32), d.operand(i.operands[2], 32)]
        return step(d, i.operands[0], lambda high, low: (_to_e4m3(high) << np.uint16(8)) | _to_e4m3(low), pair)
    if to == "e4m3x2" and origin == "f16x2" and modifiers == {"rn", "satfinite"}:
        return step(d, i.operands[0], _halves_to_e4m3, [d.operand(i.operands[1], 32)])
    if to == "f16" and origin == "f32" and modifiers == {"rz"}:
        return step(d, i.operands[0], _to_f16_towards_zero, [d.operand(i.operands[1], 32)])
    if to == "f16x2" and origin == "e4m3x2" and modifiers == {"rn"}:
        return step(d, i.operands[0], _from_e4m3, [d.operand(i.operands[1], 16)])
    function = _conversion(to, origin, modifiers)
    # The smallest registers have 16 bits.
    return step(d, i.operands[0], function, [d.operand(i.operands[1], max(WIDTHS[origin], 16))])


def _to_f16(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16)


def _to_f16_towards_zero(x: Array) -> Array:
    value = np.ascontiguousarray(x).view(f4)
    near = value.astype(np.float16)
    too_far = np.abs(near.astype(f4)) > np.abs(value)
    return np.where(too_far, np.nextafter(near, np.float16(0)), near).view(np.uint16)


def _to_e4m3(x: Array) -> Array:
    """Bits of float32 numbers as e4m3 ones, saturated; NaN stays NaN."""
    found = torch.from_numpy(x.view(f4).copy()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return found.view(torch.uint8).numpy().astype(np.uint16)


def _halves_to_e4m3(x: Array) -> Array:
    """Two float16 numbers of 32 bits as two e4m3 ones of 16."""
    both = np.ascontiguousarray(x).view(np.float16).astype(f4).reshape(-1, 2)
    return (_to_e4m3(np.ascontiguousarray(both[:, 1])) << np.uint16(8)) | _to_e4m3(np.ascontiguousarray(both[:, 0]))


def _from_e4m3(x: Array) -> Array:
    """Two e4m3 numbers of 16 bits as two float16 ones of 32."""
    both = torch.from_numpy(np.ascontiguousarray(x.astype(np.uint16)).view(np.uint8)).view(torch.float8_e4m3fn)
    return both.to(torch.float16).view(torch.int16).numpy().view(u4)


def _conversion(to: str, origin: str, modifiers: set[str]) -> Callable[[Array], Array]:
    floats = ("f16", "bf16", "f32", "f64")
    typed, bits = as_type(origin), to_bits(to)
    if modifiers - {"rn", "rni", "rzi", "rmi", "rpi", "ftz"}:
        raise PtxError(f"conversion {modifiers}")
    if to not in floats and origin not in floats:
        # The register may be wider than the type: its low bits count.
        narrow, wide = (_SIGNED if origin[0] == "s" else _UNSIGNED)[WIDTHS[origin]], _UNSIGNED[WIDTHS[to]]
        return lambda x: x.astype(_UNSIGNED[WIDTHS[origin]]).view(narrow).astype(wide)
    if to in floats and origin in floats:
        if modifiers & {"rni", "rmi", "rpi", "rzi"}:
            whole = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}[(modifiers - {"ftz"}).pop()]
            return lambda x: bits(whole(typed(x)))
        if to == "f32":
            return lambda x: bits(typed(x).astype(f4))
        if origin == "f32":
            return lambda x: (f32_to_bf16 if to == "bf16" else _to_f16)(x.view(f4))
    elif to in ("f16", "f32", "f64"):
        kind = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[to]
        return lambda x: bits(typed(x).astype(kind))
    elif to == "bf16" and origin not in floats:
        # Integers beyond 2**24 might be rounded twice.
        return lambda x: f32_to_bf16(typed(x).astype(f4))
    elif origin in ("f32", "f64") and modifiers & {"rzi", "rni"}:
        whole = np.trunc if "rzi" in modifiers else np.rint
        limits = np.iinfo((_SIGNED if to[0] == "s" else _UNSIGNED)[WIDTHS[to]])

        def clamp(x: Array) -> Array:
            value = np.nan_to_num(whole(typed(x)).astype(np.float64), nan=0.0)
            return bits(np.clip(value, limits.min, limits.max).astype(limits.dtype))

        return clamp
    raise PtxError(f"conversion of {origin} to {to}")


@builder("shfl")
def _shuffle(d: Decoder, i: Instruction) -> Step:
    if i.opcode[1] != "sync" or i.opcode[3] != "b32":
        raise PtxError("shuffle")
    mode = i.opcode[2]
    target, _, okay = i.operands[0].partition("|")
    source, lane, limit = (d.operand(text, 32) for text in i.operands[1:4])
    to, valid = d.register(target), d.register(okay) if okay else None

    def run(warp: Warp) -> None:
        v = warp.values
        here = np.arange(32)
        by, c = v[lane].astype(np.int64), v[limit].astype(np.int64)
        segments = (c >> 8) & 31
        top = (here & segments) | (c & 31 & ~segments)
        if mode == "bfly":
            wanted, inside = here ^ by, (here ^ by) <= top
        elif mode == "idx":
            wanted = (here & segments) | (by & 31 & ~segments)
            inside = wanted <= top
        elif mode == "down":
            wanted, inside = here + by, here + by <= top
        else:
            wanted, inside = here - by, here - by >= top
        wanted = np.where(inside, wanted, here)
        if warp.mask is not None and not warp.mask[wanted[warp.mask]].all():
            raise PtxError("a shuffle reads a lane that is not active")
        value = v[source][wanted]
        for index, result in ((to, value), (valid, inside)):
            if index is None:
                continue
            if warp.mask is None:
                v[index] = result
            else:
                warp.put(index, result)

    return run


@builder("vote")
def _vote(d: Decoder, i: Instruction) -> Step:
    _, _, mode, kind = i.opcode
    text = i.operands[1]
    source, flip, to = d.operand(text.lstrip("!"), 1), text.startswith("!"), d.register(i.operands[0])
    if (mode, kind) not in (("any", "pred"), ("all", "pred"), ("ballot", "b32")):
        raise PtxError("vote")

    def run(warp: Warp) -> None:
        votes = warp.values[source] ^ flip
        counted = votes if warp.mask is None else votes[warp.mask]
        if mode == "ballot":
            lanes = votes if warp.mask is None else votes & warp.mask
            value: Array = np.full(32, sum(1 << int(n) for n in np.flatnonzero(lanes)), u4)
        else:
            value = np.full(32, bool(counted.any() if mode == "any" else counted.all()))
        if warp.mask is None:
            warp.values[to] = value
        else:
            warp.put(to, value)

    return run


@builder("elect")
def _elect(d: Decoder, i: Instruction) -> Step:
    target, _, chosen = i.operands[0].partition("|")
    to, leader = d.register(target), d.register(chosen)

    def run(warp: Warp) -> None:
        first = warp.lanes()[0]
        for index, value in ((to, np.full(32, first, u4)), (leader, np.arange(32) == first)):
            if warp.mask is None:
                warp.values[index] = value
            else:
                warp.put(index, value)

    return run


@builder("redux")
def _reduce(d: Decoder, i: Instruction) -> Step:
    _, _, name, kind = i.opcode
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[name]
    typed, bits = as_type(kind), to_bits(kind)
    source, to = d.operand(i.operands[1], 32), d.register(i.operands[0])

    def run(warp: Warp) -> None:
        if warp.mask is not None:
            raise PtxError("a reduction with lanes apart")
        value = typed(warp.values[source])
        warp.values[to] = bits(np.full(32, function.reduce(value, dtype=value.dtype), value.dtype))

    return run


_ = flushed
