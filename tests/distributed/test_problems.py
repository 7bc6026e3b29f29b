"""Random problems over ranks against the reference, in float64: out, lse and every gradient."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from flashtile import distributed
from tests.cases import Case
from tests.distributed import ranks
from tests.distributed.pool import Pool

LAYOUTS = ("zigzag", "contiguous", "striped", "dealt")
AXES = ("bhqk", "hqk", "bqk", "qk", "k", "q", "h", "bk")
INTERVALS = ("documents", "prefix", "rows", "rows of heads", "columns", "both")


def drawn(seed: int, world: int) -> tuple[Case, str, str]:
    """A problem, its layout and its way to communicate."""
    draw = random.Random(seed * 8 + world)
    layout = draw.choice(LAYOUTS)
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
