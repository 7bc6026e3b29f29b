"""Lists of blocks of 64 rows or keys in the Hopper kernels, in the emulator, and which tiles they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import flashtile
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.backward import config as backward
from flashtile.backends.hopper.backward import launch
from flashtile.backends.hopper.forward import config as forward
from flashtile.call.arguments import Grads
from flashtile.call.problem import Problem, described
from flashtile.core.masks import Band
from flashtile.masks import selected_blocks
from tests.backends.hopper.emulated import on_cpu
from tests.selected import OF_HOPPER, drawn, judge
from tests.slow import slow_but

SMALL = tuple(size for size in OF_HOPPER if size != (128, 128))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", slow_but(range(40), lambda seed: seed < 6))
def test_random_calls(seed: int) -> None:
    call = drawn(seed, SMALL, (torch.bfloat16, torch.float16), 260, (64, 128, 96, 40))
    with on_cpu(seed, num_sms=2):
        judge(call, backend="hopper")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wanted", ["q", "kv", "k", "v"])
def test_gradients_that_are_not_wanted_have_no_kernels(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[str]] = []
    found = launch.launches

    def noted(*args: Any, **more: Any) -> Any:
        made = found(*args, **more)
        names.append(list(made))
        return made

    monkeypatch.setattr(launch, "launches", noted)
    calls = (drawn(seed, ((64, 64),), (torch.bfloat16,), 200, (64,)) for seed in range(9))
    call = next(each for each in calls if not each.packed)
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", call.inputs, strict=False)]
    with on_cpu(1, num_sms=2):
        compare_with_all(call, leaves, wanted)
    assert ("attention_backward_dq" in names[0]) == ("q" in wanted)
    assert ("attention_backward" in names[0]) == ("k" in wanted or "v" in wanted)


def compare_with_all(call: Any, leaves: list[torch.Tensor], wanted: str) -> None:
    """Some gradients have the bits that they have among all."""
    (rows, keys), batch = call.longest, len(call.lengths)
    mask = selected_blocks(call.indices, call.counts, call.block_size, seqlen_q=rows, seqlen_k=keys)
    got = {}
    for of in (wanted, "qkv"):
        inputs = [x.detach().clone().requires_grad_(name in of) for name, x in zip("qkv", leaves, strict=True)]
        dense = [x.unflatten(0, (batch, -1)) for x in inputs]
        out = flashtile.attention(*dense, block_mask=mask, backend="hopper").flatten(0, 1)  # type: ignore[call-overload]
        need = [x for x in inputs if x.requires_grad]
        got[of] = dict(zip(of, torch.autograd.grad(out, need, call.inputs[3]), strict=True))
    for name in wanted:
        assert torch.equal(got[wanted][name], got["qkv"][name])


def _plain(**changes: Any) -> Problem:
    facts: dict[str, Any] = {"device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16}
    facts |= {"seqlen_q": 8192, "seqlen_k": 8192, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 128}
    facts |= {"listed": (64, 64), "grads": Grads(q=True, k=True, v=True), **changes}
    return described(**{"head_dim_v": facts["head_dim"]} | facts)


def test_tiles_divide_blocks_and_two_programs_share_a_multiprocessor() -> None:
    for dim in (64, 96, 128):
        found = forward.choose(_plain(head_dim=dim))
        assert (found.num_warpgroups, found.programs, found.block_m, found.block_n) == (1, 2, 64, 64)
        assert backward.choose(_plain(head_dim=dim)).alone
    wide = forward.choose(_plain(listed=(128, 64)))
    assert (wide.num_warpgroups, wide.programs, wide.block_n) == (2, 1, 64)
    assert forward.choose(_plain(head_dim=256)).programs == 1
    for other in (
        {"softcap": 3.0}, {"mask": True}, {"alibi": True}, {"dropout_p": 0.1}, {"grad_dtype": torch.float32},
        {"head_dim": 192},
    ):  # fmt: skip
        tiles = backward.choose(_plain(**other))
        assert not tiles.alone and tiles.block_n == 64 and tiles.block_m == 64
    assert backward.choose(_plain(listed=(128, 128))) == backward.choose(_plain(listed=(128, 256)))


def test_what_is_refused() -> None:
    able = BACKEND.capabilities("backward")
    assert able is not None and not able.reasons(_plain(deterministic=True, band=Band(None, 0)))
    assert able.reasons(_plain(deterministic=True, softcap=3.0))
    grouped = _plain(num_heads_kv=2, by_head=True)
    assert not able.reasons(grouped)
    only_q = grouped.but(grads=Grads(q=True))
    assert not able.reasons(only_q) and able.reasons(only_q.but(listed=(128, 128)))
    with pytest.raises(ValueError, match="no registers for dq"):
        replace(backward.ALONE[64], by_gradient=True)
    with pytest.raises(ValueError, match="more shared memory"):
        replace(forward.one_warpgroup(128, 128), stages=3)
    with pytest.raises(ValueError, match="more registers"):
        replace(forward.one_warpgroup(128, 128), registers=240)
