"""Layouts and plans: each row has a rank; each kept pair is computed once, in few calls; each shard and sum arrives."""

from __future__ import annotations

import collections
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.distributed import calls
from flashtile.distributed.calls import NOWHERE, RingCall, held_back, in_two
from flashtile.distributed.layouts import LAYOUTS, Dealt, pieces, positions, ranges, shard_length
from flashtile.distributed.plan import make_plan
from flashtile.distributed.ring import BLOCK
from tests.slow import slow_but

lengths = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 30)), max_size=5).map(tuple)
worlds = st.integers(1, 7)
layouts = st.sampled_from(LAYOUTS)


def rows_of(found):
    return [row for some in found for row in some]


@given(lengths, worlds, layouts)
def test_every_row_has_one_rank_and_shards_are_even(lengths, world, layout):
    shards = [rows_of(ranges(lengths, world, rank, layout)) for rank in range(world)]
    assert sorted(row for shard in shards for row in shard) == list(range(sum(lengths)))
    assert [len(shard) for shard in shards] == [shard_length(sum(lengths), world, rank) for rank in range(world)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert all(shard == sorted(shard) for shard in shards)


@given(lengths, worlds, layouts, st.integers(1, 4))
def test_parts_are_a_ranks_rows_in_order(lengths, world, layout, parts):
    for rank in range(world):
        whole, cut = (
            [rows_of(ranges(lengths, world, rank, layout, *part)) for part in some]
            for some in ([()], [(part, parts) for part in range(parts)])
        )
        assert [row for part in cut for row in part] == whole[0]
        assert [len(part) for part in cut] == [shard_length(len(whole[0]), parts, part) for part in range(parts)]
        for part in range(parts):
            at = 0
            for piece in pieces(lengths, world, rank, layout, part, parts):
                assert piece.at == at and piece.length > 0
                at += piece.length


@given(lengths, worlds, layouts)
def test_positions_count_from_the_documents_first_rows(lengths, world, layout):
    position = [row for length in lengths for row in range(length)]
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    for rank in range(world):
        rows = rows_of(ranges(lengths, world, rank, layout))
        assert rows_of(positions(lengths, world, rank, layout)) == [position[row] for row in rows]
        held = pieces(lengths, world, rank, layout)
        assert [piece.document for piece in held for _ in range(piece.length)] == [document[row] for row in rows]


@given(lengths, worlds)
def test_contiguous_and_striped_ignore_documents(lengths, world):
    total = sum(lengths)
    for rank in range(world):
        assert rows_of(ranges(lengths, world, rank, "striped")) == list(range(rank, total, world))
        start = sum(shard_length(total, world, before) for before in range(rank))
        contiguous = range(start, start + shard_length(total, world, rank))
        assert rows_of(ranges(lengths, world, rank, "contiguous")) == list(contiguous)


@given(lengths, worlds)
def test_zigzag_goes_up_the_ranks_and_down_again_in_parts_that_differ_by_a_row(lengths, world):
    for document, length in enumerate(lengths):
        held = [[p for p in pieces(lengths, world, rank, "zigzag") if p.document == document] for rank in range(world)]
        rank_of = {p.start + t: rank for rank, own in enumerate(held) for p in own for t in range(p.length)}
        order = [rank_of[row] for row in range(length)]
        top = max(order, default=0)
        turn = order.index(top) if order else 0
        up, down, least = order[:turn], [rank for rank in order[turn:] if rank != top], length // (2 * world)
        assert up == sorted(up) and order[turn:] == sorted(order[turn:], reverse=True)
        assert all(part.count(rank) in (least, least + 1) for part in (up, down) for rank in range(top))
        assert 2 * least <= order.count(top) <= 2 * least + 2


def test_the_layouts_of_sixteen_rows():
    assert [ranges((16,), 2, rank, "contiguous") for rank in (0, 1)] == [(range(8),), (range(8, 16),)]
    assert [ranges((16,), 2, rank, "striped") for rank in (0, 1)] == [(range(0, 15, 2),), (range(1, 16, 2),)]
    assert ranges((16,), 4, 1, "zigzag") == (range(2, 4), range(12, 14))
    assert ranges((16,), 4, 3, "zigzag") == (range(6, 10),)  # its two parts follow one another


def test_rows_that_do_not_divide_go_on_to_the_next_rank():
    # One row each: dealt to parts in turn, they must not all be rank 0's.
    assert [rows_of(ranges((1,) * 8, 4, rank, "zigzag")) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("layout", lambda: pieces((8,), 2, 0, "zig-zag")),
        ("rank", lambda: pieces((8,), 2, 2, "zigzag")),
        ("rank", lambda: pieces((8,), 0, 0, "zigzag")),
        ("rank", lambda: pieces((8,), 2, -1, "striped")),
        ("lengths", lambda: pieces((8, -1), 2, 0, "contiguous")),
        ("rank", lambda: pieces((8,), 2, 0, "zigzag", 2, 2)),
    ],
)
def test_refusals(argument, call):
    with pytest.raises(InvalidInputError) as found:
        call()
    assert found.value.argument == argument


