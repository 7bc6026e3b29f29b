"""Users' functions in the Hopper kernels: values and gradients in the emulator, and what the tiles depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import flashtile
from flashtile.backends.gpu.launch import lower
from flashtile.backends.hopper import BACKEND, tensor_maps
from flashtile.backends.hopper.backward import config as backward
from flashtile.backends.hopper.forward import config as forward
from flashtile.call.problem import Problem
from flashtile.ops import dispatch
from tests.backends.hopper.emulated import BACKWARD_TILES, on_cpu
from tests.cases import Case, judge
from tests.mods.calls import indices_are_cut, with_functions
from tests.mods.functions import MASKS, SCORES

DENSE = Case("mods", batch=2, seqlen_q=150, seqlen_k=200, heads=2, kv_heads=1, head_dim=64)
WIDE = Case("mods", batch=1, seqlen_q=140, seqlen_k=200, heads=2, kv_heads=2, head_dim=128, causal=True)
PACKED = Case(
    "varlen_mods", batch=3, lengths=((130, 160), (0, 20), (70, 64)), heads=2, kv_heads=1, head_dim=64, spare=9
)  # fmt: skip
WIDEST = Case("mods", batch=1, seqlen_q=130, seqlen_k=150, heads=1, kv_heads=1, head_dim=256)
FEATURES = Case(
    "mods_features", batch=1, seqlen_q=130, seqlen_k=200, heads=2, kv_heads=2, head_dim=64, window=(90, 30),
    softcap=3.0, alibi="h", mask="qk", bias="hk", bias_grad=False, sinks=True, lse_grad=True,
)  # fmt: skip
BIG = Case("mods", batch=1, seqlen_q=70, seqlen_k=150, heads=1, kv_heads=1, head_dim=320, causal=True)
LONG = Case("mods", batch=2, seqlen_q=300, seqlen_k=400, heads=2, kv_heads=1, head_dim=64)
WIDE_LONG = Case("mods", batch=1, seqlen_q=260, seqlen_k=390, heads=2, kv_heads=2, head_dim=128)
PACKED_LONG = replace(PACKED, lengths=((130, 160), (0, 20), (270, 264), (140, 0)), batch=4)
DROPPING = replace(WIDE_LONG, dropout=0.3)
LISTS = (
    (None, "documents", (128, 128)), ("gated", "neighbourhood", (128, 128)), (None, "prefix", (256, 128)),
    ("distance", "window", (128, 384)), (None, "random_pairs", (128, 128)), (None, None, (128, 128)),
    (None, "nothing", (128, 128)), (None, "heads_differ", (128, 256)), (None, None, (64, 64)),
    ("gated", "documents", (64, 64)), (None, "random_pairs", (64, 128)), (None, None, (128, 64)),
    (None, "heads_differ", (192, 64)),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.one_in(44)
@pytest.mark.parametrize("case", [DENSE, WIDE, PACKED, WIDEST, FEATURES, BIG], ids=lambda c: f"{c}-{c.head_dim}")
@pytest.mark.parametrize("number", range(len(SCORES)), ids=list(SCORES))
def test_score_mods(number: int, case: Case) -> None:
    call = with_functions(case, list(SCORES)[number], None, DTYPES[number % 2], frozen=True)
    with on_cpu(number, num_sms=2):
        judge(call, "hopper")


@pytest.mark.one_in(31)
@pytest.mark.parametrize("case", [DENSE, WIDE, PACKED, WIDEST, FEATURES, BIG], ids=lambda c: f"{c}-{c.head_dim}")
@pytest.mark.parametrize("number", range(len(MASKS)), ids=list(MASKS))
def test_mask_mods(number: int, case: Case) -> None:
    call = with_functions(case, (None, "squared")[number % 2], list(MASKS)[number], DTYPES[number % 2])
    with on_cpu(number, num_sms=2):
        judge(call, "hopper")


@pytest.mark.one_in(17)
@pytest.mark.parametrize("case", [LONG, WIDE_LONG, PACKED_LONG, WIDEST, FEATURES], ids=lambda c: f"{c}-{c.head_dim}")
@pytest.mark.parametrize("number", range(len(LISTS)), ids=lambda n: "-".join(map(str, LISTS[n])))
def test_lists(number: int, case: Case) -> None:
    """Of blocks that are one tile or several; odd seeds list each head's."""
    score, mask, listed = LISTS[number]
    seed = 2 * number + (case.heads == case.kv_heads or number % 2)
    call = with_functions(case, score, mask, DTYPES[number % 2], seed, frozen=True, listed=listed)
    with on_cpu(number, num_sms=2):
        judge(call if mask != "nothing" else call.wanting(["v"]), "hopper")


