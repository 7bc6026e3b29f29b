"""Host side of cached calls of wide groups on Hopper: the launch that attends."""

from __future__ import annotations

from flashtile.backends.gpu.decode.config import DecodeTiles
from flashtile.backends.gpu.decode.launch import Attention, attention, attention_call
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.gpu.named import device_code
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.decode.config import choose
from flashtile.backends.hopper.device.records import Maps, Warps
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem

wide_cache_attention = device_code("flashtile.backends.hopper.decode.kernel").wide_cache_attention


def attend(problem: Problem, tensors: CacheTensors) -> list[Attention]:
    """The launch that attends."""
    return [attention(problem, tensors, choose(problem), wide_launch)]


def wide_launch(problem: Problem, tensors: CacheTensors, config: DecodeTiles, num_sms: int) -> Launch:
    """The launch of the attention, as ``attention_launch``."""
    p, t = problem, tensors
    call, programs = attention_call(p, t, config, num_sms)
    # Registers a thread: of all at the start; of a consumer; of the other warps.
    is_wide = p.head_dim > 128
    most, consumer, few = (232, 248, 216) if config.block_m == 64 else (168, 232, 40) if is_wide else (168, 224, 56)
    # Boxes of pages smaller than a block are 64 columns wide.
    rows = min(config.block_n, p.page_size or config.block_n)
    cols = p.head_dim if rows == config.block_n else 64
    k, v = (
        tensor_maps.entries_map(name, x, rows, cols) for name, x in (("k_cache", t.k_cache), ("v_cache", t.v_cache))
    )
    maps = Maps(k, v, *(x.stride(0) // x.stride(1) for x in (t.k_cache, t.v_cache)))
    arguments = {"call": call, "maps": maps, "warps": Warps(config.num_stages, consumer, few)}
    return Launch(wide_cache_attention, programs, arguments, {"num_warps": 4, "maxnreg": most})
