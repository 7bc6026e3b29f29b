"""Host side of the Hopper backward: workspace, tensor descriptors, the launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from flashtile.backends.base import Gradients
from flashtile.backends.hopper import backward_tiles, launch
from flashtile.backends.hopper.backward import attention_backward
from flashtile.backends.hopper.backward_mend import mend_gradients
from flashtile.backends.hopper.backward_rows import finish_dq, prepare_rows
from flashtile.backends.vocab import scheduler
from flashtile.backends.vocab.softmax import LOG2_E
from flashtile.problem import Problem, Tensors

# Half of an H200's 50 MB of L2; the order of the tiles changes no sum of a tile's own, and other chips may share it.
_CACHE_BYTES = 25 * 1024 * 1024
_ROWS = 64


@dataclass(frozen=True, eq=False)
class Workspace:
    """What the kernels share; ``backward_rows`` says how it is laid out.

    Attributes:
        rows: ``(row_blocks, 2, block_m)`` float32.
        dq: ``(row_blocks * block_m * block_d,)`` float32.
        counter: ``(1,)`` int32, the next tile.
        turns: ``(row_blocks,)`` int32, or None where sums may be added up in any order.
        flags: ``(1 + row_blocks * block_m / 64,)`` int32, or None without a band.
    """

    rows: Tensor
    dq: Tensor
    counter: Tensor
    turns: Tensor | None
    flags: Tensor | None


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with everything it is called with.

    Attributes:
        kernel: The kernel.
        grid: Programs; all three numbers, as a compiled kernel takes them.
        arguments: In order.
        options: The compiler's.
        build: What tells its build from the kernel's others of one problem; None if that takes a look at the arguments.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, int]
    build: tuple[object, ...] | None


def run(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    config: backward_tiles.Config | None = None,
) -> Gradients:
    """Every gradient, as ``Backend.backward`` says.

    Memory besides the gradients, padded to whole row blocks: dq in float32, two float32 a row, with
    ``problem.deterministic`` one int32 a row block, and with a band one every 64 rows.

    Args:
        problem: A call that the backend's capabilities cover.
        tensors: Its tensors.
        out: The forward's output, contiguous.
        lse: The forward's log-sum-exp, contiguous.
        dout: Gradient of out, any strides.
        dlse: Gradient of lse, or None for zero.
        config: Tiles to use instead of the chosen ones, for tuning.
    """
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    band = problem.band
    # A band that keeps nothing, or no rows, or no keys: TMA has no descriptor of an empty tensor.
    keeps_nothing = band.left is not None and band.right is not None and band.left + band.right < 0
    if keeps_nothing or q.numel() == 0 or k.numel() == 0:
        dsinks = None if sinks is None else _sinks_gradient_without_keys(sinks, lse, dlse)
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), None, dsinks)
    if not describable(dout):
        dout = dout.contiguous()
    plan = _plan(problem, config, q.device)
    with torch.cuda.device_of(q):
        work = plan.workspace(q)
        for each in plan.launches(tensors, out, lse, dout, dlse, Gradients(dq, dk, dv), work):
            plan.launch(each)
    dsinks = None if sinks is None else plan.sinks_gradient(sinks, work)
    return Gradients(dq, dk, dv, None, dsinks)


def _sinks_gradient_without_keys(sinks: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Where no row has a key, lse is the sink, but for rows behind the last packed sequence."""
    if dlse is None:
        return torch.zeros_like(sinks)
    rows = torch.where(lse == -torch.inf, 0.0, dlse)
    return rows.transpose(-1, -2).reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)


def describable(tensor: Tensor) -> bool:
    """Whether TMA can read it: on 16 bytes, rows of contiguous elements, all strides multiples of 16 bytes."""
    size = tensor.element_size()
    strides = [stride * size for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides)


def scales(problem: Problem) -> tuple[float, float, float, float]:
    """(scale_log2, softmax_scale, softcap, prescale), as ``backward.Transform`` has them."""
    scale, cap = problem.softmax_scale, problem.softcap
    return scale * LOG2_E.value, scale, cap, 2 * LOG2_E.value * scale / cap if cap > 0 else 0.0


def falling(problem: Problem) -> bool:
    """Whether tiles with the last keys go first.

    Long tiles should: under a left bound alone those are the last keys'. Where sums are ordered, tiles should start in
    the order in which they reach the rows: under a right bound the last keys' tile adds to its first rows at once.
    """
    if problem.band.right is not None:
        return problem.deterministic
    return problem.band.left is not None


def constants(problem: Problem, config: backward_tiles.Config) -> dict[str, Any]:
    """The main kernel's compile-time arguments."""
    return {
        "BLOCK_D": config.block_d,
        "BLOCK_M": config.block_m,
        "GROUPS": 1 if config.by_gradient else 2,
        "STAGES": config.stages,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "DS_STAGES": config.ds_stages,
        "DQ_WIDTH": config.dq_width,
        "REGISTERS": config.registers,
        "HAS_LEFT": problem.band.left is not None,
        "HAS_RIGHT": problem.band.right is not None,
        "HAS_SOFTCAP": problem.softcap > 0,
        "FALLING": falling(problem),
        "VARLEN": problem.varlen,
    }