@pytest.mark.one_in(22)
@pytest.mark.parametrize(
    "case", [LONG, WIDE_LONG, PACKED_LONG, WIDEST, FEATURES, DROPPING], ids=lambda c: f"{c}-{c.head_dim}"
)
@pytest.mark.parametrize(
    "number",
    [n for n in range(len(LISTS)) if LISTS[n][1] and LISTS[n][2][0] % 128 == 0 == LISTS[n][2][1] % 128],
    ids=lambda n: "-".join(map(str, LISTS[n])),
)
def test_lists_with_bits(number: int, case: Case) -> None:
    """Which decide in place of the function, one build for all masks."""
    score, mask, listed = LISTS[number]
    score = None if case.dropout else score
    seed = 2 * number + (case.heads == case.kv_heads)
    call = with_functions(case, score, mask, DTYPES[number % 2], seed, frozen=True, listed=listed, bits=True)
    with on_cpu(number, num_sms=2):
        judge(call if mask != "nothing" else call.wanting(["v"]), "hopper")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["BY_TMA_64", "WIDE_64", "NARROW_64", "THREE_STAGES_128", "BY_TMA_128", "BASE_128"])
def test_tiles_of_lists_with_bits(name: str) -> None:
    case = replace(LONG, head_dim=64 if "64" in name else 128)
    call = with_functions(case, None, "random_pairs", torch.bfloat16, 0, listed=(128, 128), bits=True)
    with on_cpu(3, num_sms=2, backward=BACKWARD_TILES[name]):
        judge(call, "hopper")


def test_bits_decide_and_not_what_has_changed_since() -> None:
    call = with_functions(LONG, None, "documents", torch.bfloat16, 0, listed=(128, 128), bits=True)
    found = []
    with on_cpu(1, num_sms=2):
        for _ in range(2):
            found.append(call.run("hopper")[0])
            for x in call.tensors.operands:
                x.zero_()
    assert torch.equal(*found)
    problem, without = call.problem, with_functions(LONG, None, "prefix", torch.bfloat16, 0, listed=(128, 128)).problem
    for of in (problem, without):
        assert forward.choose(of.but(mask_function=None)).block_n == 128
    assert backward.choose(problem.but(seqlen_q=4096, mask_function=None)) == backward.BY_TMA_64
    assert backward.choose(without.but(seqlen_q=4096)) == backward.WIDE_64


def test_lists_that_tiles_do_not_divide_are_refused() -> None:
    for listed, case, direction, reason in (
        ((32, 128), LONG, "forward", "no multiples of 64"),
        ((128, 96), LONG, "backward", "no multiples of 64"),
        ((128, 128), BIG, "forward", "block lists at head_dim past 256"),
        ((128, 128), replace(LONG, deterministic=True), "backward", "with interval masks, or with block lists"),
        ((128, 128), replace(LONG, heads=4, wanted="q"), "backward", "block lists by query head, of grouped heads"),
    ):
        by_head = case.heads == 4
        call = with_functions(case, None, "heads_differ" if by_head else "causal", torch.float16, 0, listed=listed)
        problem = call.problem.but(device_type="cuda", compute_capability=(9, 0))
        (said,) = dispatch.reasons("hopper", problem, direction)
        assert reason in said
        assert by_head or direction == "forward" or not dispatch.reasons("portable", problem, direction)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["by_distance", "read_twice", "gated", "graphormer"])
