"""Two GPUs over NCCL (``pytest -m gpu``): two ranks against one, by messages and by copy engines, with no host wait."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashtile
from flashtile import distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

WAYS = [
    (layout, comm, copies)
    for layout in ("zigzag", "contiguous", "striped")
    for comm, copies in (("ring", "0"), ("ring", "1"), ("allgather", "0"), ("ulysses", "0"))
]
# Name: heads, key heads, rows, bounds of documents, keywords.
CASES: dict[str, tuple[int, int, int, tuple[int, ...] | None, dict[str, Any]]] = {
    "causal": (8, 8, 2048, None, {"causal": True}),
    "uneven": (8, 2, 1999, None, {"causal": True, "deterministic": True}),
    "window": (8, 2, 2048, None, {"causal": True, "window_size": (300, 0)}),
    "packed": (8, 2, 2048, (0, 700, 701, 1500, 2048), {"causal": True}),
    "dropout": (8, 4, 1024, None, {"causal": True, "dropout_p": 0.2}),
    "alibi": (8, 4, 1024, None, {"alibi_slopes": True}),
    "sinks": (8, 4, 1024, None, {"causal": True, "sinks": True}),
}


def compare(mesh: DeviceMesh, name: str) -> None:
    heads, kv_heads, rows, bounds, keywords = CASES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    make = torch.Generator().manual_seed(0)
    lead = (rows,) if bounds else (1, rows)
    q, k, v, dout = (
        torch.randn(*lead, n, 128, generator=make).to(device, torch.bfloat16)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    vectors = {
        key: torch.rand(heads, generator=make).to(device) for key in ("alibi_slopes", "sinks") if key in keywords
    }
    keywords = {**keywords, **vectors}
    whole = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(3)
    if bounds:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        out = flashtile.attention_varlen(*whole, cu_seqlens, cu_seqlens, **keywords)
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    else:
        out = flashtile.attention(*whole, **keywords)
        lengths = {"seqlen_q": rows, "seqlen_k": rows}
    want = [out, *torch.autograd.grad(out, whole, dout)]
    cut = {"dim": 0, "cu_seqlens": bounds} if bounds else {"dim": 1}
    for layout, comm, copies in WAYS:
        os.environ["FLASHTILE_COPIES"] = copies
        mine = [distributed.shard(x.detach(), mesh, layout, **cut).requires_grad_() for x in (q, k, v)]
        mine_dout = distributed.shard(dout, mesh, layout, **cut)
        for step in range(3):
            torch.manual_seed(3)
            # From the second on nothing is planned, and nothing waits for the GPU.
            torch.cuda.set_sync_debug_mode("error" if step and "sinks" not in keywords else "default")
            out = distributed.attention(*mine, mesh=mesh, layout=layout, comm=comm, **lengths, **keywords)
            got = [out, *torch.autograd.grad(out, mine, mine_dout)]
            torch.cuda.set_sync_debug_mode("default")
            for each, one in zip(got, want, strict=True):
                part = distributed.shard(one.detach(), mesh, layout, **cut).float()
                apart = (each.float() - part).norm() / part.norm()
                assert apart < 1e-2, (layout, comm, copies, step, apart.item())


def work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ring",))
    for name in CASES:
        compare(mesh, name)
        if rank == 0:
            print(name, "agrees", flush=True)
    dist.destroy_process_group()


def test_two_gpus_equal_one() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
