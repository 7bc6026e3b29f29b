"""Hopper's kernels, in the order in which they are asked, and what they compute together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from flashtile.backends.gpu.decode.config import FEW_ROWS, LONG_KEYS, bounded, hopper_rows, most_few
from flashtile.backends.gpu.table import (
    INVARIANT_SCALES,
    INVARIANT_SCORES,
    ODD_FLOAT8_CACHE,
    SPLIT_FORWARD,
    CachedKernel,
    GpuBackend,
    Kernel,
    module,
)
from flashtile.backends.gpu.trial import tried
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import Capabilities, Direction, Limit
from flashtile.call.problem import Problem

if TYPE_CHECKING:
    from flashtile.backends.gpu.decode.launch import Attention

# Packed rows a key head. Up to 16 the Triton kernel does as well as the kernel for wide groups, which has two
# warpgroups of 64 rows each. Calls of more than 128 are the forward's.
_MOST_ROWS_OF_TRITON, _MOST_ROWS_OF_WIDE = 16, 128


def _is_big(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > 256


def _is_short(problem: Problem) -> bool:
    return problem.varlen and bool(module("portable.short.config").is_short(problem))


def _present(reasons: dict[str, bool]) -> list[str]:
    return [reason for reason, is_present in reasons.items() if is_present]


def _against_decode(problem: Problem) -> dict[str, bool]:
    """What keeps cached calls from either decode kernel."""
    p = problem
    return {
        "window": p.band.left is not None,
        "softcap": p.softcap > 0,
        "ALiBi": p.alibi,
        "tree_mask": p.tree,
        "softmax_scale": p.softmax_scale <= 0,
        "strides": not p.aligned,
    }


def _is_latent(problem: Problem) -> bool:
    # Tiles on trial for the Triton kernel are for it alone.
    # And this kernel divides keys among multiprocessors by all lengths of the batch.
    return problem.qv and tried("decode") is None and not problem.batch_invariant


def _against_latent(problem: Problem) -> list[str]:
    p = problem
    return _present({
        f"columns {p.head_dim} and {p.head_dim_v}, not 64 and 512": (p.head_dim, p.head_dim_v) != (64, 512),
        "caches in 8 bits but of rows of 656 bytes": p.kv_dtype.itemsize == 1,
        "dtype": p.dtype not in (torch.float16, torch.bfloat16),
        **_against_decode(p),
    })  # fmt: skip


def _is_prompt(problem: Problem) -> bool:
    """Whether sequences, or of packed ones the longest that there may be, have more rows than the decode kernels'."""
    rows, most = problem.seqlen_q * problem.group_size, _MOST_ROWS_OF_WIDE
    if problem.batch_invariant:
        most = most_few(problem)
    return rows > most and not problem.qv and tried("decode") is None


def _against_forward(problem: Problem) -> list[str]:
    p, config = problem, module("hopper.forward.paged.config")
    unit = 16 if config.widens(p) else 8
    return _present({
        "caches in 8 bits": config.widens(p) and p.kv_dtype != FLOAT8,
        f"8 bits in pages of {p.page_size}": config.widens(p) and config.gathers(p),
        "dtype": p.dtype not in (torch.float16, torch.bfloat16),
        "head_dim past 256": _is_big(p),
        f"head_dim that is no multiple of {unit}": p.head_dim % unit > 0 or p.head_dim_v % unit > 0,
        "strides that TMA cannot read": not p.aligned,
        "tree_mask": p.tree,
        "batch_invariant=True with ALiBi both ways": _is_alibi_by_tile(p),
    })  # fmt: skip


def _is_alibi_by_tile(problem: Problem) -> bool:
    """Whether a row's tile says in which of two ways ALiBi is added: where rows see keys past their own."""
    both_ways = problem.band.right != 0 or problem.causal_each
    return bool(problem.batch_invariant) and problem.alibi and both_ways


