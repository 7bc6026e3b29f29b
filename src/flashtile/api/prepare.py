"""``explain`` and ``warm_up``: what a call would run, without running it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Unpack

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


def explain(
    q: Tensor | Quantized,
    k: Tensor | None = None,
    v: Tensor | None = None,
    **keywords: Unpack[AnyCall],
) -> str:
    """Says which backend and tiles a call would run with, and why the other backends would not.

    Takes ``attention``'s arguments, or with cu_seqlens ``attention_varlen``'s, and raises the same errors; with
    k_cache, v_cache and cache_seqlens by name, ``attention_with_kvcache``'s. causal is that function's own default,
    unless given. Nothing is computed. Tensors on the meta device give results of the right shapes in a call, from no
    backend, and it says so.

    On a GPU it also says of each kernel whether this process has it, an archive has it or it will be compiled, and what
    this process has loaded and compiled so far: docs/kernels-ahead.md.

    Returns:
        A few lines of text.
    """
    tensors, asked, cached = asked_of("explain", (q, k, v), keywords)
    backend = keywords.get("backend")
    if cached:
        over, settings = over_cache(tensors, asked, cached)
        problem = cached_problem.problem_of(over, settings)
        if problem.device_type == "cpu":
            cached_problem.check_values(problem, over)
        return explained(
            backend, over.q.device, [(problem, over, None)],
            ("rows of selected keys", lambda: _finding_builds(tensors, asked, cached, over.q.device)),
        )  # fmt: skip
    if asked.precision is not None or isinstance(q, Quantized):
        refuse_functions(*asked.functions)
        calls = quantized_calls().calls(tensors, asked, None)
        place = q.q.device if isinstance(q, Quantized) else q.device
        return explained(
            backend,
            place,
            calls,
            ("rounding to 8 bits", lambda: quantized_calls().rounding_builds(tensors, asked, place)),
        )
    options = options_of(tensors, asked)
    given = autocast(tensors, q.device.type)
    problem = Problem.of(given, options)
    if problem.varlen and problem.device_type == "cpu":
        check_values(problem, tensors)
    return explained(backend, q.device, [(problem, given, None)])


def explained(
    backend: str | None,
    device: torch.device,
    calls: Sequence[tuple[Problem, Any, Direction | None]],
    before: tuple[str, Callable[[], list[Build]]] = ("", list),
) -> str:
    """What is said of calls on a device, each with its tensors, of all its directions or of one.

    ``before`` is what kernels that run first are for, and makes their builds.
    """
    if device.type == "meta":
        of_calls = (dispatch.describe_problem(problem) for problem, *_ in calls)
        return "\n".join(f"{said}\nno backend: a call makes results of the right shapes alone" for said in of_calls)
    if device.type != "cuda":
        return "\n".join(dispatch.explain(problem, backend, only) for problem, _, only in calls)
    from flashtile.backends.gpu.build import used  # what few programs need is not loaded by all

    with torch.cuda.device(device):
        said = [f"{before[0]}:", *map(dispatch.line_of, made)] if (made := before[1]()) else []
        said += [
            dispatch.explain(problem, backend, only, _with_state(without_data(tensors), problem))
            for problem, tensors, only in calls
        ]
    return "\n".join(filter(None, (*said, used())))


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
            raise InvalidInputError(name, f"is None, but {next(iter(cached))} is given")
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


@dataclasses.dataclass(frozen=True)
class BuildTime:
    """The build time of one kernel: backend, direction, kernel, and seconds to build it or find it built."""

    backend: str
    direction: str
    kernel: str
    seconds: float


_Given = tuple[Tensor | Quantized, Tensor | None, Tensor | None]


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

    gpu names an architecture, ``"sm_90"`` or ``"gfx942"``, to build for on a machine that need not have one, as where a
    container image is made. What is built lies in Triton's cache alone, the folder ``TRITON_CACHE_DIR``, and is found
    there by the same releases of Triton and of this package at the same path.

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
    if gpu is not None:
        if _device(device) != torch.device("cuda"):
            raise InvalidInputError("gpu", f"is given, but goes with device='cuda' alone, which is {shown(device)}")
        token = AHEAD.set(gpu_of(gpu))
        try:
            return _warm_up((q, k, v), device, backward, keywords)
        finally:
            AHEAD.reset(token)
    return _warm_up((q, k, v), device, backward, keywords)


def _warm_up(given: _Given, device: torch.device | str, backward: bool, keywords: AnyCall) -> list[BuildTime]:
    q, gpu = given[0], AHEAD.get()
    tensors, asked, cached = asked_of("warm_up", given, keywords)
    place, backward = _device(device), flag("backward", backward)
    if gpu is None and place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("device", f"is {place}, but torch finds no GPU here")
    where = {"device_type": place.type, "compute_capability": compute_capability(place)}
    in_8_bits = asked.precision is not None or isinstance(q, Quantized)
    calls: list[tuple[Problem, Any, Direction]]
    if cached:
        over, settings = over_cache(tensors, asked, cached)
        over = without_data(over)
        calls = [(cached_problem.problem_of(over, settings).but(**where), over, "decode")]
    elif in_8_bits:
        refuse_functions(*asked.functions)
        calls = quantized_calls().calls(tensors, asked, place, backward)
    else:
        options = wanting(tensors, options_of(tensors, asked), backward)
        shapes = autocast(without_data(tensors), place.type)
        problem = Problem.of(shapes, options).but(**where, gpu=gpu_name(place) if gpu is None else "")
        shapes = _with_state(shapes, problem)
        calls = [(problem, shapes, direction) for direction in directions_of(problem)]
    wanted: list[tuple[str, str, Build]] = []
    with torch.cuda.device(place) if gpu is None and place.type == "cuda" else nullcontext():
        if in_8_bits and not cached:
            rounding = quantized_calls().rounding_builds(tensors, asked, place)
            wanted += [("quantization", "quantize", build) for build in rounding]
        if cached:
            wanted += [("portable", "decode", build) for build in _finding_builds(tensors, asked, cached, place)]
        for problem, described, direction in calls:
            chosen = dispatch.select(problem, direction, keywords.get("backend"))
            builds = dispatch.builds(chosen, problem, direction, described)
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
