"""The CPU backend against the oracle: every case, every dtype, outputs poisoned."""

from __future__ import annotations

import math

import pytest
import torch

from flashtile import reference
from tests.cases import CASES, Case, build, judge, results
from tests.rule import drawn

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "cpu")


# Sums over so many rows, keys or heads that rounding them to 16 bits after each block would show.
LONG_SUMS = (
    Case("dv of one key", batch=1, seqlen_q=339, seqlen_k=1),
    Case("few keys", batch=1, seqlen_q=700, seqlen_k=3, head_dim=64),
    Case("one key head", batch=1, seqlen_q=300, seqlen_k=300, heads=8, kv_heads=1, causal=True),
    Case("many keys", batch=1, seqlen_q=3, seqlen_k=9000, head_dim=64),
    Case("bias and sinks", batch=1, seqlen_q=700, seqlen_k=3, bias="k", sinks=True),
    Case("window", batch=1, seqlen_q=700, seqlen_k=700, heads=4, kv_heads=1, window=(300, 0)),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", LONG_SUMS, ids=str)
def test_gradients_are_summed_in_float32(case: Case, dtype: torch.dtype) -> None:
    """The error is at most twice the bound of rounding the largest exact gradient once."""
    call = build(case, dtype)
    exact_call = call.upcast()
    dout = torch.randn(*call.tensors.q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = results(call, *call.run("cpu"), dout, None).values

    def by_definition() -> dict[str, torch.Tensor]:
        return results(exact_call, *reference.attention(call.problem, exact_call.tensors), dout, None).values

    exact, in_float32 = by_definition(), drawn(by_definition, torch.float32)
    for name in got.keys() - {"out", "lse"}:
        error = (got[name] - exact[name]).abs().max().item()
        largest = exact[name].abs().max().item()
        # Half a unit in the last place. The error of rounding these very numbers may be far less, by chance.
        rounding = torch.finfo(dtype).eps / 2 * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
        floor = (in_float32[name] - exact[name]).abs().max().item()
        assert error <= 2 * (rounding + floor), f"{name}: error {error:.2e}, one rounding {rounding:.2e}"
