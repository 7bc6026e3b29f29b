"""The kernels of a GPU backend in an ordered table: the only place where one is chosen."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashtile.backends.gpu import build
from flashtile.call.arguments import Grads
from flashtile.call.backend import ASKED, Build, Capabilities, Direction, Given, Limit, Plan, asked_for
from flashtile.call.problem import Problem

if TYPE_CHECKING:
    from flashtile.backends.gpu.decode.launch import Attention
    from flashtile.backends.gpu.launch import Launch


@functools.cache
def module(name: str) -> Any:
    """A module below ``flashtile.backends``. Kept, since an import statement takes longer where a module is loaded."""
    return importlib.import_module(f"flashtile.backends.{name}")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A row of a table: kernels that compute calls of a direction together.

    The first row of a direction that ``takes`` a call, has no ``reasons`` against it and ``reads`` its tensors runs
    the call.

    Attributes:
        name: Its name. If the row has ``reasons``, the name of the calls that it is for.
        direction: The direction.
        package: Where its modules ``config`` and ``launch`` are, below ``flashtile.backends``. They are loaded late.
        text: What ``explain`` says of it, with {} for its tiles.
        takes: Whether it is meant for a call.
        reasons: What keeps a call that it is meant for from it.
        reads: Whether its loads can address a call's tensors.
    """

    name: str
    direction: Direction
    package: str
    text: str = "{}"
    takes: Callable[[Problem], bool] = lambda problem: True
    reasons: Callable[[Problem], list[str]] = lambda problem: []
    reads: Callable[[Problem, Any], bool] = lambda problem, tensors: True

    def describe(self, table: GpuBackend, problem: Problem) -> str:
        """The kernel in one line, with the tiles that its plan chooses for tensors of the usual layouts."""
        return self.text.format(module(f"{self.package}.config").choose(problem))

    def make(self, table: GpuBackend, problem: Problem, like: Any, *given: Any) -> Plan:
        """The plan of a call; see ``Backend.plan``."""
        plan: Plan = module(f"{self.package}.launch").plan(problem, like, *given)
        return plan


class CachedKernel(Kernel):
    """Attention over a cache; whatever attends, the same kernel appends before.

    A plan looks for the row when it is called, since the tiles on trial decide too.
    """

    def make(self, table: GpuBackend, problem: Problem, like: Any, *given: Any) -> Plan:
        """A plan with the launches of the row that each call takes."""
        plan: Plan = module("gpu.decode.launch").plan(problem, like, table.attend)
        return plan

    def attend(self, problem: Problem, tensors: Any) -> list[Attention]:
        """The launches that attend."""
        made: list[Attention] = module(f"{self.package}.launch").attend(problem, tensors)
        return made


# A forward is split if it has at most 128 packed rows a key head, 16 in float32, and at least 2,048 keys.
_SPLIT_ROWS, _SPLIT_ROWS_FLOAT32, _SPLIT_KEYS = 128, 16, 2048


class SplitForward(Kernel):
    """The forward of one tile of rows over so many keys that programs share them, by a kernel of cached calls."""

    def describe(self, table: GpuBackend, problem: Problem) -> str:
        """The line of the same call over a cache."""
        return table.describe(as_cached(problem), "decode")

    def make(self, table: GpuBackend, problem: Problem, like: Any, *given: Any) -> Plan:
        """The plan of the call over a cache; a result over other keys is merged by the next row's kernel."""
        regular = table.kernel("forward", problem, after=self)
        place, cached = module("gpu.decode.split_forward"), functools.partial(table.plan, "decode", as_cached(problem))
        merging = functools.partial(asked_for, ASKED.get(), regular.make, table, problem)
        plan: Plan = place.SplitForwardPlan(problem, like, cached, merging)
        return plan


def is_split(problem: Problem) -> bool:
    """Whether a forward has one tile of rows over many keys.

    It looks at a sequence's own lengths, never at the batch, and so at no packed call: its lengths are the longest.
    """
    p = problem
    if p.varlen or p.mask or p.intervals or p.bias_dtype or p.origins or p.dropout_p or p.out_dtype != p.dtype:
        return False
    if p.score_function is not None or p.mask_function is not None or p.listed or max(p.head_dim, p.head_dim_v) > 256:
        return False
    most = _SPLIT_ROWS_FLOAT32 if p.dtype == torch.float32 else _SPLIT_ROWS
    return p.batch > 0 and 0 < p.seqlen_q * p.group_size <= most and p.seqlen_k >= _SPLIT_KEYS


