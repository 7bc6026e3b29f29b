"""The kernels of second derivatives in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.backends.portable.second.launch import SecondPlan
from tests.cases import CASES, Case, build
from tests.second import judge_second
from tests.test_second import scores

NAMES = (
    "chunk_window", "both_intervals", "bias_keys", "bias_large", "dropout_causal", "everything", "group", "wider_v",
    "no_keys_sinks", "masked_out_sinks", "varlen_empty", "varlen_features", "varlen_intervals",
)  # fmt: skip
RUNS = [case for case in CASES if case.name in NAMES]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call of the kernels."""
    calls: list[int] = []
    run = SecondPlan.__call__

    def counted(*args: object) -> object:
        calls.append(1)
        return run(*args)

    monkeypatch.setattr(SecondPlan, "__call__", counted)
    return calls


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", RUNS, ids=str)
def test_second_derivatives(case: Case, launched: list[int]) -> None:
    dtype = torch.float16 if RUNS.index(case) % 2 else torch.float32
    judge_second(build(case, dtype), "portable")
    assert len(launched) == (case.seqlen_k > 0)


def test_block_lists(launched: list[int]) -> None:
    def keep(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (q_idx // 24 == kv_idx // 24) | (kv_idx < 7)

    lists = flashtile.create_block_mask(keep, 1, 1, 60, 70, "cpu", BLOCK_SIZE=(16, 32))

    def second(dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        make = torch.Generator().manual_seed(0)
        q, k, v, *of = (torch.randn(1, n, 2, 16, generator=make).to(dtype) for n in (60, 70, 70) * 2)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flashtile.attention(*leaves, block_mask=lists, backend=backend)
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(first, leaves, of))

    for found, wanted in zip(second(torch.float32, "portable"), second(torch.float64, "cpu"), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert launched


BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "softcap": {"softcap": 1.5, "causal": True},
    "mask": {"mask_mod": lambda b, h, q, kv: (q + kv) % 3 != h},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("distance", "softcap"), ("read", "alone"), ("read", "softcap"), ("square", "mask"), ("square", "softcap"),
        ("cap_inside", "mask"), ("no_score", "alone"), ("infinite", "softcap"), ("corners", "mask"),
    ],
)  # fmt: skip
def test_functions_of_scores(name: str, beside: str, launched: list[int]) -> None:
    make = torch.Generator().manual_seed(0)
    score_mod = scores(torch.randn(2, 40, generator=make))[name]
    inputs = [torch.randn(1, n, heads, 16, generator=make) for n, heads in ((20, 2), (35, 1), (35, 1)) * 2]
    alibi, bias, dout = (torch.randn(*shape, generator=make) for shape in ((2,), (2, 20, 35), (1, 20, 2, 16)))

    def second(dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        q, k, v, *of = (x.to(dtype) for x in inputs)
        given = {"attn_bias": bias.to(dtype), "alibi_slopes": alibi} if beside == "softcap" else {}
        leaves = [x.requires_grad_() for x in (q, k, v, dout.to(dtype))]
        out = flashtile.attention(q, k, v, score_mod=score_mod, backend=backend, **given, **BESIDE[beside])
        first = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
        return list(torch.autograd.grad(first, leaves, of))

    for found, wanted in zip(second(torch.float32, "portable"), second(torch.float64, "cpu"), strict=True):
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert launched
