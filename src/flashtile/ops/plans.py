"""What is kept of calls: their plans, by all that checks and launches look at, and what calls of other lengths share.

Only single operations on the dictionary, so that threads need no lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import Options, is_plain
from flashtile.call.axes import is_aligned
from flashtile.call.backend import (
    LOADED,
    MEANWHILE,
    Backend,
    Direction,
    Given,
    Gradients,
    Plan,
    asked_for,
    directions_of,
)
from flashtile.call.prepared import without_data
from flashtile.call.problem import TINY, Problem, Tensors
from flashtile.core import settings
from flashtile.ops import dispatch

K = TypeVar("K")


class ShapeClass:
    """What calls that differ in lengths, batch and strides alone have in common.

    Attributes:
        problem: The problem of one of them; None until one has been planned.
        backends: By direction.
    """

    __slots__ = ("backends", "problem")

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.backends: dict[str, Backend] = {}

    def problem_of(self, t: Tensors, options: Options, **but: Any) -> Problem:
        """The problem of a regular call, with other values of some fields; its backends are then in ``backends``."""
        if self.problem is not None:
            return self.problem.resized(t, options)
        problem = Problem.of(t, options)
        problem = problem.but(**but) if but else problem
        # First the backward, so that a call is refused now if its backward cannot run.
        for direction in reversed(directions_of(problem)):
            self.backend(direction, problem, options.backend)
        self.problem = problem
        return problem

    def backend(self, direction: Direction, problem: Problem, name: str) -> Backend:
        """The backend of a direction; ``name`` is an explicit choice, or empty."""
        chosen = self.backends.get(direction)
        if chosen is None:
            chosen = self.backends[direction] = dispatch.select(problem, direction, name)
        return chosen

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = (), name: str = "") -> Plan:
        """A backend's plan; with another's after it where that computes some gradients, see ``dispatch.shares``."""
        hide_backends()
        chosen = self.backend(direction, problem, name)
        shares = dispatch.shares(chosen, problem, direction)
        main, *others = (_planned(backend, share, direction, like, given) for backend, share in shares)
        if not others:
            return main
        (rest,) = others

        def both(*call: Any) -> Gradients:
            found = rest(*call[:5])
            return dataclasses.replace(main(*call), dbias=found.dbias, doperands=found.doperands)

        return both


def _planned(backend: Backend, problem: Problem, direction: Direction, like: Any, given: Given) -> Plan:
    """A backend's plan: its builds know what they are for, and where that is wanted it says what it ran with."""
    kind = functools.partial(dispatch.kind_of, problem, direction)
    plan = asked_for(kind, backend.plan, direction, problem, like, given)
    if not settings.LOG.raw():
        return plan
    from flashtile.ops.log import logged  # what few programs need is not loaded by all

    return logged(plan, backend, problem, direction)


@contextlib.contextmanager
def building_ahead(backward: Backend, problem: Problem, like: Tensors) -> Iterator[None]:
    """Builds the backward's kernels while a forward's is compiled within; after it, if that came from an archive."""
    start = functools.partial(_build_backward, backward, problem, like)
    token, loaded = MEANWHILE.set(start), LOADED.set(False)
    try:
        yield
        if LOADED.get() and MEANWHILE.get() is start:
            start()
    finally:
        MEANWHILE.reset(token)
        LOADED.reset(loaded)


def _build_backward(chosen: Backend, problem: Problem, like: Tensors) -> None:
    """Starts to build in other threads what a backward needs; what fails there is built again when it is needed."""
    shapes, device = without_data(like), like.q.device

    def build() -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            builds = dispatch.builds(chosen, problem, "backward", shapes)
            with ThreadPoolExecutor(len(builds)) as pool:
                list(pool.map(lambda made: made.make(), builds))

    threading.Thread(target=build).start()