def boxes(config: backward_tiles.Config, varlen: bool) -> list[list[int]]:
    """Boxes of the descriptors of q, k, v, dout, dk and dv, in this order."""
    rows = launch.box(config.block_m, config.block_d, varlen)
    keys = launch.box(backward_tiles.GROUP_KEYS, config.block_d, varlen)
    out = launch.box(backward_tiles.GROUP_KEYS, config.out_d, varlen)
    return [rows, keys, keys, rows, out, out]


def adds_by_tma(problem: Problem, config: backward_tiles.Config) -> bool:
    """Whether dq is added by TMA: not in a fixed order, which needs to know when an add is over."""
    return config.dq_tma and not problem.deterministic


def dq_box(config: backward_tiles.Config) -> list[int]:
    """What TMA adds at once, in a workspace seen as lines of 128 floats."""
    return [config.dq_width // 2, 128]


def floats_layout() -> Any:
    """Shared-memory layout of what is taken from or added to the workspace: as it lies there."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of a batch, a row and a head; packed sequences are one batch."""
    return x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])


@functools.cache
def _floats_box(rows: int, cols: int) -> launch._Box:
    return launch._Box((rows, cols), floats_layout())


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, config: backward_tiles.Config | None, device: torch.device) -> Plan:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Plan(problem, config or backward_tiles.choose(problem), num_sms)


