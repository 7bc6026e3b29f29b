"""Which rows a rank holds, against rows dealt one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtile.core.errors import InvalidInputError
from flashtile.distributed.layouts import LAYOUTS, pieces, positions, ranges, shard_length

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