def hide_backends() -> None:
    """Has torch.compile, where it has been imported, run the backends' code as it is.

    Where it cannot trace a caller, it compiles each function that the caller calls, a backend's functions among them.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if hasattr(rules, "add"):  # not while another thread imports it; no public function does this
        _hide_from(rules)


@functools.cache
def _hide_from(rules: Any) -> None:
    rules.add("flashtile.backends")


# Planned calls by all that checks and launches depend on, and shape classes: a training loop repeats a few of them.
kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
MOST = 4096


@contextlib.contextmanager
def own_plans(own: OrderedDict[tuple[Any, ...], Any] | None = None) -> Iterator[None]:
    """Keeps the plans of calls inside elsewhere: for tuning, since the keys do not include tiles on trial."""
    global kept
    before = kept
    kept = OrderedDict() if own is None else own
    try:
        yield
    finally:
        kept = before


def keep(key: tuple[Any, ...], value: K) -> K:
    """Keeps what was made for calls of a key; the oldest is forgotten."""
    kept[key] = value
    if len(kept) > MOST:
        kept.popitem(last=False)
    return value


def shape_class(key: tuple[Any, ...]) -> ShapeClass:
    """The shape class of a key."""
    key = (ShapeClass, *key)
    return kept.get(key) or keep(key, ShapeClass())


def layout(x: Tensor) -> tuple[Any, ...]:
    """All that checks and launches depend on of a tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def products(q: Tensor) -> object:
    """PyTorch's setting of how float32 numbers are multiplied, where that is the dtype."""
    return q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision


def class_key(t: Tensors, o: Options) -> tuple[Any, ...] | None:
    """What a call is, but for its batch, its strides and, beyond whether it is tiny, its lengths.

    None if sizes do not fit one another.

    Two calls of a shape class are both valid or neither is, and their problems differ in lengths and batch alone. Calls
    with a mask, a bias, intervals, lists or users' functions have none: lengths are in their tensors' shapes too. Nor
    have calls with origins.
    """
    q, k, v, slopes, bounds_q, bounds_k = t.q, t.k, t.v, t.alibi_slopes, t.cu_seqlens_q, t.cu_seqlens_k
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    rank = 4 if bounds_q is None else 3
    if not (len(of_q) == len(of_k) == len(of_v) == rank and of_k[0] == of_v[0] and of_k[-3:-1] == of_v[-3:-1]):
        return None
    others: tuple[Any, ...] = ()
    batch_q, batch_k = of_q[0], of_k[0]
    if not is_plain(t):
        alone = t.attn_mask is not None or t.attn_bias is not None or t.origins is not None
        alone = alone or t.row_keys is not None or t.key_rows is not None or t.row_blocks is not None
        alone = alone or t.operands is not None
        if alone or (bounds_q is None) != (bounds_k is None):
            return None
        if bounds_q is not None and bounds_k is not None:
            if not (bounds_q.dim() == bounds_k.dim() == 1 and len(bounds_q)):
                return None
            batch_q, batch_k = len(bounds_q) - 1, len(bounds_k) - 1
        if slopes is not None and slopes.dim() == 2 and len(slopes) != batch_q:
            return None
        shapes = [None if x is None else (x.shape, x.stride()) for x in (slopes, t.sinks, t.rng_state)]
        others = *shapes, *(
            None if x is None else (x.dtype, x.device, x.data_ptr() % 16)
            for x in (slopes, t.sinks, t.rng_state, bounds_q, bounds_k)
        )  # fmt: skip
    if batch_q != batch_k:
        return None
    without_lengths = o if o.max_seqlen_q is o.max_seqlen_k is None else o[:2] + o[4:]
    tiny = rank == 4 and of_q[1] <= TINY and of_k[1] <= TINY
    on_16_bytes = is_aligned(q) and is_aligned(k) and is_aligned(v)
    return (
        without_lengths, others, tiny, of_q[-2], of_q[-1], of_k[-2], of_k[-1], of_v[-1], q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, on_16_bytes or (q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16),
    )  # fmt: skip
