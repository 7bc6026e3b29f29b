"""Host code of attention over a cache: the launches of a call, and the plan that repeats them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.decode import records
from flashtile.backends.gpu.decode.call import DecodeCall
from flashtile.backends.gpu.decode.config import DecodeTiles, choose, has_many, most_few
from flashtile.backends.gpu.host import kept
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Made, Memory, Plan, empty, max_scores_memory, with_max_scores
from flashtile.backends.gpu.records import multiprocessors
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Gpu, Problem

cache_append = device_code("flashtile.backends.gpu.decode.append").cache_append
cache_attention = device_code("flashtile.backends.gpu.decode.kernel").cache_attention


class Attention(NamedTuple):
    """A launch that attends, with what it needs.

    Attributes:
        launch: The launch.
        floats: Size of its workspace, in float32.
        counters: Its counters, 0 before and after it.
    """

    launch: Launch
    floats: int
    counters: int


# The launches that attend in a call.
Attend = Callable[[Problem, CacheTensors], list[Attention]]


class DecodePlan(Plan):
    """Attention over a cache, of calls with the same layouts and options; see ``call.backend.Decode``."""

    def __init__(self, *given: Any, max_scores: Callable[[], Tensor] | None) -> None:
        """As ``Plan``; max_scores: ``max_scores_memory``."""
        super().__init__(*given)
        self._max_scores = max_scores

    def __call__(self, tensors: CacheTensors) -> Tensor:
        """Appends if there are new keys, writes ``tensors.out``, returns lse."""
        made: Made = {}
        both = None if self._max_scores is None else with_max_scores(made, self._max_scores)
        lse: Tensor = self.run(tensors, made)["lse"]
        return lse if both is None else both


def plan(problem: Problem, tensors: CacheTensors, attend: Attend) -> DecodePlan:
    """The plan of calls with the same layouts and options; ``attend`` gives the launches that attend."""

    def prepare(t: CacheTensors, *_: Any) -> tuple[Memory, dict[str, Launch]]:
        q, made = t.q, attend(problem, t)
        # One launch after the other uses the workspace, and leaves the counters at 0.
        floats, counters = (max(each) for each in list(zip(*made, strict=True))[1:])
        memory = {"lse": empty(q.device, problem.lse_shape(q))}
        if t.rotary_cos is not None:
            memory["rotated"] = empty(q.device, q.shape, q.dtype)
        if floats:
            memory["acc"] = empty(q.device, (floats,))
        if counters:
            memory["counters"] = functools.partial(zeros, q.device, counters)
        appends = [] if t.k is None else [append_launch(problem, t)]
        launches: dict[str, Launch] = {}
        for launch in (*appends, *(each.launch for each in made)):
            name = launch.kernel.__name__
            launches[f"{name}_of_few" if name in launches else name] = launch
        return memory, launches

    return DecodePlan(tensors.q.device, prepare, max_scores=max_scores_memory(problem, tensors.q))


def attend(problem: Problem, tensors: CacheTensors, *, few: bool = False) -> list[Attention]:
    """The launch that attends with the Triton kernel; ``few`` as in ``attention_launch``.

    In batch-invariant calls packed sequences of few rows and of more have a launch each.
    """
    made = [attention(problem, tensors, choose(problem, few=few), few=few)]
    if problem.batch_invariant and problem.varlen and not few and has_many(problem) and most_few(problem):
        made += attend(problem, tensors, few=True)
    return made


class WorkLimits:
    """The most that a call may need, whatever its lengths turn out to be.

    Attributes:
        tiles: Tiles of rows.
        items: Work items: their splits.
        slots: Rows of splits in the workspace; 0 if nothing is ever split, unless warps have roles: that kernel has no
            build without a workspace.
        floats: Size of the workspace.
        counters: Two for each tile, 0 without a workspace.
        most_states: As in ``SplitRule``.
    """

    most_states: int | None = None

    def __init__(self, problem: Problem, tensors: CacheTensors, config: DecodeTiles) -> None:
        p, cut = problem, config.splitting
        group, heads, capacity = p.group_size, p.num_heads_kv, p.seqlen_k
        if cut.fixed:
            rows, splits = rows_of_few(problem, tensors), config.bound_of_fixed(problem)
            self.tiles = heads * (-(-rows // config.block_m) + p.batch + 1)
            self.items = self.tiles * splits
            # As much memory as by the rule, if runs alone do not take more.
            self.most_states = max(p.batch * cut.most_slots // max(rows * heads, 1), 1)
            slots = heads * rows * max(min(splits, self.most_states), -(-splits // cut.run))
        elif p.varlen:
            rows = tensors.q.shape[0] * group
            splits = cut.bound(capacity, group, 1, heads)
            self.tiles = heads * (-(-rows // config.block_m) + p.batch + 1)
            self.items = self.tiles + p.batch * (cut.most_slots // config.block_m + heads * splits)
            slots = min(heads * rows * splits, p.batch * cut.most_slots)
        else:
            rows = p.seqlen_q * group
            tiles = -(-rows // config.block_m)
            splits = cut.bound(capacity, rows, tiles, heads)
            self.tiles = p.batch * heads * tiles
            self.items = self.tiles * splits
            slots = p.batch * heads * rows * splits
        # The sums and maxima begin on 16 bytes.
        self.slots = max(-(-slots // 4) * 4 if splits > 1 else 0, 4 * config.specialised)
        self.floats = self.slots * (p.head_dim_v + 2)
        self.counters = 2 * self.tiles if self.slots else 0


def rows_of_few(problem: Problem, tensors: CacheTensors) -> int:
    """The most packed rows a key head of all sequences of few rows, and of the rows past the last one."""
    rows = math.prod(tensors.q.shape[:-2]) * problem.group_size
    return min(rows, (problem.batch + 1) * most_few(problem)) if has_many(problem) else rows


_CHUNK = 1 << 20
_counters: dict[tuple[torch.device, int], Tensor] = {}
# What is left of the last chunk, and all chunks, since graphs keep addresses and no tensors.
_spare: dict[torch.device, Tensor] = {}
_chunks: list[Tensor] = []


def zeros(device: torch.device, count: int) -> Tensor:
    """Counters of 0, which every launch leaves at 0, so that no other kernel need set them.

    Launches on one stream follow one another and share them. A captured launch gets its own, since graphs may be
    replayed on any stream: from a chunk that calls outside captures renew, or else zeroed by a node of the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream, spare = torch._C._cuda_getCurrentRawStream(device.index), _spare.get(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        if spare is None or len(spare) < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _spare[device] = spare[-(-count // 4) * 4 :]
        return spare[:count]
    if spare is None or len(spare) < _CHUNK // 2:
        _chunks.append(kept((_CHUNK,), torch.int32, device))
        _spare[device] = _chunks[-1]
    counters = _counters.get((device, stream))
    if counters is None or len(counters) < count:
        counters = _counters[device, stream] = kept((max(count, 4096),), torch.int32, device)
    return counters


def attention_call(
    problem: Problem, tensors: CacheTensors, config: DecodeTiles, num_sms: int, *, few: bool = False
) -> tuple[DecodeCall, int]:
    """The records of the attention, and the number of its programs; see ``attention_launch``."""
    p, bounds, heads_in_step = problem, WorkLimits(problem, tensors, config), heads_in_step_of(problem, config, num_sms)
    if bounds.most_states is not None:
        config = replace(config, splitting=replace(config.splitting, most_states=bounds.most_states))
    most = max(num_sms * config.programs_per_sm // heads_in_step, 1) * heads_in_step
    return (
        records.call_of(p, tensors, config, bounds.slots, heads_in_step, few=few),
        min(-(-bounds.items // heads_in_step) * heads_in_step, most),
    )


def heads_in_step_of(problem: Problem, config: DecodeTiles, num_sms: int) -> int:
    """``DecodeSchedule.HEADS_IN_STEP``: it divides the key heads, and the programs of the architecture's usual device.

    So one build serves all devices of an architecture: others leave a few multiprocessors of such programs out.
    """
    have = problem.compute_capability
    usual = Gpu("cuda", 10 * have[0] + have[1] if have else "gfx942", 32).multiprocessors
    most = (num_sms if problem.device_type == "cpu" else usual) * config.programs_per_sm
    return max(n for n in range(1, 17) if problem.num_heads_kv % n == most % n == 0)


def attention_launch(
    problem: Problem, tensors: CacheTensors, config: DecodeTiles, num_sms: int, *, few: bool = False
) -> Launch:
    """The launch of the attention.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        num_sms: Multiprocessors of the device, which bound the number of programs.
        few: Whether it computes packed sequences of ``FEW_ROWS`` with more than ``LONG_KEYS`` alone.
    """
    call, programs = attention_call(problem, tensors, config, num_sms, few=few)
    return Launch(cache_attention, programs, {"call": call}, config.options())


def attention(
    problem: Problem,
    t: CacheTensors,
    config: DecodeTiles,
    launch: Callable[..., Launch] = attention_launch,
    **few: bool,
) -> Attention:
    """A launch of the attention, as ``attention_launch``, with what it needs."""
    bounds = WorkLimits(problem, t, config)
    made = launch(problem, t, config, multiprocessors(t.q.device), **few)
    return Attention(made, bounds.floats, bounds.counters)


def append_launch(problem: Problem, tensors: CacheTensors) -> Launch:
    """The launch that appends keys and values and rotates the queries."""
    p, t = problem, tensors
    assert t.k is not None
    count, queries = (math.prod(x.shape[:-2]) for x in (t.k, t.q))
    head_blocks, q_blocks = (-(-n // records.HEADS_AT_ONCE) for n in (p.num_heads_kv, p.num_heads_q))
    programs = count * head_blocks + (0 if t.rotary_cos is None else queries * q_blocks)
    cache = records.cache_of(p, t, torch.uint8, p.head_dim, p.head_dim_v)
    arguments = {"cache": cache, "new": records.new_of(p, t, count), "rotation": records.rotation_of(p, t)}
    return Launch(cache_append, programs, arguments, {"num_warps": 4, "num_stages": 1})