CAUSAL = Band(None, 0)
BANDS = [Band(), CAUSAL, Band(3, 0), Band(2, 2), Band(None, 4), Band(4, None), Band(-1, 5), Band(6, -2), Band(-2, -2)]
# Queries and keys of documents.
LENGTHS = {
    "even": ((24,), (24,)),
    "uneven": ((17,), (17,)),
    "shorter than ranks": ((2,), (2,)),
    "empty": ((0,), (0,)),
    "documents": ((7, 0, 1, 12, 1, 3), (7, 0, 1, 12, 1, 3)),
    "cross": ((9,), (21,)),
    "cross, more queries": ((19,), (6,)),
    "cross documents": ((5, 1, 0, 8, 3), (9, 4, 2, 0, 3)),
}

small = st.one_of(st.sampled_from([0, 1]), st.integers(0, 16))
bounds = st.one_of(st.none(), st.integers(-6, 12))
cases = st.fixed_dictionaries(
    {
        "documents": st.lists(st.tuples(small, st.one_of(st.none(), small)), min_size=1, max_size=4),
        "world": st.integers(1, 6),
        "layout": st.sampled_from(LAYOUTS),
        "band": st.one_of(st.sampled_from([Band(), CAUSAL]), st.builds(Band, bounds, bounds)),
    }
)


def is_kept(i, j, seqlen_q, seqlen_k, band):
    apart = j - i - (seqlen_k - seqlen_q)
    return (band.left is None or -band.left <= apart) and (band.right is None or apart <= band.right)


def all_kept(lengths_q, lengths_k, band, batch=1):
    """Every pair that the mask keeps: entry of the batch, document, query, key."""
    return {
        (entry, document, i, j)
        for entry in range(batch)
        for document, (q, k) in enumerate(zip(lengths_q, lengths_k, strict=True))
        for i in range(q)
        for j in range(k)
        if is_kept(i, j, q, k, band)
    }


def rows_of_plan(lengths, world, rank, layout, batch=1):
    held = [(p.document, p.start + p.stride * t) for p in pieces(lengths, world, rank, layout) for t in range(p.length)]
    return [(entry, *row) for entry in range(batch) for row in held]


def computed(plan, lengths_q, lengths_k, layout, batch=1):
    """The pairs that a plan's calls compute, each as often as they do."""
    rows = rows_of_plan(lengths_q, plan.world, plan.rank, layout, batch)
    assert plan.rows == len(rows)
    for step in plan.steps:
        keys = rows_of_plan(lengths_k, plan.world, step.source, layout, batch)
        keys = [keys[place] for span in step.spans for place in range(*span)]
        assert step.keys == len(keys)
        for call in step.calls:
            yield from pairs_of(call, rows, keys, lengths_q, lengths_k, batch)


