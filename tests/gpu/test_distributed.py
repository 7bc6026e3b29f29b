"""Two GPUs over NCCL (``pytest -m gpu``): two ranks against one, by messages and by copy engines, with no host wait.

Most of the time goes into building kernels, about ten for each case: ``-n 8`` builds those of all cases side by side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import distributed
from flashtile.core.errors import ExchangeError
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

WAYS = [
    (layout, comm, copies)
    for layout in ("zigzag", "contiguous", "striped")
    for comm, copies in (("ring", "0"), ("ring", "1"), ("allgather", "0"), ("ulysses", "0"))
]
# Name: heads, key heads, rows, bounds of documents, keywords.
CASES: dict[str, tuple[int, int, int, tuple[int, ...] | None, dict[str, Any]]] = {
    "causal": (8, 8, 2048, None, {"causal": True}),
    "long": (8, 8, 16384, None, {"causal": True}),
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


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    """A process for each of two GPUs."""
    made = Pool(2, device="cuda")
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_equal_one(two: Pool, name: str) -> None:
    two.run(compare, name)


def repeat(mesh: DeviceMesh, times: int) -> None:
    """Both ways give the same bits, whichever rank is late and by how much."""
    make = torch.Generator("cuda").manual_seed(mesh.get_rank())
    rows = 1024
    for number in range(times):
        q, k, v, dout = (torch.randn(1, rows, 4, 128, generator=make, device="cuda").bfloat16() for _ in range(4))
        x = [each.requires_grad_() for each in (q, k, v)]
        found = []
        for copies in ("1", "0"):
            os.environ["FLASHTILE_COPIES"] = copies
            torch.cuda._sleep((number * 7 + mesh.get_rank() * 5) % 11 * 40_000)
            out = distributed.attention(*x, mesh=mesh, comm="ring", causal=True, deterministic=True)
            found.append([out, *torch.autograd.grad(out, x, dout)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), number


def test_copies_and_messages_give_the_same_bits(two: Pool) -> None:
    two.run(repeat, 200)


def leave(mesh: DeviceMesh) -> str:
    """What a rank gets to see that waits for one that died."""
    os.environ["FLASHTILE_COPIES"] = "1"
    x = torch.ones(1, 512, 2, 128, device="cuda", dtype=torch.bfloat16)
    distributed.attention(x, x, x, mesh=mesh, comm="ring")
    torch.cuda.synchronize()
    if mesh.get_rank() == 1:
        os._exit(9)
    distributed.attention(x, x, x, mesh=mesh, comm="ring")
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()
    assert time.monotonic() - start_s < 12
    with pytest.raises(ExchangeError) as error:
        distributed.attention(x, x, x, mesh=mesh, comm="ring")
    return str(error.value)


def test_a_rank_that_dies_ends_in_an_error() -> None:
    pool = Pool(2, timeout_s=5.0, device="cuda")
    (_, said), (_, died) = pool.outcomes(leave)
    pool.close()
    assert said == "the exchange during step 0 of the ring, with rank 1: no signal in 5 s"
    assert isinstance(died[0], EOFError)
