"""DTensor and tensor parallelism: two processes over gloo, and the choice of shardings on larger meshes."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import flashtile
from flashtile import InvalidInputError, UnsupportedError, distributed, nn

BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def tensors(batch: int = 2, kv_heads: int = 2, packed: bool = False, features: bool = False) -> dict[str, Tensor]:
    rows = (6,) if packed else (batch, 6)
    found = {"q": normal(*rows, 4, 8), "k": normal(*rows, kv_heads, 8, seed=1), "v": normal(*rows, kv_heads, 8, seed=2)}
    if packed:
        found |= {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
    if features:
        found |= {"attn_bias": normal(4, 6, 6, seed=3), "sinks": normal(4, seed=4)}
        found |= {
            "attn_mask": normal(batch, 1, 6, 6, seed=5) > -1,
            "alibi_slopes": normal(batch, 4, seed=8).abs().float(),
        }
    return found


def run(given: dict[str, Tensor], **more: bool) -> Any:
    function = flashtile.attention_varlen if "cu_seqlens_q" in given else flashtile.attention
    return function(**given, causal=True, return_lse=True, **more)


def check(mesh: DeviceMesh, placed: dict[str, Any], free: bool, **kind: Any) -> None:
    """Sharded results and gradients are those of the whole tensors; ``free``: without communication."""
    whole = {name: x.requires_grad_(x.dtype == torch.float64) for name, x in tensors(**kind).items()}
    leaves = {name: x for name, x in whole.items() if x.requires_grad}
    want = run(whole)
    seeds = normal(*want[0].shape, seed=6), normal(*want[1].shape, seed=7)
    want_grads = torch.autograd.grad(want, list(leaves.values()), seeds)
    place = {name: distribute_tensor(x.detach(), mesh, [placed.get(name, Replicate())]) for name, x in whole.items()}
    place = {name: x.requires_grad_(name in leaves) for name, x in place.items()}
    with CommDebugMode() as communication:
        got = run(place)
    assert (communication.get_total_counts() == 0) == free, communication.get_comm_counts()
    seeds = tuple(distribute_tensor(s, mesh, o.placements) for s, o in zip(seeds, got, strict=True))
    with CommDebugMode() as communication:
        grads = torch.autograd.grad(got, [place[name] for name in leaves], seeds)
    assert communication.get_total_counts() == 0 or not free, communication.get_comm_counts()
    equal([x.full_tensor() for x in got], list(want))
    equal([x.full_tensor() for x in grads], list(want_grads))


def qkv(placement: Any, **others: Any) -> dict[str, Any]:
    return {"q": placement, "k": placement, "v": placement, **others}


def attention_is_sharded(mesh: DeviceMesh) -> None:
    check(mesh, qkv(Replicate()), True)
    check(mesh, qkv(Shard(0)), True)
    check(mesh, qkv(Shard(2)), True)
    check(mesh, qkv(Shard(0)), True, batch=3)  # one process has two sequences
    check(mesh, {"q": Shard(2)}, True, kv_heads=1)
    check(mesh, qkv(Shard(0), attn_mask=Shard(0), alibi_slopes=Shard(0)), True, features=True)
    check(mesh, qkv(Shard(2), attn_bias=Shard(0), sinks=Shard(0), alibi_slopes=Shard(1)), True, features=True)
    check(mesh, qkv(Shard(1)), True, packed=True)
    # What is sharded in another way is communicated first: rows, keys, packed rows, key heads apart from their queries.
    check(mesh, qkv(Shard(1)), False)
    check(mesh, {"q": Shard(2), "k": Shard(1), "v": Replicate()}, False)
    check(mesh, qkv(Shard(0)), False, packed=True)
    check(mesh, {"q": Shard(2), "k": Shard(0), "v": Shard(0)}, False)


def largest_scores_are_sharded(mesh: DeviceMesh) -> None:
    for placed, kind in (
        (qkv(Shard(0)), {}), (qkv(Shard(2)), {}), (qkv(Shard(1)), {"packed": True}),
        (qkv(Shard(2), attn_bias=Shard(0), sinks=Shard(0), alibi_slopes=Shard(1)), {"features": True}),
    ):  # fmt: skip
        given = tensors(**kind)
        want = run(given, return_max_scores=True)
        place = {name: distribute_tensor(x, mesh, [placed.get(name, Replicate())]) for name, x in given.items()}
        place["q"].requires_grad_()
        with CommDebugMode() as communication:
            got = run(place, return_max_scores=True)
            got[0].sum().backward()
        assert communication.get_total_counts() == 0 and not got[2].requires_grad
        equal([x.full_tensor() for x in got], list(want))
        assert place["q"].grad is not None
    x, module = normal(2, 6, 32), nn.MultiheadAttention(32, 4, num_kv_heads=2, dtype=torch.float64)
    for projection in (module.q_proj, module.k_proj):
        torch.nn.init.constant_(projection.weight, 0.125)
    whole = module(x, return_max_scores=True)[1]
    plan(module, mesh, True, "q_proj", "k_proj", "v_proj")
    equal(module(x, return_max_scores=True)[1], whole[:2])  # of this rank's heads, which are all alike


def refusals_are_clear(mesh: DeviceMesh) -> None:
    q = distribute_tensor(normal(2, 6, 4, 8), mesh, [Shard(2)])
    with pytest.raises(UnsupportedError, match="dropout of DTensors"):
        flashtile.attention(q, q, q, dropout_p=0.1)
    with pytest.raises(InvalidInputError, match="^sinks: is a plain tensor, but q is a DTensor"):
        flashtile.attention(q, q, q, sinks=normal(4))


def attention_compiles(mesh: DeviceMesh) -> None:
    q = distribute_tensor(normal(2, 6, 4, 8), mesh, [Shard(2)])
    compiled = torch.compile(flashtile.attention, fullgraph=True, backend="aot_eager")
    equal(compiled(q, q, q).full_tensor(), flashtile.attention(*[q.full_tensor()] * 3))


def plan(module: nn.MultiheadAttention, mesh: DeviceMesh, local: bool, *names: str) -> None:
    columns = {name: ColwiseParallel(use_local_output=local) for name in names}
    parallelize_module(module, mesh, {**columns, "out_proj": RowwiseParallel()})


def the_module_is_sharded(mesh: DeviceMesh) -> None:
    x = normal(2, 6, 32)
    for local, rotary, kv_heads in ((True, True, 4), (True, False, 2), (False, False, 2)):
        torch.manual_seed(1)
        module = nn.MultiheadAttention(
            32, 4, num_kv_heads=kv_heads, causal=True, rotary=rotary, dtype=torch.float64, softcap=4.0
        )
        want = module(x)
        want_grads = torch.autograd.grad(want.square().sum(), list(module.parameters()))
        plan(module, mesh, local, "q_proj", "k_proj", "v_proj")
        out = module(x)
        equal(out, want.detach())
        out.square().sum().backward()
        equal([p.grad.full_tensor() for p in module.parameters()], list(want_grads))


def a_module_cut_within_a_head_is_refused(mesh: DeviceMesh) -> None:
    x = normal(2, 6, 32)
    for kv_heads, names, message in (
        (1, ("q_proj", "k_proj", "v_proj"), "k_proj: gives 4 features, must be whole heads of 8"),
        (2, ("q_proj",), "k_proj: gives 2 heads and q_proj 2, but whole they have 2 and 4; shard them alike"),
        (2, ("q_proj", "k_proj"), "v_proj: gives 2 heads and q_proj 2, but whole they have 2 and 4; shard them alike"),
    ):
        module = nn.MultiheadAttention(32, 4, num_kv_heads=kv_heads, dtype=torch.float64)
        plan(module, mesh, True, *names)
        with pytest.raises(InvalidInputError, match=message):
            module(x)


def work(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=wait)
    mesh = init_device_mesh("cpu", (2,))
    for part in (
        attention_is_sharded,
        largest_scores_are_sharded,
        refusals_are_clear,
        attention_compiles,
        the_module_is_sharded,
        a_module_cut_within_a_head_is_refused,
    ):
        part(mesh)
    dist.destroy_process_group()


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path / "meeting"),), nprocs=2)


LATER = """
import sys
import flashtile, torch, torch.distributed as dist
assert "torch.distributed.tensor" not in sys.modules
x = torch.randn(1, 3, 2, 8)
torch.func.vmap(flashtile.attention)(x[None], x[None], x[None])  # a call that is watched, but not by DTensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(2)])
call = {call}
assert call(q, q, q).placements == (Shard(2),)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        "flashtile.attention",
        "torch.inference_mode()(flashtile.attention)",
        "torch.compile(flashtile.attention, fullgraph=True, backend='aot_eager')",
        "torch.no_grad()(torch.compile(flashtile.attention, fullgraph=True, backend='aot_eager'))",
    ],
)
def test_dtensor_may_be_imported_after_flashtile(call: str) -> None:
    subprocess.run([sys.executable, "-c", LATER.format(call=call)], check=True, timeout=120)