def as_cached(problem: Problem) -> Problem:
    """A call without a cache, over a cache of full entries."""
    return problem.but(cached=True, grads=Grads())


def _is_odd_float8_cache(p: Problem) -> bool:
    return p.kv_dtype.itemsize == 1 and (not p.aligned or p.head_dim % 2 + p.head_dim_v % 2 > 0)


ODD_FLOAT8_CACHE = Limit("float8 caches of odd widths, or not aligned to 16 bytes", _is_odd_float8_cache)
# A block's probabilities are multiplied by its pages' scales over the largest of these.
INVARIANT_SCALES = Limit(
    "batch_invariant=True with scales by page", lambda p: bool(p.batch_invariant) and p.paged_scales
)
# Sums that the compiler may fuse with the products before them, otherwise in each loop and build: see ``mods.alibi``.
INVARIANT_SCORES = Limit(
    "batch_invariant=True with an attn_bias or a score_mod",
    lambda p: bool(p.batch_invariant) and (p.bias_dtype is not None or p.score_function is not None),
)
SPLIT_FORWARD = SplitForward("split_forward", "forward", "gpu.decode", takes=is_split)


@dataclass(kw_only=True, eq=False)
class GpuBackend:
    """A backend from its table; see ``call.backend.Backend`` for the methods.

    Attributes:
        name: The backend's name.
        summary: Where it runs.
        able: What the kernels of a direction compute.
        kernels: The table.
        gluon: Whether they need Triton's Gluon.
    """

    name: str
    summary: str
    able: Mapping[Direction, Capabilities]
    kernels: tuple[Kernel, ...]
    gluon: bool = False

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """What the kernels of a direction compute."""
        return self.able.get(direction)

    def missing(self) -> str | None:
        """Triton, where it is not installed."""
        return build.missing(gluon=self.gluon)

    def _rows(self, direction: Direction, problem: Problem) -> Iterator[Kernel]:
        return (each for each in self.kernels if each.direction == direction and each.takes(problem))

    def kernel(
        self, direction: Direction, problem: Problem, tensors: Any = None, after: Kernel | None = None
    ) -> Kernel:
        """The row that runs a call, of tensors that any row reads if they are None; ``after``: another than this."""
        for row in self._rows(direction, problem):
            if row is not after and not row.reasons(problem) and (tensors is None or row.reads(problem, tensors)):
                return row
        raise AssertionError(f"{self.name} has no kernel for {problem}")

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The kernel and its tiles, and why not the kernels before it that are meant for such calls."""
        chosen = self.kernel(direction, problem)
        parts = [chosen.describe(self, problem)]
        for row in self._rows(direction, problem):
            if row is chosen:
                break
            parts.append(f"not the kernel for {row.name}: {', '.join(row.reasons(problem))}")
        return "; ".join(parts)

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = ()) -> Plan:
        """The plan that the row makes."""
        if problem.device_type == "cuda":
            build.expect_compiling()
        return self.kernel(direction, problem).make(self, problem, like, *given)

    def attend(self, problem: Problem, tensors: Any) -> list[Attention]:
        """The launches that attend over a cache."""
        row = self.kernel("decode", problem, tensors)
        assert isinstance(row, CachedKernel)
        return row.attend(problem, tensors)

    def launches(self, problem: Problem, tensors: Any, direction: Direction) -> dict[str, Launch]:
        """The kernels of a call's plan for a direction, by name, in order. A dout is contiguous."""
        given: dict[str, Any] = {}
        if direction == "backward":
            given = {"dout": tensors.q.new_empty((*tensors.q.shape[:-1], problem.head_dim_v)), "dlse": None}
        plan: Any = self.kernel(direction, problem).make(self, problem, tensors, *given.values())
        made: dict[str, Launch] = plan.launches(tensors, False, **given)
        return made

    def builds(self, problem: Problem, tensors: Any, direction: Direction) -> list[Build]:
        """The builds of the launches."""
        return build.builds(self.launches(problem, tensors, direction))
