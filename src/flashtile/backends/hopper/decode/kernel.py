"""Attention over a cache for Hopper, for key heads that many rows share: loads, products and softmax overlap.

A warp finds the parts of a program, a warp loads their keys and values by TMA, and warpgroups of 64 rows compute with
WGMMA. Which splits there are, which program computes them, and how their states are stored and folded is that of the
Triton kernel, ``backends/gpu/decode/kernel.py``. Source of the schedule: Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, section 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.decode.call import Cache, Call, Lengths, Pages, Queries, Results, Sizes, Splitting
from flashtile.backends.gpu.device.mask import Band
from flashtile.backends.gpu.device.scores import Terms
from flashtile.backends.gpu.device.softmax import LOG2_E
from flashtile.backends.hopper.decode.roles import FIELDS, RECORD_SIZE, Channels, consumer, producer, scheduler
from flashtile.backends.hopper.device.head_dim_parts import make_rings
from flashtile.backends.hopper.device.ring import make_records

_PLAIN = [
    "pages_stride_b", "batch", "seqlen_q", "num_heads_kv", "num_new", "capacity", "right", "k_entry_rows",
    "v_entry_rows",
]  # fmt: skip


@gluon.jit
def run_roles(
    k_desc, v_desc, k_entry_rows, v_entry_rows, call, STAGES: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Makes the channels and starts the roles."""
    dtype: gl.constexpr = k_desc.dtype
    DIM: gl.constexpr = call.sizes.BLOCK_D
    WARPGROUPS: gl.constexpr = call.sizes.BLOCK_M // 64
    keys = make_rings(dtype, call.sizes.BLOCK_N, DIM, STAGES, WARPGROUPS)
    values = make_rings(dtype, call.sizes.BLOCK_N, DIM, STAGES, WARPGROUPS)
    parts = make_records(FIELDS, "", RECORD_SIZE, 2, WARPGROUPS + 1)
    q0 = make_rings(dtype, 64, DIM, 1, 0)
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consumer, (Channels(parts, q0, keys, values), call, 0)),
            (producer, (k_desc, v_desc, Channels(parts, (), keys, values), call, k_entry_rows, v_entry_rows)),
            (scheduler, (parts, call)),
        ], [1, 1], [FEW, FEW])  # fmt: skip
    else:
        q1 = make_rings(dtype, 64, DIM, 1, 0)
        gl.warp_specialize([
            (consumer, (Channels(parts, q0, keys, values), call, 0)),
            (consumer, (Channels(parts, q1, keys, values), call, 1)),
            (producer, (k_desc, v_desc, Channels(parts, (), keys, values), call, k_entry_rows, v_entry_rows)),
            (scheduler, (parts, call)),
        ], [4, 1, 1], [REGISTERS, FEW, FEW])  # fmt: skip


@gluon.jit(do_not_specialize=_PLAIN)
def wide_cache_attention(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, acc_ptr, stats_ptr, counters_ptr, cached_ptr, cu_seqlens_q_ptr,
    cu_seqlens_new_ptr, entries_ptr, pages_ptr, sinks_ptr, q_stride_b, q_stride_row, q_stride_head, out_stride_b,
    out_stride_row, out_stride_head, pages_stride_b, k_entry_rows, v_entry_rows, batch, seqlen_q, num_heads_kv, num_new,
    capacity, right, scale,
    GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, LANES: gl.constexpr, PATIENCE: gl.constexpr, PROGRAMS: gl.constexpr,
    FEWEST_KEYS: gl.constexpr, MOST_KEYS: gl.constexpr, MOST_SPLITS: gl.constexpr, MOST_SLOTS: gl.constexpr,
    RUN: gl.constexpr, LONG_KEYS: gl.constexpr, SEARCH: gl.constexpr, HAS_RIGHT: gl.constexpr,
    REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """``kernel.cache_attention`` of 16-bit queries without windows and score functions; one program an SM.

    Descriptors of the caches have boxes of BLOCK_N rows; ``entry_rows`` are rows from one entry or page to the next.
    """
    run_roles(
        k_desc, v_desc, k_entry_rows, v_entry_rows,
        Call(
            Queries(q_ptr, q_stride_b, q_stride_row, q_stride_head, cu_seqlens_q_ptr, seqlen_q, None, None),
            Lengths(cached_ptr, None, cu_seqlens_new_ptr, num_new, entries_ptr),
            Cache(q_ptr, 0, 0, 0, None, 0),
            Cache(q_ptr, 0, 0, 0, None, 0),
            Pages(pages_ptr, pages_stride_b),
            Results(
                out_ptr, out_stride_b, out_stride_row, out_stride_head, lse_ptr, acc_ptr, stats_ptr, counters_ptr,
                sinks_ptr,
            ),
            Sizes(
                batch, num_heads_kv, GROUP, capacity, PAGE_SIZE, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, BLOCK_M,
                BLOCK_N, 0, AHEAD, LANES, PATIENCE,
                Splitting(PROGRAMS, FEWEST_KEYS, MOST_KEYS, MOST_SPLITS, MOST_SLOTS, RUN, LONG_KEYS), SEARCH, False,
                False, False,
            ),
            Terms(scale * LOG2_E, False, None, (), Band(None, right if HAS_RIGHT else None), (), None),
        ),
        STAGES, REGISTERS, FEW,
    )  # fmt: skip
