"""Both halves of a rank's calls over its own keys: each kept pair is in one of them, and the work is about even."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from flashtile.core.masks import Band
from flashtile.distributed.calls import RingCall, in_two
from flashtile.distributed.plan import make_plan

CAUSAL = Band(None, 0)


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


@pytest.mark.parametrize("band", [Band(), CAUSAL, Band(5000, 0)], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("share", [1 / 2, 1 / 3])
def test_the_first_has_its_share(band: Band, layout: str, share: float) -> None:
    for rank in range(2):
        calls = make_plan((16384,), (16384,), 2, rank, layout, band).steps[0].calls
        first, final = (sum(call.pairs for call in half) for half in in_two(calls, share))
        assert 0.9 < first * (1 - share) / (final * share) < 1.1
