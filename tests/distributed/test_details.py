"""What calls do besides their numbers: precision, repeatability, what is planned and sent when, other tensors."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import UnsupportedError, distributed
from flashtile.distributed import kinds, launches, steps
from flashtile.ops import dispatch
from tests.cases import Case
from tests.distributed import ranks
from tests.distributed.pool import Pool
from tests.distributed.ranks import NAMED

BF16 = torch.bfloat16


def qkv(
    rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, rows, n, dim, generator=make).to(dtype) for n in (heads, kv_heads, kv_heads)]


def squared_errors(mesh: DeviceMesh, layout: str, comm: str) -> dict[str, float]:
    """The sum of this rank's squared errors in bfloat16, against float64 of the same numbers."""
    tensors = qkv(512, dtype=BF16)
    dout = torch.randn(1, 512, 4, 16, generator=torch.Generator().manual_seed(1)).to(BF16)
    exact = [x.double().requires_grad_() for x in tensors]
    out = flashtile.attention(*exact, causal=True)
    want = [out, *torch.autograd.grad(out, exact, dout.double())]
    mine = [distributed.shard(x, mesh, layout).requires_grad_() for x in tensors]
    out = distributed.attention(*mine, mesh=mesh, layout=layout, comm=comm, causal=True)
    got = [out, *torch.autograd.grad(out, mine, distributed.shard(dout, mesh, layout))]
    parts = [distributed.shard(x.detach(), mesh, layout) for x in want]
    names = ("out", "dq", "dk", "dv")
    return {n: (a.double() - b).square().sum().item() for n, a, b in zip(names, got, parts, strict=True)}


@pytest.mark.parametrize(("layout", "comm"), [("zigzag", "ring"), ("striped", "allgather"), ("zigzag", "ulysses")])
def test_the_error_of_bfloat16_does_not_grow(pool: Pool, layout: str, comm: str) -> None:
    totals = {}
    most = 4 if comm == "ulysses" else 8
    for world in (1, 2, most):
        found = pool.run(squared_errors, layout, comm, mesh=world)
        totals[world] = {name: sum(each[name] for each in found) for name in found[0]}
    for name, one in totals[1].items():
        assert totals[2][name] < 1.02 * one and totals[most][name] < 1.02 * totals[2][name], (name, totals)


def repeated(mesh: DeviceMesh, layout: str, comm: str) -> bool:
    runs = []
    for _ in range(2):
        mine = [distributed.shard(x, mesh, layout).requires_grad_() for x in qkv(83, dtype=BF16)]
        keywords = {"causal": True, "deterministic": True, "seqlen_q": 83, "seqlen_k": 83}
        out = distributed.attention(*mine, mesh=mesh, layout=layout, comm=comm, **keywords)
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), mine)])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("comm", ["ring", "allgather", "ulysses"])
def test_runs_repeat_their_bits(pool: Pool, comm: str) -> None:
    assert all(all(pool.run(repeated, layout, comm, mesh=2)) for layout in ("zigzag", "striped"))
    assert comm == "ulysses" or all(pool.run(repeated, "zigzag", comm, mesh=8))


def on_a_plane(mesh: DeviceMesh, name: str, comms: tuple[str, ...]) -> dict[str, float]:
    case = NAMED[name]
    return ranks.compare(mesh, case, torch.float64, [(x, c) for x in ("zigzag", "striped") for c in comms])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["causal", "everything", "packed", "packed_features", "sinks", "no_keys"])
def test_heads_are_exchanged_within_a_ring(pool: Pool, name: str) -> None:
    square, wide, turned = ((0, 1), (2, 3)), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 2, 4), (1, 3, 5))
    for mesh, names in ((square, ("ring", "ulysses")), (wide, ("ring", "ulysses")), (turned, ("ulysses", "ring"))):
        for found in pool.run(on_a_plane, name, ("ring", "allgather", "auto"), mesh=mesh, names=names):
            assert all(x < 1e-13 for x in found.values()), (mesh, found)
    for found in pool.run(on_a_plane, name, ("auto", "ulysses"), mesh=2, names=("ulysses",)):
        assert all(x < 1e-13 for x in found.values()), found


