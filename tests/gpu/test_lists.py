"""On a GPU: lists of blocks by every backend, against the oracle in float64; what their functions load, and bits."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import mods
from flashtile.api import blocks
from flashtile.compat.flex_attention import create_block_mask
from flashtile.mods.block_mask import with_bits
from flashtile.mods.converted import lists_of
from tests.cases import Case, judge
from tests.mods.calls import store_bits, stored_bits, with_functions
from tests.mods.functions import MASKS, Sizes
from tests.poison import poisoned_memory
from tests.selected import OF_HOPPER, OF_PORTABLE, dense_inputs, drawn
from tests.selected import judge as judge_selected

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NEEDS_BITS = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="bits are for Hopper"
)

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
    Case("mods", batch=1, seqlen_q=530, seqlen_k=600, heads=2, kv_heads=1, head_dim=128, dropout=0.3),
)  # fmt: skip
KINDS = (
    (None, "documents", (128, 128)), ("gated", "neighbourhood", (128, 128)), (None, None, (128, 128)),
    (None, "prefix", (256, 128)), ("distance", "window", (128, 384)), (None, "random_pairs", (128, 128)),
    (None, "nothing", (128, 128)), (None, "documents", (64, 64)), (None, "chunks", (48, 16)), (None, None, (64, 64)),
    ("gated", "random_pairs", (64, 128)), (None, None, (128, 64)), (None, "heads_differ", (192, 64)),
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda n: "-".join(map(str, KINDS[n])))
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n]}-{CASES[n].head_dim}")
def test_lists(number: int, kind: int, backend: str) -> None:
    case, (score, mask, listed) = CASES[number], KINDS[kind]
    dtype, seed = (torch.bfloat16, torch.float16)[(number + kind) % 2], 2 * kind + (case.kv_heads == case.heads)
    call = with_functions(case, score, mask, dtype, seed, frozen=True, listed=listed, device="cuda")
    judge(call if mask != "nothing" else call.wanting(["v"]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(150))
def test_random_blocks_that_data_select(seed: int, backend: str) -> None:
    sizes = OF_HOPPER if backend == "hopper" else OF_PORTABLE
    call = drawn(seed, sizes, (torch.float16, torch.bfloat16), 700, (64, 128, 96, 40))
    if backend == "hopper" and not any(n % 128 for n in call.block_size):
        call = replace(call, deterministic=False)  # which these lists refuse
    with poisoned_memory():
        judge_selected(call, "cuda", backend)


@pytest.mark.parametrize("seed", range(20))
def test_random_lists_of_single_rows(seed: int) -> None:
    call = drawn(seed, ((1, 64), (3, 16)), (torch.float16, torch.bfloat16), 300, (64, 128))
    if call.indices.shape[1] not in (1, call.heads[1]):
        call = replace(call, indices=call.indices[:, : call.heads[1]], counts=None)
    judge_selected(
        replace(call, packed=False, lengths=[call.longest] * len(call.lengths), inputs=dense_inputs(call)), "cuda"
    )


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


@NEEDS_BITS
@pytest.mark.parametrize("lengths", [(700, 900), (1000, 777), (129, 3)], ids=str)
@pytest.mark.parametrize("mask", ["documents", "heads_differ", "random_pairs"])
def test_bits_are_what_pytorch_keeps(mask: str, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers of blocks that four does not divide too."""
    make = torch.Generator().manual_seed(1)
    function = MASKS[mask](Sizes(1, 3, *lengths, torch.bfloat16, make, "cuda")).function
    made = flashtile.create_block_mask(function, None, 3, *lengths, "cuda")
    monkeypatch.setattr(blocks, "_MOST_BYTES", 0)
    plain = flashtile.create_block_mask(function, None, 3, *lengths, "cuda")
    assert made.has_bits and not plain.has_bits
    want = with_bits(plain, functools.partial(store_bits, plain))
    assert all(map(torch.equal, stored_bits(made), stored_bits(want)))


@NEEDS_BITS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["neighbourhood", "prefix"])
def test_more_than_the_most_bits_is_left_to_the_function(
    mask: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_MOST_BYTES", 0)
    case = replace(CASES[0], head_dim=head_dim, seqlen_q=1500, seqlen_k=1500)
    call = with_functions(case, None, mask, torch.bfloat16, 0, frozen=True, listed=(128, 128), device="cuda")
    assert not call.problem.has_bits
    judge(call, None)


@NEEDS_BITS
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_is_what_its_function_said(head_dim: int) -> None:
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(1, 600, 2, head_dim, device="cuda", generator=make).half() for _ in range(4))
    ids = torch.arange(600, device="cuda").int() // 70
    made = [flashtile.create_block_mask(mods.documents(ids), None, None, 600, 600)]
    found = []
    for _ in range(2):
        for mask in made:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flashtile.attention(*leaves, block_mask=mask)
            found.append((out, *torch.autograd.grad(out, leaves, grad)[1:]))
        ids.copy_(torch.arange(600, device="cuda").int() // 200)
        made = [made[0], flashtile.create_block_mask(mods.documents(ids), None, None, 600, 600)]
    assert made[0].has_bits and all(map(torch.equal, found[0], found[1]))
    want = flashtile.attention(q, k, v, block_mask=flashtile.masks.documents(ids))
    torch.testing.assert_close(found[2][0].float(), want.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("how", ["capture", "compiled", "compiled graph"])
def test_replays_and_compiled_code_follow_pytorchs_mask(how: str) -> None:
    """Lists and captured tensors that are written in place, and bits only while they hold."""
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 700, 2, 64, device="cuda", generator=make).half() for _ in range(3))
    i, reach = torch.arange(700, device="cuda"), torch.tensor([150], device="cuda")
    mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < reach[0], None, None, 700, 700, "cuda")
    assert lists_of(mask).has_bits == (torch.cuda.get_device_capability() == (9, 0))

    def step() -> torch.Tensor:
        return flashtile.attention(q, k, v, block_mask=mask)

    def listed(counts: torch.Tensor | None, items: torch.Tensor | None) -> torch.Tensor:
        assert counts is not None and items is not None
        found = torch.zeros(6, 6, dtype=torch.bool, device="cuda")
        for row in range(6):
            found[row, items[0, 0, row, : int(counts[0, 0, row])].long()] = True
        return found[i // 128][:, i // 128]

    def want() -> torch.Tensor:
        near = (i[:, None] - i).abs() < reach[0]
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        keep = full | (listed(mask.kv_num_blocks, mask.kv_indices) & near)
        return flashtile.attention(q, k, v, attn_mask=keep)

    run = step
    with torch.no_grad():
        torch.testing.assert_close(step(), want(), rtol=2e-3, atol=2e-3)
        if how == "capture":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()

            def run() -> torch.Tensor:
                graph.replay()
                return out.clone()

        else:
            run = torch.compile(step, mode="reduce-overhead" if how == "compiled graph" else None, fullgraph=True)
        for change in (lambda: None, lambda: None, lambda: reach.sub_(60), lambda: mask.kv_num_blocks.clamp_(max=1)):
            change()
            torch.testing.assert_close(run().clone(), want(), rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(step(), want(), rtol=2e-3, atol=2e-3)
