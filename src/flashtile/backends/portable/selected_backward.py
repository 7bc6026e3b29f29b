"""The gradients of attention where each query has a list of single keys, on GPUs: the launches and what they share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.host import Launcher, run
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.portable.config import SHARED_BYTES, PortableTiles, arch_of, padded
from flashtile.backends.portable.records import input_precision
from flashtile.call.problem import Problem, compute_capability, described
from flashtile.call.selected import SelectedInputs
from flashtile.core.errors import UnsupportedError

_kernels = device_code("flashtile.backends.portable.selected_backward_kernel")
# Columns of a part of a tile, at most. With parts of 128 a tile of 64 heads spills more than twice as many numbers.
_WIDTH = 64
# Heads of a query x keys of its list x warps x stages, for so many columns at most, 16 bits: what spills nothing by
# compiler reports. Blackwell has Ampere's: accumulators of 576 columns are more than its tensor memory.
_AMPERE = {128: "64x32x4x1", 256: "64x32x8x1", 1 << 31: "32x32x8x1"}
_TILES = {
    "sm_90": {128: "64x64x4x2", 256: "64x64x8x2"},
    "sm_80": _AMPERE,
    "sm_86": {128: "64x32x4x1", 256: "64x32x8x1", 1 << 31: "16x32x8x1"},
    "sm_100": _AMPERE,
}
# On sm_90 beyond 256 columns: rows that are read once or twice, and 16 heads. The first one spills 300 bytes; fewer
# heads would add twice as many numbers to each key.
_ONCE, _TWICE, _FEW = "64x64x8x1", "32x64x8x1", "16x32x4x2"
_SMALLEST = PortableTiles(16, 16, 4, 1)
# Bytes of the shares of keys that a deterministic call stores before it adds them up.
_SHARES = 2**29


class ListedRows(NamedTuple):
    """A tensor (rows, heads, dim), dim contiguous; strides in elements. Only passed on, never assigned.

    Attributes:
        ptr: Address of the first element.
        stride_row: Stride from row to row.
        stride_head: Stride from head to head.
        DIM: Columns.
        BLOCK_DIM: Columns of a tile; columns past DIM are 0.
    """

    ptr: Any
    stride_row: Any
    stride_head: Any
    DIM: Any
    BLOCK_DIM: Any


class KeySums(NamedTuple):
    """Sums of keys, or shares of them: contiguous (rows, DIM) float32.

    Attributes:
        ptr: Address of the first element.
        DIM: Columns.
        BLOCK_DIM: The power of two that holds them.
    """

    ptr: Any
    DIM: Any
    BLOCK_DIM: Any


class SelectedCall(NamedTuple):
    """What the backward of a call reads.

    Attributes:
        q: ``ListedRows``, a row a query, as are out and dout.
        k: ``ListedRows``, the rows that lists name.
        v: Likewise; None if these are the first columns of k.
        out: The forward's output.
        dout: The output's gradient.
        lse: float32, natural log.
        dlse: The gradient of lse, or None.
        stride_lse: Stride of lse from query to query.
        stride_lse_head: Stride of lse from head to head.
        stride_dlse: As of lse.
        stride_dlse_head: Likewise.
        slots: int32, contiguous (queries, most): the rows of each query's keys, from the front.
        counts: int32, how many of them there are.
        most: Places of a list.
        first: The first query of the launch.
        num_heads_kv: Key heads.
        group_size: Query heads of a key head.
        scale: The factor of products.
        cap: The softcap, or None.
        PRECISION: How float32 is multiplied.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    dlse: Any
    stride_lse: Any
    stride_lse_head: Any
    stride_dlse: Any
    stride_dlse_head: Any
    slots: Any
    counts: Any
    most: Any
    first: Any
    num_heads_kv: Any
    group_size: Any
    scale: Any
    cap: Any
    PRECISION: Any


