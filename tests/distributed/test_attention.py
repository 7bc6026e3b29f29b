"""N ranks give what one rank gives: every layout and way to communicate, every feature."""

from __future__ import annotations

import pytest
import torch

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
