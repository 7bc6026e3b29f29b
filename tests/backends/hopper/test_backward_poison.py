"""A NaN or an infinity reaches the gradients of the rows and keys that attend to it, and no others of their blocks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from flashtile import reference
from flashtile.backends.base import Gradients
from flashtile.backends.hopper import gradients
from flashtile.problem import Problem, Tensors
from tests.backends.hopper.emulated import Emulated, on_cpu
from tests.cases import Call, Case, assert_close, build, results
from tests.emulator.values import listening
from tests.poison import poisoned_memory

NAN, INF = float("nan"), float("inf")
NAMES = ("dq", "dk", "dv", "dsinks")


@dataclasses.dataclass(frozen=True)
class Spot:
    """A case, and the row and the key that poison goes to: of the last head, and the last sequence."""

    case: Case
    row: int
    key: int

    def __str__(self) -> str:
        return self.case.name


SPOTS = (
    Spot(Case("causal", batch=1, seqlen_q=200, seqlen_k=200, heads=2, kv_heads=1, head_dim=64, causal=True), 90, 80),
    Spot(Case("causal_longer_q", batch=2, seqlen_q=200, seqlen_k=130, heads=1, kv_heads=1, head_dim=72, causal=True,
              sinks=True), 65, 60),
    Spot(Case("causal_longer_k", batch=1, seqlen_q=70, seqlen_k=200, heads=1, kv_heads=1, head_dim=128, causal=True),
         20, 140),
    Spot(Case("window", batch=1, seqlen_q=300, seqlen_k=280, heads=2, kv_heads=1, head_dim=40, window=(60, 30),
              sinks=True), 150, 140),
    Spot(Case("window_softcap", batch=1, seqlen_q=200, seqlen_k=200, heads=1, kv_heads=1, head_dim=64, window=(20, 30),
              softcap=5.0), 150, 140),
    Spot(Case("window_left", batch=1, seqlen_q=150, seqlen_k=200, heads=1, kv_heads=1, head_dim=64, window=(50, None),
              scale=-0.1), 70, 90),
    Spot(Case("varlen", batch=3, lengths=((90, 130), (0, 5), (150, 150)), head_dim=64, heads=2, kv_heads=1, causal=True,
              spare=9), 40, 50),
    Spot(Case("varlen_256", batch=2, lengths=((70, 90), (100, 128)), head_dim=200, heads=1, kv_heads=1,
              window=(20, 0)), 40, 50),
)  # fmt: skip
WHERE = ("q", "k", "v", "dout", "dlse")


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """A call, and the gradients of its out and lse."""

    call: Call
    dout: Tensor
    dlse: Tensor


def _inputs(case: Case, deterministic: bool = False) -> Inputs:
    make = torch.Generator().manual_seed(3)
    call = build(case, torch.bfloat16)
    call = dataclasses.replace(call, problem=dataclasses.replace(call.problem, deterministic=deterministic))
    q = call.tensors.q
    lse_shape = call.problem.lse_shape(q)
    return Inputs(
        call, torch.randn(q.shape, generator=make).to(q.dtype), torch.randn(lse_shape, generator=make)
    )  # fmt: skip


def _place(spot: Spot, where: str) -> tuple[int | slice, ...]:
    """Where in a tensor a spot's row or key lies, without its columns."""
    case, at = spot.case, spot.row if where in ("q", "dout", "dlse") else spot.key
    if case.lengths:
        at += sum(pair[where in "kv"] for pair in case.lengths[:-1])
    if where == "dlse":
        return (-1, at) if case.lengths else (-1, -1, at)
    return (at, -1) if case.lengths else (-1, at, -1)


def _changed(inputs: Inputs, where: str, change: Callable[[Tensor], None]) -> Inputs:
    """The inputs after a change of one of their tensors."""
    if where in ("dout", "dlse"):
        changed = getattr(inputs, where).clone()
        change(changed)
        return dataclasses.replace(inputs, **{where: changed})
    changed = getattr(inputs.call.tensors, where).detach().clone()
    change(changed)
    tensors = dataclasses.replace(inputs.call.tensors, **{where: changed})
    call = dataclasses.replace(inputs.call, tensors=tensors, leaves=inputs.call.leaves | {where: changed})
    return dataclasses.replace(inputs, call=call)


