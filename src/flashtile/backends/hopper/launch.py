"""Host side of the Hopper forward: tensor descriptors, arguments, the launch."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends.hopper import tiles
from flashtile.backends.hopper.forward import attention_forward
from flashtile.backends.hopper.schedule import PACKED_ROWS
from flashtile.backends.vocab.softmax import LOG2_E
from flashtile.problem import Problem, Tensors

_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_MAX_DESCRIPTORS = 1024
# Bounds beyond any length are the same as none, and 32-bit arithmetic on positions must not overflow.
_FAR = 2**30
# The two extra dimensions of a packed tensor's descriptor, in elements: see schedule.PACKED_ROWS. The first stride
# times the coordinate PACKED_ROWS is 2**64 minus PACKED_ROWS rows, and addresses wrap.
_ANY = 0x7FFF0000
_WRAP = 2**34


def forward(problem: Problem, tensors: Tensors, config: tiles.Config | None = None) -> tuple[Tensor, Tensor]:
    """Attention's output and log-sum-exp, as ``Backend.forward`` says.

    Args:
        problem: A call that the backend's capabilities cover.
        tensors: Its tensors.
        config: Tiles to use instead of the chosen ones, for tuning.
    """
    q, k = tensors.q, tensors.k
    out = q.new_empty(*q.shape[:-1], problem.head_dim_v)
    lse = q.new_empty(problem.lse_shape(q), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if k.numel() == 0:
        return _without_keys(problem, tensors, out, lse)
    plan = _plan(problem, config, q.device.index)
    if torch.cuda.current_device() == q.device.index:
        plan.launch(tensors, out, lse)
    else:
        with torch.cuda.device(q.device):
            plan.launch(tensors, out, lse)
    return out, lse


def _without_keys(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """No keys at all: TMA has no descriptor for an empty tensor."""
    out.zero_()
    lse.fill_(-math.inf)
    if tensors.sinks is not None:
        if problem.varlen:
            assert tensors.cu_seqlens_q is not None
            rows = torch.arange(lse.shape[1], device=lse.device) < tensors.cu_seqlens_q[-1]
            lse.copy_(torch.where(rows, tensors.sinks[:, None].float(), lse))
        else:
            lse.copy_(tensors.sinks[:, None].float().expand(lse.shape))
    return out, lse


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, config: tiles.Config | None, device: int) -> _Plan:
    return _Plan(problem, config or tiles.choose(problem), device)


def meets_edges(problem: Problem, config: tiles.Config, equal_lengths: bool) -> bool:
    """Whether a warpgroup may meet an edge of the band behind the first block of keys that it works on.

    It goes through keys from above, so only the first block is cut by the right edge if the last keys of all its rows
    lie in one. They are ``block_m`` keys in a row, and a block is a whole number of such pieces: they do if they begin
    where a piece begins.

    Args:
        problem: A call.
        config: Its tiles.
        equal_lengths: Whether every packed sequence has as many queries as keys.
    """
    left, right = problem.band.left, problem.band.right
    if left is not None or right is None:
        return left is not None
    if problem.varlen:
        return not equal_lengths or right % config.block_m != 0
    return (problem.seqlen_k - problem.seqlen_q + right) % config.block_m != 0


def constants(problem: Problem, config: tiles.Config, equal_lengths: bool = False) -> dict[str, Any]:
    """The kernel's compile-time arguments; for ``equal_lengths`` see ``meets_edges``."""
    return {
        "BLOCK_D": config.block_d,
        "BLOCK_DV": config.block_dv,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUPS": config.groups,
        "STAGES": config.stages,
        "Q_STAGES": config.q_stages,
        "TILE_STAGES": config.tile_stages,
        "OUT_STAGES": config.out_stages,
        "OVERLAP": config.overlap,
        "IN_TURNS": config.in_turns,
        "REGISTERS": config.registers,
        "HAS_LEFT": problem.band.left is not None,
        "HAS_RIGHT": problem.band.right is not None,
        "HAS_EDGES": meets_edges(problem, config, equal_lengths),
        "HAS_SOFTCAP": problem.softcap > 0,
        "SCALE_FIRST": problem.softcap == 0 and problem.softmax_scale <= 0,
        "VARLEN": problem.varlen,
    }


def scales(problem: Problem) -> tuple[float, float, float]:
    """(scale_log2, softcap, prescale): scale_log2 > 0 is what the softmax needs; prescale is what comes before it."""
    if problem.softcap > 0:
        return LOG2_E.value, problem.softcap, 2 * LOG2_E.value * problem.softmax_scale / problem.softcap
    if problem.softmax_scale <= 0:
        return 1.0, 0.0, problem.softmax_scale * LOG2_E.value
    return problem.softmax_scale * LOG2_E.value, 0.0, 0.0


def box(rows: int, cols: int, varlen: bool) -> list[int]:
    """The tile that one TMA load moves, in the dimensions of its descriptor."""
    return [1, 1, rows, 1, cols] if varlen else [1, rows, 1, cols]


