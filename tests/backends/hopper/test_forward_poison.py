"""A NaN or an infinity of a value reaches the rows that keep its key, and no other row of its blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from flashtile import reference
from flashtile.backends.hopper import launch, tiles
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Call, Case, assert_close, build

CASES = (
    Case("causal", batch=1, seqlen_q=200, seqlen_k=200, heads=2, kv_heads=1, head_dim=64, causal=True),
    Case("causal_longer_k", batch=1, seqlen_q=70, seqlen_k=230, head_dim=128, causal=True, sinks=True),
    Case("causal_longer_q", batch=2, seqlen_q=200, seqlen_k=150, head_dim=72, causal=True),
    Case("causal_256", batch=1, seqlen_q=130, seqlen_k=130, head_dim=256, causal=True),
    Case("window", batch=1, seqlen_q=300, seqlen_k=280, head_dim=40, window=(60, 30), softcap=5.0),
    Case("window_left", batch=1, seqlen_q=150, seqlen_k=260, head_dim=64, window=(100, None), scale=-0.1),
    Case("window_far", batch=1, seqlen_q=130, seqlen_k=400, head_dim=64, window=(2, 200)),
    Case("varlen", batch=3, lengths=((90, 130), (0, 5), (150, 150)), head_dim=64, causal=True, spare=9),
    Case(
        "causal_wide_v",
        batch=1,
        seqlen_q=200,
        seqlen_k=200,
        heads=2,
        kv_heads=1,
        head_dim=64,
        head_dim_v=96,
        causal=True,
    ),
    Case("window_narrow_v", batch=1, seqlen_q=150, seqlen_k=170, head_dim=192, head_dim_v=40, window=(60, 30)),
    Case("varlen_192", batch=2, lengths=((70, 90), (64, 128)), head_dim=192, head_dim_v=160, causal=True, sinks=True),
    Case("varlen_256", batch=2, lengths=((70, 90), (64, 128)), head_dim=200, window=(20, 0)),
)


def _poisoned(case: Case, junk: tuple[float, ...], keys: slice, column: int) -> Call:
    """Some keys' values in one column, of one head."""
    call = build(case, torch.bfloat16)
    v = call.tensors.v.detach().clone()
    (v[:, :, 0] if v.dim() == 4 else v[:, 0])[..., keys, column] = torch.tensor(
        junk, dtype=v.dtype
    ).repeat(v.shape[-3])[: len(range(*keys.indices(v.shape[-3])))]  # fmt: skip
    return _with_values(call, v)


def _with_values(call: Call, v: Tensor) -> Call:
    return dataclasses.replace(call, tensors=dataclasses.replace(call.tensors, v=v), leaves=call.leaves | {"v": v})


def _check(call: Call, out: Tensor, lse: Tensor) -> None:
    exact, exact_lse = reference.attention(call.problem, call.upcast().tensors)
    plain, plain_lse = reference.attention(call.problem, call.tensors, call.problem.dtype)
    for name, got, want, low in (("out", out, exact, plain), ("lse", lse, exact_lse, plain_lse)):
        assert torch.equal(got.isnan(), want.isnan()), name
        known = ~(want.isnan() | low.isnan())
        assert_close(name, got[known], want[known], low[known], call.case.magnitude)


@pytest.mark.parametrize("junk", [(torch.nan,), (torch.inf,), (torch.inf, -torch.inf, 1.0)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_rows_that_keep_a_key_meet_its_value(case: Case, junk: tuple[float, ...]) -> None:
    # In the last part of the columns, where there are several.
    column = 5 if case.head_dim_v is None else case.head_dim_v - 2
    call = _poisoned(case, junk, slice(-30, None, 9), column)
    for seed, num_sms in enumerate((1, 4)):
        with on_cpu(seed, num_sms), torch.no_grad():
            _check(call, *launch.forward(call.problem, call.tensors))


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[7]], ids=str)
def test_values_that_are_all_poison_leave_rows_without_keys_alone(case: Case) -> None:
    call = build(case, torch.bfloat16)
    call = _with_values(call, torch.full_like(call.tensors.v, torch.nan))
    with on_cpu(), torch.no_grad():
        _check(call, *launch.forward(call.problem, call.tensors))


@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=str)
def test_every_configuration_gives_the_same_bits(case: Case) -> None:
    call = _poisoned(case, (torch.nan,), slice(-30, None, 9), 5)
    base = tiles.choose(call.problem)
    results = []
    for seed, config in enumerate(
        (base, dataclasses.replace(base, overlap=False), dataclasses.replace(base, dynamic=True), tiles.THREE_GROUPS_64)
    ):
        with on_cpu(seed, 1 + seed), torch.no_grad():
            results.append(launch.forward(call.problem, call.tensors, config))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(lse, results[0][1], rtol=0, atol=0, equal_nan=True)
