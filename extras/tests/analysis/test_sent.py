import itertools

import pytest

from flashtile.core.masks import Band
from flashtile.distributed.layouts import LAYOUTS
from flashtile.distributed.plan import make_plan
from flashtile_lab.analysis.sent import Sizes, bytes_sent, exchanged_bytes, gathered_bytes

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
            else:
                assert sent == [gathered_bytes(n, world, LLAMA, backward)] * world
    uneven = plans_of((35,), (35,), 4, "zigzag", CAUSAL)
    assert sum(bytes_sent(plan, LLAMA) for plan in uneven) == 3 * 35 * LLAMA.key_bytes
    assert Sizes(4, 2, 64, 32, 4).key_bytes == 2 * 96 * 4 and Sizes(4, 2, 64, 32, 2).sums_bytes == 2 * 96 * 4
    batch = make_plan((64,), (64,), 4, 0, "zigzag", CAUSAL, batch=3)
    assert bytes_sent(batch, LLAMA, True) == 3 * gathered_bytes(16, 4, LLAMA, True)


@pytest.mark.parametrize("world", [16, 4096])
@pytest.mark.parametrize(("layout", "users"), [("contiguous", 1), ("zigzag", 2)])
def test_far_steps_of_a_window_move_no_bytes(world, layout, users):
    keys = 16 if layout == "contiguous" else 64  # of a contiguous shard those in the window of the next rank
    n = 64 * world
    for rank in (1, world // 2, world - 2):
        plan = make_plan((n,), (n,), world, rank, layout, Band(16, 0))
        assert bytes_sent(plan, LLAMA) == users * keys * LLAMA.key_bytes
        assert bytes_sent(plan, LLAMA, True) == users * keys * (LLAMA.key_bytes + LLAMA.sums_bytes)
        assert {step.number for step in plan.steps if step.calls} <= {0, 1, world - 1}
        assert len(plan.steps) <= 1 + 2 * users