def pairs_of(call, rows, keys, lengths_q, lengths_k, batch):
    assert call.cu_seqlens_q[0] == call.cu_seqlens_k[0] == 0
    assert (call.cu_seqlens_q[-1], call.cu_seqlens_k[-1]) == (len(rows), len(keys))
    spans = zip(*map(itertools.pairwise, (call.cu_seqlens_q, call.cu_seqlens_k)), strict=True)
    for number, ((start, stop), (first, last)) in enumerate(spans):
        assert start <= stop and first <= last and (start, first) != (stop, last)
        assert stop - start <= call.max_seqlen_q and last - first <= call.max_seqlen_k
        origin = call.origins[number] if call.origins else None
        for t, u in itertools.product(range(stop - start), range(last - first)):
            row, key = rows[start + t], keys[first + u]
            if is_kept(t, u, stop - start, last - first, call.band):
                assert row[:2] == key[:2], "a row of one document meets a key of another"
                yield (*row, key[2])
                if origin is not None and batch == 1:
                    shift = lengths_k[row[1]] - lengths_q[row[1]]
                    i, j = origin.row + origin.row_step * t, origin.key + origin.key_step * u
                    assert (origin.head, i, j, origin.shift) == (*row[1:], key[2], shift)


def check_parts(plan, lengths_q, lengths_k, layout, batch):
    """Both ways to cut a rank's work over its own keys keep what its step 0 keeps; the first is of rows alone."""
    own, whole = plan.own, sum(call.pairs for call in plan.steps[0].calls)
    private = [own.private] if own.private else []
    of_rows, of_keys = [own.remote_rows, own.local_rows], [own.shared_keys, *own.private_keys, *private]
    assert sorted(row for x in of_rows for row in range(*x.rows)) == list(range(plan.rows))
    assert all(x.rows == own.common.rows for x in (own.shared_keys, *own.private_keys))
    rows, keys = (rows_of_plan(x, plan.world, plan.rank, layout, batch) for x in (lengths_q, lengths_k))
    for parts in (of_rows, of_keys, [own.common, *private]):
        found = collections.Counter()
        for x in parts:
            some, seen = rows[slice(*x.rows)], keys[slice(*x.keys)]
            for call in x.calls:
                found.update(pairs_of(call, some, seen, lengths_q, lengths_k, batch))
        assert max(found.values(), default=1) == 1 and found.total() == whole
    if (joined := own.joined) is not None:
        (step,) = (step for step in plan.steps if step.number and step.calls)
        theirs = rows_of_plan(lengths_k, plan.world, step.source, layout, batch)
        seen = [theirs[place] for span in step.spans for place in range(*span)] + keys[slice(*joined.keys)]
        pairs = list(pairs_of(*joined.calls, rows[slice(*joined.rows)], seen, lengths_q, lengths_k, batch))
        assert len(set(pairs)) == len(pairs) == sum(call.pairs for call in (*step.calls, *own.remote_rows.calls))
        assert len(seen) <= max(plan.keys, len(theirs))
    outside = {row for step in plan.steps[1:] for call in step.calls for row in _rows_with_keys(call)}
    assert all(row < own.remote_rows.rows[1] for row in outside)
    theirs = {place for step in plan.steps for span in step.back for place in range(*span)}
    assert not theirs & {key for x in [*own.private_keys, *private] for key in range(*x.keys)}


def _rows_with_keys(call):
    bounds = zip(*map(itertools.pairwise, (call.cu_seqlens_q, call.cu_seqlens_k)), strict=True)
    return [row for rows, keys in bounds if keys[0] < keys[1] for row in range(*rows)]


def plans_of(lengths_q, lengths_k, world, layout, band, **options):
    return [make_plan(lengths_q, lengths_k, world, rank, layout, band, **options) for rank in range(world)]


