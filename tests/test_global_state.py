"""PyTorch's process-wide settings: none changes a result, and nothing cached under one is wrong without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import reference
from flashtile.backends.cpu import plan
from flashtile.call.problem import Tensors
from flashtile.compat.bert_padding import pad_input, unpad_input
from flashtile.compat.flash_attn_2 import flash_attn_varlen_func
from flashtile.compat.rotary import apply_rotary_emb
from flashtile.core.masks import Band
from flashtile.nn import MultiheadAttention, RotaryEmbedding
from flashtile.ops import plans
from flashtile_lab.examples import char_gpt
from tests.cases import CASES, Call, build
from tests.problems import banded_problem


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# A tensor on meta has no values and on cuda cannot be made here, so both show a tensor made without a device.
STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device meta": lambda: default_device("meta"),
    "default device cuda": lambda: default_device("cuda"),
    "within a device": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic algorithms": deterministic_algorithms,
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}
NAMES = ("causal", "window", "window_causal", "softcap", "mask_keys", "lse_grad_causal_sinks", "everything",
         "varlen_empty", "varlen_features", "no_keys_sinks")  # fmt: skip
NEAR = [case for case in CASES if case.name in NAMES]


def forget_tiles() -> None:
    for cached in (plan._band_bias, plan._band_tile, plan._band_has_empty_rows):
        cached.cache_clear()


def numbers(call: Call) -> list[Tensor]:
    """out, lse and, where gradients are on, those of every leaf. Dropout is drawn in the call, on q's device."""
    out, lse = call.run("cpu")
    if not torch.is_grad_enabled():
        return [out, lse]
    total = out.double().sum() + torch.where(lse == -torch.inf, 0.0, lse).double().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, list(call.leaves.values()))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_results_are_the_same_within_and_afterwards(name: str, dtype: torch.dtype) -> None:
    calls = [build(case, dtype) for case in NEAR]
    forget_tiles()
    with plans.own_plans():
        with STATES[name]():
            within = [numbers(call) for call in calls]
        afterwards = [numbers(call) for call in calls]
    forget_tiles()
    for call, got, later in zip(calls, within, afterwards, strict=True):
        want = numbers(call)
        for results in (got, later):
            for a, b in zip(results, want, strict=False):  # those without gradients are shorter
                assert a.dtype == b.dtype and torch.equal(a, b), call.case


def test_tensors_cached_in_inference_mode_can_be_saved_for_a_backward() -> None:
    forget_tiles()
    with torch.inference_mode():
        tile, bias = plan._band_tile(Band(5, 3), 0, 7, 0, 9), plan._band_bias(Band(5, 3), 0, 7, 0, 9, torch.float32)
    scores = torch.ones(7, 9, requires_grad=True)
    torch.where(tile, scores * bias.exp(), 0.0).sum().backward()
    assert torch.equal(scores.grad, tile[0, 0].float())


def around() -> list[Tensor]:
    """What surrounds the operators, on tensors that name their device."""
    make = torch.Generator(device="cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device="cpu", dtype=torch.float32)

    x, cu = normal(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32, device="cpu")
    cos, sin = normal(9, 4), normal(9, 4)
    keep = torch.tensor([[True, True, False], [True, True, True]], device="cpu")
    rows, indices, bounds, longest, _ = unpad_input(normal(2, 3, 2, 8), keep)
    mha = MultiheadAttention(16, 2, rotary=True, device="cpu", dtype=torch.float32)
    for parameter in mha.parameters():
        parameter.data = normal(*parameter.shape)
    dense = Tensors(x[None], x[None], x[None])
    return [
        mha(normal(2, 5, 16)),
        RotaryEmbedding(8)(x, 3, cu),
        apply_rotary_emb(x, cos, sin, seqlen_offsets=2, cu_seqlens=cu, max_seqlen=4),
        pad_input(flash_attn_varlen_func(rows, rows, rows, bounds, bounds, longest, longest), indices, 2, 3),
        reference.attention(banded_problem(dense, Band(2, 0)), dense)[0],
        *flashtile.merge_states(x, normal(2, 7), x, normal(2, 7)),
        *char_gpt.batch_of(torch.arange(100, device="cpu"), 12, 3, make),
    ]


@pytest.mark.parametrize("name", ["default device meta", "default dtype float64", "default dtype bfloat16"])
def test_modules_and_helpers_follow_their_tensors(name: str) -> None:
    want = around()
    with STATES[name]():
        got = around()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
