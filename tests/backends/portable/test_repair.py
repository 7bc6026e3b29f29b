"""Which rows a repair computes again, of what another backend's kernel has left."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashtile.backends.gpu.host import Launcher, run
from flashtile.backends.portable import repair
from flashtile.call.problem import Tensors
from flashtile.core import settings
from flashtile.core.masks import Band
from flashtile.reference import attention
from tests.problems import banded_problem

pytestmark = pytest.mark.skipif(not settings.TRITON_INTERPRET.enabled(), reason="needs Triton's interpreter")


def test_rows_that_are_lost_and_no_others() -> None:
    """NaN in out too: probabilities of first keys with huge scores overflow in float16, where lse need not.

    There are more tiles than all programs look at together.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16) for n in (200, 50, 50))
    bias = torch.randn(2, 2, 200, 50)
    lost = {3: torch.finfo(torch.float32).min, 17: -1e9, 21: torch.finfo(torch.float32).max, 30: 5000.0, 190: 5000.0}
    for row, value in lost.items():
        bias[:, :, row] = value
    tensors = Tensors(q, k, v, attn_bias=bias)
    problem = banded_problem(tensors, Band())
    want, want_lse = attention(problem, tensors)
    out, lse = torch.full_like(q, 7.0), torch.full((2, 2, 200, 2), torch.nan)
    lse[..., 0] = want_lse
    lse[:, :, 3, 0], lse[:, :, 21, 0] = -torch.inf, torch.nan
    out[:, 5] = torch.nan
    made = {"out": out, "lse": lse}
    launches = repair.forward_launches(problem, tensors).values()
    run([Launcher(each, q.device, tensors, made) for each in launches], tensors, made)
    rows = [*lost, 5]
    assert (out[:, rows] - want[:, rows]).abs().max() < 1e-5
    others = [row for row in range(200) if row not in rows]
    assert (out[:, others] == 7).all() and (lse[:, :, others, 1] == 0).all()
    counts = lse[:, :, [3, 17, 21], 1].double() + (
        lse[:, :, [3, 17, 21], 0].double() - bias[:, :, [3, 17, 21], 0].double()
    )
    assert (counts - torch.log(torch.tensor(50.0))).abs().max() < 1e-5
