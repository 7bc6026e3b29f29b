"""The portable kernels' arguments from a ``Problem``, for launches and for builds without a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Call, Dropout, Heads, KeyBand, Mod, Mods, Rows, ScoreTensor, Sequences
from flashtile.backends.gpu.launch import Const, Pointer, TensorMap, pointer
from flashtile.backends.gpu.masks import Masks
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import (
    alibi_of,
    dropout_of,
    functions_of,
    geometry,
    named,
    num_packed_tiles,
    rows_of,
    score_strides,
    softcap_of,
)
from flashtile.backends.portable import config as tables
from flashtile.backends.portable.config import PortableTiles, tile_dims
from flashtile.backends.portable.device.records import TileSizes, widths
from flashtile.call.axes import is_aligned
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized_call import QuantizedTensors

mods = device_code("flashtile.backends.gpu.device.mods")
# Bytes of keys and values of heads that run together, the same for all chips, as it changes no result. Far below L2,
# which rows and results pass through as well; measured: docs/tuning-notes.md.
_CACHE_BYTES = 4 * 1024 * 1024


def num_programs(problem: Problem, tensors: Tensors | QuantizedTensors, block: int, *, over_keys: bool = False) -> int:
    """Size of a grid over blocks of rows (or keys), heads and sequences."""
    tensor, cu_seqlens = (tensors.k, tensors.cu_seqlens_k) if over_keys else (tensors.q, tensors.cu_seqlens_q)
    heads = problem.num_heads_kv if over_keys else problem.num_heads_q
    rows = tensor.shape[-3]
    if rows == 0:
        return 0
    if cu_seqlens is not None:
        return num_packed_tiles(rows, problem.batch, block) * heads
    return -(-rows // block) * heads * problem.batch


def call_of(
    problem: Problem,
    t: Tensors,
    config: PortableTiles,
    described: Sequence[str] = (),
    dout: Tensor | None = None,
    bias_sums: tuple[bool, bool] = (False, False),
    masks: Masks | None = None,
    has_own_slope: bool = True,
) -> tuple[Call, Rows | None]:
    """A kernel's ``Call``, and its rows of dout.

    Args:
        problem: The call.
        t: Its tensors.
        config: The kernel's tiles.
        described: What its loop loads of q, k, v and dout: by descriptors if all of them can be.
        dout: The output's gradient, in the backward.
        bias_sums: Whether a kernel's program sums over sequences, and over heads, that share a bias.
        masks: Intervals or lists of the call, as the kernel's tiles need them.
        has_own_slope: Whether the slope of a user's score mod is wanted, or the slopes of what follows it alone.
    """
    p = problem
    block_d, block_dv = tile_dims(p)
    tensors = {"q": (t.q, config.block_m, block_d), "k": (t.k, config.block_n, block_d),
               "v": (t.v, config.block_n, block_dv), "dout": (dout, config.block_m, block_dv)}  # fmt: skip
    vector_width = _vector_width((p.head_dim, p.head_dim_v), [x for x, _, _ in tensors.values() if x is not None])
    maps = descriptors({name: tensors[name] for name in described}, config)

    def rows(name: str, tensor: Tensor, block_dim: int) -> Rows:
        return rows_of(name, tensor, block_dim, maps.get(name), vector_width)

    call = Call(
        rows("q", t.q, block_d), rows("k", t.k, block_d), rows("v", t.v, block_dv), *sequences_of(p, t), heads_of(p),
        _mods(p, t, bias_sums, pointer(t.sinks, "sinks") if dout is None else None, masks, has_own_slope),
    )  # fmt: skip
    return call, None if dout is None else rows("dout", dout, block_dv)


def sequences_of(problem: Problem, t: Tensors | QuantizedTensors) -> tuple[Sequences, Sequences]:
    """The ``Sequences`` of the queries and of the keys."""
    return (
        Sequences(pointer(t.cu_seqlens_q, "cu_seqlens_q"), problem.batch, t.q.shape[-3]),
        Sequences(pointer(t.cu_seqlens_k, "cu_seqlens_k"), problem.batch, t.k.shape[-3]),
    )


def heads_of(problem: Problem) -> Heads:
    """``Call.heads``."""
    # Divisions by 1 go away where the compiler knows of it.
    return Heads(problem.num_heads_q, Const(1) if problem.group_size == 1 else problem.group_size)


def _mods(
    problem: Problem, t: Tensors, bias_sums: tuple[bool, bool], sinks: Pointer | None, intervals: Masks | None,
    has_own_slope: bool,
) -> Mods:  # fmt: skip
    """The transforms, masks and dropout of a call."""
    p, vector_width, origins = problem, _score_vector_width(problem, t), pointer(t.origins, "origins")
    bias, mask = None, None
    alibi = alibi_of(p, t.alibi_slopes)
    if alibi is not None and origins is not None:
        alibi = Mod(mods.alibi_of_part, None, mods.slope_of_part, (alibi.operands, origins, p.batch))
    if t.attn_bias is not None:
        tensor = score_tensor("attn_bias", t.attn_bias, vector_width)
        tensor = tensor._replace(
            stride_b=Const(0) if bias_sums[0] else tensor.stride_b,
            stride_head=Const(0) if bias_sums[1] else tensor.stride_head,
        )
        bias = Mod(mods.bias, None, mods.tensor_of_head, tensor)
    if t.attn_mask is not None:
        tensor = score_tensor("attn_mask", t.attn_mask.view(torch.uint8), vector_width)
        mask = Mod(mods.select_tensor, None, mods.tensor_of_head, tensor)
    drops = dropout_of(p, t.rng_state, origins, has_ptx(p))
    score_mod, mask_mod = functions_of(p, t)
    if score_mod is not None and not has_own_slope:
        score_mod = score_mod._replace(linear=None)
    band = band_of(p, t.q.shape[-3] + t.k.shape[-3])
    transforms, names = named(score_mod=score_mod, softcap=softcap_of(p), alibi=alibi, bias=bias)
    masks, mask_names = named(mask=mask, mask_mod=mask_mod)
    return Mods(
        p.softmax_scale, transforms, band if intervals is None else band._replace(**intervals._asdict()), masks,
        drops, sinks, names, mask_names, transforms is not None or p.softmax_scale <= 0, input_precision(p),
        p.large_scores,
    )  # fmt: skip


def plain_mods(problem: Problem, span: int, sinks: Tensor | None) -> Mods:
    """``Mods`` of a call that has no others than a softcap, a band and sinks; span: of ``band_of``."""
    transforms, names = named(softcap=softcap_of(problem))
    return Mods(
        problem.softmax_scale, transforms, band_of(problem, span), None, Dropout(None, None, 1.0, None, False),
        pointer(sinks, "sinks"), names, "", transforms is not None or problem.softmax_scale <= 0, None,
    )  # fmt: skip


def band_of(problem: Problem, span: int) -> KeyBand:
    """The band, cut to the number of rows and keys: a larger one has the same effect and could overflow."""
    of, most = problem.band, max(span, 1)
    return KeyBand(*(None if x is None else max(-most, min(most, x)) for x in (of.left, of.right, of.chunk)))


def score_tensor(name: str, tensor: Tensor, vector_width: int) -> ScoreTensor:
    """The record of a mask or a bias, or of a bias's direction."""
    batch, head, row, column = score_strides(tensor)
    return ScoreTensor(pointer(tensor, name), batch, head, row, Const(1) if column == 1 else column, vector_width)


