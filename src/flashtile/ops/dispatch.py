"""The ordered table of backends: selects one for a call, gives the reasons, and prints what each supports."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from flashtile.call.arguments import BACKENDS, BY_KIND, STRICT, Grads, checked
from flashtile.call.backend import (
    DIRECTIONS,
    FEATURES,
    Backend,
    Build,
    Capabilities,
    Direction,
    Feature,
    asked_for,
    directions_of,
)
from flashtile.call.problem import AHEAD, TINY, Problem
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, UnsupportedError

NAMES = BACKENDS
# Up to this head_dim one backend computes all gradients if it can, the bias's gradient included: docs/tuning-notes.md.
MOST_TOGETHER = 32
# Directions besides the forward and the backward -> the calls that run them, and in the singular.
_CALLS: dict[Direction, str] = {"decode": "cached calls", "quantized": "quantized calls"}
_ONE: dict[Direction, str] = {"quantized": "quantized call"}


@cache
def backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        InvalidInputError: If there is none.
    """
    checked(backend=name)
    return importlib.import_module(f"flashtile.backends.{name}").BACKEND


def reasons(name: str, problem: Problem, direction: Direction) -> list[str]:
    """Every reason why a backend cannot run a direction of a problem; empty if it can.

    Args:
        name: The backend.
        problem: The call.
        direction: One that the call has.
    """
    chosen = backend(name)
    capabilities = chosen.capabilities(direction)
    if capabilities is None:
        return [f"has no {_ONE.get(direction, direction)}"]
    why = capabilities.reasons(problem)
    missing = chosen.missing()
    return [missing, *why] if missing else why


def _first(problem: Problem, direction: Direction) -> str | None:
    able = [name for name in NAMES if not reasons(name, problem, direction)]
    quick = [name for name in able if not _is_slow(name, problem, direction)]
    return next(iter(quick or able), None)


def _first_of_most(problem: Problem, name: str) -> str:
    """The faster backend for all gradients but those that another may compute, or ``name``, which computes all."""
    others, _ = _parted(problem, _APART)
    first = _first(others, "backward") if others.needs_grad else None
    return name if first is None or max(problem.head_dim, problem.head_dim_v) <= MOST_TOGETHER else first


# Gradients that may come from another backend than the rest, and what a call says of them.
_APART = {"bias_grad": "attn_bias", "operand_grad": "captured tensors"}


def _parted(problem: Problem, features: Iterable[str]) -> tuple[Problem, Problem]:
    """The same call without some of these gradients, and with them alone."""
    grads, has_bias = problem.grads, "bias_grad" in features
    operands = grads.operands if "operand_grad" in features else ()
    others = grads._replace(bias=grads.bias and not has_bias, operands=() if operands else grads.operands)
    return problem.but(grads=others), problem.but(grads=Grads(bias=has_bias, operands=operands))


def _apart(chosen: Backend, problem: Problem, direction: Direction) -> list[str]:
    """Which of these gradients a call wants and a backend does not compute."""
    able = chosen.capabilities(direction) if direction == "backward" else None
    wanted = {"bias_grad": problem.bias_grad, "operand_grad": problem.operand_grad}
    return [] if able is None else [name for name in _APART if wanted[name] and name not in able.features]


def shares(chosen: Backend, problem: Problem, direction: Direction) -> list[tuple[Backend, Problem]]:
    """The backends that run a direction, and what each computes: two where the first lacks some gradients."""
    apart = _apart(chosen, problem, direction)
    if not apart:
        return [(chosen, problem)]
    others, rest = _parted(problem, apart)
    return [(chosen, others), (select(rest, direction), rest)]


def builds(chosen: Backend, problem: Problem, direction: Direction, shapes: Any) -> list[Build]:
    """The kernels of a direction, by all backends that run it; shapes: the call's tensors on the meta device."""
    made: list[Build] = []
    for each, share in shares(chosen, problem, direction):
        kind = partial(kind_of, share, direction)
        of_share = each.builds(share, shapes, direction)
        made += [dataclasses.replace(x, make=partial(asked_for, kind, x.make)) for x in of_share]
    return made


def _is_slow(name: str, problem: Problem, direction: Direction) -> bool:
    """Whether another backend is faster for a call of this size."""
    capabilities = backend(name).capabilities(direction)
    return capabilities is not None and capabilities.slow_if_tiny and problem.tiny


