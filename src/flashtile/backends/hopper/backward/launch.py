"""Host side of the Hopper backward: its launches, their workspace, and the plan that repeats them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu import build
from flashtile.backends.gpu.device.records import LOG2_E, Call, Heads, Rows, Sequences
from flashtile.backends.gpu.launch import Const, Launch, Pointer, TensorMap, parameter_of_map, pointer
from flashtile.backends.gpu.masks import Masks, Side, bounds_launch, masks_of, most_bounds
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import (
    BackwardPlan,
    EmptyPlan,
    Made,
    Memory,
    Plan,
    Prepare,
    empty,
    gradient_memory,
    table_memory,
)
from flashtile.backends.gpu.records import num_packed_tiles, table_launches
from flashtile.backends.hopper import records as forward_records
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.backward import config as configs
from flashtile.backends.hopper.backward import records
from flashtile.backends.hopper.backward.config import BackwardTiles
from flashtile.backends.hopper.backward.records import BackwardSchedule, MainTiles, SavedResults, Splits, Sums, Work
from flashtile.backends.hopper.backward.workspace import Workspace, key_blocks
from flashtile.backends.hopper.device.records import BOUNDS_BLOCK, Mods
from flashtile.backends.hopper.forward import launch as forward
from flashtile.backends.hopper.forward.config import by_bits, has_slope, narrowest
from flashtile.backends.hopper.records import mods_of
from flashtile.backends.portable import repair
from flashtile.call import backend as base
from flashtile.call.backend import Chain, Gradients
from flashtile.call.problem import Problem, Tensors

attention_backward = device_code("flashtile.backends.hopper.backward.kernel").attention_backward
attention_backward_pairs = device_code("flashtile.backends.hopper.backward.pairs").attention_backward_pairs
attention_backward_dq = device_code("flashtile.backends.hopper.backward.by_rows").attention_backward_dq
_rows_code = device_code("flashtile.backends.hopper.backward.rows")
finish_gradient = _rows_code.finish_gradient
prepare_rows = _rows_code.prepare_rows


# Keys for which there are bounds of intervals.
_OF_KEYS = Side(BOUNDS_BLOCK, over_keys=True)
# Half of Hopper's 50 MB of L2; other chips may use it too: the order of tiles changes no sum within a tile.
CACHE_BYTES = 25 * 1024 * 1024
# Rows of a gradient that one program of ``finish_gradient`` finishes.
_ROWS = 64


def plan(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, config: BackwardTiles | None = None
) -> base.Plan:
    """Gradients of calls of one kind, as ``call.backend.Backward`` says.

    Args:
        problem: A call that the backend's capabilities cover.
        tensors: Tensors of its layouts.
        dout: Gradient of out, any strides.
        dlse: Gradient of lse, or None for zero.
        config: Tiles to use instead of the chosen ones, for tuning.
    """
    if keeps_nothing(problem, tensors):
        return EmptyPlan(without_pairs, problem)
    p = by_bits(problem)
    config = config or configs.choose(p)
    work = Workspace.of(p, config, tensors)
    prepare = functools.partial(prepared, problem, config, work, launches)
    return ChainedPlan(p, tensors.q.device, config, prepare, dout, functools.partial(finished, p, config, work))


def prepared(
    problem: Problem, config: Any, work: Workspace, launches: Any, t: Tensors, made: Made, adds: bool
) -> tuple[Memory, dict[str, Launch]]:
    """What a plan of kernels with launches of their own allocates, and these with the repair's."""
    p, device, dout = by_bits(problem), t.q.device, made["dout"]
    memory = gradient_memory(p, t) | table_memory(p, t.q) | repair.backward_memory(p, t, work.blocks)
    memory["work"] = empty(device, (work.floats,))
    if p.intervals:
        # Bounds of keys, then bounds of rows, which are big heads' alone.
        numbers = sum(most_bounds(p, t, over_keys=over_keys) for over_keys in (True, False))
        memory["bounds"] = empty(device, (numbers,), torch.int32)
    own = launches(p, t, dout, made["dlse"], config, work, adds=adds)
    return memory, own | repair.backward_launches(problem, t, dout, config.block_m)


