"""The backward of packed sequences that fit one tile: numbers, what of a neighbour must not arrive, and which calls."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.gpu.described import described_tensors
from flashtile.backends.hopper import BACKEND
from flashtile.backends.portable.short import config
from flashtile.call.arguments import Grads
from flashtile.call.problem import Problem, described
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case, build, judge
from tests.poison import poisoned_memory
from tests.slow import named, slow_but

# Lengths of 0 and 1, one row or key fewer and more than a tile, other numbers of keys than of rows.
SELF = tuple((n, n) for n in (16, 0, 1, 63, 64, 33, 0))
OTHER = ((16, 17), (0, 9), (1, 64), (64, 1), (5, 0), (40, 33))
CASES = (
    Case("varlen", lengths=SELF, head_dim=64, spare=70),
    Case("varlen_causal", lengths=SELF, head_dim=64, causal=True, spare=70, heads=6, kv_heads=2, lse_grad=True),
    Case("varlen_others", lengths=OTHER, head_dim=64, spare=3, lse_grad=True),
    Case("varlen_others_causal", lengths=OTHER, head_dim=128, causal=True, kv_heads=1, scale=-0.1),
    Case("varlen_window", lengths=OTHER, head_dim=72, head_dim_v=40, window=(9, 3), softcap=5.0, spare=130),
    Case("varlen_16", lengths=((16, 16),) * 3 + ((7, 7), (1, 1)), head_dim=96, causal=True, alibi="h", spare=1),
    Case("varlen_chunk", lengths=((30, 30), (17, 32)), head_dim=8, chunk=10, dout="expanded", layout="packed"),
    Case("varlen_transposed", lengths=((20, 20), (12, 3)), head_dim=80, dout="transposed"),
    Case("varlen_128", lengths=((128, 128), (65, 1), (3, 127)), head_dim=128, causal=True, kv_heads=1, spare=5),
)  # fmt: skip


@pytest.mark.parametrize(
    "dtype", slow_but([torch.float16, torch.bfloat16], lambda dtype: dtype is torch.bfloat16), ids=str
)
@pytest.mark.parametrize("case", slow_but(CASES, named("varlen_causal", "varlen_others", "varlen_16")), ids=str)
def test_numbers(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "FEWEST", 1)
    case = Case(**vars(case) | {"batch": len(case.lengths)})
    call = build(case, dtype)
    assert _kernel(call.problem) == "short sequences"
    with on_cpu(zlib.crc32(case.name.encode())):
        judge(call, "hopper")


def _kernel(problem: Problem) -> str:
    return BACKEND.kernel("backward", problem).name


def test_nothing_of_a_neighbour_or_past_the_last_sequence_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN everywhere but in the second sequence, whose gradients have the bits that they have without it."""
    monkeypatch.setattr(config, "FEWEST", 1)
    case = Case("varlen", batch=3, lengths=((5, 9), (11, 7), (16, 2)), spare=20, head_dim=64, heads=2, kv_heads=1)
    found, junk = [], float("nan")
    for is_alone in (False, True):
        call, dout = build(case, torch.bfloat16), torch.ones(52, 2, 64).bfloat16()
        rows, keys = slice(5, 16), slice(9, 16)
        with torch.no_grad():
            for x, own in ((call.leaves["q"], rows), (call.leaves["k"], keys), (call.leaves["v"], keys), (dout, rows)):
                kept = x[own].clone()
                x.fill_(junk if is_alone else 1.0)[own] = kept
        with on_cpu(1), poisoned_memory():
            out, _ = call.run("hopper")
            grads = torch.autograd.grad(out, [call.leaves[name] for name in "qkv"], dout)
        found.append([x[own] for x, own in zip(grads, (rows, keys, keys), strict=True)])
        assert [bool((x[32 if n == 0 else 18 :] == 0).all()) for n, x in enumerate(grads)] == [True] * 3
    assert all(torch.equal(a, b) and a.isfinite().all() and a.any() for a, b in zip(*found, strict=True))


USUAL = {"device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "batch": 66, "seqlen_q": 64,
         "seqlen_k": 40, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 64, "head_dim_v": 64, "varlen": True,
         "needs_grad": True, "band": Band(None, 0)}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"varlen": False}, {"batch": 65}, {"seqlen_k": 129}, {"seqlen_q": 129}, {"head_dim_v": 136}, {"mask": True},
        {"grad_dtype": torch.float32}, {"grads": Grads(k=True, v=True)}, {"dropout_p": 0.1}, {"deterministic": True},
        {"bias_dtype": torch.bfloat16}, {"row_keys": True}, {"sinks": True, "grads": Grads(*[True] * 5)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_which_calls(change: dict[str, Any]) -> None:
    problem = described(**USUAL)
    assert _kernel(problem) == "short sequences" != _kernel(problem.but(**change))
    made = BACKEND.launches(problem, described_tensors(problem), "backward")
    assert [*made] == ["attention_backward_short"] and made["attention_backward_short"].programs == 132
    assert "a program a sequence and key head, 64x64, 4 warps" in BACKEND.describe(problem, "backward")
