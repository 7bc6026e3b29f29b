"""The emulation of the kernels' roundings, and the claimed errors: the paper's, over lengths, one key of many."""

from __future__ import annotations

import pytest
import torch

from flashtile import InvalidInputError, attention, quantize
from flashtile_lab.fp8 import errors
from flashtile_lab.fp8.emulation import _added, emulated
from flashtile_lab.fp8.errors import PAPER, Choice, Kind, generated, growth, measure, needle

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("sums", ["float32", "block", "one"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_emulation_is_attention_of_the_numbers_with_rounded_probabilities(causal: bool, sums: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 70, 4, 64), torch.randn(2, 300, 2, 64) + 1, torch.randn(2, 300, 2, 32)
    made = quantize(q, k, v, scales="head" if sums == "one" else "block")
    a, b, c = (x.double() for x in made.dequantized())
    want = attention(a, b, c, causal=causal, softmax_scale=0.2, backend="cpu")
    out = emulated(made, causal=causal, softmax_scale=0.2, sums=sums)
    # Rounded to nearest, numbers of e4m3 are off by 0.0265 on average, but for a row's largest, which is 256.
    assert 0.01 < (out - want).norm() / want.norm() < 0.028
    rounded = emulated(made, causal=causal, softmax_scale=0.2)
    assert (out - rounded).norm() < 1e-3 * want.norm()
    assert sums == "float32" or not torch.equal(out, rounded)


def test_emulation_refuses() -> None:
    x, bounds = torch.randn(20, 1, 16), torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="^given: has packed sequences"):
        emulated(quantize(x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds))
    with pytest.raises(InvalidInputError, match="^sums: is 'one', but the values have scales of blocks"):
        emulated(quantize(x[None], x[None], x[None]), sums="one")


def test_sums_are_as_inexact_as_was_measured_on_a_gpu() -> None:
    # On an H200, products of random numbers as here: 3.1e-3 however many keys if added block by block, of which the
    # roundings of scores are almost all; in one accumulator 3.6e-3 of 8k keys and 7.8e-3 of 64k.
    torch.manual_seed(0)
    n, dim = 8192, 32
    q, k, v = (torch.randn(rows, dim).to(E4M3).float() for rows in (32, n, n))
    probs = (q @ k.T / 64).to(E4M3).float()
    want = probs.double() @ v.double()
    one = _added(torch.zeros(32, dim), probs, v)
    measured = (3.6e-3**2 - 3.1e-3**2) ** 0.5
    assert ((one - want).norm() / want.norm()).item() == pytest.approx(measured, rel=0.2)
    blocks = sum(_added(torch.zeros(32, dim), p, x) for p, x in zip(probs.split(128, -1), v.split(128), strict=True))
    assert (blocks - want).norm() < 2e-4 * want.norm()


def test_normal_numbers() -> None:
    results = measure(*generated("normal", 256, 1024, 2))
    by_name = {each.choice.name: each.relative for each in results}
    assert by_name.pop("float16") < 1e-3
    # Twice 0.0265 of scores, and the same of probabilities and of values: 0.0265 times the root of 4.
    assert len(by_name) == 12 and all(0.050 < x < 0.055 for x in by_name.values())


@pytest.mark.long
def test_each_choice_helps_where_it_should() -> None:
    def of(kind: Kind, *names: str) -> list[float]:
        found = {x.choice.name: x.relative for x in measure(*generated(kind, 256, 2048, 4))}
        return [found[name] for name in names]

    plain, smoothed = of("biased", "block, rotated", "block, rotated, smoothed")
    assert smoothed < 0.055 < 0.07 < plain
    tensor, rotated = of("outliers", "tensor", "block, rotated")
    assert rotated < 0.65 * tensor


@pytest.mark.slow
def test_the_papers_table() -> None:
    results = measure(*generated("outliers", 2048, 8192, 16), PAPER)
    for each in results:
        assert each.choice.published is not None
        ratio = each.rmse / each.choice.published
        # The largest number of a block is exact if its scale makes it e4m3's largest, so that blocks help alone, too;
        # with scales that are larger by a tenth, the next choice, they do not.
        least, most = (0.8, 0.95) if each.choice.name == "blocks, no rotation" else (0.9, 1.1)
        assert least <= ratio <= most, each
    assert next(x.rmse for x in results if x.choice.name == "blocks and rotation") <= 9.1e-3


def test_room_makes_scales_larger() -> None:
    q, k, v = generated("outliers", 128, 256)
    plain, roomy = (errors.quantized_by(Choice("", rotate=False, room=room), q, k, v) for room in (1.0, 1.5))
    torch.testing.assert_close(roomy.k_scale, 1.5 * plain.k_scale)
    assert roomy.q.float().abs().max() == 288 and plain.q.float().abs().max() == 448  # 448 / 1.5 between 288 and 320
    torch.testing.assert_close(roomy.dequantized()[2], v.float(), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("longest", [8192, pytest.param(65536, marks=pytest.mark.slow)])
def test_error_does_not_grow_with_keys(longest: int) -> None:
    (short,), (long,) = growth((512, longest), ("block",))
    assert long == pytest.approx(short, rel=0.1)


def test_needle() -> None:
    def eight_bit(q, k, v):
        return emulated(quantize(q, k, v))

    for attend in (errors.exact, eight_bit):
        assert needle(attend, 16384, queries=16) == 1.0
    # What does not look at the keys finds none, and a key that matters little is not found.
    assert needle(lambda q, k, v: v.mean(1, keepdim=True).expand_as(q), 16384, queries=16) < 0.2
    assert needle(errors.exact, 16384, queries=16, weight=0.001) < 0.7


def test_half_is_float16_attention() -> None:
    q, k, v = generated("normal", 100, 200, 2)
    for causal in (False, True):
        want = errors.exact(q, k, v, causal)
        torch.testing.assert_close(want, attention(q, k, v, causal=causal, backend="cpu"), rtol=0, atol=1e-12)
        out = errors.half(q, k, v, causal)
        assert out.dtype == torch.float16 and 1e-4 < (out - want).norm() / want.norm() < 1e-3