def finished(problem: Problem, config: Any, work: Workspace, t: Tensors, made: Made, adds: bool) -> Gradients:
    """The gradients, once all has been launched."""
    dsinks = None
    if t.sinks is not None and problem.grads.sinks:
        dsinks = _sinks_gradient(problem, config, work, t.sinks, made["work"])
        if problem.large_scores:
            dsinks += repair.sinks_gradient(problem, t, made["lse"], made["rows"])
    return Gradients(made.get("dq"), made.get("dk"), made.get("dv"), None, dsinks)


class ChainedPlan(BackwardPlan):
    """A backward that may be a call of a ``Chain``."""

    def __init__(
        self, problem: Problem, device: torch.device, config: BackwardTiles, prepare: Prepare, dout: Tensor, finish: Any
    ) -> None:
        """Prepares nothing yet: as ``BackwardPlan``, of a dout like this one."""
        super().__init__(device, prepare, not tensor_maps.is_readable(dout), finish)
        self._problem, self._config = problem, configs.in_chain(config)
        self._chain = Plan(device, functools.partial(_prepare_chained, problem, self._config))
        self._layout: Workspace | None = None

    def in_chain(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        sums: Gradients | None,
        chain: Chain,
        heads: tuple[int, int] | None = None,
    ) -> Gradients:
        """The same for a call of a chain, which has rows and keys; see ``Chain``."""
        made = self.given(out, lse, dout, dlse, None)
        if sums is not None:
            made["dk"], made["dv"] = sums.dk, sums.dv
        kind = sums is not None and heads is None, chain.work is None, chain.calls == 1, heads
        if chain.work is None:
            self._layout = self._layout or _chain_workspace(self._problem, self._config, tensors)
            counter = self._layout.counter_at // 4
        else:
            made["work"], counter = chain.work
            made["work"][counter:].zero_()  # and dq_order
        chain.calls -= 1
        self._chain.run(tensors, made, kind)
        chain.work = made["work"], counter
        return Gradients(made.get("dq"), made.get("dk"), made.get("dv"))


def _prepare_chained(
    problem: Problem,
    config: BackwardTiles,
    t: Tensors,
    made: Made,
    kind: tuple[bool, bool, bool, tuple[int, int] | None],
) -> tuple[Memory, dict[str, Launch]]:
    """``kind``: whether it adds, whether it is the chain's first call, whether its last, and its key heads."""
    _, _, is_last, _ = kind
    memory = gradient_memory(problem, t)
    memory["work"] = empty(t.q.device, (_chain_workspace(problem, config, t).floats,))
    if "dq" in memory:
        memory["dq"] = empty(t.q.device, t.q.shape, t.q.dtype)
        if not is_last:
            del memory["dq"]
    return memory, chain_launches(problem, t, made["dout"], made["dlse"], config, *kind)


def keeps_nothing(problem: Problem, t: Tensors) -> bool:
    """Whether a call has no pairs of a row and a key. TMA has no map of an empty tensor."""
    left, right = problem.band.left, problem.band.right
    return (left is not None and right is not None and left + right < 0) or t.q.numel() == 0 or t.k.numel() == 0


