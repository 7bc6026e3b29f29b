"""The clock adds up what it is told, and shows what a second buffer is for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tests.emulator import clock
from tests.emulator.clock import Costs
from tests.emulator.test_emulator import SIDE, _described, doubled, multiplied


def test_products_take_what_their_flops_and_operands_take() -> None:
    x, out = torch.randn(SIDE, SIDE), torch.empty(SIDE, SIDE)
    free = Costs(shared_bytes=1e9, flops=4.0)
    slow = clock.measure(multiplied, (1,), (_described(x), out, ""), costs=free)
    assert slow.busy["tensor cores"] * slow.cycles == pytest.approx(2 * 2 * SIDE**3 / 4)
    assert torch.equal(out, x @ x.T + x @ x)
    narrow = clock.measure(multiplied, (1,), (_described(x), out, ""), costs=Costs(flops=1e9, shared_bytes=2.0))
    # Both operands from shared memory, two bytes each; the right one once for 64 rows, of which there are 16.
    assert narrow.busy["tensor cores"] * narrow.cycles == pytest.approx(2 * 2 * SIDE * SIDE * (1 + SIDE / 64) / 2)


def _copies(stages: int, costs: Costs) -> clock.Timing:
    x = torch.randn(8 * SIDE, SIDE)
    out = torch.full_like(x, torch.nan)
    timing = clock.measure(doubled, (1,), (_described(x), _described(out), 8, stages, ""), costs=costs)
    assert torch.equal(out, 2 * x)
    return timing


def test_a_second_buffer_hides_the_loads() -> None:
    costs = Costs(load_latency=1000, store_latency=0, copy_bytes=1e9, scalar=0, arrive=0, wake=0)
    one, two, four = (_copies(stages, costs).cycles for stages in (1, 2, 4))
    assert one > 8 * 1000
    assert two == pytest.approx(one / 2, rel=0.05)
    assert four == pytest.approx(one / 4, rel=0.1)


def test_roles_say_what_they_wait_for() -> None:
    timing = _copies(1, Costs(load_latency=1000))
    waits = timing.roles["double_tiles (partition 0"]
    assert max(waits, key=lambda what: waits[what]) == "waits for full[0]"
    assert sum(waits.values()) == pytest.approx(1, abs=0.05)