def select(problem: Problem, direction: Direction = "forward", name: str | None = None) -> Backend:
    """The backend that runs a direction of a problem.

    Args:
        problem: The call.
        direction: One that the call has.
        name: An explicit choice; None or "" takes ``FLASHTILE_BACKEND`` or else the first that can.

    Returns:
        The backend. If a backward's lacks gradients of the bias or of what is captured, another computes
        them: ``shares``.

    Raises:
        InvalidInputError: If no backend has that name, or it has no backward and the call needs one, or a setting of
            ``flashtile.core.settings`` has a wrong value.
        UnsupportedError: With the reasons of the named backend, of all, or of faster ones: ``FLASHTILE_STRICT``.
    """
    settings.validate()
    name = name or settings.BACKEND.get() or None
    if name is None:
        name = _first(problem, direction)
        if name is None:
            everyone = {each: reasons(each, problem, direction) for each in NAMES}
            raise UnsupportedError(f"no backend supports this {_ONE.get(direction, direction)}", everyone)
        if direction == "backward" and (problem.bias_grad or problem.operand_grad):
            name = _first_of_most(problem, name)
        _tell_slower(problem, direction, name)
        return backend(name)
    if problem.needs_grad and backend(name).capabilities("backward") is None:
        raise InvalidInputError("backend", f"{name!r} has no backward, but an input requires grad")
    against = reasons(name, problem, direction)
    if against:
        raise UnsupportedError(f"backend {name!r} cannot run this {_ONE.get(direction, direction)}", {name: against})
    return backend(name)


def _tell_slower(problem: Problem, direction: Direction, name: str) -> None:
    """With ``FLASHTILE_STRICT`` refuses, or warns of, a call that faster backends for its device do not run."""
    strict = settings.STRICT.get()
    if strict != "warn" and strict not in settings.ON:
        return
    why = {}
    for each in NAMES[: NAMES.index(name)]:
        able = backend(each).capabilities(direction)
        if able is not None and able.suits_device(problem) and (against := reasons(each, problem, direction)):
            why[each] = against
    if not why:
        return
    slower = UnsupportedError(
        f"{name} would run this {kind_of(problem, direction)}, though a faster backend is here", why
    )
    if strict != "warn":
        raise slower
    warnings.warn(str(slower), stacklevel=2)


def explain(problem: Problem, name: str | None = None, only: Direction | None = None, shapes: Any = None) -> str:
    """Which backend runs each direction of a problem, or only one, with which tiles, and why the others do not.

    With ``shapes``, the call's tensors on the meta device, also where each kernel of the current GPU comes from.
    """
    lines = [describe_problem(problem)]
    if problem.device_type == "cuda" and (gpu := AHEAD.get()) is not None:
        lines[0] += f", compute capability {'{}.{}'.format(*gpu.capability)}" if gpu.capability else f", {gpu.arch}"
    for direction in directions_of(problem) if only is None else (only,):
        chosen = select(problem, direction, name)
        parts = [f"{b.name}: {b.describe(p, direction)}" for b, p in shares(chosen, problem, direction)]
        apart = " and ".join(_APART[each] for each in _apart(chosen, problem, direction))
        lines.append(f"{direction}: {f'; gradient of {apart}: '.join(parts)}")
        if direction in ("forward", "decode") and (problem.varlen or problem.cached):
            lines.append(f"  {_of_bits(chosen.capabilities(direction), problem)}")
        if shapes is not None:
            lines += kernels(chosen, problem, direction, shapes)
        lines += [f"  {_against(other, chosen, problem, direction)}" for other in NAMES if other != chosen.name]
    return "\n".join(lines)


def _against(other: str, chosen: Backend, problem: Problem, direction: Direction) -> str:
    """Why another backend does not run a direction."""
    why = "; ".join(reasons(other, problem, direction))
    if not why:
        is_asked_before = NAMES.index(other) < NAMES.index(chosen.name)
        first = f"but {chosen.name} was named" if is_asked_before else f"{chosen.name} comes first"
        why = f"could run it too, {f'slower up to {TINY} rows' if _is_slow(other, problem, direction) else first}"
    return f"not {other}: {why}"


def faster(chosen: Backend, problem: Problem, direction: Direction) -> list[str]:
    """Why none of the backends that are asked before the chosen one runs a direction."""
    return [_against(other, chosen, problem, direction) for other in NAMES[: NAMES.index(chosen.name)]]


def kind_of(problem: Problem, direction: Direction) -> str:
    """A direction of a problem in one line."""
    return f"{direction} of {describe_problem(problem)}"


def _of_bits(able: Capabilities | None, problem: Problem) -> str:
    """Whether rows have bits of their own, by the backend that runs a packed or cached call."""
    found = "" if able is None else able.invariance(problem)
    if not found:
        return "not batch-invariant, which batch_invariant=True asks for"
    kinds = {
        STRICT: "batch-invariant, strictly",
        BY_KIND: "batch-invariant, rows of few queries and of many by themselves",
    }
    return kinds[found] + ("" if problem.batch_invariant else ", without being asked")


