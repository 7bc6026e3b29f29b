"""``Quantized``: where blocks and columns lie, FlashAttention-3's descales, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, Quantized
from flashtile.call.blocks import BLOCK, ORDER, as_blocks, as_columns, joined, num_blocks, split

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


def drawn(lengths_q: list[int], lengths_k: list[int], packed: bool, **other: Any) -> tuple[list[Tensor], list[Tensor]]:
    """e4m3 q, k and v with head_dims 32 and 48 and groups of 2, and their descales."""
    torch.manual_seed(0)
    rows = [(sum(n),) if packed else (len(n), n[0]) for n in (lengths_q, lengths_k)]
    shapes = ((*rows[0], 4, 32), (*rows[1], 2, 32), (*rows[1], 2, 48))
    return [torch.randn(shape).to(F8) for shape in shapes], [torch.rand(len(lengths_q), 2) + 0.5 for _ in range(3)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_from_fp8_with_descales(packed: bool) -> None:
    lengths_q, lengths_k = ([40, 0, 129], [130, 7, 256]) if packed else ([130, 130], [150, 150])
    tensors, descales = drawn(lengths_q, lengths_k, packed)
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
    tensors, descales = drawn([20], [30], False)
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
    tensors, _ = drawn([30, 30], [30, 30], False)
    arguments = dict(zip("qkv", tensors, strict=True)) | change
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        Quantized.from_fp8(**arguments)


def test_names_are_public() -> None:
    assert flashtile.Quantized is Quantized and "Quantized" in flashtile.__all__ and "quantize" in flashtile.__all__
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        flashtile.quantise  # noqa: B018
