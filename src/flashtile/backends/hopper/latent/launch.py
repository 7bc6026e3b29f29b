"""Host side of attention over latent rows: its launch, and the workspace that it needs."""

from __future__ import annotations

from flashtile.backends.gpu.decode import config as portable
from flashtile.backends.gpu.decode import records
from flashtile.backends.gpu.decode.launch import multiprocessors
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.latent.config import ROWS, choose, lanes_of
from flashtile.backends.hopper.latent.kernel import latent_attention
from flashtile.backends.hopper.latent.records import Latent
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem


def latent_launch(problem: Problem, tensors: CacheTensors) -> tuple[Launch, int, int]:
    """The launch of the attention, the floats of its workspace and its counters.

    A program leaves two states at most, that of the tile that it begins in and that of the one that it ends in.
    """
    p, t, config, programs = problem, tensors, choose(problem), multiprocessors(tensors.q.device)
    slots = 2 * ROWS * programs
    # All but the tiles is that of the Triton kernel.
    tiles = portable.Config(ROWS, 64, 4, config.stages, 1, specialised=True)
    call = records.call_of(p, t, tiles, slots, 1, few=False)
    search = max(32, records.power_of_two(p.batch + p.varlen))
    call = call._replace(schedule=call.schedule._replace(SEARCH=search, FOLD_ROWS=4, AHEAD=16))
    rows = min(64, p.keys.page_size or 64)
    k, v = (tensor_maps.entries_map(name, x, rows, 64) for name, x in (("k", t.k_cache), ("v", t.v_cache)))
    k_rows, v_rows = (x.stride(0) // x.stride(1) for x in (t.k_cache, t.v_cache))
    c, lanes = config, lanes_of(p, min(config.most_lanes, programs))
    latent = Latent(
        k, v, k_rows, v_rows, c.fixed_cost, c.fewest_blocks, c.stages, c.piece, lanes, c.registers, c.few
    )  # fmt: skip
    launch = Launch(latent_attention, programs, {"call": call, "latent": latent}, {"num_warps": 4, "maxnreg": 128})
    return launch, slots * (p.head_dim_v + 2), 2 * programs