def kernels(chosen: Backend, problem: Problem, direction: Direction, shapes: Any) -> list[str]:
    """A line for each kernel of a direction: where its code comes from."""
    return [line_of(build) for build in builds(chosen, problem, direction, shapes)]


def line_of(build: Build) -> str:
    """What ``explain`` says of a kernel."""
    return f"  kernel {build.name}: {build.source()}"


def describe_problem(problem: Problem) -> str:
    """The problem in one line."""
    p = problem
    lengths = f"{'up to ' if p.varlen else ''}{p.seqlen_q} x {p.seqlen_k}"
    if p.cached:
        pages = f" in pages of {p.page_size}" if p.page_size else ""
        lengths = f"{'up to ' if p.varlen else ''}{p.seqlen_q} x a cache of {p.seqlen_k}{pages}"
    used = ", ".join(f.label for f in FEATURES if f.used(p) and f.name not in ("causal", "window", "pages"))
    heads = f"{p.num_heads_q} heads" + (f" over {p.num_heads_kv}" if p.group_size > 1 else "")
    dims = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim} (v {p.head_dim_v})"
    dtype = str(p.dtype).removeprefix("torch.")
    if p.out_dtype != p.dtype:
        dtype += f" to {str(p.out_dtype).removeprefix('torch.')}"
    shape = f"batch {p.batch}, {lengths}, {heads}, head_dim {dims}"
    return f"{dtype} on {p.device_type}, {shape}, {p.band}" + (f", {used}" if used else "")


def support_table() -> str:
    """A Markdown table of the features that each backend supports, made from the declared capabilities."""
    chosen = [backend(name) for name in NAMES]
    rows = [["feature", *NAMES], ["---"] * (len(NAMES) + 1)]
    rows.append(["runs on", *(b.summary for b in chosen)])
    rows.append(["dtypes", *(_cell(b, _dtypes) for b in chosen)])
    rows.append(["head_dim", *(_cell(b, _head_dims) for b in chosen)])
    regular = [feature for feature in FEATURES if "forward" in feature.directions]
    rows += [[feature.label, *(_support(b, feature) for b in chosen)] for feature in regular]
    rows.append(
        ["cached calls (attention_with_kvcache)", *("yes" if b.capabilities("decode") else "no" for b in chosen)]
    )
    rows += [[feature.label, *(_support(b, feature) for b in chosen)] for feature in FEATURES if feature not in regular]
    rows.append(["quantized calls (Quantized)", *("yes" if b.capabilities("quantized") else "no" for b in chosen)])
    rows.append(["what of these it lacks", *(_limits(b) for b in chosen)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _support(b: Backend, feature: Feature) -> str:
    """Yes, no, or which directions have the feature, of those that the backend and calls with it have."""
    has = {each: b.capabilities(each) for each in feature.directions}
    able = {each: c is not None and feature.name in c.features for each, c in has.items()}
    if not any(able.values()):
        return "no"
    if "forward" not in able:
        return "yes"
    half = "by another backend" if feature.name.endswith("_grad") else "forward"
    texts = ["yes" if able["backward"] else half if able["forward"] else "no"]
    for each, calls in _CALLS.items():
        if has.get(each) is not None and able[each] != able["forward"]:
            texts.append(f"in {calls} yes" if able[each] else f"not in {calls}")
    return ", ".join(texts)


def _limits(b: Backend) -> str:
    """The limits of each direction; the forward's are the backward's too."""
    seen, texts = set[str](), []
    for each in DIRECTIONS:
        able = b.capabilities(each)
        own = [limit.label for limit in able.limits if limit.label not in seen] if able else []
        seen |= set(own)
        if own:
            where = {"forward": "regular calls", "backward": "the backward"} | _CALLS
            texts.append(f"in {where[each]}: {'; '.join(own)}")
    return ". ".join(text[0].upper() + text[1:] for text in texts) or "nothing"


def _cell(b: Backend, text: Callable[[Capabilities], str]) -> str:
    """A property of the forward, followed by the other directions' where they differ."""
    forward, backward = b.capabilities("forward"), b.capabilities("backward")
    if forward is None:
        return "none"
    cell = text(forward)
    if backward is None:
        cell += " (forward)"
    elif text(backward) != text(forward):
        cell += f"; backward {text(backward)}"
    for each, calls in _CALLS.items():
        other = b.capabilities(each)
        cell += f"; {calls} {text(other)}" if other is not None and text(other) != text(forward) else ""
    return cell


def _dtypes(c: Capabilities) -> str:
    return ", ".join(_SHORT[str(d).removeprefix("torch.")] for d in c.dtypes)


_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3"}


def _head_dims(c: Capabilities) -> str:
    limit = "any" if c.max_head_dim is None else f"to {c.max_head_dim}"
    return limit if c.head_dim_multiple == 1 else f"{limit}, multiples of {c.head_dim_multiple}"
