"""Where a NaN or an infinity may go, and where it must not.

Strictly nowhere (rule 9): from elements past a length, in other packed sequences, and past the last sequence. From a
valid element (rule 10): to the rows that attend to it, and from v, and in gradients from any input, possibly to rows
and keys of the same sequence and head group that mask it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case, build
from tests.poison import poisoned_memory
from tests.slow import slow_but

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Spot:
    """A case, and the row and the key that get a NaN or an infinity: of the last sequence and the first head."""

    case: Case
    row: int
    key: int

    def __str__(self) -> str:
        return self.case.name


SPOTS = (
    Spot(Case("causal", batch=2, seqlen_q=200, seqlen_k=200, heads=4, kv_heads=2, head_dim=64, causal=True), 90, 80),
    Spot(Case("causal_longer_q", batch=2, seqlen_q=200, seqlen_k=130, heads=1, kv_heads=1, head_dim=72, causal=True,
              sinks=True), 165, 60),
    Spot(Case("causal_longer_k", batch=1, seqlen_q=70, seqlen_k=200, heads=2, kv_heads=2, head_dim=128, causal=True),
         20, 140),
    Spot(Case("window_softcap", batch=1, seqlen_q=200, seqlen_k=190, heads=2, kv_heads=2, head_dim=64, window=(20, 30),
              softcap=5.0), 150, 140),
    Spot(Case("window_left", batch=2, seqlen_q=150, seqlen_k=200, heads=1, kv_heads=1, head_dim=64, window=(50, None),
              scale=-0.1), 70, 90),
    Spot(Case("varlen", batch=3, lengths=((90, 130), (0, 5), (150, 150)), head_dim=64, heads=2, kv_heads=1, causal=True,
              spare=9), 40, 50),
    Spot(Case("varlen_256", batch=2, lengths=((70, 90), (100, 128)), head_dim=200, heads=2, kv_heads=2,
              window=(20, 0)), 40, 50),
)  # fmt: skip


def _run(case: Case, changes: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """out, lse and the gradients of q, k and v, with elements of the inputs, of dout or of dlse replaced.

    One program computes all of it, so that bits do not depend on the order of sums.
    """
    call = build(case, torch.bfloat16)
    make = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in "qkv":
            if name in changes:
                call.leaves[name].masked_scatter_(changes[name] != 0, changes[name][changes[name] != 0])
    with poisoned_memory(), on_cpu(seed, 1):
        out, lse = call.run("hopper")
        weights = {"dout": torch.randn(out.shape, generator=make).to(out.dtype),
                   "dlse": torch.randn(lse.shape, generator=make)}  # fmt: skip
        for name, weight in weights.items():
            if name in changes:
                weight.masked_scatter_(changes[name] != 0, changes[name][changes[name] != 0])
        grads = torch.autograd.grad([out, lse], [call.leaves[name] for name in "qkv"], list(weights.values()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _by_head(case: Case, name: str, x: Tensor) -> Tensor:
    """A result as (sequences, heads, rows, ...); of packed sequences as one."""
    if name == "lse":
        return x[None] if case.lengths else x
    return x.transpose(0, 1)[None] if case.lengths else x.transpose(1, 2)


@functools.cache
def _clean(case: Case) -> dict[str, Tensor]:
    results = _run(case, {}, 7)
    assert all(not x.isnan().any() for x in results.values())
    return results


def _places(spot: Spot) -> tuple[int, int, slice, slice]:
    """(row, key) of a spot in its tensors, and the rows and keys of its sequence."""
    case = spot.case
    if not case.lengths:
        return spot.row, spot.key, slice(0, case.seqlen_q), slice(0, case.seqlen_k)
    starts = [sum(pair[side] for pair in case.lengths[:-1]) for side in (0, 1)]
    ends = [sum(pair[side] for pair in case.lengths) for side in (0, 1)]
    return starts[0] + spot.row, starts[1] + spot.key, slice(starts[0], ends[0]), slice(starts[1], ends[1])


@pytest.mark.one_in(200)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("junk", slow_but([NAN, INF], (INF).__eq__), ids=str)
@pytest.mark.parametrize("spot", SPOTS, ids=str)
def test_a_valid_element_reaches_who_attends_to_it_and_stays_in_its_head_group(
    spot: Spot, where: str, junk: float
) -> None:
    case = spot.case
    clean = _clean(case)
    row, key, rows, keys = _places(spot)
    change = torch.zeros(clean["dq" if where in ("q", "dout") else "lse" if where == "dlse" else "dk"].shape)
    at = key if where in "kv" else row
    _by_head(case, "lse" if where == "dlse" else "dq", change)[-1, 0, at].view(-1)[:1] = junk
    got = _run(case, {where: change.to(torch.float32 if where == "dlse" else torch.bfloat16)}, len(where))
    keep = build(case, torch.bfloat16).problem.band.dense(rows.stop - rows.start, keys.stop - keys.start)
    group = case.heads // case.kv_heads
    for name, x in got.items():
        by_head, before = _by_head(case, name, x), _by_head(case, name, clean[name])
        heads = 1 if name in ("dk", "dv") else group
        assert torch.equal(by_head[:, heads:], before[:, heads:]), f"{name} of another head group"
        assert torch.equal(by_head[:-1], before[:-1]), f"{name} of another sequence"
        own = keys if name in ("dk", "dv") else rows
        assert torch.equal(by_head[:, :, : own.start], before[:, :, : own.start]), f"{name} of another sequence"
        assert torch.equal(by_head[:, :, own.stop :], before[:, :, own.stop :]), f"{name} past the last sequence"
    attending = keep[:, spot.key] if where in "kv" else torch.arange(rows.stop - rows.start) == spot.row
    assert attending.any() and not attending.all()
    out, lse = (_by_head(case, name, got[name])[-1, 0, rows] for name in ("out", "lse"))
    out_before, lse_before = (_by_head(case, name, clean[name])[-1, 0, rows] for name in ("out", "lse"))
    # In q and k nothing reaches a row that masks it.
    assert torch.equal(lse[~attending], lse_before[~attending])
    if where != "v":
        assert torch.equal(out[~attending], out_before[~attending])
    if junk == INF:
        # A score of -inf is one of a key that weighs nothing.
        return
    dq = _by_head(case, "dq", got["dq"])[-1, 0, rows]
    assert not dq.isfinite().all(-1)[attending].any()
    if where in "qkv":
        assert not out.isfinite().all(-1)[attending].any()


PACKED = (
    Case("varlen", batch=3, lengths=((70, 90), (210, 215), (50, 30)), spare=60, head_dim=64),
    Case("varlen_causal", batch=3, lengths=((70, 90), (210, 215), (50, 30)), spare=60, head_dim=128, causal=True,
         sinks=True),
    Case("varlen_window", batch=3, lengths=((70, 90), (110, 85), (50, 30)), spare=6, head_dim=256, window=(50, 20),
         softcap=5.0),
)  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_nothing_past_a_length_or_of_a_neighbour_reaches_anything(case: Case) -> None:
    """NaN past the last sequence and in both neighbours of the middle one, which has the same bits as without."""
    clean = _clean(case)
    (q0, k0), (q1, k1) = case.lengths[:2]
    rows, keys = slice(q0, q0 + q1), slice(k0, k0 + k1)
    changes = {}
    for name, like, own in (("q", "dq", rows), ("k", "dk", keys), ("v", "dv", keys), ("dout", "dq", rows)):
        changes[name] = torch.full_like(clean[like], NAN)
        changes[name][own] = 0
    changes["dlse"] = torch.full_like(clean["lse"], NAN)
    changes["dlse"][:, rows] = 0
    got = _run(case, changes, 5)
    for name, x in got.items():
        own = (slice(None), rows) if name == "lse" else (rows if name in ("out", "dq") else keys,)
        assert torch.equal(x[own], clean[name][own]), name


@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_last_sequence_get_zeros(causal: bool) -> None:
    case = Case("varlen", batch=2, lengths=((70, 90), (60, 40)), spare=60, head_dim=64, causal=causal, sinks=True)
    changes = {}
    clean = _clean(case)
    for name, like, end in (("q", "dq", 130), ("k", "dk", 130), ("v", "dv", 130), ("dout", "dq", 130)):
        changes[name] = torch.zeros_like(clean[like])
        changes[name][end:] = NAN
    got = _run(case, changes)
    assert torch.equal(got["lse"], clean["lse"]) and (got["lse"][:, 130:] == -INF).all()
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(got[name], clean[name]) and (got[name][130:] == 0).all(), name