UNEVEN = [ranks.case_of(n, heads=28, kv_heads=7, head_dim=4, **more) for n, more in (
    ("causal", {"causal": True, "lse_grad": True}),
    ("everything", {"alibi": "bh", "sinks": True, "dropout": 0.2, "softcap": 3.0, "lengths": ((13, 21), (30, 18))}),
)]  # fmt: skip


def uneven(mesh: DeviceMesh, case: Case, comms: tuple[str, ...]) -> dict[str, float]:
    return ranks.compare(mesh, case, torch.float64, [("zigzag", comm) for comm in comms])


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_ranks_need_not_divide_the_key_heads(pool: Pool, case: Case) -> None:
    """28 heads over 7 on two and four ranks that exchange heads; three divide neither, so there "auto" is a ring."""
    plane = {"mesh": ((0, 1), (2, 3)), "names": ("ring", "ulysses")}
    found = pool.run(uneven, case, ("ring", "allgather", "auto"), **plane)
    found += pool.run(uneven, case, ("ulysses", "auto"), mesh=4)
    found += pool.run(uneven, case, ("auto",), mesh=3, names=("ulysses",))
    for each in found:
        assert all(x < 1e-13 for x in each.values()), each


def test_a_mesh_may_be_any_ranks_in_any_order(pool: Pool) -> None:
    for found in pool.run(on_a_plane, "causal", ("ring", "allgather", "ulysses"), mesh=(6, 3)):
        assert all(x < 1e-13 for x in found.values()), found


def alone(mesh: DeviceMesh, name: str) -> dict[str, float]:
    return ranks.compare(mesh, NAMED[name], torch.float32, [("zigzag", "auto"), ("striped", "allgather")])


@pytest.mark.parametrize("name", ["packed", "everything"])
def test_one_rank_is_a_mesh(pool: Pool, name: str) -> None:
    assert all(x < 1e-6 for x in pool.run(alone, name, mesh=1)[0].values())


def second_step(mesh: DeviceMesh, comm: str, dropout_p: float) -> None:
    """A second step of training plans nothing, compares nothing and makes no tensor of bounds."""
    mine = [distributed.shard(x, mesh).requires_grad_() for x in qkv(64)]
    keywords = {"mesh": mesh, "comm": comm, "causal": True, "dropout_p": dropout_p}
    distributed.attention(*mine, **keywords).sum().backward()
    with (
        mock.patch.object(dispatch, "select", side_effect=AssertionError),
        mock.patch.object(kinds.RingKind, "__init__", side_effect=AssertionError),
        mock.patch.object(kinds, "agree", side_effect=AssertionError),
        mock.patch.object(launches, "_int32", side_effect=AssertionError),
    ):
        distributed.attention(*mine, **keywords).sum().backward()


@pytest.mark.parametrize("comm", ["ring", "allgather", "ulysses"])
def test_a_second_step_makes_no_plan(pool: Pool, comm: str) -> None:
    pool.run(second_step, comm, 0.0, mesh=2)
    pool.run(second_step, comm, 0.2, mesh=2)


def traffic(mesh: DeviceMesh, rows: int, keywords: dict[str, Any]) -> tuple[list[str], int, int]:
    """What happens in the forward and the backward of a ring, in order; and elements sent in each."""
    events: list[str] = []
    sent = [0]

    def post(self: Any, number: int, sends: Any, receives: Any) -> Any:
        sent[-1] += sum(x.numel() for parcel in sends for parts in parcel.tensors for x in parts)
        events.append(f"post {len(sends)} {len(receives)}")
        pending = posted(self, number, sends, receives)
        waiting = mock.Mock()
        waiting.wait.side_effect = lambda: (events.append("wait"), pending.wait())
        return waiting

    posted = steps.Messages.post
    mine = [distributed.shard(x, mesh, keywords["layout"]).requires_grad_() for x in qkv(rows)]
    launch = launches.CallPlan
    with (
        mock.patch.object(steps.Messages, "post", post),
        mock.patch.object(launch, "forward", _noted(launch.forward, events)),
        mock.patch.object(launch, "backward", _noted(launch.backward, events)),
    ):
        out = distributed.attention(*mine, mesh=mesh, comm="ring", **keywords)
        sent.append(0)
        out.sum().backward()
    return events, sent[0], sent[1]


