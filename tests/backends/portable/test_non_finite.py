"""Infinities and NaN: never past a length, to another sequence, batch entry or key head; always to who attends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from flashtile.backends.gpu.trial import trial
from flashtile.backends.portable.config import PortableTiles
from flashtile.call.problem import Tensors
from flashtile.core.masks import Band
from tests.backends.portable import plans
from tests.poison import poisoned_memory
from tests.problems import banded_problem
from tests.slow import slow_but

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

BATCH, ROWS, KEYS, DIM = 2, 31, 33, 16
ENTRY, HEAD, ROW, KEY, COLUMN = 1, 2, 19, 17, 5  # where the bad element stands; query heads 2 and 3 share key head 1
LENGTHS_Q, LENGTHS_K = (9, 0, 31, 5), (6, 4, 33, 7)


@dataclass(frozen=True)
class Setting:
    """A call of 2 sequences, 4 query heads and 2 key heads, and the kernels' tiles."""

    band: Band = field(default_factory=Band)
    mask: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    bias: bool = False
    deterministic: bool = False
    one_loop: bool = False
    tma: bool = False
    apart: bool = False


SETTINGS = {
    "causal": Setting(Band(None, 0)),
    "window": Setting(Band(4, 3), one_loop=True),
    "descriptors": Setting(Band(6, 0), tma=True),
    "one loop, descriptors": Setting(Band(None, 0), tma=True, one_loop=True),
    "mask": Setting(mask=True, apart=True),
    "mask, causal, softcap": Setting(Band(None, 0), mask=True, softcap=2.0),
    "dropout": Setting(Band(None, 0), dropout=0.3),
    "bias": Setting(Band(None, 0), bias=True),
    "bias, repeatable": Setting(Band(None, 0), bias=True, deterministic=True),
}


def _run(setting: Setting, tensors: Tensors, dout: Tensor) -> dict[str, Tensor]:
    problem = banded_problem(
        tensors, setting.band, softcap=setting.softcap, dropout_p=setting.dropout, needs_grad=True,
        bias_grad=setting.bias, deterministic=setting.deterministic,
    )  # fmt: skip
    wide = PortableTiles(16, 16, 4, 1, tma=setting.tma, one_loop=setting.one_loop)
    configs = dict.fromkeys(("forward", "dq", *(("dk", "dv") if setting.apart else ("dkdv",))), wide)
    with trial(**configs, dbias=PortableTiles(16, 16, 4, 1)), poisoned_memory():
        out, lse = plans.forward(problem, tensors)
        grads = plans.backward(problem, tensors, out, lse, dout)
    found = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return found | {name: x for name in ("dbias", "dsinks") if (x := getattr(grads, name)) is not None}


