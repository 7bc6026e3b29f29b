"""An infinity or a NaN in a valid element reaches only the rows that attend to it, in gradients too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from flashtile.backends.base import Gradients
from flashtile.backends.cpu import BACKEND as CPU
from flashtile.backends.portable import BACKEND as PORTABLE
from flashtile.backends.portable import tiles
from flashtile.backends.portable.tiles import Config
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

ROW, KEY, COLUMN = 19, 17, 5
NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Setting:
    """What takes keys away from rows, and what stands beside it."""

    band: Band = field(default_factory=Band)
    mask: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    bias: bool = False
    packed: bool = False
    one_loop: bool = False
    tma: bool = False
    apart: bool = False
    empty_rows: bool = False


SETTINGS = {
    "causal": Setting(Band(None, 0)),
    "window": Setting(Band(4, 3), one_loop=True),
    "descriptors": Setting(Band(6, 0), tma=True),
    "mask": Setting(mask=True, apart=True),
    "mask, causal, softcap": Setting(Band(None, 0), mask=True, softcap=2.0),
    "softcap": Setting(Band(5, 2), softcap=2.0),
    "dropout": Setting(Band(None, 0), dropout=0.3),
    "bias": Setting(Band(None, 0), bias=True),
    "packed": Setting(Band(None, 0), packed=True),
    "empty rows": Setting(Band(None, 0), mask=True, empty_rows=True),
}


def _call(setting: Setting) -> tuple[Problem, Tensors, Tensor, Tensor]:
    """A problem, its tensors, dout, and which of (rows, keys) each of the two heads keeps."""
    torch.manual_seed(0)
    rows, keys = 31, 33
    q, k, v, dout = (torch.randn(1, n, h, 16) for n, h in ((rows, 2), (keys, 1), (keys, 1), (rows, 2)))
    mask = torch.rand(1, 2, rows, keys) > 0.4
    if setting.empty_rows:
        mask[:, :, ROW] = False
    tensors = Tensors(
        q, k, v, attn_mask=mask if setting.mask else None,
        attn_bias=torch.randn(1, 2, 1, keys) if setting.bias else None,
        rng_state=torch.tensor([5, 6]) if setting.dropout else None,
    )  # fmt: skip
    keep = setting.band.dense(rows, keys).expand(2, rows, keys)
    if setting.mask:
        keep = keep & mask[0]
    if setting.packed:
        # Two sequences; the poison lies in the second one, whose rows and keys start on no tile.
        bounds = torch.tensor([0, 9, rows], dtype=torch.int32), torch.tensor([0, 6, keys], dtype=torch.int32)
        tensors = replace(tensors, q=q[0], k=k[0], v=v[0], cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])
        keep, dout = torch.zeros(2, rows, keys, dtype=torch.bool), dout[0]
        keep[:, :9, :6] = setting.band.dense(9, 6)
        keep[:, 9:, 6:] = setting.band.dense(rows - 9, keys - 6)
    problem = Problem.build(
        tensors, setting.band, softcap=setting.softcap, dropout_p=setting.dropout, needs_grad=True,
        bias_grad=setting.bias,
    )  # fmt: skip
    return problem, tensors, dout, keep


def _gradients(backend: object, setting: Setting, problem: Problem, tensors: Tensors, dout: Tensor) -> Gradients:
    wide = Config(16, 16, 4, 1, tma=setting.tma, one_loop=setting.one_loop)
    configs = dict.fromkeys(("forward", "dq", *(("dk", "dv") if setting.apart else ("dkdv",))), wide)
    with tiles.override(**configs, dbias=replace(wide, tma=False, one_loop=False)):
        out, lse = backend.forward(problem, tensors)
        return backend.backward(problem, tensors, out, lse, dout, None)


def _poisoned(tensors: Tensors, dout: Tensor, where: str, poison: float) -> tuple[Tensors, Tensor]:
    """The tensors with one bad element of head 1, or of the key head."""
    at = (KEY, 0, COLUMN) if where in "kv" else (ROW, 1, COLUMN)
    changed = (dout if where == "dout" else getattr(tensors, where)).clone()
    (changed if changed.dim() == 3 else changed[0])[at] = poison
    return (tensors, changed) if where == "dout" else (replace(tensors, **{where: changed}), dout)


def _reached(keep: Tensor, where: str) -> dict[str, Tensor]:
    """Which rows of dq, (rows, heads), and which keys of dk and dv, (keys, 1), the element has a part in."""
    if where in "kv":
        rows = keep[:, :, KEY]
    else:
        rows = torch.zeros_like(keep[:, :, 0])
        rows[1, ROW] = keep[1, ROW].any()
    keys = (keep & rows[:, :, None]).any(dim=0).any(dim=0)
    return {"dq": rows.T, "dk": keys[:, None], "dv": keys[:, None] & (where != "v")}


@cache
def _clean(name: str) -> Gradients:
    problem, tensors, dout, _ = _call(SETTINGS[name])
    return _gradients(PORTABLE, SETTINGS[name], problem, tensors, dout)


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def _assert_others_are_spared(name: str, where: str, keep: Tensor, dirty: Gradients) -> None:
    """Gradients in which the poisoned element has no part are what they are without it."""
    reached, num_spared = _reached(keep, where), 0
    for gradient in NAMES:
        got, want = (getattr(x, gradient) for x in (dirty, _clean(name)))
        got, want = (x if x.dim() == 3 else x[0] for x in (got, want))
        spared = ~reached[gradient].expand(got.shape[:2])
        num_spared += int(spared.sum())
        _close(got[spared], want[spared])
    assert num_spared > 0
    if SETTINGS[name].bias:
        spared = ~(keep & reached["dq"].T[:, :, None]).any(dim=1)
        _close(dirty.dbias[0, :, 0][spared], _clean(name).dbias[0, :, 0][spared])


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_nan_reaches_the_gradients_of_those_who_attend(name: str, where: str) -> None:
    setting = SETTINGS[name]
    problem, tensors, dout, keep = _call(setting)
    tensors, dout = _poisoned(tensors, dout, where, torch.nan)
    dirty = _gradients(PORTABLE, setting, problem, tensors, dout)
    _assert_others_are_spared(name, where, keep, dirty)
    exact = _gradients(CPU, setting, problem, tensors, dout)
    for gradient in (*NAMES, "dbias") if setting.bias else NAMES:
        got, want = getattr(dirty, gradient), getattr(exact, gradient)
        # A dropped probability has no part in dv; the CPU backend multiplies it by 0.
        lost = want.isnan() & ~got.isnan()
        assert not lost.any() or (setting.dropout and gradient == "dv"), gradient
        _close(got[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", ["causal", "descriptors", "mask, causal, softcap"])
def test_an_infinity_reaches_no_gradient_of_others(name: str, where: str) -> None:
    setting = SETTINGS[name]
    problem, tensors, dout, keep = _call(setting)
    tensors, dout = _poisoned(tensors, dout, where, torch.inf)
    _assert_others_are_spared(name, where, keep, _gradients(PORTABLE, setting, problem, tensors, dout))


def test_what_no_sequence_owns_reaches_no_sink() -> None:
    torch.manual_seed(0)
    q, dout = torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    tensors = Tensors(q, q, q, sinks=torch.randn(2), cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    problem = Problem.build(tensors, Band(), needs_grad=True)
    setting = Setting()
    clean = _gradients(PORTABLE, setting, problem, tensors, dout)
    dout[12:] = torch.nan
    dirty = _gradients(PORTABLE, setting, problem, tensors, dout)
    assert torch.isfinite(clean.dsinks).all() and torch.equal(dirty.dsinks, clean.dsinks)
    assert torch.equal(dirty.dk, clean.dk) and torch.equal(dirty.dv, clean.dv)