def without_pairs(
    problem: Problem, t: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    sums: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of a call that keeps no pairs."""
    if sums is None:
        wanted, dtype = problem.grads, problem.grad_dtype
        each = {"dq": (wanted.q, t.q), "dk": (wanted.k, t.k), "dv": (wanted.v, t.v)}
        made: Made = {n: x.new_zeros(x.shape, dtype=dtype) for n, (is_wanted, x) in each.items() if is_wanted}
        sums = Gradients(**made)
    dsinks = None
    if t.sinks is not None and problem.grads.sinks:
        dsinks = _sinks_gradient_without_keys(t.sinks, lse, dlse)
    return Gradients(sums.dq, sums.dk, sums.dv, None, dsinks)


def _sinks_gradient(problem: Problem, config: Any, work: Workspace, sinks: Tensor, space: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key with value 0, and so dprobs 0."""
    p = problem
    rows = space[work.rows_at // 4 : work.counter_at // 4]
    lse_log2, delta = rows.view(1 if p.varlen else p.batch, p.num_heads_q, -1, 2, config.block_m).unbind(3)
    weight = torch.exp2(sinks.float()[:, None, None] * LOG2_E - lse_log2)
    return -(weight * delta).sum(dim=(0, 2, 3)).to(sinks.dtype)


def launches(
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    dlse: Tensor | None,
    config: BackwardTiles,
    work: Workspace | None = None,
    *,
    adds: bool = False,
) -> dict[str, Launch]:
    """Tables, bounds, preprocess, the main kernel, what finishes dq, dk and dv: those that the call needs, by name.

    ``adds``: dq, dk and dv to what is there.
    """
    work, wanted = work or Workspace.of(problem, config, tensors), problem.grads
    made = table_launches(problem, tensors)
    if problem.intervals:
        made["interval_bounds"] = bounds_launch(problem, tensors, _OF_KEYS)
    made["prepare_rows"] = preprocess_launch(problem, tensors, dout, dlse, config, work, adds)
    if config.alone and wanted.q:
        made["attention_backward_dq"] = _rows_launch(problem, tensors, dout, work)
    if wanted.k or wanted.v or (wanted.q and not config.alone):
        in_pairs = config.pairs is not None and not adds and _has_clusters(tensors)
        main = _pairs_launch if in_pairs else _main_launch
        made["attention_backward"] = main(problem, tensors, dout, config, work, adds)
    for name in ("dq", "dk", "dv"):
        finish = _finish_launch(problem, tensors, config, work, name, adds)
        if finish is not None:
            made[f"finish_{name}"] = finish
    return made


def chain_launches(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, config: BackwardTiles, adds: bool,
    is_first: bool,
    is_last: bool, heads: tuple[int, int] | None = None,
) -> dict[str, Launch]:  # fmt: skip
    """The launches of a call of a ``Chain``, by name; those beside the main kernel know no sequences."""
    one, rows = _as_one(problem), replace(tensors, cu_seqlens_q=None, cu_seqlens_k=None)
    work = _chain_workspace(problem, config, tensors)
    made = {"prepare_rows": preprocess_launch(one, rows, dout, dlse, config, work, False)} if is_first else {}
    chained = heads or (0, problem.num_heads_kv)
    made["attention_backward"] = _main_launch(problem, tensors, dout, config, work, adds, chained=chained)
    if is_last and (finish := _finish_launch(one, rows, config, work, "dq", False)) is not None:
        made["finish_dq"] = finish
    return made


def _chain_workspace(problem: Problem, config: BackwardTiles, tensors: Tensors) -> Workspace:
    """The workspace of all calls of a chain; without gqa_splits: their sums of dk and dv would cover some keys only."""
    return Workspace.of(_as_one(problem).but(num_heads_kv=problem.num_heads_q), config, tensors)


def _as_one(problem: Problem) -> Problem:
    """A packed call, its rows as one sequence's."""
    return problem.but(varlen=False, batch=1, grad_dtype=problem.dtype)


def preprocess_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, config: Any, work: Workspace, adds: bool
) -> Launch:
    """The launch of ``prepare_rows``; ``config`` may be any with ``block_m`` and columns."""
    p, strides = problem, dout.stride()
    batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    # Rows of sequences without keys are skipped, unless sinks want a gradient, which is made from every row.
    skips = adds and not p.grads.sinks
    dlse_b, dlse_head, dlse_row = (None, None, None) if dlse is None else (0, *dlse.stride())[-3:]
    results = SavedResults(
        Pointer(dout.dtype, "out"), Pointer(torch.float32, "lse"),
        Rows(pointer(dout, "dout"), None, batch, row, head, p.head_dim_v, config.block_dv, 1, p.varlen),
        pointer(dlse, "dlse"), dlse_b, dlse_head, Const(1) if dlse_row == 1 else dlse_row, queries_of(p, tensors),
        p.num_heads_q,
    )  # fmt: skip
    arguments = {
        "results": results,
        "cu_seqlens_k": pointer(tensors.cu_seqlens_k, "cu_seqlens_k") if skips else None,
        "work": work.record(),
        "terms": repair.terms_of(p, tensors, config.block_m),
        "BLOCK_M": config.block_m,
        "BLOCK_D": config.block_d,
    }
    return Launch(prepare_rows, work.blocks, arguments, {"num_warps": 8})


def _finish_launch(
    problem: Problem, tensors: Tensors, config: BackwardTiles, work: Workspace, name: str, adds: bool
) -> Launch | None:
    """From the sums of ``name``, one of dq, dk and dv, to the gradient; None where there are none."""
    p, is_dq = problem, name == "dq"
    at = {"dq": 0 if p.grads.q and not config.alone else None, "dk": work.dk_at, "dv": work.dv_at}[name]
    if at is None:
        return None
    block_m = config.block_m if is_dq else config.block_n
    blocks = work.blocks if is_dq else key_blocks(p, config, tensors)
    dims = (p.head_dim_v, config.block_dv) if name == "dv" else (p.head_dim, config.block_d)
    others = pointer(tensors.cu_seqlens_k, "cu_seqlens_k")
    arguments = {
        "sums": Sums(Pointer(torch.float32, "work", at), 1 if is_dq else work.sum_heads, block_m),
        "out": Rows(Pointer(p.grad_dtype, name), None, None, None, None, *dims, 1, p.varlen),
        "sequences": queries_of(p, tensors) if is_dq else keys_of(p, tensors),
        "others": others if is_dq and adds else None,
        "num_heads": p.num_heads_q if is_dq else p.num_heads_kv,
        "scale": scores_scale(p) if is_dq else 1.0,
        "ADDS": adds,
    }
    return Launch(finish_gradient, blocks * (block_m // _ROWS), arguments, {"num_warps": 4})


def _main_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, config: BackwardTiles, work: Workspace, adds: bool, *,
    chained: tuple[int, int] | None = None,
) -> Launch:  # fmt: skip
    p, (first_head, end_head) = problem, chained or (0, problem.num_heads_kv)
    heads = (end_head - first_head) * work.gqa_splits
    rows_q, rows_k = tensors.q.shape[-3], tensors.k.shape[-3]
    num_sms = tensor_maps.num_sms(tensors.q.device)
    splits = None
    if work.gqa_splits > 1:
        sums = work.sum_heads, work.sum_heads * p.num_heads_kv
        splits = Splits(work.gqa_splits, -(-p.group_size // work.gqa_splits), *sums)
    at_once = _heads_at_once(p, config, heads, rows_q, rows_k, num_sms)
    all_heads = heads * (1 if p.varlen else p.batch)
    grid = records.KeyGrid(
        _call(p, tensors, config),
        _gradients(p, tensors, dout, config, work, adds),
        _main_work(p, config, work),
        BackwardSchedule(at_once, heads, all_heads, first_head, splits, keys_fall(p), chained is not None),
        _tiles(config),
    )
    blocks = -(-rows_k // config.block_n) * p.batch
    if p.varlen:
        blocks = num_packed_tiles(rows_k, p.batch, config.block_n)
    options = {"num_warps": 4, "maxnreg": config.max_registers}
    return Launch(attention_backward, min(config.programs * num_sms, blocks * heads), {"grid": grid}, options)


def _rows_launch(problem: Problem, tensors: Tensors, dout: Tensor, work: Workspace) -> Launch:
    """The launch of ``by_rows``."""
    p, t, config = problem, tensors, configs.rows_tiles(problem)
    rows = (forward.rows_of_queries(p, t, config), *forward.rows_of_keys(p, t, config))
    mods = backward_mods(p, t, masks_of(p, t, forward.OF_ROWS))
    dq = tensor_maps.contiguous_map("dq", p.dtype, t.q.shape, config.block_m, config.out_cols, p.varlen)
    cols_v = narrowest(config.block_dv)
    output = records.RowGradient(
        dq, rows_of("dout", dout, (config.block_m, cols_v), config.block_dv, p.varlen),
        Pointer(torch.float32, "work", work.rows_at), scores_scale(p), p.varlen,
    )  # fmt: skip
    arguments = {
        "call": forward_records.call_of(p, t, rows, forward_records.keys_of(p, t), mods),
        "output": output,
        "schedule": forward_records.schedule_of(p, config, True)._replace(counter=work.record().counter),
    }
    options = {"num_warps": 4, "maxnreg": config.max_registers}
    return Launch(attention_backward_dq, forward.num_programs(p, t, config), arguments, options)


def _has_clusters(tensors: Tensors) -> bool:
    """Whether launches may be of clusters: Triton's own launcher has none."""
    return tensors.q.device.type != "cuda" or build.is_direct()


def _pairs_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, config: BackwardTiles, work: Workspace, adds: bool
) -> Launch:
    """The launch of ``pairs.attention_backward_pairs``, two programs for 128 keys, which adds to no dk and dv."""
    p, own, keys = problem, config.pairs, 2 * configs.PART_KEYS
    assert own is not None and not adds
    grid = _main_launch(p, tensors, dout, config, work, adds).arguments["grid"]

    def boxes(name: str, tensor: Tensor) -> Rows:
        return rows_of(name, tensor, (configs.PART_KEYS, configs.PART_KEYS), config.block_d, p.varlen)

    lines = None
    if own.dq_tma:
        lines = tensor_maps.floats_map(work.rows_at // 512, 128, narrowest(config.block_d // 2) // 2)
    grid = grid._replace(
        call=grid.call._replace(q=boxes("q", tensors.q), k=boxes("k", tensors.k), v=boxes("v", tensors.v)),
        gradients=grid.gradients._replace(dout=boxes("dout", dout)),
        work=grid.work._replace(dq_desc=lines),
        tiles=grid.tiles._replace(KEYS=keys, REGISTERS=own.registers, DQ_REGISTERS=own.dq_registers, HELD=own.held),
    )
    programs = 2 * -(-tensors.k.shape[-3] // keys) * p.batch * p.num_heads_kv
    options = {"num_warps": 4, "maxnreg": config.max_registers}
    launch = Launch(attention_backward_pairs, programs, {"grid": grid, "Q_MAP": 0, "DOUT_MAP": 0}, options, cluster=2)
    maps = {"Q_MAP": parameter_of_map(launch, "q"), "DOUT_MAP": parameter_of_map(launch, "dout")}
    return launch._replace(arguments={**launch.arguments, **maps})


def _call(problem: Problem, t: Tensors, config: BackwardTiles) -> Call:
    p, keys = problem, configs.PART_KEYS
    cols, cols_v = configs.box_cols(config.block_d), configs.box_cols(config.block_dv)
    return Call(
        rows_of("q", t.q, (config.block_m, cols), config.block_d, p.varlen),
        rows_of("k", t.k, (keys, cols), config.block_d, p.varlen),
        rows_of("v", t.v, (keys, cols_v), config.block_dv, p.varlen),
        queries_of(p, t), keys_of(p, t), Heads(p.num_heads_q, p.group_size),
        backward_mods(p, t, masks_of(p, t, _OF_KEYS)),
    )  # fmt: skip


def rows_of(name: str, tensor: Tensor, box: tuple[int, int], block_dim: int, varlen: bool) -> Rows:
    """Rows that TMA loads in boxes of so many rows and columns."""
    desc = tensor_maps.rows_map(name, tensor, *box, varlen)
    return Rows(None, desc, None, None, None, tensor.shape[-1], block_dim, 1, varlen)


def scores_scale(problem: Problem) -> float:
    """What turns products with dscores, which lack dropout's factor, into dq and dk."""
    return float(problem.softmax_scale / (1.0 - problem.dropout_p))


def queries_of(problem: Problem, t: Tensors) -> Sequences:
    """The sequences of queries."""
    return Sequences(pointer(t.cu_seqlens_q, "cu_seqlens_q"), problem.batch, t.q.shape[-3])


def keys_of(problem: Problem, t: Tensors) -> Sequences:
    """The sequences of keys."""
    return Sequences(pointer(t.cu_seqlens_k, "cu_seqlens_k"), problem.batch, t.k.shape[-3])


def backward_mods(problem: Problem, t: Tensors, masks: Masks | None) -> Mods:
    """The forward's ``Mods``, but products may be multiplied with a scale that is not > 0: no maximum is taken."""
    mods = mods_of(problem, t, None, None, masks)._replace(sinks=None, SCALE_FIRST=False)
    if problem.softcap > 0 or problem.score_function is not None:
        return mods
    return mods._replace(scale_log2=problem.softmax_scale * LOG2_E, prescale=None)


def _gradients(
    problem: Problem, t: Tensors, dout: Tensor, config: BackwardTiles, work: Workspace, adds: bool
) -> records.GradientTensors:
    """With gqa_splits, dk and dv are sums in the workspace."""
    p, wanted, splits = problem, problem.grads, work.gqa_splits > 1
    is_here = wanted.q and not config.alone  # dq
    out_cols = config.out_cols // 2 if p.grad_dtype == torch.float32 else config.out_cols

    def of(name: str, x: Tensor, at: int | None) -> TensorMap | Pointer:
        if splits:
            return Pointer(torch.float32, "work", at or 0)
        return tensor_maps.contiguous_map(name, p.grad_dtype, x.shape, configs.PART_KEYS, out_cols, p.varlen)

    return records.GradientTensors(
        rows_of("dout", dout, (config.block_m, configs.box_cols(config.block_dv)), config.block_dv, p.varlen),
        of("dk", t.k, work.dk_at) if wanted.k else None, of("dv", t.v, work.dv_at) if wanted.v else None,
        scores_scale(p), is_here, wanted.k, wanted.v, is_here or wanted.k, adds and not splits,
        has_slope(p),
    )  # fmt: skip


def _main_work(problem: Problem, config: BackwardTiles, work: Workspace) -> Work:
    """With a descriptor of the rows and, where TMA adds to it, of dq as lines of 128 floats."""
    # In a fixed order sums are added from registers: an add's end must be known.
    adds_by_tma = problem.grads.q and not config.alone and config.dq_tma and not problem.deterministic
    lines = min(config.dq_width, configs.box_cols(config.block_d)) // 2
    return work.record()._replace(
        rows=tensor_maps.floats_map(2 * work.blocks, config.block_m, 2, work.rows_at),
        dq_desc=tensor_maps.floats_map(work.rows_at // 512, 128, lines) if adds_by_tma else None,
        sums=None,
        sums_size=None,
    )


def keys_fall(problem: Problem) -> bool:
    """Whether tiles with the last keys go first.

    With a left bound alone the last keys' tiles are the longest, and the longest go first. Where sums are ordered,
    tiles should start in the order in which they reach the rows: with a right bound the last keys' tile adds to its
    first rows at once.
    """
    if problem.band.right is not None:
        return problem.deterministic
    return problem.band.left is not None


def _tiles(config: BackwardTiles) -> MainTiles:
    c, has_third = config, config.dq_registers > 0
    share = c.block_d if c.block_m == 128 or has_third else c.block_d // 2
    return MainTiles(
        c.block_m, c.block_n, c.block_n // configs.PART_KEYS, c.stages, c.k_stages, c.v_stages, c.ds_stages,
        1 if has_third else 2, share, c.dq_width, c.registers, c.dq_registers, 0, c.by_gradient,
    )  # fmt: skip


def _heads_at_once(problem: Problem, config: BackwardTiles, heads: int, rows_q: int, rows_k: int, num_sms: int) -> int:
    """Heads per L2 group: their tiles run together, the longest first; 1 if all tiles of a head cost the same.

    As many heads as have q, dout and float32 dq that fit L2, but enough for about one tile for each multiprocessor, two
    if their rows do not far exceed L2, and as many in the last group: else its longest tiles run alone at the end. In a
    fixed order the tiles of a head wait for one another: then two multiprocessors in three need a tile. In a fixed
    order without a mask many heads run at once, unless tiles have 64 keys and so add to dq twice as often; and as few
    as fill the GPU where both the steps are short and the warpgroups of the keys wait for their turn.
    """
    p = problem
    gqa_splits, heads = -(-heads // p.num_heads_kv), heads * (1 if p.varlen else p.batch)
    blocks = -(-(min(rows_k, p.seqlen_k) if p.varlen else rows_k) // config.block_n)
    if p.band.unbounded and not p.listed and not (p.deterministic and config.by_gradient):
        waits = config.block_m == configs.PART_KEYS and config.dq_registers == 0
        many = max(1, num_sms // max(1, blocks)) if waits else -(-num_sms // 4)
        return min(heads, many, -(-num_sms // 4)) if p.deterministic else 1
    a_head = rows_q * -(-p.group_size // gqa_splits) * config.block_d * (2 * 2 + 4)
    filled = 2 * num_sms // 3 if p.deterministic else 19 * num_sms // 20
    twice = 0 if p.deterministic else min(-(-2 * filled // max(1, blocks)), 3 * CACHE_BYTES // a_head)
    least = max(1, CACHE_BYTES // a_head, -(-filled // max(1, blocks)), twice)
    if least >= heads:
        return heads
    return next((n for n in range(least, 2 * least) if n >= heads or heads % n == 0), least)


def _sinks_gradient_without_keys(sinks: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Where no row has a key, lse is the sink, but for rows past the last packed sequence."""
    if dlse is None:
        return torch.zeros_like(sinks)
    lse = lse[..., 0] if lse.dim() > dlse.dim() else lse
    rows = torch.where(lse == -torch.inf, 0.0, dlse)
    return rows.transpose(-1, -2).reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)
