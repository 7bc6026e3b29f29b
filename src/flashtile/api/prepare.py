"""``explain`` and ``warm_up``: what a call would run, without running it."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor

from flashtile.api.attention import quantized_calls
from flashtile.api.cached import causality, completed
from flashtile.api.keywords import AnyCall, Asked, asked_of, options_of, refuse_functions, with_functions
from flashtile.call import cached_arguments, cached_problem, latent
from flashtile.call.arguments import Tensors, flag
from flashtile.call.backend import Build, Direction, directions_of
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.prepared import autocast, wanting, without_data
from flashtile.call.problem import AHEAD, Problem, check_values, compute_capability, gpu_name, gpu_of
from flashtile.call.quantized import Quantized
from flashtile.call.selected import Selected
from flashtile.core.errors import InvalidInputError, shown
from flashtile.ops import dispatch, selected

P = ParamSpec("P")
R = TypeVar("R")


def _caches_by_name(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses k or v by name beside those by position with the form of a call over a cache, which is what is meant."""

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name in ("k", "v")[: len(args) - 1 if args else 0]:
            if name in keywords:
                raise TypeError(f"{function.__name__}() got {name} twice: {_BY_NAME}")
        return function(*args, **keywords)

    return checked


_BY_NAME = "caches go by name, (q, k_cache=..., v_cache=..., cache_seqlens=..., k=new keys, v=new values)"


@_caches_by_name
def explain(
    q: Tensor | Quantized,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
    gpu: str | None = None,
    **keywords: Unpack[AnyCall],
) -> str:
    """Says which backend and tiles a call would run with, and why the other backends would not.

    Takes ``attention``'s arguments, or with cu_seqlens ``attention_varlen``'s, and raises the same errors; with
    k_cache, v_cache and cache_seqlens by name, ``attention_with_kvcache``'s. causal is that function's own default,
    unless given. Nothing is computed. Tensors on the meta device give results of the right shapes in a call, from no
    backend, and it says so.

    device is where the call would run, by default where its tensors are, and gpu names a GPU that need not be here, as
    for ``warm_up``. With one of them only shapes, strides and dtypes of the tensors are read, which may then be on the
    meta device.

    On a GPU it also says of each kernel whether this process has it, an archive has it or it will be compiled, and what
    this process has loaded and compiled so far: docs/kernels-ahead.md.

    Returns:
        A few lines of text.
    """
    with _placed(gpu, device) as place:
        return explained(keywords.get("backend"), *_runs("explain", (q, k, v), keywords, place))


# The kernels before a call's own: what they are for, their backend and direction in ``BuildTime``, and their builds.
_Before = tuple[str, tuple[str, str], Callable[[], list[Build]]]


def explained(
    backend: str | None,
    device: torch.device,
    calls: Sequence[tuple[Problem, Any, Direction | None]],
    before: _Before = ("", ("", ""), list),
) -> str:
    """What is said of calls on a device, or on ``AHEAD``'s, each with its tensors and in all directions or one."""
    if device.type == "meta":
        of_calls = (dispatch.describe_problem(problem) for problem, *_ in calls)
        return "\n".join(f"{said}\nno backend: a call makes results of the right shapes alone" for said in of_calls)
    if device.type != "cuda":
        return "\n".join(dispatch.explain(problem, backend, only) for problem, _, only in calls)
    from flashtile.backends.gpu.build import used  # what few programs need is not loaded by all

    is_here = AHEAD.get() is None
    with torch.cuda.device(device) if is_here else nullcontext():
        said = [f"{before[0]}:", *map(dispatch.line_of, made)] if (made := before[2]()) else []
        said += [
            dispatch.explain(problem, backend, only, _with_state(without_data(tensors), problem))
            for problem, tensors, only in calls
        ]
    return "\n".join(filter(None, (*said, used() if is_here else "")))


def over_cache(t: Tensors, asked: Asked, cached: dict[str, Any]) -> tuple[CacheTensors, CacheOptions]:
    """The records of a call over a cache, from the arguments that all calls have and those that it alone has.

    With lists of keys the records of the call that remains once rows are known.
    """
    made, options, lists = _as_given(t, asked, cached)
    return selected.described(made, options, lists) if lists.is_given else (latent.split(made), options)