def _poisoned(spot: Spot, where: str, junk: float, deterministic: bool = False) -> Inputs:
    def change(x: Tensor) -> None:
        x[_place(spot, where) + (() if where == "dlse" else (5,))] = junk

    return _changed(_inputs(spot.case, deterministic), where, change)


def _all_nan(inputs: Inputs, names: tuple[str, ...]) -> Inputs:
    for name in names:
        inputs = _changed(inputs, name, lambda x: x.fill_(NAN))
    return inputs


def _run(inputs: Inputs, seed: int = 0, num_sms: int = 3) -> dict[str, Tensor]:
    """The backend's gradients, from the reference's forward: what it may not see is then the backward's alone."""
    call = inputs.call
    out, lse = (x.detach() for x in reference.attention(call.problem, call.tensors))
    with on_cpu(seed, num_sms), poisoned_memory():
        grads = gradients.run(
            call.problem, _detached(call), out.to(call.problem.dtype).contiguous(), lse.float().contiguous(),
            inputs.dout, inputs.dlse,
        )  # fmt: skip
    return _named(grads)


def _detached(call: Call) -> Tensors:
    t = call.tensors
    return dataclasses.replace(t, q=t.q.detach(), k=t.k.detach(), v=t.v.detach(),
                               sinks=None if t.sinks is None else t.sinks.detach())  # fmt: skip


def _named(grads: Gradients) -> dict[str, Tensor]:
    return {name: x for name in NAMES if (x := getattr(grads, name)) is not None}


