"""Which kernels compute a cached call, and the tiles of the one for wide groups."""

from __future__ import annotations

from flashtile.backends.gpu.decode import config as portable
from flashtile.backends.gpu.decode.config import Config, Splitting, hopper_rows
from flashtile.backends.gpu.trial import tried
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.forward import cached
from flashtile.backends.hopper.forward import config as forward
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem

# Up to so many rows the Triton kernel's tiles of 16 do as well; more than two warpgroups' are the forward's.
_FEWEST_ROWS, _MOST_ROWS = 17, 128


def runs_forward(problem: Problem, tensors: CacheTensors | None = None) -> bool:
    """Whether the forward's kernel computes a call; by the longest sequence there may be, if queries are packed.

    Args:
        problem: The call.
        tensors: Its tensors, taken for readable by TMA if None.
    """
    has_rows = not problem.qv and max(problem.head_dim, problem.head_dim_v) <= 256
    has_rows = has_rows and problem.seqlen_q * problem.group_size > _MOST_ROWS
    is_readable = tensors is None or cached.can_read(problem, tensors)
    return has_rows and tried("decode") is None and not cached.reasons(problem) and is_readable


def leaves_few(problem: Problem) -> bool:
    """Whether sequences of few rows may have so many keys that they are left to a kernel that splits them."""
    return problem.varlen and problem.keys.length > portable.LONG_KEYS


def choose(problem: Problem, tensors: CacheTensors) -> Config:
    """The tiles of a call on the other kernels; those of the Triton kernel are not ``specialised``."""
    if tried("decode") is None and covers(problem) and can_read(tensors):
        return tiles(problem)
    return portable.choose(problem)


def tiles(problem: Problem) -> Config:
    """The tiles of a call that the kernel covers.

    Measured: docs/tuning-notes.md. Above long_keys 64 splits beat 32 for one sequence and lose for many.
    """
    dim, block_m = problem.head_dim, 64 if hopper_rows(problem) <= 64 else 128
    block_n, stages, run = {64: (128, 4, 4), 128: (64, 5, 4), 256: (64, 2, 1)}[dim]
    programs = 8 * problem.num_heads_kv
    rule = Splitting(programs, fewest_keys=128, most_keys=512, most_slots=8192, run=run, long_keys=2**16)
    return Config(block_m, block_n, 4, stages, 1, rule, specialised=True)


def covers(problem: Problem) -> bool:
    """Whether the kernel computes a call whose caches TMA can read: pages have whole blocks, or blocks whole pages."""
    p = problem
    plain = (
        not p.qv
        and p.band.left is None
        and p.softcap == 0
        and not p.alibi
        and p.softmax_scale > 0
        and p.aligned
        and not p.tree
    )
    rows = _FEWEST_ROWS <= hopper_rows(p) <= _MOST_ROWS
    dims = p.head_dim == p.head_dim_v and (p.head_dim in (64, 128) or (p.head_dim == 256 and hopper_rows(p) > 64))
    pages = p.keys.page_size in (16, 32, 64) or p.keys.page_size % 128 == 0
    return plain and dims and pages and rows


def can_read(tensors: CacheTensors) -> bool:
    """Whether TMA can read the caches, the rows of all entries as if they were one tensor's."""
    t = tensors
    strides = [(cache.shape[0], *cache.stride()[:2]) for cache in (t.k_cache, t.v_cache)]
    rows = all(row > 0 and entry % row == 0 and count * entry // row < 2**30 for count, entry, row in strides)
    return rows and t.cache_leftpad is None and all(map(tensor_maps.is_readable, (t.k_cache, t.v_cache)))


def describe(problem: Problem) -> str:
    """Which kernel computes a call whose tensors TMA can read, and why, in one line."""
    rows = problem.seqlen_q * problem.group_size
    if problem.qv:
        return _describe_latent(problem)
    if runs_forward(problem):
        few = f"; up to {portable.FEW_ROWS} rows over more than {portable.LONG_KEYS} keys in Triton, splits merged"
        text = (
            f"{rows} rows a key head: the forward's kernel, TMA and WGMMA, {forward.choose(portable.bounded(problem))}"
        )
        return text + few * leaves_few(problem)
    if covers(problem):
        return f"TMA and WGMMA, warp-specialised, {tiles(problem)}; splits merged in the same launch"
    against = ", ".join(cached.reasons(problem)) if rows > _MOST_ROWS else ""
    why = f"; not the forward's kernel: {against}" if against else ""
    return f"Triton with Hopper's tiles, {portable.choose(problem)}; splits merged in the same launch{why}"


def _describe_latent(problem: Problem) -> str:
    from flashtile.backends.hopper.latent import config as latent  # what few programs need is not loaded by all

    if latent.runs(problem):
        return f"TMA and WGMMA, warp-specialised, rows of keys and values read once, {latent.choose(problem)}"
    why = f"not the kernel for latent rows: {', '.join(latent.against(problem))}"
    return f"Triton with Hopper's tiles, {portable.choose(problem)}; splits merged in the same launch; {why}"