def _finding_builds(t: Tensors, asked: Asked, cached: dict[str, Any], device: torch.device) -> list[Build]:
    """The kernel that finds the rows of lists of keys, where a call over a cache has them; none off GPUs."""
    if device.type != "cuda" or (cached.get("selected") is None and cached.get("selected_slots") is None):
        return []
    return selected.builds(*_as_given(t, asked, cached))


def _as_given(t: Tensors, asked: Asked, cached: dict[str, Any]) -> tuple[CacheTensors, CacheOptions, Selected]:
    """The records of a call over a cache, and its lists of keys."""
    plain, functions = asked.plain, asked.functions
    foreign = {
        "attn_mask": t.attn_mask, "attn_bias": t.attn_bias,
        "block_mask": t.row_blocks, "cu_seqlens_k": t.cu_seqlens_k,
        "dropout_p": plain.dropout_p or None, "deterministic": plain.deterministic or None,
        "precision": asked.precision,
    }  # fmt: skip
    for name, value in foreign.items():
        if value is not None:
            raise InvalidInputError(name, "is given, but a call over a cache has none")
    for name in ("k_cache", "v_cache", "cache_seqlens"):
        if cached.get(name) is None:
            hint = f": {_BY_NAME}" if name == "k_cache" and t.v is not None else ""
            raise InvalidInputError(name, f"is None, but {next(iter(cached))} is given{hint}")
    others = (
        *asked.lengths, plain.softmax_scale, plain.softcap, cached.get("rotary_interleaved", False), plain.backend,
        plain.attention_chunk, plain.mirrored, plain.return_max_scores, plain.batch_invariant,
    )  # fmt: skip
    of_all, of_each = causality(asked.causal)
    options = cached_arguments.read(of_all, asked.window_size, asked.return_lse, others)
    given: dict[str, Any] = {name: cached.get(name, getattr(t, name, None)) for name in cached_arguments.TENSORS}
    given["causal"] = of_each
    made = CacheTensors(**given)
    if any(each is not None for each in functions):
        options = with_functions(made, *functions, plain.softcap).options(options, 0)
    return completed(made), options, Selected(cached.get("selected"), cached.get("selected_slots"))


_Given = tuple[Tensor | Quantized, Tensor | None, Tensor | None]


def _runs(
    function: str, given: _Given, keywords: AnyCall, place: torch.device | None, backward: bool | None = None
) -> tuple[torch.device, Sequence[tuple[Problem, Any, Direction | None]], _Before]:
    """Where a call runs, what it runs, each with its tensors and in all directions or one, and the kernels before.

    place is where it would run, of tensors without data; None is where its tensors are, and on a CPU their values are
    then checked. backward is as for ``warm_up``; None takes the gradients that the tensors require.
    """
    tensors, asked, cached = asked_of(function, given, keywords)
    where: dict[str, Any] = {}
    if place is not None:
        where = {"device_type": place.type, "compute_capability": compute_capability(place)}
    if cached:
        over, settings = over_cache(tensors, asked, cached)
        over = over if place is None else without_data(over)
        problem = cached_problem.problem_of(over, settings).but(**where)
        if place is None and problem.device_type == "cpu":
            cached_problem.check_values(problem, over)
        at = place or over.q.device
        finding = ("rows of selected keys", ("portable", "decode"), lambda: _finding_builds(tensors, asked, cached, at))
        return at, [(problem, over, "decode")], finding
    q: Any = given[0]
    if asked.precision is not None or isinstance(q, Quantized):
        refuse_functions(*asked.functions)
        calls = quantized_calls().calls(tensors, asked, place, backward)
        at = place or (q.q if isinstance(q, Quantized) else q).device
        rounding = lambda: quantized_calls().rounding_builds(tensors, asked, at)  # noqa: E731
        return at, calls, ("rounding to 8 bits", ("quantization", "quantize"), rounding)
    options = options_of(tensors, asked)
    if backward is not None:
        options = wanting(tensors, options, backward)
    at = place or q.device
    shapes = autocast(tensors if place is None else without_data(tensors), at.type)
    if place is not None:
        where["gpu"] = gpu_name(place) if AHEAD.get() is None else ""
    problem = Problem.of(shapes, options).but(**where)
    if place is None and problem.varlen and problem.device_type == "cpu":
        check_values(problem, tensors)
    return at, [(problem, shapes, None)], ("", ("", ""), list)


