"""Host side of cached calls on Hopper: which kernel computes which sequences, and the launch for wide groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.decode.config import Config, Rows
from flashtile.backends.decode.launch import Bounds, DecodePlan, attention_launch, multiprocessors
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.decode.config import choose, launches_of
from flashtile.backends.hopper.decode.kernel import wide_cache_attention
from flashtile.backends.hopper.forward.cached import cached_launch
from flashtile.backends.launch import Launch, TensorMap, parameters_of
from flashtile.kvcache.arguments import CacheTensors
from flashtile.problem import Problem


class CachedPlan(DecodePlan):
    """Attention over a cache on Hopper: prompts by the forward, fewer rows by the kernel for wide groups or Triton's."""

    def _launches(self, t: CacheTensors) -> list[tuple[Launch, int, int]]:
        few, above = launches_of(self._problem, t)
        made = [self._launch(t, rows) for rows in few]
        if above is not None:
            # The forward needs no workspace, and one counter, of tiles.
            made.append((cached_launch(self._problem, t, above), 0, 1))
        return made

    def _launch(self, t: CacheTensors, rows: Rows) -> tuple[Launch, int, int]:
        config = choose(self._problem, t, rows)
        bounds, sms = Bounds(self._problem, t, config), multiprocessors(t.q.device)
        if config.specialised:
            return wide_launch(self._problem, t, config, sms), bounds.floats, bounds.counters
        return attention_launch(self._problem, t, config, sms, rows), bounds.floats, bounds.counters


def wide_launch(problem: Problem, tensors: CacheTensors, config: Config, num_sms: int) -> Launch:
    """The launch of the attention, as ``attention_launch``."""
    plain = attention_launch(problem, tensors, config, num_sms)
    # Of all threads at the start; of a consumer, and of the warps that do not compute.
    is_wide = problem.head_dim > 128
    most, consumer, few = (232, 248, 216) if config.block_m == 64 else (168, 232, 40) if is_wide else (168, 224, 56)
    names = {each[0] for each in parameters_of(wide_cache_attention)}

    def others() -> dict[str, Any]:
        found = {**plain.others(), "STAGES": config.num_stages, "REGISTERS": consumer, "FEW": few}
        return {name: value for name, value in found.items() if name in names}

    sizes = {name: value for name, value in plain.sizes.items() if name in names}
    for name, cache in (("k", tensors.k_cache), ("v", tensors.v_cache)):
        sizes[f"{name}_desc"] = _boxes_of_cache(cache, problem.keys.page_size, config.block_n)
        sizes[f"{name}_entry_rows"] = cache.stride(0) // cache.stride(1)
    options = {"num_warps": 4, "maxnreg": most}
    return Launch(wide_cache_attention, plain.programs, sizes, options, others, ("wide", plain.key))


def _boxes_of_cache(cache: Tensor, page_size: int, block_n: int) -> TensorMap:
    """Boxes of rows of one head of a cache, its sequences or pages as if packed into one; of small pages 64 wide."""
    rows, (_, row, head, _) = min(block_n, page_size or block_n), cache.stride()
    _, _, heads, dim = cache.shape
    shape, strides = tensor_maps.geometry((2, heads, dim), (row, head if heads > 1 else dim, 1), varlen=True)
    sides, layout = tensor_maps.box_and_layout(cache.dtype, rows, dim if rows == block_n else 64, True)
    return TensorMap(cache.dtype, shape, strides, sides, layout)