class _Prompts(CachedKernel):
    def describe(self, table: GpuBackend, problem: Problem) -> str:
        rows = f"{problem.seqlen_q * problem.group_size} rows a key head: {super().describe(table, bounded(problem))}"
        few = f"; up to {FEW_ROWS} rows over more than {LONG_KEYS} keys in Triton, splits merged"
        if problem.batch_invariant:
            few = f"; up to {most_few(problem)} rows in Triton, splits merged"
        return rows + few * leaves_few(problem)

    def attend(self, problem: Problem, tensors: Any) -> list[Attention]:
        decode, launch = module("gpu.decode.launch"), module("hopper.forward.paged.launch").cached_launch
        has_few = leaves_few(problem)
        # The forward needs no workspace, and one counter, of tiles.
        few = (most_few(problem), -1) if problem.batch_invariant else (FEW_ROWS, LONG_KEYS)
        made = [decode.Attention(launch(problem, tensors, few if has_few else None), 0, 1)]
        return made + (decode.attend(problem, tensors, few=True) if has_few else [])


def leaves_few(problem: Problem) -> bool:
    """Whether packed sequences of few rows may have so many keys that they are left to a kernel that splits them."""
    if problem.batch_invariant:
        return problem.varlen and most_few(problem) > 0
    return problem.varlen and problem.seqlen_k > LONG_KEYS


def _is_wide(problem: Problem) -> bool:
    if (held := tried("decode")) is not None:
        return held.specialised and not problem.qv
    is_wide = _MOST_ROWS_OF_TRITON < hopper_rows(problem) <= _MOST_ROWS_OF_WIDE
    return is_wide and not problem.qv and not problem.batch_invariant


def _against_wide(problem: Problem) -> list[str]:
    p = problem
    dims = {64, 128} if 0 < hopper_rows(p) <= 64 else {64, 128, 256}
    is_other = p.head_dim != p.head_dim_v or p.head_dim not in dims
    return _present({
        f"head_dim {p.head_dim} and {p.head_dim_v}": is_other,
        f"pages of {p.page_size}": p.page_size not in (16, 32, 64) and p.page_size % 128 > 0,
        **_against_decode(p),
    })  # fmt: skip


def _reads_entries(problem: Problem, tensors: Any) -> bool:
    """Whether TMA can read the caches, the rows of all entries as if they were one tensor's, and copies the queries."""
    t, maps = tensors, module("hopper.tensor_maps")
    caches = [x for x in (t.k_cache, t.v_cache, t.row_scale) if x is not None]
    queries = () if t.qv is None else (t.qv,) if t.rotary_cos is not None else (t.q, t.qv)
    is_copied = all(stride % 16 == 0 for q in queries for stride in q.stride()[:-1])
    rows = all(map(maps.is_one, (t.k_cache, t.v_cache)))
    return rows and is_copied and t.cache_leftpad is None and all(map(maps.is_readable, caches))


def _reads_prompts(problem: Problem, tensors: Any) -> bool:
    """Whether queries, caches and the output are such that the forward can address them."""
    t, maps = tensors, module("hopper.tensor_maps")
    read = (t.k_cache, t.v_cache, t.out, *(() if t.rotary_cos is not None else (t.q,)))
    if module("hopper.forward.paged.config").gathers(problem):
        # Where rows begin is counted in 32 bits, in units of 8 elements.
        is_near = all(x.shape[0] * x.stride(0) < 8 * 2**31 for x in (t.k_cache, t.v_cache))
    else:
        is_near = maps.is_one(t.v_cache)
    return t.cache_leftpad is None and is_near and all(x.numel() and maps.is_readable(x) for x in read)


def _is_alone(problem: Problem) -> bool:
    found: bool = module("hopper.backward.config").is_alone(problem)
    return found