def _exact(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients by definition, every sum over kept pairs alone, so that no masked one can spoil it."""
    call = inputs.call
    p, t = call.problem, _detached(call)
    out, lse = (x.detach().to(dtype) for x in reference.attention(p, t, dtype))
    if not p.varlen:
        return _merged([
            _dense(p, [x[b].to(dtype) for x in (t.q, t.k, t.v, out, inputs.dout)], lse[b], inputs.dlse[b], t.sinks)
            for b in range(p.batch)
        ], torch.stack)  # fmt: skip
    bounds_q, bounds_k = t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist()
    parts = []
    for b in range(p.batch + 1):
        # Behind the last sequence, rows and keys that have nobody.
        rows = slice(bounds_q[b], bounds_q[b + 1] if b < p.batch else None)
        keys = slice(bounds_k[b], bounds_k[b + 1] if b < p.batch else None)
        ours = [x[at].to(dtype) for x, at in zip((t.q, t.k, t.v, out, inputs.dout), (rows, keys, keys, rows, rows),
                                                 strict=True)]  # fmt: skip
        parts.append(_dense(p, ours, lse[:, rows], inputs.dlse[:, rows], t.sinks, b < p.batch))
    return _merged(parts, torch.cat)


def _merged(parts: list[dict[str, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    merged = {name: join([part[name] for part in parts]) for name in NAMES[:3]}
    if "dsinks" in parts[0]:
        merged["dsinks"] = sum(part["dsinks"] for part in parts)
    return merged


def _dense(
    p: Problem, ours: list[Tensor], lse: Tensor, dlse: Tensor, sinks: Tensor | None, is_sequence: bool = True
) -> dict[str, Tensor]:
    """The gradients of one sequence, from its q, k, v, out and dout, ``(rows or keys, heads, head_dim)``."""
    q, k, v, out, dout = (x.transpose(0, 1) for x in ours)
    k, v = (x.repeat_interleave(p.group_size, dim=0) for x in (k, v))
    keep = p.band.dense(q.shape[1], k.shape[1])[None] & is_sequence
    s, derivative = q @ k.mT * p.softmax_scale, 1.0
    if p.softcap > 0:
        s = p.softcap * torch.tanh(s / p.softcap)
        derivative = 1 - (s / p.softcap) ** 2
    is_empty = lse == -INF
    probs = torch.where(keep & ~is_empty[..., None], torch.exp(s - lse[..., None]), 0)
    delta = torch.where(is_empty, 0, (out * dout).sum(-1) - dlse.to(out.dtype))
    ds = torch.where(keep, probs * (dout @ v.mT - delta[..., None]) * derivative, 0)

    def total(weights: Tensor, x: Tensor, kept: Tensor) -> Tensor:
        """``weights @ x`` over what is kept: [heads, m, n] and [heads, n, columns]."""
        finite = torch.isfinite(x)
        result = weights @ torch.where(finite, x, 0)
        return torch.where(kept.to(x.dtype).expand_as(weights) @ (~finite).to(x.dtype) > 0, NAN, result)

    dq = total(ds, k, keep) * p.softmax_scale
    dk, dv = total(ds.mT, q, keep.mT) * p.softmax_scale, total(probs.mT, dout, keep.mT)
    dk, dv = (x.unflatten(0, (p.num_heads_kv, p.group_size)).sum(1) for x in (dk, dv))
    grads = {name: x.transpose(0, 1) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    if sinks is not None:
        weight = torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(is_empty, INF, lse))
        grads["dsinks"] = -(weight * delta).sum(-1)
    return grads


def _check(inputs: Inputs, got: dict[str, Tensor]) -> None:
    """The rule for what poison has no part in; for the rest, that it is NaN or infinite."""
    exact, plain = _exact(inputs, torch.float64), _exact(inputs, inputs.call.problem.dtype)
    assert got.keys() == exact.keys()
    for name, x in got.items():
        want, low = exact[name], plain[name]
        known = want.isfinite()
        assert torch.equal(x.isfinite(), known), f"{name}: {(x.isfinite() != known).sum()} of {x.numel()} differ"
        low = torch.where(low.isfinite(), low.double(), want)
        assert_close(name, x[known], want[known], low[known], inputs.call.case.magnitude)


@pytest.mark.parametrize("spot", SPOTS, ids=str)
def test_the_definition_is_the_references(spot: Spot) -> None:
    """Where nothing is poisoned: what stands behind a mask spoils the reference's gradients, as it must not here."""
    inputs = _inputs(spot.case)
    upcast = inputs.call.upcast()
    auto = results(upcast, *reference.attention(upcast.problem, upcast.tensors), inputs.dout, inputs.dlse)
    for name, want in _exact(inputs, torch.float64).items():
        torch.testing.assert_close(want, auto.values[name])


@pytest.mark.parametrize("junk", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("spot", SPOTS, ids=str)
def test_poison_reaches_those_who_attend_to_it(spot: Spot, where: str, junk: float) -> None:
    inputs = _poisoned(spot, where, junk)
    _check(inputs, _run(inputs))


@pytest.mark.parametrize("names", [("dout",), ("k",), ("q", "k", "v", "dout")], ids=str)
@pytest.mark.parametrize("spot", [SPOTS[1], SPOTS[3], SPOTS[6]], ids=str)
def test_where_all_is_poison_rows_and_keys_that_have_nobody_keep_zeros(spot: Spot, names: tuple[str, ...]) -> None:
    inputs = _all_nan(_inputs(spot.case), names)
    _check(inputs, _run(inputs))


def _same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["q", "k", "dout"])
@pytest.mark.parametrize("spot", [SPOTS[0], SPOTS[7]], ids=str)
def test_deterministic_bits_are_so_where_something_is_mended(spot: Spot, where: str) -> None:
    inputs = _poisoned(spot, where, NAN, deterministic=True)
    first = _run(inputs, 0, 1)
    for seed, num_sms in ((1, 3), (2, 4)):
        again = _run(inputs, seed, num_sms)
        for name, x in first.items():
            _same(again[name], x)


def test_what_poison_is_far_from_keeps_its_bits() -> None:
    """Row 150 and key 140 are poisoned, in one head of two: row blocks have 64 rows here and tiles 128 keys."""
    case = Case("causal", batch=1, seqlen_q=400, seqlen_k=400, heads=2, kv_heads=2, head_dim=128, causal=True)
    spot = Spot(case, 150, 140)
    clean = _run(_inputs(case, deterministic=True))
    for where, spared in {
        # What may change besides what must: gradients that share a tile with the poison, behind a mask.
        "q": {"dq": (slice(0, 150), slice(151, 400)), "dk": (slice(256, 400),), "dv": (slice(151, 400),)},
        "dout": {"dq": (slice(0, 150), slice(151, 400)), "dk": (slice(151, 400),), "dv": (slice(256, 400),)},
        "k": {"dq": (slice(0, 128),), "dk": (), "dv": ()},
    }.items():
        dirty = _run(_poisoned(spot, where, NAN, deterministic=True))
        for name, parts in spared.items():
            _same(dirty[name][:, :, 0], clean[name][:, :, 0])
            for part in parts:
                _same(dirty[name][:, part], clean[name][:, part])


@pytest.mark.parametrize("where", ["q", "k", "dout"])
def test_a_sequence_has_the_same_gradients_alone_and_among_others(where: str) -> None:
    lengths = ((90, 130), (110, 120))
    whole = Spot(Case("varlen", batch=2, lengths=lengths, head_dim=64, causal=True), 50, 60)
    inputs = _poisoned(whole, where, NAN, deterministic=True)
    together = _run(inputs)
    alone = _inputs(Case("varlen", batch=1, lengths=lengths[1:], head_dim=64, causal=True), deterministic=True)
    t = inputs.call.tensors
    for name, x in {"q": t.q[90:], "k": t.k[130:], "v": t.v[130:], "dout": inputs.dout[90:],
                    "dlse": inputs.dlse[:, 90:]}.items():  # fmt: skip
        alone = _changed(alone, name, lambda own, x=x: own.copy_(x.detach()))
    for name, x in _run(alone).items():
        _same(x, together[name][90 if name == "dq" else 130 :])


class _Counted(Emulated):
    """An emulated kernel that counts its launches, and what its operations touch."""

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel, 0)
        self.launches = 0
        self.elements: Counter[str] = Counter()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Emulated]:
        launch = super().__getitem__(grid)

        def run(*arguments: Any, **options: Any) -> Emulated:
            self.launches += 1
            with listening(lambda kind, elements: self.elements.update({kind: elements})):
                return launch(*arguments, **options)

        return run


