import itertools

import pytest

from flashtile.core.masks import Band
from flashtile.distributed.dealing import Mask, deal_rows, weigh
from flashtile.distributed.layouts import LAYOUTS
from flashtile.distributed.plan import make_plan
from flashtile.distributed.ring import RankRing
from flashtile_lab.analysis.sent import Sizes, bytes_sent, exchanged_bytes, gathered_bytes, least_keys

CAUSAL = Band(None, 0)


def plans_of(lengths_q, lengths_k, world, layout, band):
    return [make_plan(lengths_q, lengths_k, world, rank, layout, band) for rank in range(world)]


LLAMA = Sizes(32, 8, 128, 128)


def test_bytes_are_those_of_the_formulas():
    n, world = 512, 8
    # (N - 1) 2 n H_kv D b forward; backward the same and (N - 1) 2 n H_kv D 4.
    assert gathered_bytes(n, world, LLAMA) == 7 * 2 * n * 8 * 128 * 2
    assert gathered_bytes(n, world, LLAMA, backward=True) == 7 * 2 * n * 8 * 128 * (2 + 4)
    # (N - 1) / N n D b (2 H_q + 2 H_kv), in either direction.
    assert exchanged_bytes(n, world, LLAMA) == 7 * n * 128 * 2 * (2 * 32 + 2 * 8) // 8
    assert exchanged_bytes(n, 16, LLAMA) == 15 * n * 128 * 2 * (2 * 32 + 2 * 16) // 16  # each key head twice
    assert exchanged_bytes(n, 1, LLAMA) == gathered_bytes(n, 1, LLAMA) == 0
    # With g query heads a key head the ring sends less while N < 1 + g (each rank as many rows).
    assert gathered_bytes(n, 4, LLAMA) < exchanged_bytes(n, 4, LLAMA)
    assert gathered_bytes(n, 8, LLAMA) > exchanged_bytes(n, 8, LLAMA)
    for layout, band in itertools.product(LAYOUTS, (Band(), CAUSAL)):
        plans = plans_of((n * world,), (n * world,), world, layout, band)
        for backward in (False, True):
            sent = [bytes_sent(plan, LLAMA, backward) for plan in plans]
            if layout == "contiguous" and band == CAUSAL:  # half of it: rank r has keys for those after it
                assert sum(sent) == world * gathered_bytes(n, world, LLAMA, backward) // 2
            elif layout == "zigzag" and band == CAUSAL:  # ranks after a shard's owner need the first half of it
                assert sum(sent) == world * gathered_bytes(n, world, LLAMA, backward) * 3 // 4
            else:
                assert sent == [gathered_bytes(n, world, LLAMA, backward)] * world
    uneven = plans_of((35,), (35,), 4, "zigzag", CAUSAL)
    assert (
        sum(bytes_sent(plan, LLAMA) for plan in uneven)
        == sum(step.keys for plan in uneven for step in plan.steps[1:]) * LLAMA.key_bytes
    )
    assert Sizes(4, 2, 64, 32, 4).key_bytes == 2 * 96 * 4 and Sizes(4, 2, 64, 32, 2).sums_bytes == 2 * 96 * 4
    batch = make_plan((64,), (64,), 4, 0, "zigzag", Band(), batch=3)
    assert bytes_sent(batch, LLAMA, True) == 3 * gathered_bytes(16, 4, LLAMA, True)


@pytest.mark.parametrize("world", [16, 4096])
@pytest.mark.parametrize(("layout", "users"), [("contiguous", 1), ("zigzag", 2)])
def test_far_steps_of_a_window_move_no_bytes(world, layout, users):
    keys = 16  # those in the window of the rows after them
    n = 64 * world
    for rank in (1, world // 2, world - 2):
        plan = make_plan((n,), (n,), world, rank, layout, Band(16, 0))
        assert bytes_sent(plan, LLAMA) == users * keys * LLAMA.key_bytes
        assert bytes_sent(plan, LLAMA, True) == users * keys * (LLAMA.key_bytes + LLAMA.sums_bytes)
        assert {step.number for step in plan.steps if step.calls} <= {0, 1, world - 1}
        assert len(plan.steps) <= 1 + 2 * users


LENGTHS = {
    "one": (2**17,), "short": (2048,) * 64,
    "uneven": (20000, 31, 9000, 1, 4096, 17000, 2000, 12000, 700, 30000, 5000, 9000, 22244),
}  # fmt: skip


@pytest.mark.parametrize("band", [CAUSAL, Band(1023, 0), Band(), Band(700, 300)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_dealt_work_is_even_and_little_travels(name, band):
    """4 ranks of 32k tokens: at most 1.1 of what blocks of 128 need travels, the fullest keeps 1.05 of the mean."""
    lengths, world = LENGTHS[name], 4
    assert sum(lengths) == world * 32768
    layout = deal_rows(lengths, world, Mask(band))
    plans, ring = plans_of(lengths, lengths, world, layout, band), RankRing(lengths, lengths, world, layout, band)
    pairs = [plan.pairs for plan in plans]
    assert sum(pairs) == sum(band.count(n, n) for n in lengths) and max(pairs) * world <= 1.05 * sum(pairs)
    moved = sum(step.keys for plan in plans for step in plan.steps[1:])
    least = sum(least_keys(ring, rank) for rank in range(world))
    assert moved <= 1.1 * least and sum(bytes_sent(plan, LLAMA) for plan in plans) == moved * LLAMA.key_bytes
    sums = sum(bytes_sent(plan, LLAMA, True) for plan in plans) - moved * LLAMA.key_bytes
    assert sums == moved * LLAMA.sums_bytes
    assert name != "short" or moved == 0
    weight = weigh(lengths, world, layout, Mask(band))
    assert weight.moved == moved and weight.imbalance == pytest.approx(max(pairs) * world / sum(pairs))
