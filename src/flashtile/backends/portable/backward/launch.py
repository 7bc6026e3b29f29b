"""The backward's host code: the kernels' launches in order, and the plan that repeats them."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.base import Gradients
from flashtile.backends.host import Step
from flashtile.backends.launch import Launch, Pointer
from flashtile.backends.portable.arguments import (
    common_arguments,
    descriptors,
    heads_at_once,
    num_programs,
    row_strides,
)
from flashtile.backends.portable.backward.config import Kernel, choose, key_kernels
from flashtile.backends.portable.backward.dbias import attention_backward_dbias
from flashtile.backends.portable.backward.kernel import attention_backward_dkdv, attention_backward_dq
from flashtile.backends.portable.backward.preprocess import prepare_rows
from flashtile.backends.portable.config import Config, overridden, padded
from flashtile.backends.vocab import scores
from flashtile.problem import Problem, Tensors

_PREPARE_ROWS = 32
_MAX_TILE = 128
_FLOATS = Pointer(torch.float32)
_OPERANDS = (
    "q", "k", "v", "dout", "alibi", "mask", "bias", "cu_seqlens_q", "cu_seqlens_k", "rng_state", "out", "lse", "dlse",
    "delta", "origin", "dq", "dk", "dv", "dbias",
)  # fmt: skip


class BackwardPlan:
    """The backward of calls with the same layouts and options; see ``Backend.plan_backward``.

    Computes only the gradients that ``problem.grads`` requests. Workspace: two float32 per row.
    """

    def __init__(self, problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> None:
        """Prepares nothing yet: tiles depend on overrides in force when the plan runs."""
        self._problem = problem
        self._copies_dout = dout.stride(-1) != 1
        rows = tensors.q.shape[-3]
        self._rows_shape = (*problem.lse_shape(tensors.q)[:-1], row_pitch(rows, problem.varlen))
        self._steps: dict[object, list[Step]] = {}

    def __call__(self, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
        """The gradients, from the forward's results."""
        p, t, wanted = self._problem, tensors, self._problem.grads
        if self._copies_dout:
            dout = dout.contiguous()
        # The forward's results are 16-byte aligned, but a caller may pass others.
        out, lse = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (out, lse))
        delta, origin = lse.new_empty(self._rows_shape), lse.new_empty(self._rows_shape)
        dq = t.q.new_empty(t.q.shape) if wanted.q else None
        dk = t.k.new_empty(t.k.shape) if wanted.k else None
        dv = t.v.new_empty(t.v.shape) if wanted.v else None
        dbias = t.attn_bias.new_empty(t.attn_bias.shape) if t.attn_bias is not None and wanted.bias else None
        key = overridden()
        steps = self._steps.get(key)
        if steps is None:
            made = launches(p, t, dout, dlse).values()
            steps = self._steps[key] = [Step(each, _OPERANDS, t.q.device) for each in made]
        operands = (
            t.q, t.k, t.v, dout, t.alibi_slopes, t.attn_mask, t.attn_bias, t.cu_seqlens_q, t.cu_seqlens_k, t.rng_state,
            out, lse, dlse, delta, origin, dq, dk, dv, dbias,
        )  # fmt: skip
        for step in steps:
            step.run(operands)
        dsinks = None
        if t.sinks is not None and wanted.sinks:
            dsinks = _sinks_gradient(p, t.sinks, lse, delta[..., : lse.shape[-1]])
        return Gradients(dq, dk, dv, dbias, dsinks)


def row_pitch(rows: int, varlen: bool) -> int:
    """Rows of delta and origin per head, padded so that the last tile of rows fits.

    A dense sequence's tiles start on multiples of their size, so with a pitch that is a multiple of the largest size no
    load needs a mask, and all are aligned. A packed sequence's tiles start anywhere.
    """
    return triton.cdiv(rows + (_MAX_TILE if varlen else 0), _MAX_TILE) * _MAX_TILE