class SelectedSizes(NamedTuple):
    """The tiles, and whether sums are made by atomic adds.

    Attributes:
        HEADS: Heads of a tile.
        KEYS: Keys.
        WIDTH: Columns of a part.
        ADDS: Whether dk and dv are added to; else each program stores its shares of them.
    """

    HEADS: Any
    KEYS: Any
    WIDTH: Any
    ADDS: Any


class SelectedOptions(NamedTuple):
    """What a call asks for, and where.

    Attributes:
        where: What ``described`` makes of the device, compute capability and dtype, which tiles depend on.
        softmax_scale: The factor of products.
        softcap: The softcap, 0 for none.
    """

    where: Problem
    softmax_scale: float
    softcap: float


def gradients(
    given: SelectedInputs,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sinks.

    Args:
        given: The tensors, float16, bfloat16 or float32; if v is k's first columns, rows are read once.
        softmax_scale: The factor of products.
        softcap: As of ``flashtile.attention``; 0 for none.
        sinks: ``(num_heads_q,)``, or None.
        deterministic: Whether the results have the same bits in each run; else dk and dv are sums in any order.

    Returns:
        dq, dk, dv, and the gradient of the sinks, None without them. Contiguous, each of its tensor's dtype.

    Raises:
        UnsupportedError: Rows of float32 too wide for the GPU's shared memory.
    """
    t, device = _as_read(given), given.q.device
    where = described(device_type=device.type, compute_capability=compute_capability(device), dtype=t.q.dtype)
    options = SelectedOptions(where, softmax_scale, softcap)
    made = {"dq": torch.empty(t.q.shape, dtype=t.q.dtype, device=device), "dk": _zeros(t.k), "dv": _zeros(t.v)}
    if 0 in t.slots.shape or 0 in t.k.shape:
        made["dq"].zero_()
    elif deterministic:
        _add_shares(t, options, made)
    else:
        run([Launcher(backward_launch(t, options), device, t, made)], t, made)
    dq, dk, dv = (made[f"d{name}"].to(x.dtype) for name, x in (("q", given.q), ("k", given.k), ("v", given.v)))
    return dq, dk, dv, None if sinks is None else sinks_gradient(sinks, t)


def _as_read(t: SelectedInputs) -> SelectedInputs:
    """The tensors as kernels read them: rows contiguous, lse and dlse float32, slots and counts contiguous."""
    t = SelectedInputs(
        _readable(t.q), _readable(t.k), _readable(t.v), _readable(t.out), t.lse.float(),
        _readable(t.dout.to(t.q.dtype)), None if t.dlse is None else t.dlse.float(), t.slots.contiguous(),
        t.counts.contiguous(),
    )  # fmt: skip
    # Triton's interpreter multiplies the bits of bfloat16.
    return _widened(t) if t.q.device.type == "cpu" and t.q.dtype == torch.bfloat16 else t


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _readable(x: Tensor) -> Tensor:
    """The tensor with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _widened(t: SelectedInputs) -> SelectedInputs:
    """The same in float32; v stays a part of k."""
    k = t.k.float()
    v = k[..., : t.v.shape[-1]] if _is_part(t) else t.v.float()
    return t._replace(q=t.q.float(), k=k, v=v, out=t.out.float(), dout=t.dout.float())


def _is_part(t: SelectedInputs) -> bool:
    """Whether v is the first columns of k."""
    same = t.v.shape[:-1] == t.k.shape[:-1] and t.v.stride() == t.k.stride() and t.v.data_ptr() == t.k.data_ptr()
    return same and t.v.shape[-1] <= t.k.shape[-1]


def sinks_gradient(sinks: Tensor, t: SelectedInputs) -> Tensor:
    """``-sum over queries of exp(sink - lse) * delta``: a sink is a key with value 0, so its dprobs is 0."""
    delta = (t.out.float() * t.dout.float()).sum(-1)
    if t.dlse is not None:
        delta = delta - t.dlse
    weight = torch.exp(sinks.float() - torch.where(t.lse == -torch.inf, torch.inf, t.lse))
    return -(weight * delta).sum(0).to(sinks.dtype)


def block_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The columns of tiles: a power of two up to 64, then multiples of 64; the smaller one as ``padded_dims`` says."""
    dim, dim_v = (-(-n // _WIDTH) * _WIDTH if n > _WIDTH else padded(n) for n in (head_dim, head_dim_v))
    return max(dim, min(dim_v, _WIDTH)), max(dim_v, min(dim, _WIDTH))


def _reads_once(t: SelectedInputs) -> bool:
    """Whether v is whole parts of k's tile."""
    dim, dim_v = t.k.shape[-1], t.v.shape[-1]
    return _is_part(t) and (dim_v % _WIDTH == 0 or dim_v == dim == padded(dim))


def choose(t: SelectedInputs, where: Problem) -> PortableTiles:
    """The tiles, block_m being heads of a query and block_n keys of its list.

    Raises:
        UnsupportedError: No tile fits shared memory.
    """
    arch, (dim, dim_v) = arch_of(where), block_dims(t.q.shape[-1], t.v.shape[-1])
    least = 16 if arch == "interpreter" else padded(t.q.shape[1] // t.k.shape[1])
    if where.dtype == torch.float32:
        needed = 4 * _SMALLEST.block_m * (2 * dim + dim_v) + 4096
        if arch == "sm_86" and needed > SHARED_BYTES[arch]:
            raise UnsupportedError(
                f"portable: the gradients of attention over selected keys of float32 with head_dim {t.q.shape[-1]} and "
                f"{t.v.shape[-1]} need {needed} bytes of shared memory, this GPU has {SHARED_BYTES[arch]}"
            )
        is_wide = max(dim, dim_v) > 256 and arch != "gfx942"
        found = dataclasses.replace(_SMALLEST, num_warps=8) if is_wide else _SMALLEST
    else:
        rows = _TILES.get(arch, {})
        name = next((each for most, each in rows.items() if max(dim, dim_v) <= most), None)
        found = _SMALLEST if name is None else PortableTiles.parse(name)
        if arch == "sm_90" and max(dim, dim_v) > 256:
            found = PortableTiles.parse(_FEW if least <= 16 else _ONCE if _reads_once(t) else _TWICE)
    return dataclasses.replace(found, block_m=min(found.block_m, least))


def backward_launch(t: SelectedInputs, options: SelectedOptions, queries: tuple[int, int] | None = None) -> Launch:
    """The launch of the backward.

    Args:
        t: The tensors as kernels read them; their layouts count.
        options: What is asked for.
        queries: The first and the number of queries that shares are stored for; None to add all up.
    """
    group, tiles = t.q.shape[1] // t.k.shape[1], choose(t, options.where)
    dims, dlse = block_dims(t.q.shape[-1], t.v.shape[-1]), t.dlse
    first, count = (0, t.q.shape[0]) if queries is None else queries

    def rows(name: str, block: int) -> ListedRows:
        x: Tensor = getattr(t, name)
        return ListedRows(pointer(x, name), x.stride(0), x.stride(1), x.shape[-1], block)

    call = SelectedCall(
        rows("q", dims[0]), rows("k", dims[0]), None if _reads_once(t) else rows("v", dims[1]), rows("out", dims[1]),
        rows("dout", dims[1]), pointer(t.lse, "lse"), pointer(dlse, "dlse"), t.lse.stride(0), t.lse.stride(1),
        None if dlse is None else dlse.stride(0), None if dlse is None else dlse.stride(1),
        pointer(t.slots, "slots"), pointer(t.counts, "counts"), t.slots.shape[1], first, t.k.shape[1], group,
        float(options.softmax_scale), float(options.softcap) if options.softcap > 0 else None,
        input_precision(options.where),
    )  # fmt: skip
    ending = "" if queries is None else "_shares"
    dk, dv = (key_sums(f"{name}{ending}", x) for name, x in (("dk", t.k), ("dv", t.v)))
    sizes = SelectedSizes(tiles.block_m, tiles.block_n, _WIDTH, queries is None)
    arguments = {"call": call, "dq_ptr": Pointer(t.q.dtype, "dq"), "dk": dk, "dv": dv, "tiles": sizes}
    programs = count * t.k.shape[1] * -(-group // tiles.block_m)
    return Launch(_kernels.attention_selected_backward, programs, arguments, tiles.options())


def described_launches(problem: Problem, *, is_part: bool) -> dict[str, Launch]:
    """The launches of a described call, by name: with sums of dk and dv, and by shares.

    Args:
        problem: Its dtype, head dimensions, heads and device.
        is_part: Whether v is k's first columns.
    """
    p, dims = problem, (problem.head_dim, problem.head_dim_v)
    q, out = (torch.empty(p.seqlen_q, p.num_heads_q, n, dtype=p.dtype, device="meta") for n in dims)
    k, v = (torch.empty(p.seqlen_k, p.num_heads_kv, n, dtype=p.dtype, device="meta") for n in dims)
    lse, counts = q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty(p.seqlen_q, dtype=torch.int32)
    slots = counts[:, None].expand(-1, p.seqlen_k)
    t = SelectedInputs(q, k, k[..., : p.head_dim_v] if is_part else v, out, lse, out, None, slots, counts)
    options = SelectedOptions(p, p.softmax_scale, p.softcap)
    shares = backward_launch(t, options, (0, p.seqlen_q))
    found = {"selected_backward": backward_launch(t, options), "selected_backward_shares": shares}
    return found | {f"sum_selected_{name}": sum_launch(name, x, 2) for name, x in (("dk", k), ("dv", v))}


def key_sums(name: str, x: Tensor) -> KeySums:
    """Sums like k or v, or their shares, which are an operand of this name."""
    return KeySums(Pointer(torch.float32, name), x.shape[-1], padded(x.shape[-1]))


def sum_launch(name: str, x: Tensor, blocks: int) -> Launch:
    """The launch that adds shares of ``dk`` or ``dv``, like ``x``, up; blocks: of heads."""
    arguments = {
        "shares": key_sums(f"{name}_shares", x), "sums": key_sums(name, x), "order": Pointer(torch.int64, "order"),
        "bounds": Pointer(torch.int32, "bounds"), "num_heads_kv": x.shape[1], "blocks": blocks, "AT_ONCE": 4,
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": 1}
    return Launch(_kernels.sum_selected_shares, x.shape[0] * x.shape[1], arguments, options)


def _add_shares(t: SelectedInputs, options: SelectedOptions, made: dict[str, Tensor]) -> None:
    """Computes dq, dk and dv, by as many queries at a time as there is memory for shares of their keys."""
    (rows, heads_kv, _), device, (count, most) = t.k.shape, t.k.device, t.slots.shape
    blocks = -(-(t.q.shape[1] // heads_kv) // choose(t, options.where).block_m)
    added = {"dk": t.k, "dv": t.v}
    each = most * heads_kv * blocks
    at_once = max(1, min(count, _SHARES // (4 * each * sum(x.shape[-1] for x in added.values()))))
    given: dict[str, Tensor] = dict(made)
    for name, x in added.items():
        given[f"{name}_shares"] = torch.empty(at_once * each, x.shape[-1], dtype=torch.float32, device=device)
    place, numbers = torch.arange(most, device=device), torch.arange(rows + 1, dtype=torch.int32, device=device)
    for first in range(0, count, at_once):
        chosen = slice(first, first + at_once)
        # Places past the end of a list come last, where no row's begin.
        found = torch.where(place < t.counts[chosen, None], t.slots[chosen], rows).flatten()
        found, given["order"] = found.sort(stable=True)
        given["bounds"] = torch.searchsorted(found, numbers, out_int32=True)
        launches = [backward_launch(t, options, (first, len(found) // most))]
        launches += [sum_launch(name, x, blocks) for name, x in added.items()]
        run([Launcher(launch, device, t, given) for launch in launches], t, given)
