"""Whether a call needs the dispatcher, and what is then registered with those who watch it.

PyTorch's FLOP counter and DTensor take as long to import as all of flashtile. Who uses them has imported them before a
call that they see, so their rules are registered at such calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

# Each looks whether its module has been imported; called again and again, so what has been done already costs little.
REGISTERS: list[Callable[[], None]] = []


def is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher is needed. Bypassing it where possible saves as much time as a kernel launch takes.

    It is needed during tracing, under a dispatch mode (FakeTensor, FLOP counter), a functorch transform, forward-mode
    differentiation or the profiler, and for tensors of a subclass or without data.
    """
    if (
        type(q) is type(k) is type(v) is Tensor
        and not q.is_meta
        and not _is_compiling()
        and _num_modes() == 0
        and _transform() is None
        and forward_ad._current_level < 0
        and not profiler._is_profiler_enabled
    ):
        return False
    if not _is_compiling():  # of what is traced the operators register, in ``transforms``
        register()
    return True


# By names of this module: each object more that another thread has used too costs the backward's thread.
_is_compiling, _num_modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def register() -> None:
    """Registers with what has been imported."""
    for each in REGISTERS:
        each()