def _noted(function: Any, events: list[str]) -> Any:
    def run(self: Any, *args: Any) -> Any:
        events.append("launch")
        return function(self, *args)

    return run


def test_keys_travel_while_kernels_run(pool: Pool) -> None:
    """Of two ranks: keys leave before the first kernel; dk and dv return beside a kernel over the rank's own keys."""
    for events, *_ in pool.run(traffic, 64, {"causal": True, "layout": "zigzag"}, mesh=2):
        forward = ["post 1 1", "launch", "wait", "post 0 0", "launch", "wait"]
        backward = ["post 1 1", "launch", "wait", "post 0 0", "launch", "wait", "post 1 1", "launch", "wait"]
        assert events == forward + backward


def test_far_steps_of_a_window_move_no_bytes(pool: Pool) -> None:
    """A window of 7 keys reaches from rows of one rank to those of the rank before, and from no other."""
    row = 2 * (16 + 16)  # of 16 keys those from a multiple of 8 on: 8
    found = pool.run(traffic, 64, {"causal": True, "layout": "contiguous", "window_size": (7, 0)}, mesh=4)
    assert [sent for _, sent, _ in found] == [8 * row, 8 * row, 8 * row, 0]
    # In the backward keys again, and the sums of their gradients home.
    assert [sent for _, _, sent in found] == [8 * row, 16 * row, 16 * row, 8 * row]


def round_trip(mesh: DeviceMesh, layout: str, bounds: tuple[int, ...] | None, total: int) -> None:
    x = torch.arange(3.0 * total).view(total, 3)
    mine = distributed.shard(x, mesh, layout, dim=0, cu_seqlens=bounds)
    assert mine.is_contiguous() and abs(mine.shape[0] - total / mesh.size()) < 1
    assert torch.equal(distributed.unshard(mine, mesh, layout, dim=0, cu_seqlens=bounds), x)
    assert torch.equal(distributed.unshard(mine.t()[None], mesh, layout, dim=-1, cu_seqlens=bounds), x.t()[None])
    length = {"seqlen": total} if bounds is None else {"cu_seqlens": bounds}
    row_positions = torch.arange(total)
    for start, stop in itertools.pairwise(bounds) if bounds else ():
        row_positions[start:stop] -= start
    want = distributed.shard(row_positions, mesh, layout, dim=0, cu_seqlens=bounds)
    assert torch.equal(distributed.positions(mesh, layout, **length), want)