def _vector_width(dims: tuple[int, int], tensors: Sequence[Tensor]) -> int:
    """The stride divisor that the kernel may assume where Triton finds no 16: 16 bytes, in elements; else 1."""
    vector_width = 16 // tensors[0].element_size()
    odd = all(dim % vector_width == 0 for dim in dims) and any(dim % 16 for dim in dims)
    return vector_width if odd and all(map(is_aligned, tensors)) else 1


def _score_vector_width(problem: Problem, tensors: Tensors) -> int:
    """``ScoreTensor.VECTOR`` of a call's mask and bias; a packed sequence may have any number of keys."""
    given = [x for x in (tensors.attn_mask, tensors.attn_bias) if x is not None]
    if problem.varlen or not given:
        return 1
    return math.gcd(16, problem.seqlen_k, *(stride for x in given for stride in score_strides(x)[:3]))


def tiles_of(config: PortableTiles, together: int = 1) -> TileSizes:
    """A kernel's last argument; together: of ``heads_at_once``."""
    return TileSizes(together, config.block_m, config.block_n, config.one_loop, config.mask_all)


def heads_at_once(problem: Problem, first: Tensor, second: Tensor) -> int:
    """How many heads to process together so that their inner-loop tensors (batch, rows, heads, dim) fit in L2.

    1 if all blocks of a head cost the same: neighbouring programs then read the same rows at the same time.
    """
    if problem.band.unbounded:
        return 1
    rows = first.shape[-3]
    a_head = rows * (first.shape[-1] + second.shape[-1]) * first.element_size()
    return max(1, _CACHE_BYTES // max(1, a_head))


def has_ptx(problem: Problem) -> bool:
    """Whether kernels may have inline PTX: on NVIDIA's GPUs."""
    return tables.arch_of(problem) not in ("interpreter", "gfx942")


def input_precision(problem: Problem) -> str:
    """How float32 is multiplied on an NVIDIA GPU: as six products of bfloat16, or as tf32 if torch's own setting asks.

    A number is the sum of three of bfloat16, so what is left out is below float32's own rounding, and tensor cores take
    a fifth of the time of IEEE products. AMD's matrix units multiply float32 themselves, and 16 bits have one way.
    """
    if problem.dtype != torch.float32 or not has_ptx(problem):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"


def describable(tensor: Tensor) -> bool:
    """Whether a tensor descriptor can read it: not empty, 16-byte aligned, and no dimension expanded."""
    vector_width = 16 // tensor.element_size()
    strides = [stride for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return tensor.numel() > 0 and tensor.data_ptr() % 16 == 0 and all(s > 0 and s % vector_width == 0 for s in strides)


def descriptors(tensors: dict[str, Any], config: PortableTiles) -> dict[str, tuple[TensorMap, ...]]:
    """Descriptors of tensors, given with a tile's rows and columns, that a loop loads: of all of them or none."""
    if not config.tma or not all(describable(tensor) for tensor, _, _ in tensors.values()):
        return {}
    return {name: tuple(descriptor(name, tensor, rows, cols) for cols in widths(columns))
            for name, (tensor, rows, columns) in tensors.items()}  # fmt: skip


def descriptor(name: str, tensor: Tensor, rows: int, columns: int) -> TensorMap:
    """A tensor map over (batch, rows, heads, dim), or packed rows; its box is ``rows`` by ``columns`` of one head."""
    packed = tensor.dim() == 3
    shape, strides = geometry(tuple(tensor.shape), tensor.stride(), packed)
    return TensorMap(tensor.dtype, shape, strides, (1,) * packed + (1, rows, 1, columns), None, name)
