"""Quantized calls of the CPU backend against attention over the dequantised numbers: every case."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile import reference
from flashtile.call.quantized_arguments import FLOAT8
from flashtile.ops import dispatch
from tests.quantization.cases import CASES, WIDE, QuantizedCase, build, exact, judge


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: QuantizedCase) -> None:
    call = build(case)
    assert dispatch.reasons("cpu", call.problem, "quantized") == []
    judge(call, "cpu", WIDE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_dequantises_what_was_laid_out(case: QuantizedCase) -> None:
    """Two pieces of code that know where blocks and columns lie, one of the library and one of these tests."""
    call = build(case)
    want, found = exact(call, WIDE), reference.attention_quantized(call.problem, call.tensors)
    for got, x in zip(found, (want.out, want.lse), strict=True):
        torch.testing.assert_close(got, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "q_scale", "v", "k"])
def test_the_rule_sees_what_is_off(name: str) -> None:
    """The judge's own test: a scale that is off by 0.4%, or keys in another order, are no rounding."""
    call = build(next(case for case in CASES if case.name == "packed_blocks"))
    x = getattr(call.tensors, name)
    wrong = x.view(torch.uint8).roll(1, -1 if name == "v" else 0).view(FLOAT8) if x.dtype == FLOAT8 else x * 1.004
    call = dataclasses.replace(call, tensors=dataclasses.replace(call.tensors, **{name: wrong}))
    with pytest.raises(AssertionError, match="off"):
        judge(call, "cpu", WIDE)
