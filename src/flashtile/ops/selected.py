"""The operator of cached calls where each query names the keys that it sees; see ``call.selected``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flashtile.call import selected
from flashtile.call.backend import Build
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.cached_problem import check_values, problem_of
from flashtile.call.selected import Compact, Reach, Selected
from flashtile.core import settings
from flashtile.ops.cached import CACHED, split
from flashtile.ops.operation import is_watched

# Queries of one launch: kernels look at the keys of all sequences of a call to divide them, and here each is a query.
_MOST_AT_ONCE = 1024


def attend(t: CacheTensors, options: CacheOptions, given: Selected, with_lse: bool = True) -> Tensor:
    """Runs the call: through its operator, or directly where the dispatcher is not needed.

    Args:
        t: The call's tensors. ``out`` is written.
        options: The call's options.
        given: The lists.
        with_lse: Whether the caller uses lse; if not, it may have any strides.

    Returns:
        lse, as in ``call.backend.Decode``.
    """
    selected.check_company(t, options, given)
    if is_watched(t.q, t.k_cache, t.v_cache):
        watched: Tensor = OPERATOR.overload(*given, *CACHED.flatten(CACHED.readable(t), options))
        return watched
    lse = _attend(t, options, given)
    return _contiguous(lse, options) if with_lse else lse


def attend_apart(t: CacheTensors, options: CacheOptions, given: Selected) -> Tensor:
    """As ``attend``, by whoever has checked what goes with lists, below the dispatcher."""
    return _contiguous(_attend(t, options, given), options)


def rows_of(t: CacheTensors, options: CacheOptions, given: Selected) -> tuple[Tensor, Tensor]:
    """The rows of the cache that each query sees, and how many: as of ``call.selected.Compact``."""
    t, reach = checked(t, options, given)
    return _compact(t)(t, given, reach)


def _attend(t: CacheTensors, options: CacheOptions, given: Selected) -> Tensor:
    t, reach = checked(t, options, given)
    made, settled = selected.reduced(t, options, reach, *_compact(t)(t, given, reach))
    parts = []
    for part in selected.in_parts(made, _MOST_AT_ONCE):
        part, call = CACHED.planned(part, settled)
        parts.append(call.run(part))
    found: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if made.out.data_ptr() != t.out.data_ptr():
        t.out.copy_(made.out.view(t.out.shape))
    return selected.lse_of(t, found)


def checked(t: CacheTensors, options: CacheOptions, given: Selected) -> tuple[CacheTensors, Reach]:
    """The call with values apart where they are columns of keys, and what its queries may reach; all is checked.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    t, call = CACHED.planned(selected.to_check(split(t), given), options)
    selected.check_lists(t, given)
    reach = selected.reach_of(t, options, call.problem, given)
    if call.problem.device_type == "cpu" or (settings.CHECK.raw() and settings.CHECK.enabled()):
        nothing = given.slots is not None  # lengths do not apply
        check_values(call.problem, dataclasses.replace(t, cache_seqlens=t.cache_seqlens * 0) if nothing else t)
        selected.check_values(t, given, reach)
    return t, reach


def described(t: CacheTensors, options: CacheOptions, given: Selected) -> tuple[CacheTensors, CacheOptions]:
    """The call that remains once rows are known, with lists of none in their place: what ``explain`` tells about."""
    t, reach = _shapes_checked(split(t), options, given)
    rows = torch.zeros_like(given.lists).flatten(0, -2)
    return selected.reduced(t, options, reach, rows, rows.new_zeros(rows.shape[:1]))


def builds(t: CacheTensors, options: CacheOptions, given: Selected) -> list[Build]:
    """The kernel that finds the rows of a call on the current GPU; none without Triton."""
    from flashtile.ops.lists import has_triton  # what few programs need is not loaded by all

    t, reach = _shapes_checked(split(t), options, given)
    if not has_triton():
        return []
    from flashtile.backends.gpu import build
    from flashtile.backends.portable.selected import launches

    return build.builds(launches(t, given, reach))


def _shapes_checked(t: CacheTensors, options: CacheOptions, given: Selected) -> tuple[CacheTensors, Reach]:
    """As ``checked``, for tensors that may have no data, and without a plan."""
    selected.check_company(t, options, given)
    t = selected.to_check(t, given)
    reach = selected.reach_of(t, options, problem_of(t, options), given)
    selected.check_lists(t, given)
    return t, reach


def _compact(t: CacheTensors) -> Compact:
    if t.q.is_cuda:
        from flashtile.ops.lists import has_triton  # what few programs need is not loaded by all

        if has_triton():
            from flashtile.backends.portable.selected import compacted

            return compacted
    return selected.compacted


def _contiguous(lse: Tensor, options: CacheOptions) -> Tensor:
    """The lse as other calls return it: with largest scores, each of the two lies in memory as it would alone."""
    return lse.movedim(-1, 0).contiguous().movedim(0, -1) if options.return_max_scores else lse.contiguous()


def _run(positions: Tensor | None, slots: Tensor | None, *args: Any) -> Tensor:
    t, options = CACHED.unflatten(args)
    given = Selected(positions, slots)
    selected.check_company(t, options, given)
    return attend_apart(t, options, given)


def _fake(positions: Tensor | None, slots: Tensor | None, *args: Any) -> Tensor:
    t, options = CACHED.unflatten(args)
    t, _ = _shapes_checked(t, options, Selected(positions, slots))
    return CACHED.fake(*CACHED.flatten(t, options))[1]


OPERATOR = CACHED.define(
    "selected_attention_with_kvcache", _run, _fake, leading={"selected": "Tensor?", "selected_slots": "Tensor?"},
    writes=("out",), results=("lse",), tags=(torch.Tag.needs_fixed_stride_order,),
)  # fmt: skip
