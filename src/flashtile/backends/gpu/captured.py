"""What a call's mods are and read, for kernels' arguments and the steps that launch them."""

from __future__ import annotations

from typing import Any

from flashtile.backends.gpu.device.mods import Mod
from flashtile.call.problem import Problem


def operand_names(t: Any) -> tuple[str, ...]:
    """The names under which a step finds what mods read."""
    tensors = tuple(f"operand{n}" for n in range(len(t.operands or ())))
    return (*tensors, *(f"number{n}" for n in range(len(t.numbers or ()))))


def read_by_mods(t: Any) -> tuple[Any, ...]:
    """What a step finds under these names."""
    return () if t.operands is None else (*t.operands, *(t.numbers or ()))


def functions_of(problem: Problem, t: Any) -> tuple[Mod | None, Mod | None]:
    """The user's score mod and mask mod."""
    if problem.score_function is None and problem.mask_function is None:
        return None, None
    from flashtile.backends.gpu.functions import mod_of
    from flashtile.call.functions import mask_function, score_function

    score, mask = score_function(problem, t), mask_function(problem, t)
    return mod_of(score), mod_of(mask, 0 if score is None else len(score.numbers))
