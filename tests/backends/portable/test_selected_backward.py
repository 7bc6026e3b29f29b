"""The backward over selected single keys in Triton's interpreter, against autograd of the gathered formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashtile.backends.portable import selected_backward
from flashtile.backends.portable.selected_backward import gradients
from flashtile.call.selected import SelectedInputs

ROWS, MOST, SCALE = 40, 33, 0.2
COUNTS = (0, 33, 1, 5, 20)


class Given(NamedTuple):
    """A call, and the gradient of its results; v None for k's first columns."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    slots: Tensor
    counts: Tensor
    dout: Tensor
    dlse: Tensor | None
    sinks: Tensor | None
    softcap: float

    def to(self, dtype: torch.dtype) -> Given:
        """In another dtype."""
        cast = {n: x.to(dtype) for n, x in self._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()}
        return self._replace(**cast)


def make(
    heads: tuple[int, int] = (4, 1), dims: tuple[int, int] = (16, 16), *, counts: Sequence[int] = COUNTS,
    is_part: bool = False, dlse: bool = False, sinks: bool = False, softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Given:  # fmt: skip
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    n = len(counts)
    # Row 0 is in no list; the places past the end of one name rows that there are not.
    lists = torch.stack([torch.randperm(ROWS - 1, generator=random)[:MOST] + 1 for _ in counts])
    slots = torch.where(torch.arange(MOST) < torch.tensor(counts)[:, None], lists, 2**30)
    return Given(
        normal(n, heads[0], dims[0]), normal(ROWS, heads[1], dims[0]),
        None if is_part else normal(ROWS, heads[1], dims[1]), slots.int(), torch.tensor(counts, dtype=torch.int32),
        normal(n, heads[0], dims[1]), normal(n, heads[0]).float() if dlse else None,
        normal(heads[0]).float() if sinks else None, softcap,
    )  # fmt: skip


def attend(t: Given, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The output and lse of the gathered formula, in the leaves' dtype."""
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    inside = torch.arange(MOST) < t.counts[:, None]
    at, group = torch.where(inside, t.slots, 0).long(), q.shape[1] // k.shape[1]
    keys, values = (x[at].masked_fill(~inside[..., None, None], 0).repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("nhd,njhd->nhj", q, keys) * SCALE
    if t.softcap:
        scores = t.softcap * torch.tanh(scores / t.softcap)
    scores = scores.masked_fill(~inside[:, None], -torch.inf)
    if "sinks" in leaves:
        scores = torch.cat([scores, leaves["sinks"][:, None].expand(len(q), -1, 1)], -1)
    empty = (scores == -torch.inf).all(-1)
    lse = torch.logsumexp(scores.masked_fill(empty[..., None], 0.0), -1)
    probs = torch.exp(scores - lse[..., None])[..., :MOST]
    return torch.einsum("nhj,njhd->nhd", probs, values), lse.masked_fill(empty, -torch.inf)


def leaves_of(t: Given) -> dict[str, Tensor]:
    v = t.k[..., : t.dout.shape[-1]] if t.v is None else t.v
    found = {"q": t.q, "k": t.k, "v": v} | ({} if t.sinks is None else {"sinks": t.sinks})
    return {name: x.detach().clone().requires_grad_() for name, x in found.items()}


def expected(t: Given, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, lse and the gradients, by PyTorch."""
    t = t.to(dtype)
    leaves = leaves_of(t)
    out, lse = attend(t, leaves)
    total = (out * t.dout).sum()
    if t.dlse is not None:
        total = total + (lse * t.dlse).masked_fill(lse == -torch.inf, 0.0).sum()
    return out.detach(), lse.detach(), list(torch.autograd.grad(total, list(leaves.values())))


def found(t: Given, **options: Any) -> list[Tensor | None]:
    out, lse, _ = expected(t)
    v = t.k[..., : t.dout.shape[-1]] if t.v is None else t.v
    inputs = SelectedInputs(t.q, t.k, v, out.to(t.q.dtype), lse.float(), t.dout, t.dlse, t.slots, t.counts)
    return list(gradients(inputs, SCALE, t.softcap, t.sinks, **options))


def judge(given: list[Tensor | None], wanted: list[Tensor], most: float = 1e-5) -> None:
    for x, y in zip([x for x in given if x is not None], wanted, strict=True):
        assert (x.double() - y).abs().max() <= most * y.abs().max()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1), (16, 2), (64, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (64, 16), (80, 48), (24, 100)])
def test_sizes(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    t = make(heads, dims, counts=COUNTS[:3])
    judge(found(t), expected(t)[2])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("beside", ["alone", "dlse", "softcap", "sinks", "all"])
def test_features(beside: str, deterministic: bool, is_part: bool) -> None:
    has = {name: beside in (name, "all") for name in ("dlse", "softcap", "sinks")}
    softcap = 1.5 if has["softcap"] else 0.0
    t = make((6, 2), (64, 64), is_part=is_part, dlse=has["dlse"], sinks=has["sinks"], softcap=softcap)
    judge(found(t, deterministic=deterministic), expected(t)[2])


@pytest.mark.parametrize("deterministic", [False, True])
def test_latent_rows(deterministic: bool) -> None:
    t = make((20, 1), (576, 512), counts=(0, 5, 20), is_part=True, sinks=True)
    judge(found(t, deterministic=deterministic), expected(t)[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_err_no_more_than_twice_as_pytorch(dtype: torch.dtype) -> None:
    t = make((16, 1), (64, 64), is_part=True, dtype=dtype)
    wanted = expected(t)[2]
    for x, y, plain in zip(found(t)[:3], wanted, expected(t, dtype)[2], strict=True):
        assert x is not None and x.dtype == dtype
        assert (x.double() - y).abs().max() <= 2 * (plain.double() - y).abs().max()


def test_a_key_of_every_query_and_a_key_twice() -> None:
    t = make((4, 1), counts=(5, 5, 5, 20))
    t.slots[:, 1] = 7
    t.slots[3, 4:9] = 7
    for deterministic in (False, True):
        judge(found(t, deterministic=deterministic), expected(t)[2])


def test_rows_in_no_list_stay_out() -> None:
    t = make((4, 1), (16, 16), sinks=True)
    wanted = expected(t)[2]
    out, lse, _ = expected(t)
    assert t.v is not None
    t.k[0], t.v[0] = torch.nan, torch.inf
    inputs = SelectedInputs(t.q, t.k, t.v, out.float(), lse.float(), t.dout, None, t.slots, t.counts)
    for deterministic in (False, True):
        given = gradients(inputs, SCALE, 0.0, t.sinks, deterministic)
        judge(list(given), wanted)
        assert (given[1][0] == 0).all()


def test_strides() -> None:
    """Rows of wider tensors, heads before rows, an expanded dout, lse by heads."""
    t = make((4, 2), (64, 32), dlse=True)
    assert t.v is not None and t.dlse is not None
    t = t._replace(dout=torch.ones_like(t.dout))
    out, lse, wanted = expected(t)
    wide = torch.full((ROWS, 2, 112), torch.nan)
    wide[..., :64], wide[..., 72:104] = t.k, t.v
    inputs = SelectedInputs(
        t.q.transpose(0, 1).contiguous().transpose(0, 1), wide[..., :64], wide[..., 72:104],
        out.float().transpose(0, 1).contiguous().transpose(0, 1), lse.float().t().contiguous().t(),
        torch.ones(()).expand(t.dout.shape), t.dlse.t().contiguous().t(), t.slots, t.counts,
    )  # fmt: skip
    judge(list(gradients(inputs, SCALE)), wanted)


def test_deterministic_has_the_same_bits_each_run_and_by_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    t = make((20, 1), (64, 64), is_part=True, counts=(5, 0, 20, 33, 12, 33))
    first, again = (found(t, deterministic=True) for _ in range(2))
    judge(first, expected(t)[2])
    # Two queries at a time.
    monkeypatch.setattr(selected_backward, "_SHARES", 2 * MOST * 2 * 64 * 2 * 4)
    parts = found(t, deterministic=True)
    for x, y, z in zip(first, again, parts, strict=True):
        if x is not None:
            assert y is not None and torch.equal(x, y)
            torch.testing.assert_close(x, z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts", [(), (0, 0)])
def test_no_keys(counts: tuple[int, ...]) -> None:
    t = make((4, 1), counts=counts) if counts else make()._replace(counts=torch.zeros(5, dtype=torch.int32))
    for deterministic in (False, True):
        assert all(x is None or (x == 0).all() for x in found(t, deterministic=deterministic))
    zeros = [torch.zeros_like(t.dout), torch.full(t.dout.shape[:2], -torch.inf)]
    assert t.v is not None
    inputs = SelectedInputs(t.q, t.k, t.v, *zeros, t.dout, None, t.slots[:, :0], t.counts * 0)
    dq, dk, dv, dsinks = gradients(inputs, SCALE)
    assert dsinks is None and all((x == 0).all() for x in (dq, dk, dv))