def launches(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> dict[str, Launch]:
    """The launches by kernel name, in order, for plans and for builds."""
    p, wanted = problem, problem.grads
    made = {"prepare_rows": _prepare_launch(p, dout, dlse)}
    for name in key_kernels(p):
        with_dk, with_dv = wanted.k and name != "dv", wanted.v and name != "dk"
        if with_dk or with_dv:
            made[f"attention_backward_{name}"] = _dkdv_launch(p, tensors, dout, name, with_dk, with_dv)
    if wanted.q:
        made["attention_backward_dq"] = _dq_launch(p, tensors, dout)
    if wanted.bias:
        made["attention_backward_dbias"] = _dbias_launch(p, tensors, dout)
    return made


def _prepare_launch(problem: Problem, dout: Tensor, dlse: Tensor | None) -> Launch:
    """Computes delta and origin from the forward's results and their gradients."""
    packed, rows = dout.dim() == 3, dout.shape[-3]
    batch = 1 if packed else dout.shape[0]
    pitch = row_pitch(rows, packed)
    dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if packed else dlse.stride()
    arguments = {
        "out_ptr": Pointer(dout.dtype),
        "dout_ptr": dout,
        "lse_ptr": _FLOATS,
        "dlse_ptr": dlse,
        "delta_ptr": _FLOATS,
        "origin_ptr": _FLOATS,
        **row_strides("dout", dout),
        **dict(zip(("dlse_stride_b", "dlse_stride_head", "dlse_stride_row"), dlse_strides, strict=True)),
        "batch": batch,
        "seqlen_q": rows,
        "num_heads_q": problem.num_heads_q,
        "row_pitch": pitch,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": _PREPARE_ROWS,
        "BLOCK_DV": padded(problem.head_dim_v),
    }
    programs = batch * problem.num_heads_q * (pitch // _PREPARE_ROWS)
    return Launch(prepare_rows, programs, arguments, {"num_warps": 4, "num_stages": 1})


def _arguments(problem: Problem, tensors: Tensors, dout: Tensor, config: Config) -> dict[str, Any]:
    """The arguments shared by the kernels that loop over queries or keys."""
    arguments = common_arguments(problem, tensors, config) | row_strides("dout", dout)
    pitch = row_pitch(tensors.q.shape[-3], problem.varlen)
    return arguments | {"dout_ptr": dout, "origin_ptr": _FLOATS, "delta_ptr": _FLOATS, "row_pitch": pitch}


def _loop_arguments(problem: Problem, config: Config) -> dict[str, Any]:
    derivative = scores.softcap_derivative if problem.softcap > 0 else None
    return {"ONE_LOOP": config.one_loop, "MASK_ALL": config.mask_all, "DERIVATIVE": derivative}


def _dkdv_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, name: Kernel, with_dk: bool, with_dv: bool
) -> Launch:
    config, grads = choose(problem, name), Pointer(tensors.k.dtype)
    arguments = _arguments(problem, tensors, dout, config)
    sources = {"q": (tensors.q, arguments["BLOCK_D"]), "dout": (dout, arguments["BLOCK_DV"])}
    arguments |= descriptors(sources, config.block_m, config) | _loop_arguments(problem, config)
    arguments |= {"dk_ptr": grads if with_dk else None, "dv_ptr": grads if with_dv else None}
    arguments["heads_at_once"] = heads_at_once(problem, tensors.q, dout)
    programs = num_programs(problem, tensors, config.block_n, over_keys=True)
    return Launch(attention_backward_dkdv, programs, arguments, config.options())


def _dq_launch(problem: Problem, tensors: Tensors, dout: Tensor) -> Launch:
    config = choose(problem, "dq")
    arguments = _arguments(problem, tensors, dout, config)
    sources = {"k": (tensors.k, arguments["BLOCK_D"]), "v": (tensors.v, arguments["BLOCK_DV"])}
    arguments |= descriptors(sources, config.block_n, config) | _loop_arguments(problem, config)
    arguments |= {"dq_ptr": Pointer(tensors.q.dtype), "heads_at_once": heads_at_once(problem, tensors.k, tensors.v)}
    programs = num_programs(problem, tensors, config.block_m)
    return Launch(attention_backward_dq, programs, arguments, config.options())


def _dbias_launch(problem: Problem, tensors: Tensors, dout: Tensor) -> Launch:
    config, bias = choose(problem, "dbias"), tensors.attn_bias
    assert bias is not None
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    sums = [have == 1 and size != 1 for have, size in zip(shape, full, strict=True)]
    arguments = _arguments(problem, tensors, dout, config) | {"dbias_ptr": Pointer(bias.dtype)}
    arguments |= dict(zip(("bias_heads", "bias_rows", "bias_cols"), shape[1:], strict=True))
    arguments |= dict(zip(("SUM_BATCH", "SUM_HEADS", "SUM_ROWS", "SUM_COLS"), sums, strict=True))
    arguments |= {"max_rows": full[2], "max_cols": full[3]}
    programs = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    return Launch(attention_backward_dbias, programs, arguments, config.options())


def _sinks_gradient(problem: Problem, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key whose value is 0, so its dprobs is 0."""
    if problem.varlen:
        lse, delta = lse[None], delta[None]
    weight = torch.exp(sinks.float()[:, None] - torch.where(lse == -torch.inf, torch.inf, lse))
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)
