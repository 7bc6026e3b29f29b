"""score_mod and mask_mod of a call: from functions to what its records hold, and from those to a ``Problem``'s keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import Options, check_tensor
from flashtile.call.cached_arguments import CacheOptions
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.sizes import holds
from flashtile.mods.graph import Graph, GraphError, evaluate, kind_of, parse, places_of
from flashtile.mods.record import Lowered, ModKey, OperandKind, lowered

if TYPE_CHECKING:
    from flashtile.call.problem import Problem

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


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
        return dataclasses.replace(
            options, mods=self.mods, window_left=left, window_right=right, softcap=self.softcap or options.softcap
        )


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
        UnsupportedError: The tensors are DTensors, whose shards do not know which heads they are.
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


def parts_of(texts: Sequence[str], operands: Sequence[Any], numbers: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Each mod's text, operands and numbers."""
    found, first, first_number = [], 0, 0
    for text in texts:
        graph = parse(text)
        last, last_number = first + len(graph.operands), first_number + len(graph.numbers)
        found.append((text, tuple(operands[first:last]), tuple(numbers[first_number:last_number])))
        first, first_number = last, last_number
    return found


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


def keys_of(t: Any, mods: Sequence[str]) -> dict[str, ModKey]:
    """The ``ModKey`` of each mod of a call by "score" or "mask"; checks what they read.

    Raises:
        InvalidInputError: A text is no graph, or the operands are not what it reads.
    """
    if not mods and t.operands is None:
        return {}
    operands, numbers = t.operands or (), t.numbers or ()
    try:
        graphs = [parse(text) for text in mods]
    except GraphError as error:
        raise InvalidInputError("mods", str(error)) from error
    for name, given_, wanted in (
        ("operands", len(operands), sum(len(g.operands) for g in graphs)),
        ("numbers", len(numbers), sum(len(g.numbers) for g in graphs)),
    ):
        if given_ != wanted:
            raise InvalidInputError(name, f"has {given_}, but the mods read {wanted}")
    if [g.what for g in graphs] not in (["score"], ["mask"], ["score", "mask"]):
        raise InvalidInputError("mods", "must be a score mod, a mask mod, or the two in this order")
    keys = {}
    for graph, (text, read, _) in zip(graphs, parts_of(mods, operands, numbers), strict=True):
        for kind, x in zip(graph.operands, read, strict=True):
            _check_operand(f"{graph.what}_mod", kind, x, t.q)
        keys[graph.what] = ModKey(text, tuple(OperandKind(x.dtype, x.dim()) for x in read))
    return keys


def _check_operand(argument: str, kind: str, x: Tensor, q: Tensor) -> None:
    check_tensor(argument, x)
    what = f"reads a tensor of shape {tuple(x.shape)}"
    if x.dtype not in DTYPES:
        raise InvalidInputError(argument, f"{what} and dtype {x.dtype}, must be a float, integer or bool dtype")
    if x.device != q.device:
        raise InvalidInputError(argument, f"{what} on {x.device}, but q is on {q.device}")
    if f"{kind_of(x.dtype)}{x.dim()}" != kind:
        raise InvalidInputError(argument, f"{what} and dtype {x.dtype}, but its graph has {kind}")
    if holds(x.numel() == 0):
        raise InvalidInputError(argument, f"{what}, which has no element")
