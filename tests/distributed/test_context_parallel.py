"""PyTorch's own ``context_parallel``, with flashtile in the place of its flash attention.

On a CPU PyTorch chooses another operator, for which its ring has no rule. So what stands for
``scaled_dot_product_attention`` here is the call that it becomes on a GPU where flash attention is chosen.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.integrations import _flash_impl, sdpa
from tests.distributed.pool import Pool

aten = torch.ops.aten


def on_a_gpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **others: Any
) -> Tensor:
    assert mask is None
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=others["scale"])[0]


on_a_gpu.__name__ = "scaled_dot_product_attention"


def ring(mesh: DeviceMesh, causal: bool, method: str, served: bool) -> tuple[dict[str, float], int, dict[str, int]]:
    """How far out and gradients are from one device's, in float64, and the calls that ran and that were left."""
    from torch.distributed.tensor.experimental import _attention as cp  # takes seconds, and a few ranks need it

    sdpa.calls.clear()
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, 24, 8, generator=make, dtype=torch.float64) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = aten._scaled_dot_product_attention_math(*whole, None, is_causal=causal, scale=0.3)[0]
    wanted = want, *torch.autograd.grad(want, whole, dout)
    before = cp._cp_options.rotate_method
    with ExitStack() as stack:
        stack.callback(_flash_impl.Handle(sdpa.calls, "CPU").remove)
        stack.callback(setattr, cp._cp_options, "rotate_method", before)
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", on_a_gpu))
        stack.enter_context(mock.patch.object(sdpa, "_PYTORCH", on_a_gpu))
        stack.enter_context(mock.patch.object(cp._cp_options, "enable_load_balance", causal))
        if served:
            stack.enter_context(sdpa.use())
        cp.set_rotate_method(method)
        stack.enter_context(cp.context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4))
        mine = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*mine, is_causal=causal, scale=0.3)
        assert out.shape[2] == 24 // mesh.size()
        found = cp.context_parallel_unshard(mesh, [out.detach(), *torch.autograd.grad(out, mine, dout)], [2] * 4)
    apart = (float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True))
    return dict(zip(("out", "dq", "dk", "dv"), apart, strict=True)), sdpa.calls.served, dict(sdpa.calls.left)


@pytest.mark.long
@pytest.mark.parametrize(("causal", "method"), [(True, "allgather"), (True, "alltoall"), (False, "alltoall")])
def test_pytorchs_ring_runs_the_activated_implementation(pool: Pool, causal: bool, method: str) -> None:
    for apart, served, left in pool.run(ring, causal, method, False, mesh=2):
        assert all(x < 1e-5 for x in apart.values()), apart  # its ring merges in float32
        assert served == 2 and not left


@pytest.mark.long
def test_calls_inside_are_left_to_the_ring_while_sdpa_is_served(pool: Pool) -> None:
    for apart, served, left in pool.run(ring, True, "allgather", True, mesh=2):
        assert all(x < 1e-5 for x in apart.values()), apart
        assert served == 2 and sum(left.values()) == 1 and "context_parallel" in next(iter(left))
