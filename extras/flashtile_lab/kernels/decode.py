"""The kernels of cached calls that are built without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashtile.backends.gpu.decode.config import choose
from flashtile.backends.gpu.decode.launch import append_launch, attention_launch
from flashtile.backends.gpu.launch import Launch
from flashtile.call.arguments import BY_KIND
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem, described
from flashtile.core.masks import Band
from flashtile_lab.kernels.build import KernelBuild, kernel_builds

_FLOAT8, _BF16 = torch.float8_e4m3fn, torch.bfloat16


def launches(problem: Problem, tensors: CacheTensors) -> dict[str, Launch]:
    """The kernels of a cached call by name, in the order in which they run."""
    made = {"cache_append": append_launch(problem, tensors)} if tensors.k is not None else {}
    return made | {"cache_attention": attention_launch(problem, tensors, choose(problem), num_sms=132)}


def builds(backend: str, capability: tuple[int, int] | None) -> list[KernelBuild]:
    """Every kernel: the usual head dims, pages, and each feature once."""
    calls: list[dict[str, Any]] = [
        {},
        {"page_size": 16},
        {"head_dim": 64, "num_heads_q": 64},
        {"head_dim": 256, "num_heads_q": 16},
        {"kv": _FLOAT8},
        {"kv": _FLOAT8, "page_size": 64, "scales": True},
        {"packed": True, "page_size": 16, "appends": True, "has": ("page_indptr",)},
        {"kv": torch.float8_e5m2, "appends": True, "has": ("e5m2",)},
        {"seqlen_q": 512, "appends": True},
        {"packed": True, "page_size": 16, "appends": True},
        {"packed": True, "page_size": 16, "appends": True, "has": ("slot_mapping",)},
        {"seqlen_q": 8, "page_size": 16, "appends": True, "has": ("causal",), "band": Band()},
        {"dtype": torch.float32},
        {"page_size": 16, "max_scores": True},
        {"tree": True, "seqlen_q": 8, "page_size": 16},
        {"tree": True, "seqlen_q": 64, "packed": True, "appends": True, "alibi": True, "band": Band(4096, 0)},
        {"softcap": 30.0, "alibi": True, "sinks": True, "band": Band(128, 0), "page_size": 16, "appends": True},
        {"packed": True, "page_size": 16, "batch_invariant": BY_KIND},
        {"packed": True, "seqlen_q": 64, "batch_invariant": BY_KIND, "band": Band(1024, 0)},
    ]
    made: list[KernelBuild] = []
    for call in calls:
        problem, tensors = described_call(capability, **call)
        made += kernel_builds(backend, "decode", problem, launches(problem, tensors), more=call.get("has", ()))
    for eight_bits in (False, True):
        problem, tensors = latent_call(capability, eight_bits=eight_bits)
        more = ("latent rows", *(("of 656 bytes",) if eight_bits else ()))
        made += kernel_builds(backend, "decode", problem, launches(problem, tensors), more=more)
    return made


def latent_call(
    capability: tuple[int, int] | None, page_size: int = 64, *, eight_bits: bool = False
) -> tuple[Problem, CacheTensors]:
    """One over latent rows: 128 heads over one, of 64 columns and 512 of values, these in 16 bits or in 8."""
    problem, t = described_call(capability, head_dim=576, num_heads_q=128, page_size=page_size)
    cache = t.k_cache[:, :, :1]
    own, values = (slice(512, 576), slice(512))
    tensors = dataclasses.replace(
        t, out=t.q.new_empty(*t.q.shape[:-1], 512), q=t.q[..., own], qv=t.q[..., values], k_cache=cache[..., own],
        v_cache=cache[..., values],
    )  # fmt: skip
    problem = problem.but(num_heads_kv=1, head_dim=64, head_dim_v=512, qv=True, row_scale=eight_bits)
    if eight_bits:
        packed = torch.empty(*cache.shape[:-1], 656, dtype=torch.uint8, device="meta")
        tensors.k_cache, tensors.v_cache = packed[..., 528:].view(_BF16), packed[..., :512].view(_FLOAT8)
        tensors.row_scale = packed[..., 512:528].view(torch.float32)
    return problem, tensors


def described_call(
    capability: tuple[int, int] | None,
    *,
    head_dim: int = 128,
    num_heads_q: int = 32,
    seqlen_q: int = 1,
    page_size: int = 0,
    dtype: torch.dtype = _BF16,
    kv: torch.dtype | None = None,
    packed: bool = False,
    appends: bool = False,
    scales: bool = False,
    has: tuple[str, ...] = (),
    **values: Any,
) -> tuple[Problem, CacheTensors]:
    """A cached call of 8 sequences of up to 8192 keys of 8 heads, and its tensors on the meta device."""
    batch, capacity, heads, kv = 8, 8192, 8, kv or dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    rows = (batch * seqlen_q,) if packed else (batch, seqlen_q)
    lengths, bounds = empty(batch, of=torch.int32), empty(batch + 1, of=torch.int32) if packed else None
    entries = (batch * capacity // page_size, page_size) if page_size else (batch, capacity)
    q, cache, new = empty(*rows, num_heads_q, head_dim), empty(*entries, heads, head_dim, of=kv), None
    ragged = "page_indptr" in has
    table = empty(batch, capacity // page_size, of=torch.int32) if page_size and not ragged else None
    scale = empty(entries[0], heads, of=torch.float32) if scales else None
    if appends:
        new = empty(*rows, heads, head_dim)
    angles = empty(capacity, head_dim // 2, of=torch.float32) if appends else None
    problem = described(
        device_type="cuda",
        compute_capability=capability,
        dtype=dtype,
        kv_dtype=kv,
        batch=batch,
        seqlen_q=seqlen_q,
        varlen=packed,
        seqlen_k=capacity,
        cached=True,
        page_size=page_size,
        num_heads_q=num_heads_q,
        num_heads_kv=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        softmax_scale=head_dim**-0.5,
        causal_each="causal" in has,
        **{"band": Band(None, 0), **values},
    )
    tensors = CacheTensors(
        out=q, q=q, k_cache=cache, v_cache=cache, cache_seqlens=lengths, page_table=table, k=new, v=new,
        rotary_cos=angles, rotary_sin=angles, k_scale=scale, v_scale=scale, cu_seqlens_q=bounds,
        cu_seqlens_k_new=bounds if appends else None,
        alibi_slopes=empty(num_heads_q, of=torch.float32) if problem.alibi else None,
        sinks=empty(num_heads_q, of=torch.float32) if problem.sinks else None,
        tree_mask=empty(batch, seqlen_q, of=torch.int64) if problem.tree else None,
        slot_mapping=empty(*rows, of=torch.int64) if "slot_mapping" in has else None,
        page_indptr=empty(batch + 1, of=torch.int32) if ragged else None,
        page_indices=empty(entries[0], of=torch.int32) if ragged else None,
        causal=empty(batch, of=torch.bool) if problem.causal_each else None,
    )  # fmt: skip
    return problem, tensors