_TILES, _MERGED = "TMA and WGMMA, warp-specialised and persistent, {}", "splits merged in the same launch"
_LATENT = "TMA and WGMMA, warp-specialised, rows of keys and values read once, {}"
_WIDE = f"TMA and WGMMA, warp-specialised, {{}}; {_MERGED}"
KERNELS = (
    SPLIT_FORWARD,
    Kernel("big_heads", "forward", "hopper.big_heads", _TILES, _is_big),
    Kernel("forward", "forward", "hopper.forward", _TILES),
    Kernel("short sequences", "backward", "portable.short", "Triton, a program a sequence and key head, {}", _is_short),
    Kernel("big_backward", "backward", "hopper.big_backward", _TILES, _is_big),
    Kernel("backward", "backward", "hopper.backward", _TILES),
    CachedKernel(
        "latent rows", "decode", "hopper.latent", _LATENT, _is_latent, _against_latent, _reads_entries
    ),
    _Prompts(
        "prompts", "decode", "hopper.forward.paged", "the forward's kernel, TMA and WGMMA, {}", _is_prompt,
        _against_forward, _reads_prompts,
    ),
    CachedKernel("wide groups", "decode", "hopper.decode", _WIDE, _is_wide, _against_wide, _reads_entries),
    CachedKernel("decode", "decode", "gpu.decode", f"Triton with Hopper's tiles, {{}}; {_MERGED}"),
    Kernel("quantized", "quantized", "hopper.quantized", _TILES),
)  # fmt: skip

# What every direction has.
_COMMON = frozenset({"causal", "window", "grouped_heads", "varlen", "head_dim_v", "softcap", "sinks"})
_BOTH = _COMMON | {
    "alibi", "chunk", "mask", "bias", "dropout", "deterministic", "intervals", "block_lists", "score_mod", "mask_mod",
    "max_scores", "batch_invariant",
}  # fmt: skip
_LISTS = (
    Limit("block lists of blocks that are no multiples of 64", lambda p: any(n % 64 for n in p.listed[:2])),
    Limit("block lists at head_dim past 256", lambda p: p.listed != () and _is_big(p)),
)
_OF_FORWARD = (Limit("batch_invariant=True with ALiBi both ways", _is_alibi_by_tile), INVARIANT_SCORES)
_OF_BACKWARD = (
    Limit("interval masks by head, of grouped heads", lambda p: p.by_head and p.intervals and p.group_size > 1),
    Limit(
        "block lists by query head, of grouped heads, for dq alone",
        lambda p: p.by_head and p.listed != () and p.group_size > 1 and not (p.grads.k or p.grads.v or _is_alone(p)),
    ),
    Limit(
        "dropout at head_dim past 256 or with a score_mod",
        lambda p: p.dropout_p > 0 and (_is_big(p) or p.score_function is not None),
    ),
    Limit(
        "deterministic=True with interval masks, or with block lists but plain ones of 64 rows or keys",
        lambda p: p.deterministic and (p.intervals or (p.listed != () and not _is_alone(p))),
    ),
)
_FORWARD = Capabilities(
    device_types=("cuda",),
    dtypes=(torch.float16, torch.bfloat16),
    max_head_dim=512,
    head_dim_multiple=8,
    nvidia=True,
    always_invariant=True,
    slow_if_tiny=True,
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
    features=_BOTH | {"bias_grad", "operand_grad"},
    limits=_LISTS + _OF_FORWARD,
)
ABLE: dict[Direction, Capabilities] = {
    "forward": _FORWARD,
    "backward": dataclasses.replace(
        _FORWARD, chain_rows=128, chain_head_dim=256, features=_BOTH, limits=_LISTS + _OF_BACKWARD
    ),
    "decode": dataclasses.replace(
        _FORWARD, head_dim_multiple=1, slow_if_tiny=False, limits=(ODD_FLOAT8_CACHE, INVARIANT_SCALES),
        features=_COMMON
        | {"alibi", "chunk", "unaligned", "pages", "float8_cache", "float8_rows", "tree_mask", "causal_each", "qv"}
        | {"max_scores", "batch_invariant"},
    ),
    "quantized": dataclasses.replace(
        _FORWARD, max_head_dim=256, dtypes=(FLOAT8,), head_dim_multiple=16, slow_if_tiny=False, features=_COMMON,
        limits=(),
    ),
}  # fmt: skip

BACKEND = GpuBackend(
    name="hopper", summary="NVIDIA Hopper (compute capability 9.0)", able=ABLE, kernels=KERNELS, gluon=True
)
