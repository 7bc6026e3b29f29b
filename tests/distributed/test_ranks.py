"""Ranks against one: the table, random problems, functions of users, huge scores, caches whose keys are spread."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import InvalidInputError, distributed
from tests.cases import Case
from tests.distributed import ranks
from tests.distributed.pool import Pool
from tests.distributed.ranks import CASES, NAMED

LAYOUTS = ("zigzag", "contiguous", "striped")


def ways(case: Case, world: int) -> list[tuple[str, str]]:
    """Layouts and ways to communicate that a case has; heads are exchanged where ranks divide them, or they them."""
    divides = case.heads % world == 0 and (case.kv_heads % world == 0 or world % case.kv_heads == 0)
    comms = ("ring", "allgather", "ulysses", "auto") if divides else ("ring", "allgather", "auto")
    return [(layout, comm) for layout in LAYOUTS for comm in comms]


# Every case on three ranks, which divide nothing; these also on two and eight.
EVERYWHERE = ("causal", "window_causal", "dropout_causal", "few_rows", "packed_empty", "packed_short", "everything")
USUAL = [(case, 3) for case in CASES] + [(NAMED[name], world) for name in EVERYWHERE for world in (2, 8)]
OTHERS = [
    (case, world) for case in CASES for world in (2, 4, 8) if world == 4 or case not in map(NAMED.get, EVERYWHERE)
]


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    ("case", "world"), [*USUAL, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)], ids=str
)
def test_ranks_equal_one(pool: Pool, case: Case, world: int) -> None:
    for found in pool.run(ranks.compare, case, torch.float64, ways(case, world), mesh=world):
        assert all(x < 1e-13 for x in found.values()), found


@pytest.mark.one_in(8)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["causal_even", "packed", "everything", "lse_sinks"])
def test_float32_differs_by_rounding(pool: Pool, name: str, world: int) -> None:
    for found in pool.run(ranks.compare, NAMED[name], torch.float32, ways(NAMED[name], world), mesh=world):
        assert all(x < 1e-6 for x in found.values()), found


PROBLEMS_LAYOUTS = ("zigzag", "contiguous", "striped", "dealt")
AXES = ("bhqk", "hqk", "bqk", "qk", "k", "q", "h", "bk")
INTERVALS = ("documents", "prefix", "rows", "rows of heads", "columns", "both")


def drawn(seed: int, world: int) -> tuple[Case, str, str]:
    """A problem, its layout and its way to communicate."""
    draw = random.Random(seed * 8 + world)
    layout = draw.choice(PROBLEMS_LAYOUTS)
    values: dict[str, Any] = {"kv_heads": draw.choice((1, 2, 4)), "head_dim": draw.choice((4, 8))}
    # Documents of uneven lengths, some of no or of one row; dealt ones attend to themselves.
    if draw.random() < 0.6:
        lengths = [
            (draw.choice((0, 1, draw.randint(2, 24), draw.randint(25, 90))),) * 2 for _ in range(draw.randint(1, 6))
        ]
        if layout != "dealt" and draw.random() < 0.3:
            lengths = [(q, draw.randint(0, 40)) for q, _ in lengths]
        values["lengths"] = tuple(lengths)
    else:
        values |= {"batch": draw.randint(1, 2), "seqlen_q": draw.randint(1, 150)}
        values["seqlen_k"] = values["seqlen_q"] if layout == "dealt" or draw.random() < 0.7 else draw.randint(1, 150)
    if draw.random() < 0.15:  # long enough for rows and keys that stand apart
        layout = draw.choice(("contiguous", "dealt"))
        if draw.random() < 0.5:
            values["lengths"] = tuple((draw.choice((5, 100, 300, 420)),) * 2 for _ in range(draw.randint(2, 7)))
            values["batch"] = len(values["lengths"])
        else:
            values |= {"lengths": (), "batch": 1, "seqlen_q": 900, "seqlen_k": 900}
    window = draw.choice((None, None, (draw.randint(0, 30), 0), (draw.randint(0, 20), draw.randint(0, 9)), (None, 3)))
    values |= {"causal": draw.random() < 0.5, "window": window}
    if draw.random() < 0.35:
        values["mask"] = draw.choice(AXES)
    if draw.random() < 0.5:
        values |= {"bias": draw.choice(AXES), "bias_grad": draw.random() < 0.8}
        values["large"] = draw.choice(("", "", "min", "-1e9"))
    if draw.random() < 0.3:
        values["intervals"] = draw.choice(INTERVALS)
    values |= {"sinks": draw.random() < 0.2, "lse_grad": draw.random() < 0.3}
    values |= {"softcap": draw.choice((0.0, 0.0, 3.0)), "alibi": draw.choice(("", "", "h", "bh"))}
    comm = draw.choice(("ring", "ring", "ring", "auto", "allgather"))
    return ranks.case_of(f"problem{seed}", **values), layout, comm


def compare(mesh: DeviceMesh, seeds: range) -> dict[str, Any]:
    """What is far from the reference, by problem."""
    wrong: dict[str, Any] = {}
    for seed in seeds:
        case, name, comm = drawn(seed, mesh.size())
        want = ranks.on_one(case, torch.float64, seed, oracle=True)
        layout: Any = name
        if name == "dealt":
            given: Any = {"cu_seqlens": ranks.bounds_of(case)[0]} if case.lengths else {"seqlen": case.seqlen_q}
            layout = distributed.deal(mesh, causal=case.causal, window_size=case.window, **given)
        part = ranks.parts_of(case, want, mesh, layout)
        got = ranks.on_ranks(mesh, case, torch.float64, layout, comm, part, seed)
        assert got.keys() == want.keys() - {"dout", "dlse"}
        apart = {key: ranks.distance(x, part[key], want[key], 0.1) for key, x in got.items()}
        if not all(x < 1e-12 for x in apart.values()):
            wrong[f"{seed} {case!r} {layout} {comm}"] = apart
    return wrong


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("group", range(4))
@pytest.mark.one_in(4)
def test_random_problems_equal_the_reference(pool: Pool, world: int, group: int) -> None:
    """200 in all."""
    for found in pool.run(compare, range(17 * group, 17 * group + 17), mesh=world):
        assert not found, found


ROWS, HEADS, BOUNDS = 45, 4, (0, 13, 14, 45)


def functions(kind: str, table: Tensor, scale: Tensor) -> dict[str, Any]:
    """The keywords of a kind; table is (heads, rows + 1), scale one number for each document or entry."""

    def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * scale[b] + table[h, (q - k).abs()]

    def thirds(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q + 2 * k + b + h) % 3 != 0) | (q == k)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "score": {"score_mod": relative},
        "mask": {"mask_mod": thirds, "window_size": (20, 4)},
        "band": {"mask_mod": causal},
        "both": {"score_mod": relative, "mask_mod": thirds, "causal": True},
    }[kind]


def compare_functions(mesh: DeviceMesh, kind: str, packed: bool, layout: str, comm: str) -> dict[str, float]:
    make = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    lead = (ROWS,) if packed else (2, ROWS)
    whole = [normal(*lead, heads, 8).requires_grad_() for heads in (HEADS, 2, 2)]
    read = [normal(HEADS, ROWS + 1).requires_grad_(), normal(3).requires_grad_()]
    read = [x for x in read if kind in ("score", "both")] or [torch.zeros(1, 1), torch.zeros(1)]
    keywords, leaves = functions(kind, *read), [x for x in read if x.requires_grad]
    dout, bounds = normal(*lead, HEADS, 8), torch.tensor(BOUNDS, dtype=torch.int32)
    if packed:
        out = flashtile.attention_varlen(*whole, bounds, bounds, **keywords)
    else:
        out = flashtile.attention(*whole, **keywords)
    want = [out.detach(), *torch.autograd.grad(out, [*whole, *leaves], dout)]
    where: dict[str, Any] = {"dim": 0, "cu_seqlens": BOUNDS} if packed else {}
    mine = [distributed.shard(x.detach(), mesh, layout, **where).requires_grad_() for x in whole]
    lengths: dict[str, Any] = {"seqlen_q": ROWS, "seqlen_k": ROWS}
    if packed:
        lengths = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
    for _ in range(2):  # the second has new numbers in the same tensors' places
        out = distributed.attention(*mine, mesh=mesh, layout=layout, comm=comm, **lengths, **keywords)
        got = [out, *torch.autograd.grad(out, [*mine, *leaves], distributed.shard(dout, mesh, layout, **where))]
    parts = [*(distributed.shard(x, mesh, layout, **where) for x in want[:4]), *want[4:]]
    names = ("out", "dq", "dk", "dv", "dtable", "dscale")
    return {n: ranks.distance(x.detach(), y, w) for n, x, y, w in zip(names, got, parts, want, strict=False)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["score", "mask", "band", "both"])
def test_functions_see_the_whole(pool: Pool, kind: str, packed: bool) -> None:
    for layout, comm in (("zigzag", "ring"), ("striped", "allgather"), ("contiguous", "ring"), ("zigzag", "ulysses")):
        for world in (2,) if comm == "ulysses" else (3, 4):
            for found in pool.run(compare_functions, kind, packed, layout, comm, mesh=world):
                assert all(x < 1e-12 for x in found.values()), (layout, comm, world, found)


# What is added to all scores of a row; of the last but one row all keys are dropped.
HUGE_ROWS = (torch.finfo(torch.float32).min, -1e9, -3e5, 1e9, torch.finfo(torch.float32).max, -torch.inf, 0.0)
KEYS = 37


def compare_huge(mesh: DeviceMesh, kind: str, layout: str, comm: str) -> dict[str, float]:
    """Distances of this rank's results from those of one."""
    make = torch.Generator().manual_seed(5)
    # Scores of whole numbers and halves, which float32 holds near 3e5 too, in whichever order they are summed.
    whole = [torch.randint(-1, 2, (2, n, 4, 4), generator=make).float() for n in (len(HUGE_ROWS), KEYS, KEYS)]
    added = torch.tensor(HUGE_ROWS)[:, None].expand(-1, KEYS)
    # The average of a row; one key more, without a value, for those of -1e9; all of the denominator for most rows.
    sinks = torch.tensor([-torch.inf, -1e9, 0.5, -torch.inf])
    leaves = [*whole, sinks] if kind == "function" else [*whole, sinks, added.contiguous()]
    leaves = [x.clone().requires_grad_() for x in leaves]

    def shifted(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + added[q, k]

    def call(function: Any, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
        given = {"score_mod": shifted} if kind == "function" else {"attn_bias": leaves[4]}
        return function(q, k, v, sinks=leaves[3], return_lse=True, **given, **others)

    results = call(flashtile.attention, *leaves[:3])
    seeds = [torch.randn(x.shape, generator=make) for x in results]
    seeds[1][:, [0, 3], 5] = 0  # no key, no sink
    want = [*results, *torch.autograd.grad(results, leaves, seeds)]
    mean = leaves[2].mean(1, keepdim=True).expand(-1, 2, -1, -1)
    torch.testing.assert_close(results[0][:, :2, 0], mean[:, :, 0])
    torch.testing.assert_close(results[0][:, 1, 1], mean[:, 1, 1] * KEYS / (KEYS + 1))
    mine = [distributed.shard(x.detach(), mesh, layout).requires_grad_() for x in whole]
    lengths = {"seqlen_q": len(HUGE_ROWS), "seqlen_k": KEYS}
    got = call(distributed.attention, *mine, mesh=mesh, layout=layout, comm=comm, **lengths)
    by_rows = zip((*results, *seeds), (1, 2, 1, 2), strict=True)
    of_rows = [distributed.shard(x.detach(), mesh, layout, dim=dim) for x, dim in by_rows]
    got = [*got, *torch.autograd.grad(got, [*mine, *leaves[3:]], of_rows[2:])]
    parts = [*of_rows[:2], *(distributed.shard(x, mesh, layout) for x in want[2:5]), *want[5:]]
    names = ("out", "lse", "dq", "dk", "dv", "dsinks", "dbias")
    return {n: ranks.distance(x.detach(), y, w, 1.0) for n, x, y, w in zip(names, got, parts, want, strict=False)}


@pytest.mark.parametrize("kind", ["bias", "function"])
@pytest.mark.parametrize(
    ("layout", "comm", "world"),
    [("contiguous", "ring", 3), ("zigzag", "allgather", 2), ("striped", "ulysses", 2), ("zigzag", "ring", 4)],
)
def test_counts_of_keys_are_not_lost(pool: Pool, kind: str, layout: str, comm: str, world: int) -> None:
    for found in pool.run(compare_huge, kind, layout, comm, mesh=world):
        assert all(x < 1e-6 for x in found.values()), found


LENGTHS = torch.tensor([0, 1, 7, 29, 40], dtype=torch.int32)


def owners(layout: str, interleave: int, world: int, capacity: int) -> Tensor:
    """The rank that holds each of 40 keys."""
    keys = torch.arange(40)
    return keys // interleave % world if layout == "striped" else keys // capacity


def compare_cache(
    mesh: DeviceMesh,
    layout: str,
    interleave: int,
    seqlen_q: int,
    pages: int,
    dtype: torch.dtype,
    keywords: dict[str, Any],
) -> tuple[float, float]:
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    q, k, v = normal(5, seqlen_q, 4, 8), normal(5, 40, 2, 8), normal(5, 40, 2, 12)
    sinks = normal(4) if keywords.get("sinks") else None
    keywords = {**keywords, "sinks": sinks, "return_lse": True}
    want = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=LENGTHS, **keywords)
    world = len(mesh.mesh.flatten())
    rank = mesh.mesh.flatten().tolist().index(torch.distributed.get_rank())
    capacity = -(-40 // world) + 2 if layout == "contiguous" else 40  # a multiple of a page
    mine = owners(layout, interleave, world, capacity) == rank
    # What lies behind a rank's keys is never read into a result.
    here_k, here_v = (torch.full((5, capacity, 2, x.shape[-1]), torch.nan, dtype=dtype) for x in (k, v))
    here_k[:, : mine.sum()], here_v[:, : mine.sum()] = k[:, mine], v[:, mine]
    if pages:
        table = torch.randperm(5 * capacity // pages, generator=make).view(5, -1).int()
        paged = []
        for x in (here_k, here_v):
            pool = x.new_empty(5 * capacity // pages, pages, 2, x.shape[-1])
            pool[table.flatten().long()] = x.reshape(-1, pages, 2, x.shape[-1])
            paged.append(pool)
        here_k, here_v = paged
        keywords["page_table"] = table
    placed = {"mesh": mesh, "layout": layout, "interleave": interleave}
    got = distributed.attention_with_sharded_kvcache(q, here_k, here_v, cache_seqlens=LENGTHS, **placed, **keywords)
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, want, strict=True))
    assert torch.equal(got[1] == -torch.inf, want[1] == -torch.inf)
    apart = [
        torch.where(a == b, 0.0, a.double() - b.double()).abs().max().item() for a, b in zip(got, want, strict=True)
    ]
    return apart[0], apart[1]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("keywords", [
    {}, {"causal": False}, {"window_size": (5, None)}, {"window_size": (3, 2), "causal": False},
    {"window_size": (None, 1), "causal": False}, {"softcap": 2.0, "sinks": True}, {"softmax_scale": 0.7},
], ids=str)  # fmt: skip
def test_sharded_caches_equal_one(pool: Pool, keywords: dict[str, Any]) -> None:
    for layout, interleave in (("striped", 1), ("striped", 4), ("contiguous", 1)):
        for seqlen_q, pages in ((1, 0), (3, 0), (2, 2)):
            for world in (1, 3):
                arguments = layout, interleave, seqlen_q, pages, torch.float64, keywords
                for apart in pool.run(compare_cache, *arguments, mesh=world):
                    assert max(apart) < 1e-13, arguments


def test_ranks_of_two_dimensions_and_low_precision(pool: Pool) -> None:
    plane = {"mesh": ((0, 1), (2, 3)), "names": ("ring", "ulysses")}
    for apart in pool.run(compare_cache, "striped", 2, 1, 0, torch.float32, {}, **plane):
        assert max(apart) < 2e-6
    for apart in pool.run(compare_cache, "striped", 1, 1, 0, torch.bfloat16, {}, mesh=8):
        assert apart[0] < 2**-7 and apart[1] < 1e-2


def differently(mesh: DeviceMesh) -> None:
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8)
    distributed.attention_with_sharded_kvcache(
        q, cache, cache, cache_seqlens=4, mesh=mesh, interleave=1 + mesh.get_rank(), layout="striped"
    )


def refused(mesh: DeviceMesh, keywords: dict[str, Any]) -> str:
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8)
    with pytest.raises(InvalidInputError) as caught:
        distributed.attention_with_sharded_kvcache(
            **{"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": 4, "mesh": mesh, **keywords}
        )
    return str(caught.value)


def test_wrong_calls(pool: Pool) -> None:
    for error in pool.errors(differently, mesh=2)[:2]:
        assert str(error) == "interleave: is 2 on rank 1, but 1 on rank 0"
    for keywords, message in (
        ({"layout": "zigzag"}, "layout: is 'zigzag', must be one of striped, contiguous"),
        ({"interleave": 0}, "interleave: is 0, must be an integer >= 1"),
        ({"q": torch.ones(2, 8)}, "q: has 2 dimensions, must have 4"),
        ({"q": torch.ones(1, 1, 2, 8, requires_grad=True)}, "q: requires grad, but a cached call has no gradient"),
    ):
        assert all(found.startswith(message) for found in pool.run(refused, keywords, mesh=1))
