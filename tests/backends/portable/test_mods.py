"""Printed functions in the portable kernels, under Triton's interpreter: values and gradients."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.api import blocks
from flashtile.backends.portable.backward import operands
from flashtile.backends.portable.lists import kinds
from flashtile.call.functions import Function
from flashtile.mods.block_mask import with_bits
from flashtile.mods.graph import parse
from flashtile.mods.record import lowered
from flashtile.ops.lists import evaluated
from tests.cases import Case, judge
from tests.fuzz.functions import fuzz
from tests.mods import calls
from tests.mods.calls import indices_are_cut, with_functions
from tests.mods.functions import MASKS, SCORES, Sizes

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DENSE = Case("mods", batch=2, seqlen_q=19, seqlen_k=35, heads=2, kv_heads=1)
PACKED = Case("varlen_mods", batch=3, lengths=((13, 21), (1, 1), (20, 18)), heads=2, kv_heads=2, causal=True)
FEATURES = Case(
    "mods_features", batch=2, seqlen_q=19, seqlen_k=35, heads=2, kv_heads=2, window=(12, 3), softcap=3.0, alibi="h",
    mask="qk", bias="hk", sinks=True, dropout=0.2, lse_grad=True,
)  # fmt: skip


@pytest.mark.one_in(34)
@pytest.mark.parametrize("case", [DENSE, PACKED, FEATURES], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str, case: Case) -> None:
    judge(with_functions(case, name, None, torch.float32), "portable")


@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", [DENSE, PACKED, FEATURES], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str, case: Case) -> None:
    judge(with_functions(case, None, name, torch.float32), "portable")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    judge(with_functions(DENSE, "read_twice", "documents", dtype), "portable")


def test_indices_past_the_ends_are_cut() -> None:
    assert indices_are_cut("portable", torch.float32, 16, rows=30)


WAYS = {"by_distance": "diagonals", "bias_turned": "pairs", "by_row_and_key": "rows", "graphormer": "any"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WAYS)
def test_gradients_of_what_is_captured_repeat_bit_for_bit(name: str) -> None:
    case = replace(DENSE, deterministic=True, seqlen_q=10, seqlen_k=18)
    call = with_functions(case, name, "heads_differ", torch.float32)
    assert operands.shares_of(call.problem, call.tensors)[0].way == WAYS[name]
    judge(call, "portable")
    out, _ = call.run("portable")
    leaves = [x for x in call.leaves.values() if x is not call.tensors.q]
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, torch.ones_like(out))))


def test_repeatable_sums_by_place_are_right() -> None:
    """Of magnitudes far apart, in whatever order."""
    call = with_functions(replace(DENSE, deterministic=True), "graphormer", None, torch.float32)
    share = operands.shares_of(call.problem, call.tensors)[0]
    made = {name: allocate() for name, allocate in operands.memory_of(call.problem, call.tensors, share).items()}
    sums, largest = made.values()
    assert (sums.dtype, largest.dtype) == (torch.int64, torch.int32)
    values = torch.randn(sums.numel()).double() * torch.logspace(-9, 9, sums.numel())
    greatest = values.float().abs().view(torch.int32)
    units = torch.exp2((61 - 34 - ((greatest >> 23) - 127)).double())
    sums.copy_((values * units).long())
    largest.copy_(greatest)
    found = operands.gradient_of(call.problem, call.tensors, share, made)
    torch.testing.assert_close(found.flatten().double(), values, rtol=1e-6, atol=0)


def test_what_functions_make_past_the_ends_and_of_dropped_pairs_stays_out() -> None:
    q, k, v = (torch.randn(1, 19, 2, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(19, 19)
    table[:, 5] = torch.nan
    leaf = table.requires_grad_()

    def wild(score, b, h, q_idx, kv_idx):
        return score + leaf[q_idx, kv_idx] + 1.0 / (kv_idx - 7) + torch.log(19.0 - q_idx)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx != 5) & (kv_idx != 7)

    found = {}
    for backend in ("cpu", "portable"):
        out = flashtile.attention(q, k, v, score_mod=wild, mask_mod=mask, backend=backend)
        found[backend] = (out, *torch.autograd.grad(out.sum(), (q, k, v, leaf)))
    for got, want in zip(found["portable"], found["cpu"], strict=True):
        torch.testing.assert_close(got, want)
        assert got.isfinite().all()


def test_numbers_reach_kernels_as_they_are() -> None:
    q, k, v = (torch.randn(1, 19, 1, 16) for _ in range(3))
    for width, factor in ((3, 0.25), (5, 4.0)):

        def mod(score, b, h, q_idx, kv_idx, width=width, factor=factor):
            return score * factor + (q_idx - kv_idx) // width

        got, want = (flashtile.attention(q, k, v, score_mod=mod, backend=name) for name in ("portable", "cpu"))
        torch.testing.assert_close(got, want)


@pytest.mark.long
@pytest.mark.parametrize("shard", range(20))
def test_random_functions(shard: int) -> None:
    assert not fuzz("portable", 3 * shard, 3, print)


def test_few_rows_over_many_keys() -> None:
    """Where a call without functions takes the kernel that splits keys."""
    q, k, v = (torch.randn(1, n, 2, 16) for n in (1, 2100, 2100))

    def mask(b, h, q_idx, kv_idx):
        return kv_idx % 3 == 0

    got, want = (flashtile.attention(q, k, v, mask_mod=mask, backend=name) for name in ("portable", "cpu"))
    torch.testing.assert_close(got, want)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", [DENSE, PACKED, FEATURES], ids=str)
@pytest.mark.parametrize(
    ("score", "mask", "listed"),
    [
        (None, "heads_differ", (16, 32)), ("by_distance", "documents", (32, 16)), ("graphormer", "chunks", (16, 16)),
        ("bias", "window", (48, 16)), ("by_row_and_key", "prefix", (16, 48)), (None, "nothing", (16, 16)),
    ],
)  # fmt: skip
def test_lists(score: str | None, mask: str, listed: tuple[int, int], case: Case) -> None:
    call = with_functions(case, score, mask, torch.float32, seed=1, listed=listed)
    judge(call if mask != "nothing" else call.wanting(["v"]), "portable")


def test_listed_rows_past_all_that_is_stored_of_a_head() -> None:
    """A block of 256 rows, where lse and delta of 19 are stored as 128; after the last head's are sums not yet made."""
    judge(with_functions(replace(DENSE, batch=1), None, "prefix", torch.float32, listed=(256, 16)), "portable")