@contextmanager
def _placed(gpu: str | None, device: torch.device | str | None) -> Iterator[torch.device | None]:
    """Where a call would run, None if nothing says so; within, kernels are for the GPU that is named."""
    place = None if device is None else _device(device)
    if gpu is None:
        if AHEAD.get() is None and place is not None and place.type == "cuda" and not torch.cuda.is_available():
            raise InvalidInputError("device", f"is {place}, but torch finds no GPU here")
        yield place
        return
    if place not in (None, torch.device("cuda")):
        raise InvalidInputError("gpu", f"is given, but goes with device='cuda' alone, which is {shown(device)}")
    token = AHEAD.set(gpu_of(gpu))
    try:
        yield torch.device("cuda")
    finally:
        AHEAD.reset(token)


@dataclasses.dataclass(frozen=True)
class BuildTime:
    """The build time of one kernel: backend, direction, kernel, and seconds to build it or find it built."""

    backend: str
    direction: str
    kernel: str
    seconds: float


@_caches_by_name
def warm_up(
    q: Tensor | Quantized,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    device: torch.device | str = "cuda",
    backward: bool = True,
    gpu: str | None = None,
    into: str | os.PathLike[str] | None = None,
    **keywords: Unpack[AnyCall],
) -> list[BuildTime]:
    """Builds the kernels that a call needs, in parallel, so that the call itself does not wait for them.

    Takes the arguments of ``explain``. Only shapes, strides and dtypes of the tensors are read: they may be on the meta
    device, ``torch.empty(8, 512, 16, 64, dtype=torch.bfloat16, device="meta")``, where they take no memory.

    device is where the call will run. With backward the backward is built too, for the tensors that require a gradient,
    or for all if none does; its dout is assumed contiguous. A call over a cache has none; with k and v what appends is
    built.

    gpu names a GPU, ``"H100"``, or an architecture, ``"sm_90"``, ``"9.0"`` or ``"gfx942"``, to build for on a machine
    that need not have one, as where a container image is made. What is built lies in Triton's cache alone, the folder
    ``TRITON_CACHE_DIR``, and is found there by the same releases of Triton and of this package at the same path.

    into names an archive, ``"kernels.ftk"``, to which the kernels are added, for ``gpu`` or else the GPU that is here.
    A process with ``FLASHTILE_KERNELS`` set to its path loads them in milliseconds and needs no Triton for them.

    Returns:
        A record per kernel; no records for a backend that needs no build.

    Raises:
        InvalidInputError: An argument is wrong, or the archive cannot be written.
    """
    if into is not None:
        from flashtile.backends.gpu import ahead  # what few programs need is not loaded by all

        major, minor = (0, 0) if gpu is not None else compute_capability(_device(device)) or (0, 0)
        if gpu is None and not major:
            raise InvalidInputError("into", "is given, but there is no NVIDIA GPU here: name one with gpu='sm_90'")
        with ahead.into(into):
            return warm_up(q, k, v, device=device, backward=backward, gpu=gpu or f"sm_{major}{minor}", **keywords)
    wanted: list[tuple[str, str, Build]] = []
    with _placed(gpu, device):
        place, calls, before = _runs("warm_up", (q, k, v), keywords, _device(device), flag("backward", backward))
        with torch.cuda.device(place) if AHEAD.get() is None and place.type == "cuda" else nullcontext():
            wanted += [(*before[1], build) for build in before[2]()]
            for problem, tensors, only in calls:
                shapes = _with_state(tensors, problem)
                for direction in directions_of(problem) if only is None else (only,):
                    chosen = dispatch.select(problem, direction, keywords.get("backend"))
                    builds = dispatch.builds(chosen, problem, direction, shapes)
                    wanted += [(chosen.name, direction, build) for build in builds]
    # Compilers run in their own processes, so threads are enough to build kernels in parallel.
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
        return list(pool.map(_make, wanted))


def _with_state(shapes: Any, problem: Problem) -> Any:
    """The tensors with the state of the random numbers, which a call makes itself."""
    if not problem.dropout_p:
        return shapes
    return dataclasses.replace(shapes, rng_state=torch.empty(2, dtype=torch.int64, device="meta"))


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError("device", f"is {shown(device)}, must be a torch.device or its name") from error


def _make(wanted: tuple[str, str, Build]) -> BuildTime:
    backend, direction, build = wanted
    start_s = time.perf_counter()
    build.make()
    return BuildTime(backend, direction, build.name, time.perf_counter() - start_s)
