"""The backward on the host: which kernels run, on what, in which order."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.base import Gradients
from flashtile.backends.portable import backward, warm
from flashtile.backends.portable.dbias import attention_backward_dbias
from flashtile.backends.portable.launch import (
    Launch,
    common_arguments,
    common_operands,
    descriptors,
    heads_at_once,
    num_programs,
    row_strides,
)
from flashtile.backends.portable.tiles import Config, choose, key_kernels, padded
from flashtile.backends.vocab import scores
from flashtile.problem import Problem, Tensors

_PREPARE_ROWS = 32
_MAX_TILE = 128


def prepare_launch(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, origin: Tensor
) -> Launch:
    """Computes delta and origin, of ``row_workspace``, from the forward's results and their gradients."""
    varlen = problem.varlen
    batch = 1 if varlen else out.shape[0]
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
        "batch": batch,
        "seqlen_q": out.shape[0 if varlen else 1],
        "num_heads_q": problem.num_heads_q,
        "row_pitch": delta.shape[-1],
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": _PREPARE_ROWS,
        "BLOCK_DV": padded(problem.head_dim_v),
    }
    programs = batch * problem.num_heads_q * (delta.shape[-1] // _PREPARE_ROWS)
    return Launch(backward.prepare_rows, programs, arguments, {"num_warps": 4, "num_stages": 1})


def row_workspace(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for delta and origin, like lse, but with room behind the rows for all tiles of rows to end in.

    A dense sequence's tiles start on multiples of their size, so with the largest size's multiples as pitch no load
    needs a mask, and all are aligned. A packed sequence's start anywhere.
    """
    pitch = triton.cdiv(lse.shape[-1] + (_MAX_TILE if lse.dim() == 2 else 0), _MAX_TILE) * _MAX_TILE
    whole = torch.empty(2, *lse.shape[:-1], pitch, dtype=torch.float32, device=lse.device)
    return whole[0], whole[1]


def _arguments(
    problem: Problem, tensors: Tensors, dout: Tensor, delta: Tensor, origin: Tensor, config: Config
) -> dict[str, Any]:
    arguments = common_arguments(problem, tensors, config)
    arguments |= row_strides("dout", dout, problem.varlen)
    return arguments | {"dout_ptr": dout, "origin_ptr": origin, "delta_ptr": delta, "row_pitch": delta.shape[-1]}


def _loop_arguments(problem: Problem, config: Config) -> dict[str, Any]:
    derivative = scores.softcap_derivative if problem.softcap > 0 else None
    return {"ONE_LOOP": config.one_loop, "MASK_ALL": config.mask_all, "DERIVATIVE": derivative}


def dkdv_launch(
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    rows: tuple[Tensor, Tensor],
    dk: Tensor | None,
    dv: Tensor | None,
    config: Config,
) -> Launch:
    """The launch for dk and dv, or for the one that is not None; rows is (delta, origin), of ``row_workspace``."""
    arguments = _arguments(problem, tensors, dout, *rows, config)
    sources = {"q": (tensors.q, arguments["BLOCK_D"]), "dout": (dout, arguments["BLOCK_DV"])}
    arguments |= descriptors(sources, config.block_m, config, problem.varlen)
    arguments |= _loop_arguments(problem, config)
    arguments |= {"dk_ptr": dk, "dv_ptr": dv, "heads_at_once": heads_at_once(problem, tensors.q, dout)}
    programs = num_programs(problem, tensors, config.block_n, over_keys=True)
    return Launch(backward.attention_backward_dkdv, programs, arguments, config.options())


def dq_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, rows: tuple[Tensor, Tensor], dq: Tensor, config: Config
) -> Launch:
    """The launch for dq; rows is (delta, origin), of ``row_workspace``."""
    arguments = _arguments(problem, tensors, dout, *rows, config)
    sources = {"k": (tensors.k, arguments["BLOCK_D"]), "v": (tensors.v, arguments["BLOCK_DV"])}
    arguments |= descriptors(sources, config.block_n, config, problem.varlen)
    arguments |= _loop_arguments(problem, config)
    arguments |= {"dq_ptr": dq, "heads_at_once": heads_at_once(problem, tensors.k, tensors.v)}
    programs = num_programs(problem, tensors, config.block_m)
    return Launch(backward.attention_backward_dq, programs, arguments, config.options())


def dbias_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, rows: tuple[Tensor, Tensor], dbias: Tensor, config: Config
) -> Launch:
    """The launch for dbias; rows is (delta, origin), of ``row_workspace``."""
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
    delta, origin = rows = row_workspace(lse)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (tensors.q, tensors.k, tensors.v))
    dbias = None
    if bias is not None and problem.bias_grad:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)

    def launches() -> list[Launch]:
        common = problem, tensors, dout, rows
        made = [prepare_launch(problem, out, lse, dout, dlse, *rows)]
        for name in key_kernels(problem):
            wanted = None if name == "dv" else dk, None if name == "dk" else dv
            made.append(dkdv_launch(*common, *wanted, choose(problem, name)))
        made.append(dq_launch(*common, dq, choose(problem, "dq")))
        if dbias is not None:
            made.append(dbias_launch(*common, dbias, choose(problem, "dbias")))
        return made

    operands = common_operands(tensors)
    operands |= {"out_ptr": out, "lse_ptr": lse, "dout_ptr": dout, "dlse_ptr": dlse, "delta_ptr": delta}
    operands |= {"origin_ptr": origin, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "dbias_ptr": dbias}
    warm.launch("backward", problem, operands, launches)
    dsinks = None if sinks is None else sinks_gradient(problem, sinks, lse, delta[..., : lse.shape[-1]])
    return Gradients(dq, dk, dv, dbias, dsinks)
