"""Device functions of cached calls, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flashtile.backends.gpu.decode import append, call, eight_bit, work
from flashtile.backends.gpu.decode.config import SplitRule
from tests.backends.decode.rule import cut


@triton.jit
def _cut(keys_ptr, rows_ptr, out_ptr, heads, BLOCK_N: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
         C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, LONG: tl.constexpr, F: tl.constexpr,
         N: tl.constexpr):  # fmt: skip
    n = tl.arange(0, N)
    keys, rows = tl.load(keys_ptr + n), tl.load(rows_ptr + n)
    splits, chunk = work.cut(keys, rows, (rows + 63) // 64, heads, BLOCK_N, call.Splitting(A, B, C, D, E, 1, LONG, F))
    tl.store(out_ptr + n, splits)
    tl.store(out_ptr + N + n, chunk)


def test_cut_is_the_rule_of_the_host() -> None:
    torch.manual_seed(0)
    for rule in (
        SplitRule(),
        SplitRule(fewest_of_long=256),
        SplitRule(264, 128, 1024, 16, 2000),
        SplitRule(8, 16, 64, 8, long_keys=5000),
    ):
        for heads, block_n in ((1, 64), (8, 32), (300, 128)):
            keys = torch.randint(0, 200_000, (64,), dtype=torch.int32)
            keys[:8] = torch.tensor([0, 1, 15, 16, 17, 63, 64, 65])
            rows = torch.randint(1, 600, (64,), dtype=torch.int32)
            out = torch.zeros(2, 64, dtype=torch.int32)
            _cut[(1,)](
                keys, rows, out, heads, block_n, rule.programs, rule.fewest_keys, rule.most_keys, rule.most_splits,
                rule.most_slots, rule.long_keys, rule.fewest_of_long, 64,
            )  # fmt: skip
            want = [
                cut(rule, k, r, -(-r // 64), heads, block_n) for k, r in zip(keys.tolist(), rows.tolist(), strict=True)
            ]
            assert [tuple(pair) for pair in out.T.tolist()] == want


@triton.jit
def _encode(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, append.e4m3_bits(tl.load(x_ptr + n)))


@triton.jit
def _encode_e5m2(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, append.e5m2_bits(tl.load(x_ptr + n)))


@triton.jit
def _decode(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, eight_bit.decoded(tl.load(x_ptr + n).to(tl.uint16)))


def _launched(function: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    function[(1,)](x, out, x.numel())
    return out


def test_every_e4m3_number_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = _launched(_decode, codes, torch.zeros(256, dtype=torch.float16)).float() * 256
    torch.testing.assert_close(got, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("encode", "kind"), [(_encode, torch.float8_e4m3fn), (_encode_e5m2, torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_numbers_are_rounded_to_8_bits_as_pytorch_rounds_them(encode: Any, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    most = torch.finfo(kind).max
    codes = torch.arange(0, 128, dtype=torch.int32).to(torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()]
    middle = (codes[1:] + codes[:-1]) / 2
    near = torch.cat(
        [codes, middle, torch.nextafter(middle, torch.tensor(0.0)), middle * 1.0001, torch.rand(2000) * 1.1 * most]
    )
    x = torch.cat([near, -near, torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 1e-30, 1.04 * most])])
    x = torch.cat([x, torch.randn(8192 - len(x)) * 10.0 ** torch.randint(-6, 5, (8192 - len(x),))])
    got = _launched(encode, x, torch.zeros(8192, dtype=torch.uint8)).view(kind).float()
    torch.testing.assert_close(got, x.clamp(-most, most).to(kind).float(), rtol=0, atol=0)
    assert _launched(encode, torch.full((16,), torch.nan), torch.zeros(16, dtype=torch.uint8)).tolist() == [0x7F] * 16


@triton.jit
def _scaled(x_ptr, half_ptr, power_ptr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    q = tl.load(x_ptr + at)
    power = eight_bit.power_of_rows(q, q)
    tl.store(half_ptr + at, eight_bit.scaled(q, power))
    tl.store(power_ptr + tl.arange(0, M), power)


def test_rows_become_float16_without_loss() -> None:
    torch.manual_seed(0)
    rows = torch.randn(16, 32).bfloat16().float() * 10.0 ** torch.arange(-8, 8)[:, None]
    rows = rows.bfloat16().float()
    rows[3] = 0
    half, power = torch.zeros(16, 32, dtype=torch.float16), torch.zeros(16)
    _scaled[(1,)](rows, half, power, 16, 32)
    back, top = half.double() * power.double()[:, None], rows.abs().amax(1, keepdim=True).double()
    exact = rows.double().abs() >= top * 2.0**-14
    assert torch.equal(back[exact], rows.double()[exact])
    assert ((back - rows).abs() <= top * 2.0**-24).all()
