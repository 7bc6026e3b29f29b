"""Host side of the backward with big heads: its launches and its plan."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Call, Heads
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.gpu.masks import Side, bounds_launch, bounds_of, masks_of, most_bounds
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import BackwardPlan, EmptyPlan, Made
from flashtile.backends.gpu.records import num_packed_tiles, table_launches
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.backward import launch as backward
from flashtile.backends.hopper.backward.records import BackwardSchedule, Splits
from flashtile.backends.hopper.backward.workspace import Workspace
from flashtile.backends.hopper.big_backward import config as configs
from flashtile.backends.hopper.big_backward.config import BLOCK, BigBackwardTiles
from flashtile.backends.hopper.big_backward.records import Gradient, Grid
from flashtile.backends.hopper.forward.config import by_bits, has_slope
from flashtile.call import backend as base
from flashtile.call.backend import Gradients
from flashtile.call.problem import Problem, Tensors

big_backward = device_code("flashtile.backends.hopper.big_backward.kernel").big_backward


_OF_KEYS = Side(BLOCK, over_keys=True)
# Columns of a box: all that a swizzle of 128 bytes holds.
_BOX = 64
# Hopper has so many multiprocessors, for each so many tiles: of fewer than these, few are so long that others wait for
# them at the end; splits are to make so many.
_MULTIPROCESSORS, _TILES_EACH, _SPLITS_EACH = 132, 2, 4


def plan(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, config: BigBackwardTiles | None = None
) -> base.Plan:
    """Gradients of calls of one kind; see ``backward.launch.plan``. The plan takes no part in a ``Chain``."""
    if backward.keeps_nothing(problem, tensors):
        return EmptyPlan(backward.without_pairs, problem)
    p = by_bits(problem)
    config, work = config or configs.choose(p), workspace(p, tensors)

    def finish(t: Tensors, made: Made, adds: bool) -> Gradients:
        # From the splits' sums to dk and dv, in a fixed order.
        for name, at in (("dk", work.dk_at), ("dv", work.dv_at)):
            if at is not None:
                grad, count = made[name], work.gqa_splits
                sums = made["work"][at // 4 : at // 4 + count * grad.numel()]
                total = sums.view(*grad.shape[:-1], count, grad.shape[-1]).sum(-2)
                _ = grad.add_(total) if adds else grad.copy_(total)
        return backward.finished(p, config, work, t, made, adds)

    prepare = functools.partial(backward.prepared, problem, config, work, launches)
    return BackwardPlan(tensors.q.device, prepare, not tensor_maps.is_readable(dout), finish)


def workspace(problem: Problem, tensors: Tensors) -> Workspace:
    """Two float32 for each query, in blocks: see ``backward.rows``. With splits, what each makes of dk and dv.

    That is float32 and laid out like k and v, but of each row and key head the splits follow one another.
    """
    rows = tensors.q.shape[-3]
    if problem.varlen:
        blocks = num_packed_tiles(rows, problem.batch, BLOCK) * problem.num_heads_q
    else:
        blocks = -(-rows // BLOCK) * problem.batch * problem.num_heads_q
    counter_at = 4 * blocks * 2 * BLOCK
    end, count = counter_at + 16, gqa_splits(problem, tensors)
    dk_at = end if count > 1 and problem.grads.k else None
    end += 0 if dk_at is None else 4 * count * tensors.k.numel()
    dv_at = end if count > 1 and problem.grads.v else None
    end += 0 if dv_at is None else 4 * count * tensors.v.numel()
    return Workspace(blocks, count, 0, counter_at, None, count, dk_at, dv_at, end // 4)


def gqa_splits(problem: Problem, tensors: Tensors) -> int:
    """How many tiles share the query heads of one key head: 1 unless there are few tiles."""
    p = problem
    tiles = _blocks(p, tensors.k) * p.num_heads_kv
    if p.group_size == 1 or not (p.grads.k or p.grads.v) or tiles >= _TILES_EACH * _MULTIPROCESSORS:
        return 1
    heads = -(-p.group_size // min(p.group_size, -(-_SPLITS_EACH * _MULTIPROCESSORS // tiles)))
    return -(-p.group_size // heads)


def _blocks(problem: Problem, own: Tensor) -> int:
    """Tiles of a head of all sequences."""
    if problem.varlen:
        return num_packed_tiles(own.shape[-3], problem.batch, BLOCK)
    return -(-own.shape[-3] // BLOCK) * problem.batch


def launches(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, config: BigBackwardTiles,
    work: Workspace | None = None, *, adds: bool = False,
) -> dict[str, Launch]:  # fmt: skip
    """The launches by name, in order: tables, bounds of intervals, preprocess, a kernel for each wanted gradient."""
    work, wanted = work or workspace(problem, tensors), problem.grads
    made = table_launches(problem, tensors)
    if problem.intervals:
        made["interval_bounds"] = bounds_launch(problem, tensors, _OF_KEYS)
        if wanted.q:
            made["interval_bounds_q"] = bounds_launch(problem, tensors, _side(problem, tensors, over_keys=False))
    made["prepare_rows"] = backward.preprocess_launch(problem, tensors, dout, dlse, config, work, adds)
    for of in ("v", "k", "q"):
        if getattr(wanted, of):
            made[f"big_backward_d{of}"] = _gradient_launch(problem, tensors, dout, config, work, of, adds)
    return made


def _side(problem: Problem, tensors: Tensors, *, over_keys: bool) -> Side:
    """Bounds of the queries follow bounds of the keys."""
    return _OF_KEYS if over_keys else Side(BLOCK, offset=most_bounds(problem, tensors, over_keys=True))


def _gradient_launch(
    problem: Problem, t: Tensors, dout: Tensor, config: BigBackwardTiles, work: Workspace, of: str, adds: bool
) -> Launch:
    p, c = problem, config
    own, heads = (t.q, p.num_heads_q) if of == "q" else (t.k, p.num_heads_kv)
    dim, splits = p.head_dim_v if of == "v" else p.head_dim, None
    if of != "q" and work.gqa_splits > 1:
        # Sums lie behind pointers of their own, so offsets are 0 and not None (``gpu.device``: flags).
        splits = Splits(work.gqa_splits, -(-p.group_size // work.gqa_splits), 0, 0)
        heads *= work.gqa_splits
    masks = masks_of(p, t, _OF_KEYS)
    if masks is not None:
        # Scores lie keys first, whatever the tile is of: bounds alone are its side's.
        masks = masks._replace(bounds=bounds_of(p, t, _side(p, t, over_keys=of != "q")))
    dims = (c.block_d, c.block_d, c.block_dv)
    q, k, v = (
        backward.rows_of(name, x, (BLOCK, _BOX), block_dim, p.varlen)
        for name, x, block_dim in zip("qkv", (t.q, t.k, t.v), dims, strict=True)
    )
    call = Call(
        q, k, v, backward.queries_of(p, t), backward.keys_of(p, t), Heads(p.num_heads_q, p.group_size),
        backward.backward_mods(p, t, masks),
    )  # fmt: skip
    dtype = p.grad_dtype if splits is None else torch.float32
    cols = _BOX // 2 if dtype == torch.float32 else _BOX
    out = tensor_maps.contiguous_map("d" + of, dtype, (*own.shape[:-2], heads, dim), BLOCK, cols, p.varlen)
    if splits is not None:
        out = out._replace(operand="work", offset=(work.dv_at if of == "v" else work.dk_at) or 0)
    grid = Grid(
        call,
        Gradient(
            backward.rows_of("dout", dout, (BLOCK, _BOX), c.block_dv, p.varlen),
            out, tensor_maps.floats_map(2 * work.blocks, BLOCK, 2, work.rows_at),
            None if of == "v" else float(p.softmax_scale), adds and splits is None, has_slope(p),
        ),
        BackwardSchedule(_heads_at_once(p, t, of), heads, None, None, splits, _falls(p, of), False),
        c.tiles(of),
    )  # fmt: skip
    options = {"num_warps": 4, "maxnreg": c.max_registers}
    return Launch(big_backward, _blocks(p, own) * heads, {"grid": grid}, options)


def _falls(problem: Problem, of: str) -> bool:
    """Whether the last tiles go first: where they are the longest."""
    left, right = problem.band.left, problem.band.right
    return right is not None if of == "q" else right is None and left is not None


def _heads_at_once(problem: Problem, t: Tensors, of: str) -> int:
    """Heads with tiles that start together, the longest first; 1 where all tiles of a head take as long.

    As many as have rows that fit L2, or two tiles for each multiprocessor, if their rows do not far exceed L2.
    """
    p = problem
    if p.band.unbounded:
        return 1
    own, other, group = (t.q, t.k, 1) if of == "q" else (t.k, t.q, p.group_size)
    blocks = -(-(min(own.shape[-3], p.seqlen_q if of == "q" else p.seqlen_k)) // BLOCK)
    a_head = 2 * other.shape[-3] * group * (p.head_dim + p.head_dim_v)
    filled = -(-_TILES_EACH * tensor_maps.num_sms(t.q.device) // max(1, blocks))
    return max(1, backward.CACHE_BYTES // max(1, a_head), min(filled, 3 * backward.CACHE_BYTES // max(1, a_head)))
