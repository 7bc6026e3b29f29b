"""The backward on the host: which kernels run, on what, in which order."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.base import Gradients
from flashtile.backends.portable import backward
from flashtile.backends.portable.dbias import attention_backward_dbias
from flashtile.backends.portable.launch import (
    Launch,
    common_arguments,
    describable,
    descriptor,
    num_programs,
    row_strides,
)
from flashtile.backends.portable.tiles import Config, choose, padded
from flashtile.backends.vocab import scores
from flashtile.problem import Problem, Tensors

_PREPARE_ROWS = 32


def prepare_launch(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, origin: Tensor
) -> Launch:
    """Computes delta and origin, both like lse, from the forward's results and their gradients."""
    varlen = problem.varlen
    rows = out.shape[0] if varlen else out.shape[0] * out.shape[1]
    dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if varlen else dlse.stride()
    arguments = {
        "out_ptr": out,
        "dout_ptr": dout,
        "lse_ptr": lse,
        "dlse_ptr": dlse,
        "delta_ptr": delta,
        "origin_ptr": origin,
        **row_strides("dout", dout, varlen),
        **dict(zip(("dlse_stride_b", "dlse_stride_head", "dlse_stride_row"), dlse_strides, strict=True)),
        "num_rows": rows,
        "seqlen_q": out.shape[0 if varlen else 1],
        "num_heads_q": problem.num_heads_q,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": _PREPARE_ROWS,
        "BLOCK_DV": padded(problem.head_dim_v),
    }
    programs = triton.cdiv(rows, _PREPARE_ROWS) * problem.num_heads_q
    return Launch(backward.prepare_rows, programs, arguments, {"num_warps": 4, "num_stages": 1})


def _arguments(
    problem: Problem, tensors: Tensors, dout: Tensor, delta: Tensor, origin: Tensor, config: Config
) -> dict[str, Any]:
    arguments = common_arguments(problem, tensors, config)
    arguments |= row_strides("dout", dout, problem.varlen)
    arguments |= {"q_ptr": tensors.q, "k_ptr": tensors.k, "v_ptr": tensors.v, "dout_ptr": dout}
    return arguments | {"origin_ptr": origin, "delta_ptr": delta}


def dkdv_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, rows: tuple[Tensor, Tensor], grads: Gradients, config: Config
) -> Launch:
    """The launch for dk and dv; rows is (delta, origin)."""
    tma = config.tma and describable(tensors.q) and describable(dout)
    arguments = _arguments(problem, tensors, dout, *rows, config)
    for name, tensor in (("q", tensors.q), ("dout", dout)):
        arguments[f"{name}_source"] = descriptor(tensor, config.block_m, problem.varlen) if tma else None
    arguments |= {"dk_ptr": grads.dk, "dv_ptr": grads.dv, "TMA": tma}
    arguments["DERIVATIVE"] = scores.softcap_derivative if problem.softcap > 0 else None
    programs = num_programs(problem, tensors, config.block_n, over_keys=True)
    return Launch(backward.attention_backward_dkdv, programs, arguments, config.options())


def dq_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, rows: tuple[Tensor, Tensor], grads: Gradients, config: Config
) -> Launch:
    """The launch for dq; rows is (delta, origin)."""
    tma = config.tma and describable(tensors.k) and describable(tensors.v)
    arguments = _arguments(problem, tensors, dout, *rows, config)
    for name, tensor in (("k", tensors.k), ("v", tensors.v)):
        arguments[f"{name}_source"] = descriptor(tensor, config.block_n, problem.varlen) if tma else None
    arguments |= {"dq_ptr": grads.dq, "TMA": tma}
    arguments["DERIVATIVE"] = scores.softcap_derivative if problem.softcap > 0 else None
    programs = num_programs(problem, tensors, config.block_m)
    return Launch(backward.attention_backward_dq, programs, arguments, config.options())


def dbias_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, rows: tuple[Tensor, Tensor], dbias: Tensor, config: Config
) -> Launch:
    """The launch for dbias; rows is (delta, origin)."""
    shape = (1,) * (4 - dbias.dim()) + tuple(dbias.shape)
    full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    sums = [have == 1 and size != 1 for have, size in zip(shape, full, strict=True)]
    arguments = _arguments(problem, tensors, dout, *rows, config)
    arguments["dbias_ptr"] = dbias
    arguments |= dict(zip(("bias_batch", "bias_heads", "bias_rows", "bias_cols"), shape, strict=True))
    arguments |= dict(zip(("SUM_BATCH", "SUM_HEADS", "SUM_ROWS", "SUM_COLS"), sums, strict=True))
    arguments |= {"max_rows": full[2], "max_cols": full[3]}
    programs = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    return Launch(attention_backward_dbias, programs, arguments, config.options())


def sinks_gradient(problem: Problem, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key whose value, and so whose dprobs, is 0."""
    if problem.varlen:
        lse, delta = lse[None], delta[None]
    weight = torch.exp(sinks.float()[:, None] - torch.where(lse == -torch.inf, torch.inf, lse))
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)


def run(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Every gradient, as ``Backend.backward`` says. Workspace: two float32 a row."""
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    bias, sinks = tensors.attn_bias, tensors.sinks
    rows = (torch.empty_like(lse), torch.empty_like(lse))
    prepare_launch(problem, out, lse, dout, dlse, *rows).run()
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (tensors.q, tensors.k, tensors.v))
    dbias = (
        torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        if bias is not None and problem.bias_grad
        else None
    )
    dsinks = None if sinks is None else sinks_gradient(problem, sinks, lse, rows[0])
    grads = Gradients(dq, dk, dv, dbias, dsinks)
    dkdv_launch(problem, tensors, dout, rows, grads, choose(problem, "dkdv")).run()
    dq_launch(problem, tensors, dout, rows, grads, choose(problem, "dq")).run()
    if dbias is not None:
        dbias_launch(problem, tensors, dout, rows, dbias, choose(problem, "dbias")).run()
    return grads
