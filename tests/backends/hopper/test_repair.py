"""Rows whose scores are huge: Hopper's kernels lose them, the portable ones repair them, and no other row changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.gpu.described import described_tensors
from flashtile.backends.hopper import BACKEND
from flashtile.call.problem import described
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Call, Case, build
from tests.poison import poisoned_memory

LOW, HIGH = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
MOST: dict[str, object] = {"batch": 1, "bias": "hqk", "bias_float": True, "bias_grad": False}
CALLS = (
    Case("dense", seqlen_q=80, seqlen_k=70, head_dim=64, kv_heads=1, causal=True, lse_grad=True, **MOST),  # type: ignore[arg-type]
    Case("varlen", lengths=((20, 70), (0, 20), (70, 40)), spare=5, head_dim=64, **MOST | {"batch": 3}),  # type: ignore[arg-type]
    Case("intervals", seqlen_q=70, seqlen_k=90, head_dim=64, intervals="documents", **MOST),  # type: ignore[arg-type]
    Case("big", seqlen_q=70, seqlen_k=40, heads=1, kv_heads=1, head_dim=264, **MOST),  # type: ignore[arg-type]
)


def _run(call: Call) -> dict[str, Tensor]:
    """out and lse with rows first but for the batch, and the gradients."""
    with on_cpu(1, 2), poisoned_memory():
        out, lse = call.run("hopper")
        grads = torch.autograd.grad(out, list(call.leaves.values()), torch.ones_like(out))
    of_leaves = {f"d{name}": x for name, x in zip(call.leaves, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach().transpose(-1, -2), **of_leaves}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CALLS, ids=str)
def test_rows_beside_huge_ones_keep_their_bits(case: Case) -> None:
    call = build(case, torch.bfloat16)
    bias = call.tensors.attn_bias
    assert bias is not None
    plain, lost = _run(call), {3: LOW, 17: HIGH, 20: -1e9, 66: 3e5}
    for row, value in lost.items():
        bias[:, :, row] = value
    found = _run(call)
    length = call.tensors.q.shape[-3]
    starts = [0] if call.tensors.cu_seqlens_q is None else call.tensors.cu_seqlens_q.tolist()
    kept = torch.ones(length, dtype=torch.bool)
    kept[[start + row for start in starts for row in lost if start + row < length]] = False
    for name in ("out", "lse", "dq"):
        axis = found[name].dim() - (2 if name == "lse" else 3)
        of_kept = [x[name].movedim(axis, 0)[kept] for x in (plain, found)]
        assert torch.equal(*of_kept), name
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")
    assert not torch.equal(plain["dv"], found["dv"])


@pytest.mark.parametrize("case", CALLS[:2], ids=str)
def test_a_row_of_equal_huge_scores_is_an_average(case: Case) -> None:
    """Of values that are 1 it is 1, and each key's share of their gradient is that of all rows that keep it."""
    call = build(case, torch.float16)
    bias = call.tensors.attn_bias
    assert bias is not None
    bias[:] = LOW
    with torch.no_grad():
        call.tensors.v.fill_(1.0)
        call.tensors.q.zero_()
    found = _run(call)
    rows = found["out"].reshape(-1, found["out"].shape[-1])
    counted = rows[(rows != 0).any(1)]
    assert len(counted) > 0 and (counted - 1).abs().max() < 1e-3
    # Probabilities of a row add up to 1, so all of dv adds up to the number of rows that have keys.
    assert abs(found["dv"].double().sum().item() / counted.numel() - 1) < 1e-3
    assert found["dq"].abs().max() < 1e-2 and found["dk"].abs().max() < 1e-2


@pytest.mark.parametrize(("head_dim", "names"), [(128, ["dkdv", "dq"]), (320, ["dk", "dv", "dq"])])
def test_what_repairs_is_built_ahead(head_dim: int, names: list[str]) -> None:
    usual = {"device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "batch": 1, "seqlen_q": 256,
             "seqlen_k": 256, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": head_dim, "head_dim_v": head_dim,
             "band": Band(), "softmax_scale": 0.1, "needs_grad": True}  # fmt: skip
    for bias, of_forward, of_backward in ((None, [], []), (torch.bfloat16, ["forward"], names)):
        problem = described(**usual, bias_dtype=bias)
        tensors = described_tensors(problem)
        for direction, of in (("forward", of_forward), ("backward", of_backward)):
            made = BACKEND.launches(problem, tensors, direction)  # type: ignore[arg-type]
            assert [each for each in made if "repair" in each] == [f"repair_{name}" for name in of]
