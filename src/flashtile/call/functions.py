"""score_mod and mask_mod of a call: from functions to what its records hold, and from those to a ``Problem``'s keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import Options
from flashtile.call.cached_arguments import CacheOptions
from flashtile.call.problem import Problem
from flashtile.core.errors import UnsupportedError
from flashtile.mods.graph import Graph, evaluate, places_of
from flashtile.mods.record import Lowered, ModKey, lowered

AnyOptions = TypeVar("AnyOptions", Options, CacheOptions)


class Functions(NamedTuple):
    """What the functions of a call become.

    Attributes:
        mods: Their texts, a score mod's first.
        operands: What these read, one mod's tensors after the other's; None without any function.
        numbers: The same of numbers.
        left: The left bound of the band that is recognised in the mask, counted from the first row; None for none.
        right: The right one.
        softcap: A softcap that is recognised in the score mod, 0 for none.
        is_mapped: Whether a transform of ``torch.func`` wraps what they read.
    """

    mods: tuple[str, ...] = ()
    operands: tuple[Tensor, ...] | None = None
    numbers: tuple[float, ...] | None = None
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    is_mapped: bool = False

    def options(self, options: AnyOptions, shift: int) -> AnyOptions:
        """A call's options with them; ``shift`` is seqlen_k - seqlen_q."""
        left, right = self.left, self.right
        left = None if left is None else left + shift
        right = None if right is None else right - shift
        left, right = _least(left, options.window_left), _least(right, options.window_right)
        softcap = self.softcap or options.softcap
        return options._replace(mods=self.mods, window_left=left, window_right=right, softcap=softcap)


def _least(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)


def functions_of(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    t: Any,
    softcap: object,
    has_shift: bool,
) -> Functions:
    """The functions of a call, traced if they are new.

    Args:
        score_mod: See ``attention``, like mask_mod.
        mask_mod: See there.
        t: The call's other tensors.
        softcap: The call's own, after which none is recognised.
        has_shift: Whether all sequences have one seqlen_k - seqlen_q, so that a band can be recognised.

    Raises:
        InvalidInputError: Naming the function that is no mod.
        UnsupportedError: The tensors are DTensors: their shards do not know which heads they are.
    """
    if hasattr(t.q, "placements"):
        raise UnsupportedError("score_mod and mask_mod: not for DTensors; call attention on local tensors")
    found: list[Lowered] = []
    left = right = None
    cap = 0.0
    if score_mod is not None:
        score = lowered(score_mod, "score_mod", "score", not softcap, t.q.device)
        cap = score.softcap
        found.append(score)
    if mask_mod is not None:
        mask = lowered(mask_mod, "mask_mod", "mask", has_shift, t.q.device)
        found.append(mask)
        for is_right, most in mask.bounds:
            if is_right:
                right = most if right is None else min(right, most)
            else:
                left = most if left is None else min(left, most)
    found = [each for each in found if each.text]
    if not found:
        return Functions((), None, None, left, right, cap)
    operands = tuple([_beside(x, t.q) for each in found for x in each.operands])
    numbers = tuple([x for each in found for x in each.numbers])
    is_mapped = any(each.is_mapped for each in found)
    return Functions(tuple([each.text for each in found]), operands, numbers, left, right, cap, is_mapped)


def _beside(x: Tensor, q: object) -> Tensor:
    """A number in a CPU tensor on q's device."""
    if x.dim() == 0 and isinstance(q, Tensor) and x.device.type == "cpu" and x.device != q.device:
        return x.to(q.device)
    return x


class Function(NamedTuple):
    """A mod of a call with what it reads.

    Attributes:
        graph: What it computes.
        operands: Its tensors.
        numbers: Its numbers.
        first: The place of its first tensor in ``Tensors.operands``.
    """

    graph: Graph
    operands: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    first: int

    def values(self, ends: Sequence[int], at: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Nodes of the graph, see ``graph.evaluate``."""
        return evaluate(self.graph, ends, at, self.operands, self.numbers, dtype)

    def curve_values(self, at: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """A score mod's result, its slope, and that one's derivative, None for 0."""
        from flashtile.mods.curve import curved  # what few programs need is not loaded by all

        slope = curved(self.graph.text)
        assert slope.slope is not None
        ends = [self.graph.result, slope.result, slope.slope]
        final, own, curve = evaluate(slope, ends, at, self.operands, self.numbers, dtype)
        return final, own, None if slope.is_const(slope.slope, 0.0) else curve

    def places(self, load: int, at: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Where a load reads, see ``graph.places_of``."""
        return places_of(self.graph, load, at, self.operands, self.numbers, dtype)


def score_function(problem: Problem, t: Any) -> Function | None:
    """The score mod of a call, None if it has none."""
    key = problem.score_function
    return None if key is None else Function(key.graph, *_first_of(key, t, 0, 0), 0)


def mask_function(problem: Problem, t: Any) -> Function | None:
    """The mask mod of a call, None if it has none."""
    key, score = problem.mask_function, problem.score_function
    if key is None:
        return None
    first, number = (0, 0) if score is None else (len(score.operands), len(score.graph.numbers))
    return Function(key.graph, *_first_of(key, t, first, number), first)


def _first_of(key: ModKey, t: Any, first: int, number: int) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    graph = key.graph
    return t.operands[first : first + len(graph.operands)], t.numbers[number : number + len(graph.numbers)]
