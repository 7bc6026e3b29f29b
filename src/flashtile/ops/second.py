"""Second derivatives of calls: by the portable kernels where a GPU computes the first, else in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashtile.backends.portable.kernels import needs_widening
from flashtile.call.backend import SecondGradients
from flashtile.call.problem import Tensors
from flashtile.ops.operation import PlannedCall
from flashtile.ops.plans import layout


def run(
    call: PlannedCall, t: Tensors, directions: Sequence[Tensor | None], out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None,
) -> SecondGradients:  # fmt: skip
    """The gradients of the backward's results with respect to its inputs.

    Args:
        call: The planned call.
        t: Its tensors.
        directions: What arrives for the gradients of q, k, v, the bias and the sinks, each None for 0.
        out: The forward's.
        lse: The forward's.
        dout: The gradient of out.
        dlse: The gradient of lse, None for 0.
    """
    if not has_kernels(call, t):
        from flashtile.backends.cpu import second

        return second.second((*directions,), dout, dlse, out, lse, t, call.problem)
    from flashtile.backends.portable.second.launch import SecondPlan

    of = tuple(None if x is None else _readable(x) for x in directions)
    dout, out, lse = _readable(dout), *(x if x.data_ptr() % 16 == 0 else x.clone() for x in (out, lse))
    key = SecondPlan, *(None if x is None else layout(x) for x in (*of, dout, dlse))
    plan = call.backwards.get(key)
    if plan is None:
        plan = call.backwards[key] = SecondPlan(call.problem, t)
    found: SecondGradients = plan(t, of, out, lse, dout, dlse)
    return found


def has_kernels(call: PlannedCall, t: Tensors) -> bool:
    """Whether a call's second derivatives are computed by kernels."""
    p = call.problem
    if call.shape_class.backend("backward", p, call.options.backend).name == "cpu" or not (t.q.numel() and t.k.numel()):
        return False
    from flashtile.backends.portable.second import config

    return not config.reasons(p) and not needs_widening(p)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
