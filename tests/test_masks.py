from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashtile.core.masks import Band

LENGTHS = st.integers(0, 9)
BOUNDS = st.one_of(st.none(), st.integers(-4, 11))
CHUNKS = st.one_of(st.none(), st.integers(1, 12))


@given(LENGTHS, LENGTHS, BOUNDS, BOUNDS, CHUNKS, st.integers(0, 8), st.integers(1, 9))
def test_ranges_and_counts_agree_with_the_dense_mask(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, chunk: int | None, first: int, rows: int
) -> None:
    band = Band(left, right, chunk)
    dense = band.dense(seqlen_q, seqlen_k)
    assert band.count(seqlen_q, seqlen_k) == int(dense.sum())
    kept = dense.any(1).nonzero().flatten().tolist()
    outermost = range(*band.any_rows(seqlen_q, seqlen_k))
    # With bounds that leave out a row's own position, rows in the middle of chunks may keep nothing.
    assert kept == list(outermost) if chunk is None else set(kept) <= set(outermost)
    last = min(first + rows, seqlen_q)
    if last <= first:
        return
    block = dense[first:last]
    start, stop = band.any_keys(first, last, seqlen_q, seqlen_k)
    assert set(block.any(0).nonzero().flatten().tolist()) <= set(range(start, stop))
    assert block.all(0).nonzero().flatten().tolist() == list(range(*band.all_keys(first, last, seqlen_q, seqlen_k)))
    part = band.dense(seqlen_q, seqlen_k, rows=(first, last), keys=(0, seqlen_k))
    assert part.equal(block)


def test_causal_aligns_the_last_query_with_the_last_key() -> None:
    assert Band(None, 0).dense(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert Band(1, 0).dense(4, 2).tolist() == [[False, False], [False, False], [True, False], [True, True]]


def test_chunks_are_counted_from_the_first_key() -> None:
    assert Band(chunk=2).dense(2, 5).tolist() == [[False, False, True, True, False], [False] * 4 + [True]]
    assert Band(None, 0, 2).dense(5, 3).int().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1]]
    # No row sees further than its chunk is long.
    assert Band(9, None, 4) == Band(3, 3, 4) and Band(None, 0, 4) == Band(3, 0, 4)


def test_prints_as_people_say_it() -> None:
    assert [str(b) for b in (Band(), Band(None, 0), Band(3, 0), Band(None, 2), Band(None, 0, 8))] == [
        "full",
        "causal",
        "window(3, 0)",
        "window(inf, 2)",
        "window(7, 0) in chunks of 8",
    ]