@pytest.mark.parametrize("listed", [None, (128, 128)], ids=str)
def test_what_is_captured_has_its_gradient_from_another_backend(listed: tuple[int, int] | None, name: str) -> None:
    call = with_functions(
        replace(WIDE, bias="hk"), name, "documents", torch.bfloat16, listed=listed, bits=listed is not None
    )
    with on_cpu(1, num_sms=2):
        said = dispatch.explain(call.problem)
        assert "backward: hopper: " in said and "; gradient of attn_bias and captured tensors: cpu: " in said
        judge(call, None)


def test_indices_past_the_ends_are_cut() -> None:
    with on_cpu(2, num_sms=2):
        assert indices_are_cut(None, torch.bfloat16)


def test_a_named_backend_computes_all() -> None:
    call = with_functions(WIDE, "by_distance", None, torch.bfloat16)
    with (
        on_cpu(1),
        pytest.raises(flashtile.UnsupportedError, match="no gradients of tensors that a score_mod"),
    ):
        call.run("hopper")


@pytest.mark.parametrize("head_dim", [256, 264])
def test_slopes_of_any_size_are_handed_over(head_dim: int) -> None:
    """Where a warpgroup owns one gradient; in float16 times 2^14 a slope of more than 4 would be infinite."""
    q, k, v = (torch.randn(1, 130, 1, head_dim).bfloat16().requires_grad_() for _ in range(3))

    def steep(score, b, h, q_idx, kv_idx):
        return score * 40.0

    found = {}
    for name in ("hopper", "cpu"):
        with on_cpu(1):
            out = flashtile.attention(q * 0.05, k, v, score_mod=steep, backend=name)
            found[name] = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for got, want in zip(found["hopper"], found["cpu"], strict=True):
        assert (got - want).float().norm() <= 0.02 * want.float().norm()


def _described(score: str | None, mask: str | None, **values: object) -> Problem:
    case = Case("mods", seqlen_q=256, seqlen_k=256, heads=4, kv_heads=2, head_dim=64, causal=True)
    problem = with_functions(case, score, mask, torch.bfloat16, frozen=True).problem
    return problem.but(device_type="cuda", compute_capability=(9, 0), **values)


def test_tiles_follow_from_the_graph() -> None:
    def tiles(*names: str | None, dim: int = 128) -> tuple[int, int]:
        config = forward.choose(_described(*names, head_dim=dim, head_dim_v=dim, seqlen_q=8192, seqlen_k=8192))
        assert config.strip == config.block_m  # heads of a group share no tile
        return config.num_warpgroups, config.block_n

    assert tiles("distance", None) == tiles("by_row_and_key", "documents") == (2, 128)
    assert tiles("distance", None, dim=64) == (2, 128)
    # What is read from a table of distances costs as little as a formula.
    for name in ("by_distance", "buckets"):
        assert tiles(name, None) == tiles(name, None, dim=64) == (2, 128)
    for names in (("gated", None), ("squared", "documents"), ("graphormer", None), (None, "random_pairs")):
        assert tiles(*names) == tiles(*names, dim=64) == (2, 64)
    assert tiles(None, "documents", dim=64) == tiles(None, "chunks", dim=64) == (3, 128)
    assert backward.choose(_described("distance", None)) == backward.NARROW_64
    assert backward.choose(_described(None, "documents")) == backward.WIDE_64
    assert forward.choose(_described("capped", None)).block_n == 64  # a softcap of a sum


def test_new_values_and_lengths_need_no_other_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "num_sms", lambda device: 132)
    keys = set()
    for rows in (640, 900, 1000):
        case = Case("mods", seqlen_q=rows, seqlen_k=rows, heads=2, kv_heads=2, head_dim=64)
        for score, mask in (("by_distance", "prefix"), ("gated", "neighbourhood")):
            call = with_functions(case, score, mask, torch.float16, seed=rows, frozen=True)
            described = call.problem.but(device_type="cuda", compute_capability=(9, 0))
            for direction in ("forward", "backward"):
                for name, launch in BACKEND.launches(described, call.tensors, direction).items():
                    keys.add((score, name, lower(launch)[0]))
    assert len(keys) == len({(score, name) for score, name, _ in keys})
