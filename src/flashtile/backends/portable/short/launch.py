"""The launch of the backward of short packed sequences, and the plan that repeats it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import BackwardPlan, Made, Memory, gradient_memory
from flashtile.backends.portable.device.records import ForwardResults, KeyGradients
from flashtile.backends.portable.records import call_of, tiles_of
from flashtile.backends.portable.short import config as configs
from flashtile.call.backend import Gradients
from flashtile.call.problem import Problem, Tensors

attention_backward_short = device_code("flashtile.backends.portable.short.kernel").attention_backward_short


def plan(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> BackwardPlan:
    """Gradients of calls that ``config.is_short`` takes, as ``call.backend.Backward`` says; it adds to no sums."""

    def prepare(t: Tensors, made: Made, adds: bool) -> tuple[Memory, dict[str, Launch]]:
        found = short_launch(problem, t, made["dout"], made["dlse"])
        return gradient_memory(problem, t), {found.kernel.__name__: found}

    def finish(t: Tensors, made: Made, adds: bool) -> Gradients:
        return Gradients(made["dq"], made["dk"], made["dv"])

    return BackwardPlan(tensors.q.device, prepare, dout.stride(-1) != 1, finish)


def short_launch(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> Launch:
    """One program for each sequence and key head; neighbours read neighbouring heads of the same rows."""
    p, config = problem, configs.choose(problem)
    call, douts = call_of(p, tensors, config, dout=dout)
    head, row = (0, 0) if dlse is None else dlse.stride()
    results = ForwardResults(
        Pointer(dout.dtype, "out"), Pointer(torch.float32, "lse"), pointer(dlse, "dlse"), 0, head, row, 1,
        dout.shape[0], p.num_heads_q,
    )  # fmt: skip
    grads = KeyGradients(Pointer(p.grad_dtype, "dk"), Pointer(p.grad_dtype, "dv"), None, False)
    arguments = {
        "call": call, "douts": douts, "results": results, "dq_ptr": Pointer(p.grad_dtype, "dq"), "grads": grads,
        "tiles": tiles_of(config),
    }  # fmt: skip
    return Launch(attention_backward_short, p.batch * p.num_heads_kv, arguments, config.options())