@pytest.fixture
def eight() -> Iterator[None]:
    """A group of eight processes of which only this one exists; what it communicates is made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh_shape", "heads", "kv_heads", "placements", "kept"),
    [
        ((8,), 8, 8, (Shard(2),), True),
        ((8,), 16, 8, (Shard(2),), True),
        ((8,), 8, 1, (Shard(2),), True),
        ((8,), 8, 4, (Shard(2),), False),  # a key head would be on two processes
        ((8,), 12, 12, (Shard(2),), False),  # processes would have unequal numbers of heads
        ((2, 4), 8, 4, (Shard(0), Shard(2)), True),
        ((2, 4), 8, 8, (Shard(2), Shard(2)), True),
        ((2, 4), 4, 4, (Replicate(), Shard(2)), True),
        ((2, 4), 6, 6, (Replicate(), Shard(2)), False),
        ((4, 2), 6, 2, (Shard(0), Shard(2)), False),  # 6 heads would also be allowed on the four
    ],
    ids=str,
)
def test_heads_are_sharded_where_they_divide(
    eight: None, mesh_shape: tuple[int, ...], heads: int, kv_heads: int, placements: tuple[Any, ...], kept: bool
) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    q, k = normal(4, 5, heads, 8), normal(4, 5, kv_heads, 8, seed=1)
    few = tuple(Replicate() if x == Shard(2) and kv_heads == 1 else x for x in placements)
    placed = [distribute_tensor(x, mesh, p, src_data_rank=None) for x, p in ((q, placements), (k, few))]
    with CommDebugMode() as communication:
        out = flashtile.attention(placed[0], placed[1], placed[1])
    assert (out.placements == placements) == kept == (communication.get_total_counts() == 0)
    if kept:  # this process's part of the whole
        whole = distribute_tensor(flashtile.attention(q, k, k), mesh, placements, src_data_rank=None)
        equal(out.to_local(), whole.to_local())


# Calls of a DTensor and of a plain tensor, by the argument to name.
MIXED: dict[str, Callable[[Any, Tensor], object]] = {
    "q": lambda d, x: flashtile.attention(x, d, d),
    "k": lambda d, x: flashtile.attention(d, x, d),
    "v with a gradient": lambda d, x: flashtile.attention(d, d, x.clone().requires_grad_()),
    "sinks": lambda d, x: flashtile.attention(d, d, d, sinks=x[0, 0, :, 0]),
    "attn_mask of plain q": lambda d, x: flashtile.attention(x, x, x, attn_mask=d[0, :, 0, :1] > 0),
    "cu_seqlens_q": lambda d, x: flashtile.attention_varlen(d[0], d[0], d[0], BOUNDS, BOUNDS),
    "out": lambda d, x: flashtile.attention_varlen(x[0], x[0], x[0], BOUNDS, BOUNDS, out=d[0]),
    "lse_a": lambda d, x: flashtile.merge_states(d, x[..., 0], d, d[..., 0]),
    "block_mask": lambda d, x: flashtile.attention(d, d, d, block_mask=flashtile.masks.documents(BOUNDS[1:])),
    "k compiled": lambda d, x: torch.compile(flashtile.attention, backend="eager")(d, x, d),
    "k_cache": lambda d, x: flashtile.attention_with_kvcache(x, d, x, cache_seqlens=3),
    "attn_bias over ranks": lambda d, x: distributed.attention(x, x, x, mesh=d.device_mesh, attn_bias=d[0, :, 0, :1]),
    "x": lambda d, x: nn.RotaryEmbedding(8)(d),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_tensors_are_refused_by_name(eight: None, name: str) -> None:
    mesh = init_device_mesh("cpu", (8,))
    x = normal(2, 6, 8, 8)
    with pytest.raises(InvalidInputError, match=rf"^{name.split()[0]}: is .*DTensor"):
        MIXED[name](distribute_tensor(x, mesh, [Replicate()], src_data_rank=None), x)