class Plan:
    """Everything about the launches that does not change between two calls of one problem."""

    def __init__(self, problem: Problem, config: backward_tiles.Config, num_sms: int) -> None:
        p = problem
        self.problem = p
        self.config = config
        self.num_sms = num_sms
        dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[p.dtype]
        self.boxes = [launch._Box.of(box, dtype) for box in boxes(config, p.varlen)]
        self.rows_box = _floats_box(2, config.block_m)
        self.dq_box = _floats_box(*dq_box(config)) if adds_by_tma(problem, config) else None
        self.builds: dict[object, Any] = {}
        far = 2**30
        self.bounds = tuple(0 if x is None else max(-far, min(far, x)) for x in (p.band.left, p.band.right))
        self.constants = tuple(constants(p, config).values())

    def row_blocks(self, rows: int) -> int:
        """Row blocks of the workspace for so many rows a sequence, or packed rows."""
        if self.problem.varlen:
            blocks = scheduler.num_packed_tiles(rows, self.problem.batch, self.config.block_m)
            return blocks * self.problem.num_heads_q
        return triton.cdiv(rows, self.config.block_m) * self.problem.batch * self.problem.num_heads_q

    def workspace(self, q: Tensor) -> Workspace:
        """Uninitialised memory for one call."""
        blocks, config = self.row_blocks(q.shape[0 if self.problem.varlen else 1]), self.config
        floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        turns = blocks if self.problem.deterministic else 0
        flags = 0 if self.problem.band.unbounded else 1 + blocks * (config.block_m // _ROWS)
        counts = torch.empty(1 + turns + flags, dtype=torch.int32, device=q.device)
        return Workspace(
            floats(blocks, 2, config.block_m),
            floats(blocks * config.block_m * config.block_d),
            counts[:1],
            counts[1 : 1 + turns] if turns else None,
            counts[1 + turns :] if flags else None,
        )

    def launch(self, each: Launch) -> None:
        """Launches a kernel on the current stream, past the compiler's front end if its build is known."""
        key = None if each.build is None else (id(each.kernel), each.build)
        known = self.builds.get(key)
        if known is not None:
            known[each.grid](*each.arguments)
            return
        compiled = each.kernel[each.grid](*each.arguments, **each.options)
        if key is not None:
            self.builds[key] = compiled

    def launches(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        grads: Gradients,
        work: Workspace,
    ) -> list[Launch]:
        """The kernels of a call, in order; they fill ``grads``."""
        needed = [
            self._prepare(tensors, out, lse, dout, dlse, work),
            self._sweep(tensors, dout, grads, work),
            self._finish(tensors, grads.dq, work),
        ]
        return needed if work.flags is None else [*needed, self._mend(tensors, dout, grads, work)]

    def _prepare(
        self, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, work: Workspace
    ) -> Launch:
        p, config = self.problem, self.config
        # Queries are looked at only where something may leak.
        q = None if work.flags is None else tensors.q
        strides = *(_strides(q) if q is not None else (0, 0, 0)), *_strides(dout)
        dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if p.varlen else dlse.stride()
        arguments = (
            q, out, dout, lse, dlse, tensors.cu_seqlens_q, work.rows, work.dq, work.counter, work.turns, work.flags,
            *strides, *dlse_strides, p.batch, out.shape[0 if p.varlen else 1],
            p.num_heads_q, p.head_dim, config.block_m, config.block_d, p.varlen, p.softcap > 0,
        )  # fmt: skip
        # What the compiler would look at in an argument that it specialises.
        seen = tuple((stride % 16 == 0, stride == 1, stride < 2**31) for stride in strides)
        build = seen if dlse is None else None
        return Launch(prepare_rows, (work.rows.shape[0], 1, 1), arguments, {"num_warps": 8}, build)

    def _sweep(self, tensors: Tensors, dout: Tensor, grads: Gradients, work: Workspace) -> Launch:
        p, config = self.problem, self.config
        q, k = tensors.q, tensors.k
        described = (q, k, tensors.v, dout, grads.dk, grads.dv)
        descriptors = [launch._descriptor(x, box, p.varlen) for x, box in zip(described, self.boxes, strict=True)]
        rows_desc = launch._descriptor(work.rows.view(-1, config.block_m), self.rows_box, False)
        dq_desc = launch._descriptor(work.dq.view(-1, 128), self.dq_box, False) if self.dq_box else None
        rows_q, rows_k = (q.shape[0], k.shape[0]) if p.varlen else (q.shape[1], k.shape[1])
        arguments = (
            *descriptors[:4], rows_desc, *descriptors[4:], dq_desc, work.dq, work.turns, work.counter,
            tensors.cu_seqlens_q, tensors.cu_seqlens_k, *scales(p), rows_q, rows_k, p.batch, p.num_heads_kv,
            p.group_size, *self.bounds, self.heads_at_once(rows_q), *self.constants,
        )  # fmt: skip
        blocks = triton.cdiv(rows_k, config.block_n) * p.batch
        if p.varlen:
            blocks = scheduler.num_packed_tiles(rows_k, p.batch, config.block_n)
        grid = (min(self.num_sms, blocks * p.num_heads_kv), 1, 1)
        # Nothing but the problem decides about its build: run-time arguments are unspecialised or fresh memory.
        return Launch(attention_backward, grid, arguments, {"num_warps": 4, "maxnreg": config.max_registers}, ())

    def _finish(self, tensors: Tensors, dq: Tensor, work: Workspace) -> Launch:
        p, config = self.problem, self.config
        arguments = (
            work.dq, dq, work.flags, tensors.cu_seqlens_q, p.batch, dq.shape[0 if p.varlen else 1], p.num_heads_q,
            p.softmax_scale, p.head_dim, config.block_m, config.block_d, p.varlen,
        )  # fmt: skip
        return Launch(finish_dq, (work.rows.shape[0] * config.block_m // _ROWS, 1, 1), arguments, {"num_warps": 4}, ())

    def _mend(self, tensors: Tensors, dout: Tensor, grads: Gradients, work: Workspace) -> Launch:
        p, config = self.problem, self.config
        read = (tensors.q, tensors.k, tensors.v, dout)
        # TMA reads all of them, so that every stride is a multiple of 8 elements, but for those that nobody steps by.
        strides = [stride // 8 for x in read for stride in _strides(x)]
        rows_q, rows_k = (x.shape[0 if p.varlen else 1] for x in (tensors.q, tensors.k))
        arguments = (
            *read, grads.dq, grads.dk, grads.dv, work.rows, work.flags, tensors.cu_seqlens_q, tensors.cu_seqlens_k,
            *strides, *scales(p), rows_q, rows_k, p.batch, p.num_heads_kv, p.group_size, *self.bounds, p.head_dim,
            config.block_m, config.block_n, p.band.left is not None, p.band.right is not None, p.softcap > 0, p.varlen,
        )  # fmt: skip
        wide = tuple(stride >= 2**31 for stride in strides)
        return Launch(mend_gradients, (self.num_sms, 1, 1), arguments, {"num_warps": 8}, wide)

    def heads_at_once(self, rows: int) -> int:
        """Key heads whose rows, with dq in float32, fit the cache; one if all tiles of a head cost the same."""
        p = self.problem
        if p.band.unbounded:
            return 1
        a_head = rows * p.group_size * self.config.block_d * (2 * 2 + 4)
        return max(1, _CACHE_BYTES // a_head)

    def sinks_gradient(self, sinks: Tensor, work: Workspace) -> Tensor:
        """``-sum over rows of exp(sink - lse) * delta``: a sink is a key whose value, and so whose dprobs, is 0."""
        p, block_m = self.problem, self.config.block_m
        batch = 1 if p.varlen else p.batch
        rows = work.rows.view(batch, p.num_heads_q, -1, 2, block_m)
        origin, delta = rows.unbind(3)
        weight = torch.exp2(sinks.float()[:, None, None] * LOG2_E.value - origin)
        return -(weight * delta).sum(dim=(0, 2, 3)).to(sinks.dtype)
