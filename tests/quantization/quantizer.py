"""Calls of the kernels that quantise, and the comparison with PyTorch's arithmetic; for interpreters and for GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.cpu.rounding import quantized
from flashtile.backends.portable.rounding.launch import QuantizePlan
from flashtile.call.quantized import Choices, Inputs, Scales
from tests.poison import poisoned_memory


@dataclass(frozen=True)
class Case:
    """One call; packed lengths are (queries, keys) of each sequence, with some rows of none at the end."""

    name: str
    head_dim: int = 64
    head_dim_v: int = 64
    lengths: tuple[tuple[int, int], ...] = ((130, 200),)
    packed: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    scales: Scales = "block"
    rotate: bool = True
    smooth_k: bool = True
    heads: tuple[int, int] = (2, 1)
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def choices(self) -> Choices:
        return Choices(self.scales, self.rotate, self.smooth_k, self.interleaved, self.seed)


CASES = (
    Case("blocks", heads=(4, 2)),
    Case("head", 128, 32, scales="head", lengths=((128, 129), (128, 129))),
    Case("tensor", 32, 48, scales="tensor", rotate=False),
    Case("plain", 16, 16, rotate=False, smooth_k=False),
    Case("packed", packed=True, lengths=((1, 300), (0, 20), (128, 128), (140, 0), (2, 1)), seed=9),
    Case("packed head", 32, 16, packed=True, scales="head", lengths=((40, 260), (129, 5)), smooth_k=False),
    Case("packed tensor", 48, 32, packed=True, scales="tensor", lengths=((40, 60), (70, 70))),
    Case("halves", 64, 16, rotary_dim=64, lengths=((90, 200),)),
    Case("some halves", 128, 16, rotary_dim=64, packed=True, lengths=((3, 140), (90, 20)), rotate=False),
    Case("pairs", 96, 16, rotary_dim=48, interleaved=True, scales="head"),
    Case("few pairs", 48, 16, rotary_dim=24, interleaved=False),
    Case("d256", 256, 256, heads=(1, 1)),
    Case("d192", 192, 192, heads=(1, 1), lengths=((100, 100),)),
    Case("more keys than the mean is of", 32, 16, lengths=((40, 1500), (3, 70)), packed=True),
    Case("d112", 112, 80, heads=(1, 1), packed=True, rotary_dim=32, lengths=((100, 100),)),
)


def inputs(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Inputs:
    """Tensors with views' strides, keys with a mean, and numbers of all sizes; on meta their layouts alone."""
    torch.manual_seed(len(case.name))
    with torch.device("meta") if device == "meta" else nullcontext():
        return _inputs(case, dtype, device)


def _inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    (heads_q, heads_kv), bounds = case.heads, None

    def rows(side: int, heads: int, dim: int) -> Tensor:
        each = [lengths[side] for lengths in case.lengths]
        shape = (sum(each) + 5 * case.packed, 2 * heads) if case.packed else (len(each), each[0], 2 * heads)
        x = torch.randn(*shape, dim) * torch.rand(*shape[:-1], 1, 1).square().mul(8)
        return x.to(device, dtype)[..., :heads, :]

    q, k, v = rows(0, heads_q, case.head_dim), rows(1, heads_kv, case.head_dim), rows(1, heads_kv, case.head_dim_v)
    k += 2 * torch.randn(case.head_dim).to(k)
    if case.packed:
        bounds = [torch.tensor([0, *side]).cumsum(0).int().to(device) for side in zip(*case.lengths, strict=True)]
    cos = sin = None
    if case.rotary_dim:
        # Too short for the longest sequence: its last rows are not turned.
        turn = torch.randn(max(max(n for _, n in case.lengths) - 3, 1), case.rotary_dim // 2)
        cos, sin = turn.cos().to(device), turn.sin().to(device)
    return Inputs(q, k, v, *(bounds or (None, None)), cos, sin)


def check(case: Case, given: Inputs, apart: float = 0.0, flips: float = 1e-3) -> None:
    """Runs the kernels and compares with ``plain.quantized``.

    Args:
        case: The call.
        given: Its tensors.
        apart: How far q and k may be from theirs, relative; 0 if only ``flips`` are allowed.
        flips: The share of numbers that may go to the next one of e4m3, since they are between the two.
    """
    with poisoned_memory():
        found = QuantizePlan(given, case.choices)(given)
    want = quantized(given, case.choices)
    for name, number, wanted in zip("qkv", found.dequantized(), want.dequantized(), strict=True):
        a, b = getattr(found, name), getattr(want, name)
        assert a.shape == b.shape and a.is_contiguous() and a.dtype == b.dtype, name
        if apart and name != "v":
            # One key less the mean is 0, or what rounding left of it, whose scale is as small.
            is_zero = (wanted == 0.0).all(-1)
            assert number[is_zero].norm() <= 1e-4 * getattr(given, name).float().norm(), name
            a, b = a[~is_zero].float(), b[~is_zero].float()
            assert (a - b).norm() <= apart * b.norm(), name
        else:
            codes, others = (_in_order(x.view(torch.uint8)) for x in (a, b))
            assert (codes - others).abs().max() <= 1, name
            assert (codes != others).double().mean() <= flips, name
        scale, expected = getattr(found, f"{name}_scale"), getattr(want, f"{name}_scale")
        if apart and name == "k":
            scale = torch.where((expected == 1.0) & (scale < 1e-4), expected, scale)
        torch.testing.assert_close(scale, expected, rtol=max(apart / 4, 1e-6), atol=0)
    assert (found.shift is None) == (want.shift is None)
    if found.shift is not None and want.shift is not None:
        size = want.shift.abs().max().item()
        # Turned rows are multiplied with the rotation as two numbers of 16 bits, which in bfloat16 leave 2^-18 of each.
        is_split = case.rotary_dim > 0 and case.rotate and given.q.dtype == torch.bfloat16
        torch.testing.assert_close(found.shift, want.shift, rtol=1e-5, atol=(2**-18 if is_split else 2e-6) * size)
    assert (found.dtype, found.scales, found.rotated, found.smoothed, found.seed) == (
        want.dtype, case.scales, case.rotate, case.smooth_k, case.seed,
    )  # fmt: skip


def _in_order(codes: Tensor) -> Tensor:
    """Bytes of e4m3 numbers as integers in the order of the numbers; both zeros are 0."""
    codes = codes.int()
    return torch.where(codes < 128, codes, 128 - codes)
