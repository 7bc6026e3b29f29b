"""Quantized calls and the kernels that quantise, in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile.backends.gpu.trial import trial
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.rounding import launch
from flashtile.call.quantized_call import FLOAT8
from flashtile.ops import dispatch
from tests.fuzz.judged import judge as judge_random
from tests.fuzz.judged import on_cpu
from tests.quantization.cases import CASES, QuantizedCase, build, emulated, judge
from tests.quantization.quantizer import CASES as CASES_ROUNDING
from tests.quantization.quantizer import Case, check, inputs
from tests.slow import one_of_each, slow_but

# Tiles of several sizes, none longer than a block of keys that shares a scale; small ones cost the interpreter more.
TILES = (
    PortableTiles(64, 64, 4, 1),
    PortableTiles(16, 128, 4, 1),
    PortableTiles(32, 16, 4, 1),
    PortableTiles(128, 32, 4, 1, one_loop=True),
)
_QUICK = ("full", "blocks_causal", "window", "softcap", "sinks_shifted", "mixed_scales", "packed_spare", "everything")


@pytest.mark.parametrize("case", one_of_each(CASES), ids=str)
def test_case(case: QuantizedCase) -> None:
    call = build(case)
    assert dispatch.reasons("portable", call.problem, "quantized") == []
    with trial(quantized=TILES[0]):
        judge(call, "portable")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("tiles", "case"),
    slow_but(
        [(tiles, case) for tiles in TILES[1:] for case in CASES],
        lambda pair: pair[1].name in _QUICK[:: 1 + TILES.index(pair[0])],
    ),
    ids=str,
)
def test_tiles(tiles: PortableTiles, case: QuantizedCase) -> None:
    with trial(quantized=tiles):
        judge(build(case), "portable")


@pytest.mark.long
@pytest.mark.parametrize("shard", slow_but(range(15), lambda shard: shard == 0))
def test_random_calls(shard: int) -> None:
    for number in range(shard * 15, shard * 15 + 15):
        with trial(quantized=TILES[number % len(TILES)]):
            judge_random(on_cpu(number, "portable", "quantized"), "portable")


def test_nan_reaches_the_rows_that_see_it_alone() -> None:
    case = QuantizedCase("nan", ((40, 40),), causal=True, heads=1, kv_heads=1)
    call = build(case)
    for name in ("k", "q"):
        x = getattr(call.tensors, name).view(torch.uint8).clone()
        x[0, 20, 0, 3] = 0x7F
        broken = dataclasses.replace(call, tensors=dataclasses.replace(call.tensors, **{name: x.view(FLOAT8)}))
        out, lse = broken.run("portable")
        want, _ = call.run("portable")
        rows = torch.arange(40) >= 20 if name == "k" else torch.arange(40) == 20
        assert out[0, rows].isnan().all() and lse[0, 0, rows].isnan().all()
        assert torch.equal(out[0, ~rows], want[0, ~rows])


def test_probabilities_are_rounded_to_nearest() -> None:
    """One row, two keys: the second's probability is 2^8 p with p between two e4m3 numbers."""
    case = QuantizedCase("two", ((1, 2),), heads=1, kv_heads=1, scale=1.0, scales=("tensor",) * 3, half=True)
    call = build(case)
    t = call.tensors
    one = torch.ones_like(t.q_scale)
    q, k, v = (torch.zeros(x.shape) for x in (t.q, t.k, t.v))
    q[..., 0], v[..., 1] = 1.0, 1.0  # column 1 holds key 1
    for gap in (0.1015625, 0.25, 3.0, 9.0, 11.0):
        k[0, 1, 0, 0] = -gap
        codes = {"q": q.to(FLOAT8), "k": k.to(FLOAT8), "v": v.to(FLOAT8)}
        scales = {"q_scale": one, "k_scale": one, "v_scale": one}
        again = dataclasses.replace(call, tensors=dataclasses.replace(t, **codes, **scales))
        out, lse = again.run("portable")
        probs = (256 * torch.exp(codes["k"][0, 1, 0, 0].float())).to(FLOAT8).float() / 256
        assert torch.equal(out.float(), (probs / (1 + probs)).to(out.dtype).float().expand_as(out))
        torch.testing.assert_close(lse.flatten(), torch.log1p(probs).flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["blocks_causal", "window", "softcap", "packed_blocks", "everything"])
def test_results_are_those_of_the_emulation(name: str) -> None:
    """Bit for bit the same roundings of probabilities, but for those that float32 puts on the other side of a tie."""
    call = build(dataclasses.replace(next(case for case in CASES if case.name == name), half=True))
    with trial(quantized=PortableTiles(32, 64, 4, 1)):
        out, lse = call.run("portable")
    want, want_lse = emulated(call, 64)
    off = (out.double() - want).norm() / want.norm()
    assert off < 5e-4, f"{off:.1e}"
    exists = want_lse != -torch.inf
    assert (lse.double() - want_lse)[exists].abs().mean() < 1e-5


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES_ROUNDING, ids=str)
def test_numbers(case: Case) -> None:
    check(case, inputs(case))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES_ROUNDING, ids=str)
def test_numbers_of_float16(case: Case) -> None:
    # There is no bfloat16, whose products the interpreter takes for those of integers.
    check(case, inputs(case, torch.float16))


def test_more_sequences_than_are_searched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "search_of", lambda batch: 2)
    case = Case("five", 16, 16, ((1, 9), (0, 2), (128, 5), (3, 0), (2, 1)), True, rotate=False, smooth_k=False)
    check(case, inputs(case))
