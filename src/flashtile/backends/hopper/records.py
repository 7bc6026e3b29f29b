"""The arguments of the Hopper forwards from a ``Problem``, for launches and for builds without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import LOG2_E, Call, Heads, KeyBand, Mod, Rows, Sequences
from flashtile.backends.gpu.launch import Const, Pointer, TensorMap, pointer
from flashtile.backends.gpu.masks import Masks
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import dropout_of, functions_of, max_scores_of, named, score_strides
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import ForwardSchedule, Keys, Mods, Output, PairTensor, Slopes
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized_call import QuantizedTensors

# Keys and values that are read at the same time: the L2 cache has 50 MB, and queries and outputs need some of it.
_CACHED_BYTES = 2**25
_user_functions = device_code("flashtile.backends.hopper.device.functions").user_functions
_drops_of = device_code("flashtile.backends.hopper.device.dropout").drops_of


def call_of(
    problem: Problem, t: Tensors | QuantizedTensors, rows: tuple[Rows, Rows, Rows], keys: Keys, mods: Mods
) -> Call:
    """A kernel's ``Call``, from ``rows_of`` q, k and v."""
    p = problem
    queries = Sequences(pointer(t.cu_seqlens_q, "cu_seqlens_q"), p.batch, t.q.shape[-3])
    return Call(*rows, queries, keys, Heads(p.num_heads_q, p.group_size), mods)


def rows_of(box: TensorMap, block_dim: int, dim: int | None = None) -> Rows:
    """The rows of a tensor that TMA reads; block_dim: columns of a tile; products need ``dim`` of them, or all."""
    return Rows(None, box, None, None, None, dim, block_dim, None, len(box.box) == 5)


def keys_of(problem: Problem, t: Tensors | QuantizedTensors) -> Keys:
    """The ``Keys`` of a call without a cache."""
    return Keys(pointer(t.cu_seqlens_k, "cu_seqlens_k"), t.k.shape[-3], None, problem.varlen, False)


def output_of(problem: Problem, box: TensorMap | None, block_dim: int, is_joined: bool = False) -> Output:
    """Where a forward stores its results: by TMA, or without a box in float32."""
    # Only such outputs are addressed by column.
    dim = problem.head_dim_v if box is None or is_joined else None
    partial_out, partial_lse = (
        Pointer(torch.float32, name) if is_joined else None for name in ("partial_out", "partial_lse")
    )
    return Output(
        box, Pointer(torch.float32, "out") if box is None else None,
        Pointer(torch.float32, "lse"), partial_out, partial_lse, dim, block_dim, problem.varlen,
        2 if problem.large_scores else 1, max_scores_of(problem),
    )  # fmt: skip


def mods_of(
    problem: Problem, t: Tensors, bias_map: TensorMap | None, mask_map: TensorMap | None, intervals: Masks | None
) -> Mods:
    """The ``Mods`` of a call; maps are ``tensor_maps.score_map``'s, None for what threads load themselves."""
    p, alibi, bias, mask = problem, None, None, None
    if t.alibi_slopes is not None:
        # Kept keys are then never past their row.
        one_sided = p.band.right is not None and p.band.right <= 0
        alibi = Slopes(
            pointer(t.alibi_slopes, "alibi_slopes"), p.num_heads_q if t.alibi_slopes.dim() == 2 else 0, one_sided
        )
    if t.attn_bias is not None:
        bias = _pair_tensor("attn_bias", t.attn_bias, bias_map)
    if t.attn_mask is not None:
        mask = _pair_tensor("attn_mask", t.attn_mask.view(torch.uint8), mask_map)
    score_mod, mask_mod = functions_of(p, t)
    made = plain_mods(p, t, alibi, bias, mask, score_mod, mask_mod)
    return made if intervals is None else made._replace(band=made.band._replace(**intervals._asdict()))


def plain_mods(
    problem: Problem, t: Tensors | QuantizedTensors, alibi: Slopes | None = None, bias: PairTensor | None = None,
    mask: PairTensor | None = None, score_mod: Mod | None = None, mask_mod: Mod | None = None,
) -> Mods:  # fmt: skip
    """``Mods`` of a call with a softcap, a band and sinks, if it has them, and those given."""
    scale, prescale, softcap = problem.softmax_scale * LOG2_E, None, None
    # What a user's score mod takes is scaled before.
    first = 1.0 if score_mod is not None else problem.softmax_scale
    if problem.softcap > 0:
        softcap = float(problem.softcap)
        scale, prescale = LOG2_E, 2 * LOG2_E * first / problem.softcap
    elif score_mod is not None:
        scale = LOG2_E
    elif problem.softmax_scale <= 0:
        scale, prescale = 1.0, scale
    band = KeyBand(*map(tensor_maps.side_of, (problem.band.left, problem.band.right, problem.band.chunk)))
    transforms, names = named(score_mod=score_mod, softcap=_known(softcap), alibi=_known(alibi), bias=_known(bias))
    masks, mask_names = named(mask=_known(mask), mask_mod=mask_mod)
    drops = None
    if problem.dropout_p > 0 and isinstance(t, Tensors):
        drops = dropout_of(problem, t.rng_state, None, True)
    is_scaled = prescale is not None or score_mod is not None
    return Mods(
        scale, prescale, problem.softmax_scale if score_mod is not None else None, transforms, band, masks,
        drops, pointer(t.sinks, "sinks"), names, mask_names, is_scaled,
        None if score_mod is None and mask_mod is None else _user_functions,
        None if drops is None else _drops_of,
    )  # fmt: skip


def _known(operands: Any) -> Mod | None:
    """A mod that the kernels know by its name."""
    return None if operands is None else Mod(None, None, None, operands)


def _pair_tensor(name: str, tensor: Tensor, box: TensorMap | None) -> PairTensor:
    *others, column = score_strides(tensor)
    steps = (*others, Const(1) if column == 1 else column)
    if box is None:
        return PairTensor(pointer(tensor, name), None, steps)
    return PairTensor(None, box._replace(operand=name), steps)


def schedule_of(problem: Problem, config: Any, has_edges: bool) -> ForwardSchedule:
    """The tiles."""
    c = config
    cached_rows = _CACHED_BYTES // (problem.dtype.itemsize * (c.block_d + c.block_dv))
    return ForwardSchedule(
        Pointer(torch.int32, "counters") if c.dynamic else None, c.block_m, c.strip, c.pack_gqa, c.block_n,
        c.num_warpgroups, c.stages, c.q_stages, c.tile_stages, c.out_stages, c.score_stages, c.overlap, c.pingpong,
        c.in_turn, c.registers, has_edges, cached_rows, problem.cached and problem.varlen and not c.pingpong,
    )  # fmt: skip