def check_pairs(lengths_q, lengths_k, world, layout, band, batch=1, origins=False):
    found = collections.Counter()
    for plan in plans_of(lengths_q, lengths_k, world, layout, band, batch=batch, origins=origins):
        own = list(computed(plan, lengths_q, lengths_k, layout, batch))
        check_parts(plan, lengths_q, lengths_k, layout, batch)
        assert plan.pairs == len(own)
        found.update(own)
    assert found == dict.fromkeys(all_kept(lengths_q, lengths_k, band, batch), 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_kept_pair_is_computed_once(lengths, band, layout):
    for world, origins in ((1, False), (2, True), (3, False), (4, False), (5, True)):
        check_pairs(*LENGTHS[lengths], world, layout, band, origins=origins)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("origins", [False, True])
def test_a_window_of_few_keys_stands_apart(origins):
    check_pairs((900,), (900,), 2, "contiguous", Band(70, 0), origins=origins)
    check_pairs((1200,), (1200,), 3, "contiguous", Band(70, 20), origins=origins)
    first, second = plans_of((900,), (900,), 2, "contiguous", Band(70, 0), origins=origins)
    # Rank 1: of 450 rows 128 wait for 70 keys, 72 with those around them; rank 0 rounds all sums but those of 128.
    assert [first.own.remote_rows.rows, first.own.local_rows.rows, first.own.joined] == [(0, 0), (0, 450), None]
    assert [second.own.remote_rows.rows, second.own.local_rows.rows] == [(0, 128), (128, 450)]
    assert second.own.joined.keys == (0, 128) and second.steps[1].spans == ((376, 450),)
    assert first.own.shared_keys.keys == (256, 450) and [x.keys for x in first.own.private_keys] == [(0, 256)]
    assert second.own.shared_keys.calls == () and second.own.private_keys == (second.own.common,)


def test_a_cut_document_stands_apart():
    lengths = (250, 150, 200)
    layout = Dealt(lengths, (((0, 0, 100), (2, 0, 200)), ((0, 100, 150), (1, 0, 150))))
    check_pairs(lengths, lengths, 2, layout, CAUSAL)
    first, second = plans_of(lengths, lengths, 2, layout, CAUSAL)
    assert first.own.private.rows == (100, 300) and second.own.private.rows == (150, 300)
    assert second.own.joined.rows == (0, 150) and second.steps[1].spans == ((0, 100),)
    assert len(second.own.joined.calls) == 1 and second.own.joined.calls[0].band == CAUSAL


@given(cases, st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_kept_pair_is_computed_once_whatever_the_case(case, origins):
    lengths_q = tuple(q for q, _ in case["documents"])
    lengths_k = tuple(q if k is None else k for q, k in case["documents"])
    check_pairs(lengths_q, lengths_k, case["world"], case["layout"], case["band"], origins=origins)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("band", [CAUSAL, Band(3, 1)], ids=str)
def test_a_batch_is_the_same_for_each_entry(band, layout):
    check_pairs((11,), (11,), 3, layout, band, batch=3)
    one, two = (make_plan((8,), (8,), 2, 1, layout, band, batch=batch, origins=True) for batch in (1, 2))
    for a, b in zip(one.steps[0].calls, two.steps[0].calls, strict=True):
        assert b.origins == a.origins + tuple(origin._replace(head=1) for origin in a.origins)
    assert make_plan((8,), (8,), 2, 1, layout, band, batch=2, origins=True).pairs == 2 * one.pairs


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("band", [CAUSAL, Band(), Band(700, 0), Band(300, 50), Band(-5, 900)], ids=str)
@pytest.mark.parametrize("world", slow_but([64, 1024, 4096], (64).__eq__))
def test_pairs_of_many_ranks_are_those_of_their_rows(world, band, layout):
    n = 4 * world + 3
    draw = random.Random(world)
    for rank in {0, world - 1, *draw.sample(range(world), 2)}:
        rows = rows_of_plan((n,), world, rank, layout)
        kept = [band.row_keys(i, n, n) for _, _, i in rows]
        plan = make_plan((n,), (n,), world, rank, layout, band)
        assert plan.pairs == sum(stop - start for start, stop in kept)
        assert len({step.source for step in plan.steps}) == len(plan.steps)
    if world == 64:
        assert sum(plan.pairs for plan in plans_of((n,), (n,), world, layout, band)) == band.count(n, n)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("world", [2, 3, 8, 64, 512, 4096])
def test_causal_zigzag_is_even(world):
    lengths = (2 * world * 32,)
    even = CAUSAL.count(*lengths, *lengths) / world
    ranks = range(world) if world <= 64 else (0, 1, world // 2, world - 1)
    for rank in ranks:
        plan = make_plan(lengths, lengths, world, rank, "zigzag", CAUSAL)
        assert plan.pairs == pytest.approx(even, rel=0.02)
        steps = [sum(call.pairs for call in step.calls) for step in plan.steps]
        assert steps[1:] == [2 * 32 * 32] * (world - 1)  # half of all pairs of a rank's rows and a shard
    # What the other layouts are without it.
    first, last = (make_plan(lengths, lengths, world, rank, "contiguous", CAUSAL).pairs for rank in (0, world - 1))
    assert last / first > 1.9 * world - 1


def test_causal_zigzag_of_documents_is_even():
    lengths = (16 * 5, 16, 16 * 40, 16 * 7)
    pairs = {plan.pairs for plan in plans_of(lengths, lengths, 8, "zigzag", CAUSAL)}
    assert len(pairs) == 1 and pairs.pop() * 8 == sum(CAUSAL.count(n, n) for n in lengths)


def spans(call):
    """Lengths of the sequences of a call that have rows and keys."""
    lengths = [[b - a for a, b in itertools.pairwise(c)] for c in (call.cu_seqlens_q, call.cu_seqlens_k)]
    return [(q, k) for q, k in zip(*lengths, strict=True) if q and k]


def test_pieces_are_joined_to_one_call_a_step():
    plan = make_plan((64,), (64,), 4, 1, "zigzag", CAUSAL)
    own, *rest = plan.steps
    assert [(call.band, spans(call)) for call in own.calls] == [(CAUSAL, [(16, 16)])]
    assert [step.source for step in rest] == [0, 3, 2]
    found = [[(call.band, call.cu_seqlens_q, call.cu_seqlens_k) for call in step.calls] for step in rest]
    lower = [(Band(), (0, 16), (0, 8))]  # all rows over the first piece of keys, which travels alone
    higher = [(Band(), (0, 8, 16), (0, 0, 16))]  # the second piece of rows over all keys
    assert found == [lower, higher, higher]
    assert rest[1].calls is rest[2].calls
    # Positions of joined pieces have a gap: where they matter, each pair of pieces is a sequence of its own.
    apart = make_plan((64,), (64,), 4, 1, "zigzag", CAUSAL, origins=True).steps[0]
    assert sorted(pair for call in apart.calls for pair in spans(call)) == [(8, 8)] * 3
    assert [len(call.origins) for call in apart.calls] == [len(call.cu_seqlens_q) - 1 for call in apart.calls]
    assert NOWHERE in apart.calls[-1].origins


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_documents_share_calls(layout):
    lengths = (40, 1, 56, 1, 8, 130)
    for plan in plans_of(lengths, lengths, 4, layout, CAUSAL):
        assert all(len(step.calls) == 1 for step in plan.steps if step.calls)
        # A document of one row keeps all there is, which the causal band keeps too.
        assert [call.band for call in plan.steps[0].calls] == [CAUSAL]
    for plan in plans_of((256, 512, 1024), (256, 512, 1024), 4, "contiguous", Band(31, 0)):
        assert {call.band for call in plan.steps[0].calls} == {Band(31, 0)}
        assert all(len(step.calls) == 1 for step in plan.steps[1:] if step.calls)


def needed(lengths_q, lengths_k, world, layout, band):
    """For each shard of keys the other ranks that keep a pair of it, and which of its rows they keep."""
    owner_q, owner_k = (
        {row[1:]: rank for rank in range(world) for row in rows_of_plan(lengths, world, rank, layout)}
        for lengths in (lengths_q, lengths_k)
    )
    kept = all_kept(lengths_q, lengths_k, band)
    apart = {(owner_k[document, j], owner_q[document, i], document, j) for _, document, i, j in kept}
    apart = {pair for pair in apart if pair[0] != pair[1]}
    at = [{row[1:]: place for place, row in enumerate(rows_of_plan(lengths_k, world, p, layout))} for p in range(world)]
    places = collections.defaultdict(set)
    for shard, user, document, j in apart:
        places[shard, user].add(at[shard][document, j])
    return {p: {user for shard, user, _, _ in apart if shard == p} for p in range(world)}, places


def check_transfers(lengths_q, lengths_k, world, layout, band, lag):
    plans = plans_of(lengths_q, lengths_k, world, layout, band, lag=lag)
    steps = {(plan.rank, step.number): step for plan in plans for step in plan.steps}
    users, places = needed(lengths_q, lengths_k, world, layout, band)
    sent = [
        (number, rank, send.to, send.source, send.spans)
        for (rank, number), step in steps.items()
        for send in step.sends
    ]
    received = [
        (number, step.receive_from, rank, step.source, step.spans)
        for (rank, number), step in steps.items()
        if step.receive_from is not None
    ]
    assert sorted(sent) == sorted(received)
    for number, rank, to, source, spans in sent:
        rows = {row for span in spans for row in range(*span)}
        assert places[source, to] <= rows and len(rows) == sum(stop - start for start, stop in spans)
        # No row travels of which no block of 128 around it is needed.
        assert {row // BLOCK for row in rows} == {row // BLOCK for row in places[source, to]}
        assert source == rank or (steps[rank, number - 1].source == source and steps[rank, number - 1].spans == spans)
    assert {p: {to for _, _, to, source, _ in sent if source == p} for p in range(world)} == users
    assert len(sent) == sum(map(len, users.values()))  # each shard once to each that needs it
    check_sums(plans, steps, users, lag)


def check_sums(plans, steps, users, lag):
    sums, home = {}, {plan.rank: [] for plan in plans}
    for (rank, number), step in sorted(steps.items(), key=lambda item: item[0][1]):
        assert number == 0 or bool(step.calls) == (step.sums_to is not None)
        if number and step.calls:
            before = set()
            if step.sums_from is not None:
                giver = steps[step.sums_from, number - lag]
                assert (giver.source, giver.spans, giver.sums_to) == (step.source, step.spans, rank)
                before = sums.pop((step.sums_from, number - lag))
            sums[rank, number] = before | {rank}
            if step.sums_to == step.source:
                assert steps[step.source, number].sums_back == rank
                home[step.source] += sums.pop((rank, number))
        if step.sums_back is not None:
            assert steps[step.sums_back, number].sums_to == rank
            assert steps[step.sums_back, number].spans == step.back
    assert not sums
    assert {p: sorted(found) for p, found in home.items()} == {p: sorted(found) for p, found in users.items()}


@given(cases, st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_shards_and_sums_arrive(case, lag):
    lengths_q = tuple(q for q, _ in case["documents"])
    lengths_k = tuple(q if k is None else k for q, k in case["documents"])
    check_transfers(lengths_q, lengths_k, case["world"], case["layout"], case["band"], lag)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("band", [Band(), CAUSAL, Band(2, 0), Band(2, 2), Band(5, -4)], ids=str)
def test_shards_and_sums_arrive_in_a_longer_ring(band, layout):
    check_transfers((51,), (51,), 12, layout, band, 2)
    check_transfers((30, 1, 0, 17, 70), (30, 1, 0, 17, 70), 9, layout, band, 1)


def test_a_full_ring_passes_shards_to_the_next_rank():
    for rank, plan in enumerate(plans_of((64,), (64,), 8, "zigzag", Band())):
        after, before = (rank + 1) % 8, (rank - 1) % 8
        for step in plan.steps[1:]:
            assert step.receive_from == before
            assert [(send.to, send.source) for send in step.sends] == [(after, (step.source + 1) % 8)]


@pytest.mark.long
def test_a_plan_takes_a_number_of_looks_that_grows_with_the_ring(monkeypatch):
    # One rank of 4,096 in time: it may look at each other rank a few times, and not at all pairs of ranks.
    looks = 0

    def counted(*args, kept=calls.kept):
        nonlocal looks
        looks += 1
        return kept(*args)

    monkeypatch.setattr(calls, "kept", counted)
    for layout, band in itertools.product(LAYOUTS, (Band(), CAUSAL, Band(1000, 0))):
        looks = 0
        make_plan.__wrapped__((2**20,), (2**20,), 4096, 2048, layout, band)
        assert looks < 7 * 4 * 4096


def test_plans_are_kept():
    plan = make_plan((100, 3), (100, 3), 4, 2, "zigzag", CAUSAL)
    assert make_plan((100, 3), (100, 3), 4, 2, "zigzag", CAUSAL) is plan
    assert make_plan((100, 3), (100, 3), 4, 1, "zigzag", CAUSAL) is not plan


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("lengths_k", {"lengths_k": (8,)}),
        ("lengths", {"lengths_k": (8, -1)}),
        ("rank", {"rank": 4}),
        ("layout", {"layout": "ring"}),
        ("batch", {"batch": 0}),
        ("lag", {"lag": 0}),
    ],
)
def test_refusals_of_plan(argument, changes):
    call = {"lengths_q": (8, 8), "lengths_k": (8, 8), "world": 4, "rank": 0, "layout": "zigzag", "band": CAUSAL}
    with pytest.raises(InvalidInputError) as found:
        make_plan(**call | changes)
    assert found.value.argument == argument


def kept(call: RingCall) -> Counter[tuple[int, ...]]:
    """Every pair of a row and a key that a call keeps; with their positions if it has origins."""
    found: Counter[tuple[int, ...]] = Counter()
    bounds = zip(itertools.pairwise(call.cu_seqlens_q), itertools.pairwise(call.cu_seqlens_k), strict=True)
    for n, ((row, row_stop), (key, key_stop)) in enumerate(bounds):
        for i in range(row_stop - row):
            for j in range(*call.band.row_keys(i, row_stop - row, key_stop - key)):
                o = call.origins[n] if call.origins else None
                where = (o.head, o.row + o.row_step * i, o.key + o.key_step * j, o.shift) if o else ()
                found[row + i, key + j, *where] += 1
    return found


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("origins", [False, True])
@pytest.mark.parametrize("band", [Band(), CAUSAL, Band(5, 0), Band(4, 3), Band(None, 2), Band(3, None)], ids=str)
@pytest.mark.parametrize("lengths", [((24,), (24,)), ((20,), (31,)), ((31,), (9,)), ((7, 1, 0, 12), (7, 3, 5, 2))])
def test_halves_keep_what_the_calls_keep(
    layout: str, origins: bool, band: Band, lengths: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    for rank in range(3):
        plan = make_plan(*lengths, 3, rank, layout, band, batch=2, origins=origins)
        calls = plan.steps[0].calls
        first, final = in_two(calls)
        whole = sum((kept(call) for call in calls), Counter())
        assert sum((kept(call) for call in (*first, *final)), Counter()) == whole
        assert max(whole.values(), default=1) == 1
        for call in (*first, *final):
            assert (call.cu_seqlens_q[-1], call.cu_seqlens_k[-1]) == (plan.rows, plan.keys)


def test_a_rank_waits_with_work_for_the_sums_of_many_keys_alone() -> None:
    calls = make_plan((4096,), (4096,), 2, 0, "contiguous", CAUSAL).steps[0].calls
    assert held_back(calls, 0.5, 256) == in_two(calls, 0.5)
    for few in (0, 255):
        assert held_back(calls, 0.5, few) == (calls, ())


@pytest.mark.parametrize("band", [Band(), CAUSAL, Band(5000, 0)], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("share", [1 / 2, 1 / 3])
def test_the_first_has_its_share(band: Band, layout: str, share: float) -> None:
    for rank in range(2):
        calls = make_plan((16384,), (16384,), 2, rank, layout, band).steps[0].calls
        first, final = (sum(call.pairs for call in half) for half in in_two(calls, share))
        assert 0.9 < first * (1 - share) / (final * share) < 1.1