def boxes(config: tiles.Config, varlen: bool) -> list[list[int]]:
    """Those of q, k, v and the output: rows of the narrowest part that a tile's columns consist of, see columns.py."""
    cols, cols_v = tiles.narrowest(config.block_d), tiles.narrowest(config.block_dv)
    return [
        box(config.block_m, cols, varlen),
        box(config.block_n, cols, varlen),
        box(config.block_n, cols_v, varlen),
        box(config.block_m, config.out_cols, varlen),
    ]


class _Plan:
    """Everything about a launch that does not change between two calls of one problem."""

    def __init__(self, problem: Problem, config: tiles.Config, device: int) -> None:
        p = problem
        self.varlen = p.varlen
        self.dtype = _GLUON_DTYPES[p.dtype]
        self.config = config
        self.boxes = [_Box.of(each, self.dtype) for each in boxes(config, p.varlen)]
        self.scalars = (*scales(p),)
        self.heads = (p.num_heads_q, p.group_size)
        self.batch = p.batch
        self.is_banded = not p.band.unbounded
        self.bounds = tuple(
            0 if bound is None else max(-_FAR, min(_FAR, bound)) for bound in (p.band.left, p.band.right)
        )
        self.constants = [tuple(constants(p, config, equal).values()) for equal in (False, True)]
        self.rows = config.groups * config.block_m
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.kernels: dict[object, Any] = {}

    def launch(self, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
        q, k, v = tensors.q, tensors.k, tensors.v
        descriptors = [_descriptor(t, b, self.varlen) for t, b in zip((q, k, v, out), self.boxes, strict=True)]
        rows_q, rows_k = (q.shape[0], k.shape[0]) if self.varlen else (q.shape[1], k.shape[1])
        blocks = rows_q // self.rows + self.batch + 1 if self.varlen else -(-rows_q // self.rows) * self.batch
        grid = (min(self.num_sms, blocks * self.heads[0]), 1, 1)
        # Read again where a masked value may have left a NaN, which only a band can mask.
        pointers = (q, k, v, out) if self.is_banded else (None,) * 4
        counter = _counter(lse.device) if self.config.dynamic else None
        equal_lengths = self.varlen and _same(tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        args = (
            *descriptors, *pointers, lse, tensors.sinks, tensors.cu_seqlens_q, tensors.cu_seqlens_k, counter,
            *self.scalars, rows_q, rows_k, self.batch, *self.heads, *self.bounds, *self.constants[equal_lengths],
        )  # fmt: skip
        # The kernel's arguments are declared unspecialised, so nothing else decides which build a call needs.
        key = (equal_lengths, None if tensors.sinks is None else tensors.sinks.dtype)
        kernel = self.kernels.get(key)
        if kernel is None:
            self.kernels[key] = attention_forward[grid](*args, num_warps=4, maxnreg=self.config.max_registers)
        else:
            kernel[grid](*args)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are one, as when a packed sequence attends to itself: nobody reads them to find out."""
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """A zero that the kernel counts tiles with and leaves zero: one for all launches of a stream, which take turns.

    A captured launch may be replayed on any stream, beside others: it gets a counter of its own.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counter = _counters.get((device, stream))
    if counter is None:
        counter = _counters[device, stream] = torch.zeros((), dtype=torch.int32, device=device)
    return counter


@dataclass(frozen=True)
class _Box:
    """A descriptor's box and the shared-memory layout of its tiles."""

    shape: tuple[int, ...]
    layout: Any

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def _of(shape: tuple[int, ...], dtype: Any) -> _Box:
        return _Box(shape, gl.NVMMASharedLayout.get_default_for(list(shape), dtype))

    @classmethod
    def of(cls, shape: list[int], dtype: Any) -> _Box:
        return cls._of(tuple(shape), dtype)


class _Address:
    """What a descriptor needs of a tensor, without keeping its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.address = tensor.data_ptr()
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        return self.address


_descriptors: OrderedDict[object, TensorDescriptor] = OrderedDict()


def _descriptor(tensor: Tensor, box: _Box, varlen: bool) -> TensorDescriptor:
    """The descriptor of a tensor, from a cache by address, shape and strides."""
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, id(box))
    found = _descriptors.get(key)
    if found is None:
        shape, strides = geometry(tuple(tensor.shape), tensor.stride(), varlen)
        found = TensorDescriptor(_Address(tensor), shape, strides, list(box.shape), box.layout)
        _descriptors[key] = found
        if len(_descriptors) > _MAX_DESCRIPTORS:
            _descriptors.popitem(last=False)
    return found


def geometry(shape: tuple[int, ...], strides: tuple[int, ...], varlen: bool) -> tuple[list[int], list[int]]:
    """Shape and strides of a descriptor, in elements.

    A dimension of size 1 may come with any stride, and TMA takes multiples of 16 bytes only: head_dim is one.
    """
    head_dim = shape[-1]
    strides = tuple(head_dim if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    if not varlen:
        return list(shape), [*strides[:-1], 1]
    row = strides[0]
    return [_ANY, _ANY, PACKED_ROWS.value, *shape[1:]], [_WRAP - row, row, row, strides[1], 1]
