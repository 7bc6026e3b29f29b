"""Launches that repeat: a compiled kernel is called again with new pointers, past Triton's look at every argument.

Triton derives from each argument what to specialise on, some 45 of them a launch. All of that follows from the problem,
the tiles, and the shapes, strides and alignment of the tensors, so a call that agrees in these with an earlier one runs
that one's kernels, with that one's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashtile.backends.portable import tiles
from flashtile.backends.portable.launch import Launch, input_precision
from flashtile.problem import Problem

Operands = Mapping[str, Tensor | None]

_MAX_KNOWN = 4096
_known: dict[tuple[Any, ...], list[_Repeat]] = {}


class _Repeat:
    """A compiled kernel with its arguments; tensors, and descriptors of tensors, are filled in by name."""

    def __init__(self, launch: Launch, compiled: Any) -> None:
        names = [parameter.name for parameter in launch.kernel.params]
        self.arguments = [launch.arguments[name] for name in names]
        self.pointers = [(i, n) for i, n in enumerate(names) if isinstance(launch.arguments[n], Tensor)]
        self.descriptors = [
            (i, n.replace("_source", "_ptr"), vars(launch.arguments[n]))
            for i, n in enumerate(names)
            if n.endswith("_source") and launch.arguments[n] is not None
        ]
        for i, *_ in [*self.pointers, *self.descriptors]:
            self.arguments[i] = None
        self.descriptors = [(i, n, {**fields, "base": None}) for i, n, fields in self.descriptors]
        self.runner = compiled[(launch.programs, 1, 1)]

    def run(self, operands: Operands) -> None:
        arguments = self.arguments.copy()
        for i, name in self.pointers:
            arguments[i] = operands[name]
        for i, name, fields in self.descriptors:
            # Past __init__, which would check again what the first launch has checked.
            arguments[i] = TensorDescriptor.__new__(TensorDescriptor)
            vars(arguments[i]).update(fields, base=operands[name])
        self.runner(*arguments)


def launch(name: str, problem: Problem, operands: Operands, make: Callable[[], list[Launch]]) -> None:
    """Launches the kernels of a direction, in order, on the tensors' device.

    Args:
        name: Which direction.
        problem: The call.
        operands: Every tensor that a launch takes, by argument.
        make: Makes the launches, called the first time only.
    """
    first = next(iter(operands.values()))
    assert first is not None
    if not first.is_cuda or torch.version.hip is not None:
        # The interpreter compiles nothing; on AMD, Triton also looks at the size of the memory behind a pointer.
        for made in make():
            made.run()
    elif first.device.index == torch.cuda.current_device():
        _on_device(name, problem, operands, make, first.device.index)
    else:
        with torch.cuda.device(first.device):
            _on_device(name, problem, operands, make, first.device.index)


def _on_device(name: str, problem: Problem, operands: Operands, make: Callable[[], list[Launch]], device: int) -> None:
    layouts = tuple([
        None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in operands.values()
    ])  # fmt: skip
    key = (name, problem, tiles.overridden(), input_precision(problem.dtype), device, layouts)
    repeats = _known.get(key)
    if repeats is not None:
        for repeat in repeats:
            repeat.run(operands)
        return
    run = [(made, made.run()) for made in make()]
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[key] = [_Repeat(made, compiled) for made, compiled in run if compiled is not None]