def _counted(inputs: Inputs, num_sms: int = 3) -> _Counted:
    """What the mending kernel does for a call."""
    counted = _Counted(gradients.mend_gradients)
    call = inputs.call
    out, lse = (x.detach() for x in reference.attention(call.problem, call.tensors))
    with on_cpu(0, num_sms), mock.patch.object(gradients, "mend_gradients", counted):
        gradients.run(call.problem, _detached(call), out.to(call.problem.dtype), lse.float(), inputs.dout, inputs.dlse)
    return counted


def test_where_nothing_is_poisoned_a_program_reads_one_number() -> None:
    full = Case("full", batch=1, seqlen_q=150, seqlen_k=150, head_dim=64)
    assert _counted(_inputs(full)).launches == 0
    clean = _counted(_inputs(dataclasses.replace(full, causal=True)))
    assert clean.launches == 1
    assert clean.elements["load"] == 3 and clean.elements["product"] == 0


@pytest.mark.parametrize(
    "names", [("dout",), ("q", "k", "v", "dout"), ("v",), ("k",)], ids="+".join
)  # fmt: skip
def test_poison_everywhere_costs_no_second_backward(names: tuple[str, ...]) -> None:
    """Work grows with the blocks, not with their pairs: what is NaN by right is found to be so in a step or two."""
    products = []
    for seqlen in (256, 512):
        case = Case("causal", batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=1, kv_heads=1, head_dim=64, causal=True)
        products.append(_counted(_all_nan(_inputs(case), names)).elements["product"])
    assert products[1] <= 2.2 * products[0]