@pytest.mark.parametrize("size", [(32, 32), (48, 33)], ids=str)
@pytest.mark.parametrize("mask", ["documents", "heads_differ", "prefix"])
def test_the_kernel_of_lists_counts_as_pytorch_does(mask: str, size: tuple[int, int]) -> None:
    function = MASKS[mask](Sizes(2, 2, 90, 75, torch.float32, torch.Generator().manual_seed(1))).function
    read = lowered(function, "mask_mod", "mask", False)
    made = Function(parse(read.text), read.operands, read.numbers, 0)
    given = made, (2, 2), (90, 75), size, (1, -(-90 // size[0])), torch.device("cpu")
    assert torch.equal(kinds(*given), evaluated(*given))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mask", "size"), [("documents", (128, 128)), ("heads_differ", (256, 128)), ("prefix", (128, 384))]
)
def test_the_kernel_of_bits_keeps_what_pytorch_keeps(
    mask: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a limit of bytes, beyond which a call asks the function."""
    function = MASKS[mask](Sizes(2, 3, 290, 390, torch.float32, torch.Generator().manual_seed(1))).function
    plain = flashtile.create_block_mask(function, 2, 3, 290, 390, "cpu", size)
    monkeypatch.setattr(blocks, "_takes_bits", lambda place: True)
    made = flashtile.create_block_mask(function, 2, 3, 290, 390, "cpu", size)
    want = calls.stored_bits(with_bits(plain, functools.partial(calls.store_bits, plain)))
    found = calls.stored_bits(made)
    assert made.has_bits and all(map(torch.equal, found, want))
    assert all(map(torch.equal, made.dense(), plain.dense()))
    monkeypatch.setattr(blocks, "_MOST_BYTES", 4 * sum(x.numel() for x in want))
    assert flashtile.create_block_mask(function, 2, 3, 290, 390, "cpu", size).has_bits
    monkeypatch.setattr(blocks, "_MOST_BYTES", 4 * sum(x.numel() for x in want) - 1)
    assert not flashtile.create_block_mask(function, 2, 3, 290, 390, "cpu", size).has_bits


@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_backends_without_use_for_bits_take_the_lists(backend: str) -> None:
    case = Case("mods", batch=1, seqlen_q=140, seqlen_k=150, heads=2, kv_heads=1)
    judge(with_functions(case, None, "documents", torch.float32, listed=(128, 128), bits=True), backend)
