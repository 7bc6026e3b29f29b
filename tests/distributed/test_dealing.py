"""Layouts for masks: every row is dealt once, work is even, and of interval masks only what is seen travels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from flashtile import InvalidInputError, distributed, masks
from flashtile.core.masks import Band
from flashtile.distributed import dealing, values
from flashtile.distributed.dealing import Mask, deal_rows, weigh
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Dealt, pieces, shard_length
from flashtile.distributed.plan import make_plan
from flashtile.distributed.ring import BLOCK
from tests.distributed.pool import Pool
from tests.intervals import dense, drawn_mask

CAUSAL = Band(None, 0)
bands = st.sampled_from([CAUSAL, Band(), Band(7, 0), Band(200, 0), Band(30, 20)])


def held(lengths: tuple[int, ...], world: int, layout: Any) -> list[list[tuple[int, int]]]:
    """Document and row of each of a rank's rows, by rank."""
    return [
        [(p.document, p.start + p.stride * t) for p in pieces(lengths, world, rank, layout) for t in range(p.length)]
        for rank in range(world)
    ]


@given(st.lists(st.integers(0, 700), min_size=1, max_size=9), st.integers(1, 6), bands)
@settings(max_examples=120, deadline=None)
def test_every_row_is_dealt_once_and_ranks_have_as_many(lengths: list[int], world: int, band: Band) -> None:
    whole = tuple(lengths)
    deal = dealing._Deal(whole, world, Mask(band))
    layouts = [deal_rows(whole, world, Mask(band)), deal.blocks()]
    layouts += [dealing._Deal(whole, world, Mask(band)).documents(limit) for limit in (0, 100, 700)]
    everything = [(document, row) for document, length in enumerate(whole) for row in range(length)]
    for layout in layouts:
        ranks = held(whole, world, layout)
        assert sorted(itertools.chain(*ranks)) == everything
        assert [len(rows) for rows in ranks] == [shard_length(sum(whole), world, rank) for rank in range(world)]
        # Plans and weights agree on it.
        plans = [make_plan(whole, whole, world, rank, layout, band) for rank in range(world)]
        weight, pairs = weigh(whole, world, layout, Mask(band)), [plan.pairs for plan in plans]
        assert weight.moved == sum(step.keys for plan in plans for step in plan.steps[1:])
        assert weight.imbalance == pytest.approx(max(pairs) * world / max(sum(pairs), 1) if sum(pairs) else 1)


def test_documents_that_fit_move_nothing() -> None:
    lengths = (512,) * 12
    for world in (2, 3, 4, 6):
        for band in (CAUSAL, Band(), Band(100, 0)):
            assert weigh(lengths, world, deal_rows(lengths, world, Mask(band)), Mask(band)) == (1.0, 0)
    # Of these halves are even only as 300 + 700 and 400 + 600, which contiguous shards are not.
    lengths = (700, 600, 400, 300)
    layout = deal_rows(lengths, 2, Mask(Band(99, 0)))
    assert isinstance(layout, Dealt) and weigh(lengths, 2, layout, Mask(Band(99, 0))).moved == 0
    long = deal_rows((4096,), 4, Mask(CAUSAL)), deal_rows((4096,), 4, Mask(Band(99, 0)))
    assert long == ("zigzag", "contiguous")


@pytest.mark.parametrize("watched", [True, False])
def test_intervals_that_are_written_to_are_read_again(watched: bool) -> None:
    """Tensors of inference mode, and what numpy and .data write, have no versions."""
    with torch.inference_mode(not watched):
        ends = torch.tensor([[0, 4]] * 4, dtype=torch.int32)[None, None]
        first = values.intervals(ends, None, (4,), (4,))
        (ends.data if watched else ends)[..., 1] = 2
        then = values.intervals(ends, None, (4,), (4,))
        assert first is not None and then is not None
        assert first.rows != then.rows and values.intervals(ends, None, (4,), (4,)) is then


