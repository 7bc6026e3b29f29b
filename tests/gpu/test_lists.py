"""On a GPU: lists of blocks by every backend, against the oracle in float64; what their functions load, and bits."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import mods
from tests.cases import Case, judge
from tests.mods.calls import with_functions
from tests.poison import poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = [name for name in flashtile.backends() if name != "cpu"]
CASES = (
    Case("mods", batch=2, seqlen_q=700, seqlen_k=900, heads=4, kv_heads=2, head_dim=64),
    Case("mods", batch=1, seqlen_q=1000, seqlen_k=777, heads=2, kv_heads=2, head_dim=128),
    Case("mods", batch=1, seqlen_q=2048, seqlen_k=2048, heads=4, kv_heads=4, head_dim=128),
    Case("varlen_mods", batch=4, lengths=((130, 160), (0, 20), (670, 864), (300, 0)), heads=4, kv_heads=1, head_dim=64,
         spare=9),
    Case("varlen_mods", batch=3, lengths=((530, 560), (1, 200), (670, 300)), heads=2, kv_heads=1, head_dim=128),
    Case("mods", batch=1, seqlen_q=530, seqlen_k=600, heads=2, kv_heads=1, head_dim=256),
    Case("mods", batch=1, seqlen_q=530, seqlen_k=600, heads=2, kv_heads=1, head_dim=96),
    Case("mods", batch=1, seqlen_q=530, seqlen_k=600, heads=2, kv_heads=1, head_dim=192, head_dim_v=128),
    Case("mods", batch=1, seqlen_q=300, seqlen_k=400, heads=2, kv_heads=1, head_dim=320),
    Case("mods_features", batch=1, seqlen_q=530, seqlen_k=800, heads=2, kv_heads=2, head_dim=64, window=(190, 130),
         softcap=3.0, alibi="h", mask="qk", bias="hk", bias_grad=False, sinks=True, lse_grad=True),
)  # fmt: skip
KINDS = (
    (None, "documents", (128, 128)), ("gated", "neighbourhood", (128, 128)), (None, None, (128, 128)),
    (None, "prefix", (256, 128)), ("distance", "window", (128, 384)), (None, "random_pairs", (128, 128)),
    (None, "nothing", (128, 128)), (None, "documents", (64, 64)), (None, "chunks", (48, 16)),
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda n: "-".join(map(str, KINDS[n])))
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n]}-{CASES[n].head_dim}")
def test_lists(number: int, kind: int, backend: str) -> None:
    case, (score, mask, listed) = CASES[number], KINDS[kind]
    dtype, seed = (torch.bfloat16, torch.float16)[(number + kind) % 2], 2 * kind + (case.kv_heads == case.heads)
    call = with_functions(case, score, mask, dtype, seed, frozen=True, listed=listed, device="cuda")
    judge(call if mask != "nothing" else call.wanting(["v"]), backend)


@pytest.mark.parametrize("learned", ["by_distance", "read_twice", "graphormer"])
def test_what_is_captured_learns_beside_lists(learned: str) -> None:
    case = CASES[2]
    judge(with_functions(case, learned, "documents", torch.bfloat16, listed=(128, 128), device="cuda"), None)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_of_a_long_sequence_keep_what_causal_keeps(head_dim: int) -> None:
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 16384, 2, head_dim, device="cuda", dtype=torch.bfloat16, generator=make) for _ in range(4)
    )
    listed = flashtile.create_block_mask(mods.causal, None, None, 16384, 16384, "cuda")
    found = []
    with poisoned_memory():
        for mask in ({"causal": True}, {"block_mask": listed}, {"block_mask": listed}):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flashtile.attention(*leaves, **mask)
            found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for n, (got, again, want) in enumerate(zip(found[1], found[2], found[0], strict=True)):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
        assert n == 1 or torch.equal(got, again)  # dq is a sum in any order