def _dense(setting: Setting) -> tuple[Tensors, Tensor, Tensor]:
    """The tensors, dout, and which (batch, query head, row, key) are kept."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(BATCH, n, h, DIM) for n, h in ((ROWS, 4), (KEYS, 2), (KEYS, 2), (ROWS, 4)))
    mask = torch.rand(BATCH, 4, ROWS, KEYS) > 0.4
    tensors = Tensors(
        q, k, v, attn_mask=mask if setting.mask else None,
        attn_bias=torch.randn(BATCH, 4, 1, KEYS) if setting.bias else None,
        rng_state=torch.tensor([5, 6]) if setting.dropout else None,
    )  # fmt: skip
    keep = setting.band.dense(ROWS, KEYS).expand(BATCH, 4, ROWS, KEYS)
    return tensors, dout, keep & mask if setting.mask else keep


@cache
def _clean(name: str) -> dict[str, Tensor]:
    tensors, dout, _ = _dense(SETTINGS[name])
    return _run(SETTINGS[name], tensors, dout)


# Quick: each setting with two tensors in turns, of which one is k or v.
PLACES = [(name, where) for name in SETTINGS for where in ("q", "k", "v", "dout")]
QUICK = {PLACES[4 * i + j] for i in range(len(SETTINGS)) for j in (i % 2, 2 + i % 2)}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("value", slow_but([torch.nan, torch.inf], (torch.inf).__eq__))
@pytest.mark.parametrize(("name", "where"), slow_but(PLACES, QUICK.__contains__))
def test_who_attends_to_an_element_gets_it_and_no_other_sequence_or_head(name: str, where: str, value: float) -> None:
    setting = SETTINGS[name]
    tensors, dout, keep = _dense(setting)
    changed = (dout if where == "dout" else getattr(tensors, where)).clone()
    changed[(ENTRY, KEY, 1, COLUMN) if where in "kv" else (ENTRY, ROW, HEAD, COLUMN)] = value
    if where == "dout":
        dirty = _run(setting, tensors, changed)
    else:
        dirty = _run(setting, replace(tensors, **{where: changed}), dout)
    for result, got in dirty.items():
        want, other = _clean(name)[result], torch.ones(BATCH, got.shape[1 if result in ("lse", "dbias") else 2]).bool()
        other[ENTRY, other.shape[1] // 2 :] = False  # the query heads of key head 1, or that head itself
        order = (0, 1) if result in ("lse", "dbias") else (0, 2)
        got, want = (x.movedim(order, (0, 1)) for x in (got, want))
        assert torch.isfinite(want).all()
        assert torch.equal(got[other], want[other]), result
    reached = keep[ENTRY, 2:, :, KEY] if where in "kv" else torch.zeros(2, ROWS, dtype=torch.bool)
    if where not in "kv":
        reached[HEAD - 2, ROW] = True
    keys = (keep[ENTRY, 2:] & reached[:, :, None]).any(dim=0).any(dim=0)
    bad = {
        r: ~torch.isfinite(x[ENTRY]).all(-1) if r[0] in "od" else ~torch.isfinite(x[ENTRY]) for r, x in dirty.items()
    }
    if value != torch.inf:  # an infinite score is a probability of 0 or 1
        if where != "dout":
            assert bad["out"][:, 2:].T[reached].all()
        assert bad["dq"][:, 2:].T[reached].all()
        assert bad["dk"][keys, 1].all()
        assert where == "v" or setting.dropout or bad["dv"][keys, 1].all()
    elif where == "v" and not setting.dropout:
        assert bad["out"][:, 2:].T[reached].all()


def _packed(bad: float | None) -> tuple[Tensors, Tensor]:
    """Four sequences and 6 rows past the last; with ``bad`` in all but the rows and keys of the third."""
    torch.manual_seed(0)
    bounds_q, bounds_k = (torch.tensor([0, *n]).cumsum(0) for n in (LENGTHS_Q, LENGTHS_K))
    total_q, total_k = int(bounds_q[-1]) + 6, int(bounds_k[-1]) + 6
    q, k, v, dout = (torch.randn(n, h, 24) for n, h in ((total_q, 4), (total_k, 2), (total_k, 2), (total_q, 4)))
    if bad is not None:
        for x, bounds in ((q, bounds_q), (k, bounds_k), (v, bounds_k), (dout, bounds_q)):
            x[: bounds[2]] = bad
            x[bounds[3] :] = bad
    return Tensors(q, k, v, cu_seqlens_q=bounds_q.int(), cu_seqlens_k=bounds_k.int(), sinks=torch.randn(4)), dout


LOOPS = ({}, {"tma": True}, {"tma": True, "one_loop": True})
PACKED = [(band, loops) for band in (Band(), Band(None, 0), Band(7, 2)) for loops in LOOPS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("band", "loops"), slow_but(PACKED, PACKED[::4].__contains__), ids=str)
def test_nothing_comes_from_other_packed_sequences(band: Band, loops: dict[str, bool]) -> None:
    setting = Setting(band, **loops)
    clean, dirty = (_run(setting, *_packed(bad)) for bad in (None, torch.nan))
    rows, keys = slice(sum(LENGTHS_Q[:2]), sum(LENGTHS_Q[:3])), slice(sum(LENGTHS_K[:2]), sum(LENGTHS_K[:3]))
    for name, part in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
        assert torch.isfinite(clean[name][part]).all()
        assert torch.equal(clean[name][part], dirty[name][part]), name
    assert torch.equal(clean["lse"][:, rows], dirty["lse"][:, rows])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_comes_from_past_the_end(causal: bool, tma: bool) -> None:
    """A dense call on the middle of larger tensors that are NaN elsewhere."""
    torch.manual_seed(0)
    setting = Setting(Band(None, 0) if causal else Band(), tma=tma)
    whole = [torch.full((4, 3, 56, DIM), torch.nan) for _ in range(4)]
    parts = [x[1:3, 1:2, 8 : 8 + n].transpose(1, 2) for x, n in zip(whole, (ROWS, KEYS, KEYS, ROWS), strict=True)]
    for part in parts:
        part.copy_(torch.randn(part.shape))
    q, k, v, dout = parts
    dirty = _run(setting, Tensors(q, k, v), dout)
    clean = _run(setting, Tensors(q.contiguous(), k.contiguous(), v.contiguous()), dout.contiguous())
    for name, want in clean.items():
        assert torch.isfinite(want).all()
        assert torch.equal(dirty[name], want), name


def test_nothing_comes_from_rows_of_no_sequence() -> None:
    torch.manual_seed(0)
    q, dout = torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    sinks = torch.randn(2)
    clean = _run(Setting(), Tensors(q, q, q, sinks=sinks, cu_seqlens_q=bounds, cu_seqlens_k=bounds), dout)
    bad, dout = q.clone(), dout.clone()
    bad[12:], dout[12:] = torch.nan, torch.nan
    dirty = _run(Setting(), Tensors(bad, bad, bad, sinks=sinks, cu_seqlens_q=bounds, cu_seqlens_k=bounds), dout)
    assert torch.isfinite(clean["dsinks"]).all() and torch.equal(dirty["dsinks"], clean["dsinks"])
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(dirty[name][:12], clean[name][:12])
        assert (dirty[name][12:] == 0).all(), name


def test_an_empty_row_is_zero_beside_a_nan() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 20, 1, 16), torch.randn(1, 20, 1, 16), torch.full((1, 20, 1, 16), torch.nan)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[3] = False
    tensors = Tensors(q, k, v, attn_mask=mask)
    out, lse = plans.forward(banded_problem(tensors, Band()), tensors)
    assert (out[0, 3] == 0).all() and lse[0, 0, 3] == -torch.inf and out[0, 4:].isnan().all()