@pytest.mark.parametrize(
    "kind", ["documents", "rows", "rows of heads", "columns", "columns of heads", "both", "prefix"]
)
@pytest.mark.parametrize("band", [CAUSAL, Band(), Band(150, 60)], ids=str)
def test_of_intervals_what_is_seen_travels(kind: str, band: Band) -> None:
    """Against the mask's booleans: all keys that are seen travel, and none of a block of 128 in which none is."""
    length, world, make = 600, 3, torch.Generator().manual_seed(5)
    mask = drawn_mask(kind, (2, 2), length, length, make)
    if kind.startswith("rows") or kind == "both":  # short ones
        assert mask.row_keys is not None
        mask.row_keys[..., 1] = mask.row_keys[..., 0] + 40
    kept = values.intervals(mask.row_keys, mask.key_rows, (length,), (length,))
    assert kept is not None and values.intervals(mask.row_keys, mask.key_rows, (length,), (length,)) is kept
    # What any head of any entry keeps, of rows and keys each from the first to the last.
    union = dense_of(kept, length) & band.dense(length, length)
    exact = dense(mask, length, length).flatten(0, 1).any(0) & band.dense(length, length)
    assert not (exact & ~union).any()
    moved = {}
    for layout in ("contiguous", "zigzag", "striped"):
        rows = held((length,), world, layout)
        for rank in range(world):
            plan = make_plan((length,), (length,), world, rank, layout, band, origins=True, intervals=kept)  # type: ignore[arg-type]
            for step in plan.steps[1:]:
                keys = [j for _, j in rows[step.source]]
                seen = union[[i for _, i in rows[rank]]][:, keys].any(0).nonzero().flatten().tolist()
                got = {place for span in step.spans for place in range(*span)}
                assert set(seen) <= got and {x // BLOCK for x in got} == {x // BLOCK for x in seen}
                moved[layout] = moved.get(layout, 0) + len(got)
    weight = weigh((length,), world, "contiguous", Mask(band, kept))
    assert weight.moved == moved.get("contiguous", 0)
    counted = Mask(band, kept).counter((length,))
    if kind != "both":
        assert [counted(0, i, 1) for i in range(length)] == union.sum(1).tolist()


def dense_of(kept: Kept, length: int) -> torch.Tensor:
    keep = torch.ones(length, length, dtype=torch.bool)
    i = torch.arange(length)
    for ends, along in ((kept.rows, i[None]), (kept.keys, i[:, None])):
        if ends is not None:
            first, stop = torch.tensor(ends[0]).unbind(1)
            first, stop = (first[:, None], stop[:, None]) if along.shape[0] == 1 else (first[None], stop[None])
            keep &= (first <= along) & (along < stop)
    return keep


def dealt(mesh: DeviceMesh) -> None:
    bounds = (0, 63, 95, 127, 190)
    layout, again = (distributed.deal(mesh, cu_seqlens=bounds, causal=True, window_size=(5, 0)) for _ in range(2))
    assert isinstance(layout, Dealt) and layout is again
    x = torch.arange(2.0 * 190).view(190, 2)
    mine = distributed.shard(x, mesh, layout, dim=0, cu_seqlens=bounds)
    assert torch.equal(distributed.unshard(mine, mesh, layout, dim=0, cu_seqlens=bounds), x)
    documents = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
    want = distributed.shard(documents, mesh, layout, dim=0, cu_seqlens=bounds)
    assert torch.equal(distributed.positions(mesh, layout, cu_seqlens=bounds), want)
    with pytest.raises(InvalidInputError, match="^layout: is of 4 documents, 190 rows in all, on 3 ranks, but"):
        distributed.shard(x, mesh, layout, dim=0)
    q = torch.ones(1, 10, 2, 8)
    with pytest.raises(InvalidInputError, match="^layout: is of 4 documents"):
        distributed.attention(q, q, q, mesh=mesh, layout=layout)
    with pytest.raises(InvalidInputError, match="^seqlen: and cu_seqlens"):
        distributed.deal(mesh)
    prefixes = masks.prefix(torch.tensor([60]), 190)
    assert distributed.deal(mesh, seqlen=190, block_mask=prefixes) in ("contiguous", "zigzag")


def test_ranks_deal_alike(pool: Pool) -> None:
    pool.run(dealt, mesh=3)
