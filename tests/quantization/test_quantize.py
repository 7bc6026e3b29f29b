"""``quantize`` and ``Quantized`` on the CPU: bounds of rounding, blocks, columns, the rotation, and calls over them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import InvalidInputError, Quantized, attention, quantize, reference
from flashtile.call.blocks import BLOCK, ORDER, as_blocks, as_columns, joined, num_blocks, split
from flashtile.call.quantized_call import FLOAT8
from flashtile.call.rotary import apply_rotary
from flashtile.call.rotation import parts, rotate, signs, unrotate
from flashtile.ops import dispatch
from tests.quantization.cases import CASES, WIDE, QuantizedCase, build, exact, judge

KINDS = ("block", "head", "tensor")


def drawn(rows_q: int, rows_k: int, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(rows_q + rows_k)
    q = torch.randn(2, rows_q, 4, head_dim)
    k = torch.randn(2, rows_k, 2, head_dim) + 3 * torch.randn(2, 1, 2, head_dim)
    return [x.to(dtype) for x in (q, k, torch.randn(2, rows_k, 2, 48))]


def angles(rows: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    turn = torch.randn(rows, rotary_dim // 2, dtype=torch.float64)
    return turn.cos(), turn.sin()


def in_float64(q: Tensor, k: Tensor, turned: Any, interleaved: bool, seed: int | None) -> list[Tensor]:
    """q and k as they should be before they are rounded, and the shift."""
    q, k = q.double(), k.double()
    if turned:
        q, k = (apply_rotary(x, *(t[:n] for t in angles_), interleaved=interleaved) for x, angles_, n in (
            (q, [t[k.shape[1] - q.shape[1] :] for t in turned], q.shape[1]), (k, turned, k.shape[1])))  # fmt: skip
    mean = k.mean(1, keepdim=True)
    shift = (q * mean.repeat_interleave(q.shape[2] // k.shape[2], dim=2)).sum(-1).mT
    return [*(x if seed is None else rotate(x, seed) for x in (q, k - mean)), shift]


def check_rounding(found: Tensor, want: Tensor, largest: Tensor) -> None:
    """Numbers are within half a step of e4m3, scaled so that 448 is ``largest``, and a few roundings of float32."""
    unit = largest / 448
    step = torch.ldexp(torch.ones_like(want), torch.frexp(want.abs() / unit).exponent.clamp(min=-5) - 4) * unit
    assert ((found - want).abs() <= step / 2 + 1e-5 * largest).all()


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("interleaved", [None, False, True], ids=["plain", "halves", "pairs"])
@pytest.mark.parametrize("scales", KINDS)
def test_against_float64(head_dim: int, interleaved: bool | None, scales: Any) -> None:
    q, k, v = drawn(150, 300, head_dim)
    turned = None if interleaved is None else angles(300, 32)
    cos, sin = (x.float() for x in turned) if turned else (None, None)
    made = quantize(
        q, k, v, scales=scales, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=bool(interleaved), seed=2
    )
    want_q, want_k, shift = in_float64(q, k, turned, bool(interleaved), 2)
    for found, want, scale in zip(
        made.dequantized(), (want_q, want_k, v.double()), (made.q_scale, made.k_scale, made.v_scale), strict=True
    ):
        parts = want.split(BLOCK, dim=1)
        largest = torch.stack([x.abs().amax((1, 3)) for x in parts], dim=-1)  # (batch, heads, blocks)
        axes = {"block": (), "head": (2,), "tensor": (0, 1, 2)}[scales]
        largest = largest.amax(axes, keepdim=True) if axes else largest
        torch.testing.assert_close(scale.double(), largest / 448, rtol=1e-5, atol=0)
        of_rows = largest.expand(2, want.shape[2], len(parts)).repeat_interleave(BLOCK, dim=-1)[..., : want.shape[1]]
        check_rounding(found.double(), want, of_rows.mT[..., None])
    assert made.shift is not None
    torch.testing.assert_close(made.shift.double(), shift, rtol=1e-5, atol=1e-4)
    assert (made.scales, made.rotated, made.smoothed, made.seed, made.dtype) == (scales, True, True, 2, torch.bfloat16)


@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_attention_is_that_of_the_tensors(rotates: bool, smooth_k: bool) -> None:
    q, k, v = drawn(100, 300)
    made = quantize(q, k, v, rotate=rotates, smooth_k=smooth_k)
    assert (made.shift is None) is not smooth_k
    a, b, c = (x.double() for x in made.dequantized())
    want, want_lse = attention(q.double(), k.double(), v.double(), return_lse=True, backend="cpu")
    out, lse = attention(a, b, c, return_lse=True, backend="cpu")
    if made.shift is not None:
        lse = lse + made.shift * 64**-0.5
    # Three roundings of which each is 0.026 of a number; the means of k are three times the rest.
    assert (out - want).norm() < (0.055 if smooth_k else 0.17) * want.norm()
    assert (lse - want_lse).abs().max() < (0.05 if smooth_k else 0.5)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=4), st.sampled_from(KINDS))
@settings(max_examples=25)
def test_packed_sequences_are_as_if_alone(lengths: list[tuple[int, int]], scales: Any) -> None:
    torch.manual_seed(0)
    bounds_q, bounds_k = (torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True))
    total_q, total_k = int(bounds_q[-1]) + 5, int(bounds_k[-1]) + 3
    q, k, v = torch.randn(total_q, 4, 32), torch.randn(total_k, 2, 32) + 1, torch.randn(total_k, 2, 16)
    cos, sin = (x.float() for x in angles(300, 32))
    options = {"rotary_cos": cos, "rotary_sin": sin, "scales": scales}
    made = quantize(q, k, v, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, **options)
    found = made.dequantized()
    assert (
        made.shift is not None and not made.q[bounds_q[-1] :].float().any() and not made.k[bounds_k[-1] :].float().any()
    )
    for b, (n_q, n_k) in enumerate(lengths):
        rows_q, rows_k = (slice(s[b], s[b + 1]) for s in (bounds_q, bounds_k))
        if n_q > n_k or scales == "tensor":
            continue  # positions before 0 are refused there; a tensor's scale is of all sequences
        alone = quantize(q[None, rows_q], k[None, rows_k], v[None, rows_k], **options)
        assert alone.shift is not None
        torch.testing.assert_close(made.shift[:, rows_q], alone.shift[0], rtol=1e-5, atol=1e-5)
        for one, other, rows in zip(found, alone.dequantized(), (rows_q, rows_k, rows_k), strict=True):
            # The mean of k is summed in another order: a number between two steps may go to the other one.
            apart = (one[rows] - other[0]).abs() > 1e-5
            assert apart.sum() <= 1 + apart.numel() // 1000


def test_rows_before_the_first_key_are_not_turned() -> None:
    q, k = torch.randn(50, 1, 32), torch.randn(20, 1, 32)
    bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (50, 20)]
    cos, sin = (x.float() for x in angles(20, 32))
    made = quantize(
        q, k, k, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], rotate=False, smooth_k=False, rotary_cos=cos,
        rotary_sin=sin,
    )  # fmt: skip
    found = made.dequantized()[0]
    torch.testing.assert_close(found[:30], q[:30], rtol=0.07, atol=0.01)
    torch.testing.assert_close(found[30:], apply_rotary(q[30:], cos, sin), rtol=0.07, atol=0.01)
    assert (found[30:] - q[30:]).abs().max() > 0.5


def test_extreme_numbers() -> None:
    x = torch.zeros(1, 256, 1, 16)
    x[0, 128:, 0] = torch.tensor([1e-42, 3e38])[torch.randint(2, (128, 16))]
    for y in (x, x.clamp(max=1e-39), x * 0):
        made = quantize(y, y, y, rotate=False, smooth_k=False)
        assert made.q_scale[0, 0, 0] == 1 and not made.q[0, :128].float().any()
        assert made.q_scale.isfinite().all() and (made.q_scale > 0).all()
        torch.testing.assert_close(made.dequantized()[0], y, rtol=0.07, atol=1e-39)
    y = x.bfloat16()
    y[0, 3] = torch.nan
    assert quantize(y, y, y).dequantized()[0][0, 3].isnan().all()


@pytest.mark.parametrize(("rows_q", "rows_k"), [(0, 200), (130, 0), (0, 0)])
@pytest.mark.parametrize("scales", KINDS)
def test_no_rows(rows_q: int, rows_k: int, scales: Any) -> None:
    made = quantize(*drawn(rows_q, rows_k), scales=scales)
    assert [x.shape[1] for x in made.dequantized()] == [rows_q, rows_k, rows_k]
    assert all((x > 0).all() for x in (made.q_scale, made.k_scale, made.v_scale))
    assert made.shift is not None and (rows_k or not made.shift.any())


def test_plans_are_of_layouts_and_not_of_values() -> None:
    q, k, v = drawn(64, 64, dtype=torch.float16)
    first = quantize(q, k, v)
    other = quantize(2 * q, 8 * k, 4 * v)
    for name, factor in (("q", 2), ("k", 8), ("v", 4)):
        assert torch.equal(getattr(first, name).float(), getattr(other, name).float())
        assert torch.equal(getattr(first, f"{name}_scale") * factor, getattr(other, f"{name}_scale"))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    again = quantize(*strided)
    assert first.dtype == torch.float16 and again.q.is_contiguous() and torch.equal(again.q.float(), first.q.float())
    assert not torch.equal(quantize(q, k, v, seed=1).q.float(), first.q.float())


@pytest.mark.long
def test_under_compile_and_fake_tensors() -> None:
    q, k, v = drawn(70, 140)

    @torch.compile(fullgraph=True, backend="eager")
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        made = quantize(q, k, v)
        assert made.shift is not None
        return made.q, made.k, made.v, made.q_scale, made.k_scale, made.v_scale, made.shift

    made = quantize(q, k, v)
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "shift")
    for name, found in zip(names, function(q, k, v), strict=True):
        torch.testing.assert_close(found.float(), getattr(made, name).float())
    with FakeTensorMode() as mode:
        fake = quantize(*(mode.from_tensor(x) for x in (q, k, v)))
    assert all(getattr(fake, name).shape == getattr(made, name).shape for name in names)
    assert all(getattr(fake, name).is_contiguous() and getattr(made, name).is_contiguous() for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": "row"}, "scales: is 'row', must be 'block', 'head' or 'tensor'"),
        ({"scales": ["block"]}, "scales: is ['block'], must be"),
        ({"rotate": 1}, "rotate: is 1, must be a Python bool"),
        ({"smooth_k": None}, "smooth_k: is None, must be a Python bool"),
        ({"seed": -1}, "seed: is -1, must be an integer >= 0"),
        ({"q": 3.0}, "q: is of type float, must be a torch.Tensor"),
        ({"q": torch.zeros(2, 50, 3, 64)}, "q: num_heads_q is 3, must be a multiple of k's num_heads_kv 2"),
        ({"v": torch.zeros(2, 50, 2, 40)}, "v: head_dim_v is 40, must be a multiple of 16"),
        ({"v": torch.zeros(2, 50, 2, 272)}, "v: head_dim_v is 272, must be a multiple of 16 and at most 256"),
        ({"v": torch.zeros(2, 50, 2, 48, dtype=torch.float16)}, "v: dtype is torch.float16, but q has torch.float32"),
        ({"max_seqlen_k": 3}, "max_seqlen_k: is given, but goes with cu_seqlens alone"),
        ({"rotary_cos": torch.zeros(50, 16)}, "rotary_sin: is of type NoneType"),
        ({"rotary_cos": torch.zeros(49, 16)}, "rotary_cos: has 49 positions, but k has 50"),
        ({"rotary_cos": torch.zeros(50, 33)}, "rotary_cos: turns 66 features, but q has head_dim 64"),
        ({"rotary_cos": torch.zeros(50, 16).half()}, "rotary_cos: dtype is torch.float16, must be float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(zip("qkv", drawn(50, 50), strict=True)) | change
    cos = arguments.get("rotary_cos")
    if cos is not None and "NoneType" not in message:
        arguments["rotary_sin"] = cos
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        quantize(**arguments)


def test_more_refusals() -> None:
    q, k, v = (x.bfloat16() for x in drawn(60, 50))
    with pytest.raises(InvalidInputError, match="^q: dtype is torch.float64, must be bfloat16, float16 or float32"):
        quantize(q.double(), k.double(), v.double())
    with pytest.raises(InvalidInputError, match="^rotary_cos: is given with 60 queries and 50 keys"):
        quantize(q, k, v, rotary_cos=torch.zeros(50, 8), rotary_sin=torch.zeros(50, 8))
    with pytest.raises(InvalidInputError, match="^cu_seqlens_q: ends with 70, but q has 60 rows"):
        bounds = torch.tensor([0, 70]).int()
        quantize(q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    k.requires_grad_()
    with pytest.raises(InvalidInputError, match="^k: requires grad, but 8-bit tensors have no gradient"):
        quantize(q, k, v)
    with torch.no_grad():
        assert quantize(q, k, v).k.dtype == torch.float8_e4m3fn
    with pytest.raises(InvalidInputError, match="^k: requires grad"):  # also where a plan is there already
        quantize(q, k, v)


F8 = torch.float8_e4m3fn
LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=6)


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@given(LENGTHS, st.integers(0, 200))
@settings(max_examples=60)
def test_blocks_of_packed_rows(lengths: list[int], spare: int) -> None:
    bounds = bounds_of(lengths)
    total = int(bounds[-1]) + spare
    x = torch.arange(1, total + 1)[:, None, None]
    blocks = split(x, bounds)
    assert blocks.shape == (total // BLOCK + len(lengths), BLOCK, 1, 1) == (num_blocks(total, bounds), BLOCK, 1, 1)
    # By the rule itself: sequence b's rows one after another from its first block on, and nothing else anywhere.
    want = torch.zeros(len(blocks) * BLOCK, dtype=torch.long)
    for b, length in enumerate(lengths):
        first = (int(bounds[b]) // BLOCK + b) * BLOCK
        assert not want[first : first + length].any()
        want[first : first + length] = x[bounds[b] : bounds[b] + length, 0, 0]
    assert torch.equal(blocks.flatten(), want)
    back = joined(blocks, bounds, total)
    assert torch.equal(back[: bounds[-1]], x[: bounds[-1]])
    assert not back[bounds[-1] :].any()


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 300])
def test_blocks_of_dense_rows(rows: int) -> None:
    x = torch.randn(2, rows, 3, 16)
    blocks = split(x, None)
    assert blocks.shape == (2, -(-rows // BLOCK), BLOCK, 3, 16)
    assert torch.equal(joined(blocks, None, rows), x)
    assert not blocks.flatten(1, 2)[:, rows:].any()


def test_columns_hold_keys_in_order() -> None:
    blocks = torch.randn(2, 3, BLOCK, 2, 16)
    columns = as_columns(blocks)
    assert columns.shape == (2, 2, 16, 3 * BLOCK)
    for place in (0, 2, 6, 8, 14, 17, 130, 383):
        key = place // 16 * 16 + ORDER[place % 16]
        assert torch.equal(columns[1, 1, :, place], blocks[1, key // BLOCK, key % BLOCK, 1])
    assert torch.equal(as_blocks(columns), blocks)


def drawn_bits(
    lengths_q: list[int], lengths_k: list[int], packed: bool, **other: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """e4m3 q, k and v with head_dims 32 and 48 and groups of 2, and their descales."""
    torch.manual_seed(0)
    rows = [(sum(n),) if packed else (len(n), n[0]) for n in (lengths_q, lengths_k)]
    shapes = ((*rows[0], 4, 32), (*rows[1], 2, 32), (*rows[1], 2, 48))
    return [torch.randn(shape).to(F8) for shape in shapes], [torch.rand(len(lengths_q), 2) + 0.5 for _ in range(3)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_from_fp8_with_descales(packed: bool) -> None:
    lengths_q, lengths_k = ([40, 0, 129], [130, 7, 256]) if packed else ([130, 130], [150, 150])
    tensors, descales = drawn_bits(lengths_q, lengths_k, packed)
    bounds = (bounds_of(lengths_q), bounds_of(lengths_k)) if packed else (None, None)
    made = Quantized.from_fp8(*tensors, *descales, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], dtype=torch.float16)
    assert (made.scales, made.dtype, made.rotated, made.smoothed, made.shift) == (
        "head",
        torch.float16,
        False,
        False,
        None,
    )
    for name, x, descale, found, lengths in zip(
        "qkv", tensors, descales, made.dequantized(), (lengths_q, lengths_k, lengths_k), strict=True
    ):
        by_head = descale.repeat_interleave(x.shape[-2] // 2, dim=1)
        each = by_head.repeat_interleave(torch.tensor(lengths), dim=0) if packed else by_head[:, None]
        assert torch.equal(found, x.float() * each[..., None]), name
    keys = torch.zeros(made.v.shape[-1], dtype=torch.bool)
    for b, length in enumerate(lengths_k if packed else lengths_k[:1]):
        first = (int(bounds[1][b]) // BLOCK + b) * BLOCK if bounds[1] is not None else 0
        keys[[first + j for j in range(BLOCK * 2) if j // 16 * 16 + ORDER[j % 16] < length]] = True
    assert not made.v.float()[..., ~keys].any() and made.v.float()[..., keys].any(-2).all()


def test_from_fp8_without_descales() -> None:
    tensors, descales = drawn_bits([20], [30], False)
    made = Quantized.from_fp8(*tensors, None, descales[1], None)
    q, k, v = made.dequantized()
    assert torch.equal(q, tensors[0].float()) and torch.equal(v, tensors[2].float())
    assert torch.equal(k, tensors[1].float() * descales[1][:, None, :, None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": torch.zeros(2, 30, 2, 32, dtype=torch.float8_e5m2)},
            "k: dtype is torch.float8_e5m2, must be float8_e4m3fn",
        ),
        ({"q": torch.zeros(2, 30, 4, 32)}, "q: dtype is torch.float32, must be float8_e4m3fn"),
        ({"q_descale": torch.ones(2, 4)}, "q_descale: num_heads_kv is 4, but k has 2"),
        ({"v_descale": torch.ones(2)}, "v_descale: has 1 dimensions, must have 2: (batch, num_heads_kv)"),
        ({"k_descale": torch.ones(2, 2, dtype=torch.bfloat16)}, "k_descale: dtype is torch.bfloat16, must be float32"),
        ({"v": torch.zeros(2, 31, 2, 48).to(F8)}, "v: seqlen_k is 31, but k has 30"),
        ({"v": torch.zeros(2, 30, 2, 40).to(F8)}, "v: head_dim_v is 40, must be a multiple of 16 and at most 256"),
        ({"dtype": torch.float32}, "dtype: is torch.float32, must be torch.bfloat16 or torch.float16"),
        ({"max_seqlen_q": 30}, "max_seqlen_q: is given, but goes with cu_seqlens alone"),
        ({"cu_seqlens_q": torch.tensor([0, 30], dtype=torch.int32)}, "q: has 4 dimensions, must have 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_fp8_refuses(change: dict[str, Any], message: str) -> None:
    tensors, _ = drawn_bits([30, 30], [30, 30], False)
    arguments = dict(zip("qkv", tensors, strict=True)) | change
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        Quantized.from_fp8(**arguments)


def test_names_are_public() -> None:
    assert flashtile.Quantized is Quantized and "Quantized" in flashtile.__all__ and "quantize" in flashtile.__all__
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        flashtile.quantise  # noqa: B018


DIMS = [16, 48, 64, 80, 96, 112, 128, 192, 240, 256]


def matrix(dim: int, seed: int) -> Tensor:
    """The matrix by its definition: element (i, j) of a part is -1 to the number of bits that i and j share."""
    blocks = []
    for side in parts(dim):
        shared = [[(i & j).bit_count() for j in range(side)] for i in range(side)]
        blocks.append((-1.0) ** torch.tensor(shared, dtype=torch.float64) * side**-0.5)
    return signs(dim, seed).double()[:, None] * torch.block_diag(*blocks)


@pytest.mark.parametrize("dim", DIMS)
def test_is_the_signed_hadamard_matrix(dim: int) -> None:
    assert sum(parts(dim)) == dim
    x = torch.randn(5, 3, dim, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, 7), x @ matrix(dim, 7), rtol=0, atol=1e-12)
    torch.testing.assert_close(unrotate(rotate(x, 7), 7), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_leaves_scores_as_they_are(dim: int) -> None:
    q, k = torch.randn(2, 40, dim, dtype=torch.float64).unbind()
    torch.testing.assert_close(rotate(q, 3) @ rotate(k, 3).T, q @ k.T, rtol=0, atol=1e-11)
    # Not so with other signs: the test above would see a seed that is not used.
    assert (rotate(q, 3) @ rotate(k, 4).T - q @ k.T).abs().max() > 1


def test_spreads_one_large_feature_over_its_part() -> None:
    x = torch.zeros(96, dtype=torch.float64)
    x[5], x[70] = 1000.0, 8.0
    y = rotate(x)
    torch.testing.assert_close(y[:64].abs(), torch.full((64,), 125.0, dtype=torch.float64))
    torch.testing.assert_close(y[64:].abs(), torch.full((32,), 2**0.5, dtype=torch.float64))


def test_signs_are_fixed_and_balanced() -> None:
    assert signs(16, 0).tolist() == [1, -1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, 1, 1, -1, 1]
    assert torch.equal(signs(64, 0), signs(256, 0)[:64]) and not torch.equal(signs(64, 0), signs(64, 1))
    assert torch.equal(signs(64, 2**32 + 5), signs(64, 5))
    total = sum(signs(256, seed).sum().item() for seed in range(100))
    assert abs(total) < 5 * 25600**0.5


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