def gradient_of_whole(mesh: DeviceMesh, layout: str, dtype: torch.dtype) -> None:
    """Each rank weighs the whole differently: a shard's gradient is the sum."""
    x = torch.randn(13, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.randn(mesh.size(), 13, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = distributed.shard(x, mesh, layout, dim=0).t()[None].requires_grad_()
    whole = distributed.unshard(mine, mesh, layout, dim=2)
    assert torch.equal(whole[0].t(), x)
    rank = mesh.get_local_rank() if mesh.ndim == 1 else mesh.get_local_rank(0) * 2 + mesh.get_local_rank(1)
    (found,) = torch.autograd.grad((whole[0].t() * weights[rank]).sum(), mine)
    want = distributed.shard(weights.to(torch.float64).sum(0), mesh, layout, dim=0).t()[None]
    assert found.dtype == dtype and found.shape == mine.shape
    torch.testing.assert_close(found.double(), want, rtol=1e-2 if dtype == BF16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_unshard_has_a_gradient(pool: Pool, layout: str) -> None:
    pool.run(gradient_of_whole, layout, torch.float32, mesh=3)
    pool.run(gradient_of_whole, layout, BF16, mesh=((0, 1), (2, 3)), names=("ring", "ulysses"))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_shards_and_positions(pool: Pool, layout: str) -> None:
    for total, bounds in ((16, None), (13, None), (2, None), (0, None), (16, (0, 5, 5, 6, 16)), (13, (0, 12, 13))):
        for world in (1, 2, 3, 8):
            pool.run(round_trip, layout, bounds, total, mesh=world)
        pool.run(round_trip, layout, bounds, total, mesh=((0, 1), (2, 3)), names=("ring", "ulysses"))


def odd_shards(mesh: DeviceMesh) -> str:
    with pytest.raises(flashtile.InvalidInputError) as caught:
        distributed.unshard(torch.zeros(5 if mesh.get_rank() else 3, 2), mesh, dim=0)
    return str(caught.value)


def test_shards_of_other_lengths_are_refused(pool: Pool) -> None:
    assert set(pool.run(odd_shards, mesh=2)) == {"x: has 3 rows on rank 0, must have 4 of 8 under layout 'zigzag'"}


def dtensors(mesh: DeviceMesh, layout: str, packed: bool, features: bool) -> None:
    """DTensors that are sharded along the rows give what local tensors give, as DTensors, gradients too."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    bounds = (0, 11, 24) if packed else None
    whole = [x[0] if packed else x for x in qkv(24)]
    rows = 0 if packed else 1
    mine = [distributed.shard(x, mesh, layout, rows, cu_seqlens=bounds).requires_grad_() for x in whole]
    keywords: dict[str, Any] = {"mesh": mesh, "layout": layout, "causal": True, "return_lse": True}
    if packed:
        keywords |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    sinks = torch.linspace(-1, 1, 4) if features else None
    want = distributed.attention(*mine, sinks=sinks, **keywords)
    seed = torch.randn_like(want[0])
    wanted = torch.autograd.grad(want[0], mine, seed)
    placed = [DTensor.from_local(x.detach(), mesh, [Shard(rows)]).requires_grad_() for x in mine]
    sinks = None if sinks is None else DTensor.from_local(sinks, mesh, [Replicate()])
    got = distributed.attention(*placed, sinks=sinks, **keywords)
    grads = torch.autograd.grad(got[0], placed, DTensor.from_local(seed, mesh, [Shard(rows)]))
    assert got[0].placements == (Shard(rows),) and got[1].placements == (Shard(1 if packed else 2),)
    assert got[0].shape == whole[0].shape and got[1].shape == ((4, 24) if packed else (1, 4, 24))
    assert all(torch.equal(a.to_local(), b) for a, b in zip((*got, *grads), (*want, *wanted), strict=True))
    assert all(grad.placements == (Shard(rows),) for grad in grads)
    with pytest.raises(flashtile.InvalidInputError, match=r"k: is placed as no DTensor, but q as \(Shard\(dim="):
        distributed.attention(placed[0], mine[1], mine[2], **keywords)
    heads = [DTensor.from_local(x.detach(), mesh, [Shard(rows + 1)]) for x in mine]
    with pytest.raises(flashtile.InvalidInputError, match="must be sharded along dimension"):
        distributed.attention(*heads, **keywords)


def test_dtensors(pool: Pool) -> None:
    for packed in (False, True):
        pool.run(dtensors, "zigzag", packed, False, mesh=3)
    pool.run(dtensors, "striped", False, True, mesh=2)


def dtensors_of_a_plane(mesh: DeviceMesh) -> None:
    """Batch along one dimension of the mesh, rows along the other."""
    from torch.distributed.tensor import DTensor, Shard

    whole = [torch.cat([x, -x]) for x in qkv(16)]
    want = flashtile.attention(*whole, causal=True)
    ring = mesh["ring"]
    mine = [distributed.shard(x[mesh.get_local_rank("data")][None], ring) for x in whole]
    placed = [DTensor.from_local(x, mesh, [Shard(0), Shard(1)]) for x in mine]
    out = distributed.attention(*placed, mesh=ring, causal=True)
    assert out.placements == (Shard(0), Shard(1)) and out.shape == want.shape
    part = distributed.shard(want[mesh.get_local_rank("data")][None], ring)
    torch.testing.assert_close(out.to_local(), part, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="dropout_p: of DTensors whose batch or heads are sharded"):
        distributed.attention(*placed, mesh=ring, dropout_p=0.1)


def test_dtensors_of_a_larger_mesh(pool: Pool) -> None:
    pool.run(dtensors_of_a_plane, mesh=((0, 1), (2, 3)), names=("data", "ring"))


def autocast_and_saved(mesh: DeviceMesh) -> None:
    """Autocast casts as it does for one rank; hooks of saved tensors may change strides; no graph of the backward."""
    mine = [distributed.shard(x, mesh).requires_grad_() for x in qkv(32)]
    with torch.autocast("cpu", torch.bfloat16):
        assert distributed.attention(*mine, mesh=mesh).dtype is torch.bfloat16
    out = distributed.attention(*mine, mesh=mesh, causal=True)
    want = torch.autograd.grad(out.square().sum(), mine)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.t() if x.dim() == 2 else x.transpose(0, 1).contiguous(),
        lambda x: x.t() if x.dim() == 2 else x.transpose(0, 1),
    ):
        out = distributed.attention(*mine, mesh=mesh, causal=True)
    got = torch.autograd.grad(out.square().sum(), mine)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(distributed.attention(*mine, mesh=mesh).sum(), mine, create_graph=True)
    with torch.inference_mode():
        free = distributed.attention(*[x.detach() for x in mine], mesh=mesh, softcap=9.0)
    kept = distributed.attention(*mine, mesh=mesh, softcap=9.0)
    assert torch.equal(free, kept)
    kept.sum().backward()


def test_autograd_and_autocast(pool: Pool) -> None:
    pool.run(autocast_and_saved, mesh=2)


def compiled(mesh: DeviceMesh) -> None:
    """torch.compile leaves the call alone, in both directions, and keeps what is around it."""
    mine = [distributed.shard(x, mesh).requires_grad_() for x in qkv(32)]

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.attention(2 * q, k, v, mesh=mesh, causal=True).sin()

    want = block(*mine)
    got = torch.compile(block, backend="aot_eager")(*mine)
    assert torch.equal(got, want)
    wanted, found = (torch.autograd.grad(x.sum(), mine) for x in (want, got))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda q: block(q, *mine[1:]).sum())(mine[0])


def test_compiled_and_transformed_calls(pool: Pool) -> None:
    pool.run(compiled, mesh=2)


def chosen(mesh: DeviceMesh, rows: int, heads: int, kv_heads: int, **keywords: Any) -> str:
    q, k = torch.empty(1, rows, heads, 128), torch.empty(1, rows, kv_heads, 128)
    found = []

    class Noted(kinds.RingKind):
        def __init__(self, spec: Any, t: Any, copies: bool) -> None:
            found.append(kinds.chosen(spec, kinds.Problem.of(t, spec.options)))
            raise StopIteration

    with mock.patch.object(kinds, "RingKind", Noted), pytest.raises(StopIteration):
        distributed.attention(q, k, k, mesh=mesh, causal=True, **keywords)
    return found[0]


def test_auto_takes_the_ring_where_kernels_hide_it(pool: Pool) -> None:
    def ways(*shape: int, **mesh: Any) -> set[str]:
        return set(pool.run(chosen, *shape, **{"mesh": 8, **mesh}))

    assert ways(16384, 16, 16) == {"ring"}
    assert ways(512, 16, 16) == {"ulysses"}  # a sixteenth of the work for each byte
    assert ways(512, 16, 4) == {"ring"}  # 8 ranks do not divide 4 heads
    assert ways(16, 64, 8) == {"ring"}  # few key heads are fewer bytes than many query heads
    assert ways(512, 16, 16, mesh=((0, 1), (2, 3)), names=("ring", "ulysses")) == {"ring"}
