"""The backend protocol and the record in which a backend declares its capabilities.

A feature that ``Capabilities`` do not name is unsupported. ``FEATURES`` lists each once, with a test of whether a
problem uses it; refusals and the printed support table come from it. What a backend lacks of features that it has, such
as dropout beside some other feature, is a ``Limit`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import FLOAT8, STRICT
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized_call import QuantizedTensors
from flashtile.core.states import Partial

T = TypeVar("T")
# decode: cached calls (``attention_with_kvcache``), whatever the number of their queries.
# quantized: the forward of a ``flashtile.Quantized``.
Direction = Literal["forward", "backward", "decode", "quantized"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "decode", "quantized")
_REGULAR, _BUT_QUANTIZED = DIRECTIONS[:2], DIRECTIONS[:3]
_DECODE: tuple[Direction, ...] = ("decode",)


def directions_of(problem: Problem) -> tuple[Direction, ...]:
    """The directions that a call of the problem runs."""
    if problem.cached:
        return _DECODE
    if problem.dtype == FLOAT8:
        return ("quantized",)
    return ("forward", "backward") if problem.needs_grad else ("forward",)


@dataclass(frozen=True)
class Feature:
    """One feature of a call.

    Attributes:
        name: Its name in ``Capabilities.features``.
        label: Its name in refusals and in the support table.
        used: Whether a problem needs it.
        directions: Directions with calls that can use it.
    """

    name: str
    label: str
    used: Callable[[Problem], bool]
    directions: tuple[Direction, ...] = _REGULAR


def _is_float8_cache(p: Problem) -> bool:
    return p.cached and p.kv_dtype.itemsize == 1


FEATURES: tuple[Feature, ...] = (
    Feature("causal", "causal", lambda p: p.band.right is not None, DIRECTIONS),
    Feature("window", "sliding window", lambda p: p.band.left is not None or p.band.right not in (None, 0), DIRECTIONS),
    Feature("chunk", "chunks (attention_chunk)", lambda p: p.band.chunk is not None, _BUT_QUANTIZED),
    Feature("grouped_heads", "grouped heads (GQA, MQA)", lambda p: p.group_size > 1, DIRECTIONS),
    Feature("varlen", "packed sequences (varlen)", lambda p: p.varlen, DIRECTIONS),
    Feature("head_dim_v", "head_dim_v other than head_dim", lambda p: p.head_dim_v != p.head_dim, DIRECTIONS),
    Feature("softcap", "softcap", lambda p: p.softcap > 0, DIRECTIONS),
    Feature("alibi", "ALiBi", lambda p: p.alibi, _BUT_QUANTIZED),
    Feature("mask", "boolean attn_mask", lambda p: p.mask),
    Feature("intervals", "interval masks (flashtile.masks)", lambda p: p.intervals, _BUT_QUANTIZED),
    Feature("block_lists", "block lists (create_block_mask, PyTorch's BlockMask)", lambda p: bool(p.listed)),
    Feature("bias", "additive attn_bias", lambda p: p.bias_dtype is not None),
    Feature("bias_grad", "gradient of attn_bias", lambda p: p.bias_grad),
    Feature("sinks", "sinks", lambda p: p.sinks, DIRECTIONS),
    Feature("dropout", "dropout", lambda p: p.dropout_p > 0),
    Feature("origins", "positions of a longer sequence (context parallel with dropout or ALiBi)", lambda p: p.origins),
    Feature("deterministic", "deterministic=True", lambda p: p.deterministic),
    Feature("batch_invariant", "batch_invariant=True", lambda p: bool(p.batch_invariant), _BUT_QUANTIZED),
    Feature(
        "score_mod", "score_mod (a function of the user's)", lambda p: p.score_function is not None, _BUT_QUANTIZED
    ),
    Feature("mask_mod", "mask_mod (a function of the user's)", lambda p: p.mask_function is not None, _BUT_QUANTIZED),
    Feature("operand_grad", "gradients of tensors that a score_mod captures", lambda p: p.operand_grad),
    Feature("max_scores", "largest scores (return_max_scores)", lambda p: p.max_scores, _BUT_QUANTIZED),
    Feature("unaligned", "inputs not aligned to 16 bytes", lambda p: not p.aligned, DIRECTIONS),
    Feature("pages", "caches in pages (page_table)", lambda p: p.page_size > 0, _DECODE),
    Feature("causal_each", "causal by sequence (a tensor)", lambda p: p.causal_each, _DECODE),
    Feature("tree_mask", "draft trees (tree_mask)", lambda p: p.tree, _DECODE),
    Feature("qv", "queries of values (qv, or values that are the keys' first columns)", lambda p: p.qv, _DECODE),
    Feature("float8_rows", "latent rows of 656 bytes (8 bits, scales by row)", lambda p: p.row_scale, _DECODE),
    Feature("float8_cache", "float8 caches", _is_float8_cache, _DECODE),
)


class Limit(NamedTuple):
    """Calls that none of a backend's kernels computes though it has each of their features.

    Attributes:
        label: Their name in refusals and in the support table.
        hits: Whether a problem is one of them.
    """

    label: str
    hits: Callable[[Problem], bool]


def _is_big_function(p: Problem) -> bool:
    return (p.score_function is not None or p.mask_function is not None) and max(p.head_dim, p.head_dim_v) > 256


BIG_FUNCTIONS = Limit("functions of the user's at head_dim past 256", _is_big_function)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one direction of a backend supports; of ``FEATURES`` the names of those that a numerical test covers.

    Attributes:
        device_types: PyTorch device types it runs on.
        dtypes: Input dtypes.
        max_head_dim: Largest head_dim and head_dim_v, None for any.
        head_dim_multiple: head_dim and head_dim_v must be multiples of it.
        min_compute_capability: Lowest NVIDIA compute capability, None where that does not apply.
        max_compute_capability: Highest, None for any.
        nvidia: Whether of GPUs only NVIDIA's will do.
        chain_rows: Multiples on which sequences that have keys begin, and end unless with the last row, in a ``Chain``;
            0 for a backward that takes none.
        chain_head_dim: Largest head_dim and head_dim_v of one.
        always_invariant: Whether packed calls that may be batch-invariant are so without being asked, strictly, if the
            backend has the feature.
        slow_if_tiny: Whether ``Problem.tiny`` calls go to the next backend that can run them, unless this one is named.
        features: Names of the supported features.
        limits: What it does not support of them.
    """

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    head_dim_multiple: int = 1
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    nvidia: bool = False
    chain_rows: int = 0
    chain_head_dim: int = 0
    always_invariant: bool = False
    slow_if_tiny: bool = False
    features: frozenset[str] = frozenset()
    limits: tuple[Limit, ...] = ()

    def reasons(self, problem: Problem) -> list[str]:
        """Every reason why the problem cannot run here, empty if it can."""
        why = [*self._device_reasons(problem), *self._shape_reasons(problem)]
        why += [f"no {f.label}" for f in FEATURES if f.name not in self.features and f.used(problem)]
        return why + [f"no {limit.label}" for limit in self.limits if limit.hits(problem)]

    def suits_device(self, problem: Problem) -> bool:
        """Whether nothing is against the device of a problem."""
        return not self._device_reasons(problem)

    def invariance(self, problem: Problem) -> str:
        """How a packed or cached call is batch-invariant: asked or not, ``arguments.STRICT`` or not; empty if not."""
        if problem.batch_invariant or not self.always_invariant or not problem.varlen or problem.cached:
            return problem.batch_invariant
        asked = problem.but(batch_invariant=STRICT)
        is_own = (
            "batch_invariant" in self.features
            and not problem.dropout_p
            and not problem.listed
            and not any(x.hits(asked) for x in self.limits)
        )
        return STRICT if is_own else ""

    def _device_reasons(self, problem: Problem) -> list[str]:
        if problem.device_type not in self.device_types:
            return [f"needs {' or '.join(self.device_types)} tensors, these are on {problem.device_type}"]
        have = problem.compute_capability
        if have is None:
            return ["needs an NVIDIA GPU"] if self.nvidia and problem.device_type == "cuda" else []
        low, high = self.min_compute_capability, self.max_compute_capability
        if (low and have < low) or (high and have > high):
            needed = ".".join(map(str, low)) if low else ""
            more = "" if high == low else " or later"
            return [f"needs compute capability {needed}{more}, this device is {have[0]}.{have[1]}"]
        return []

    def _shape_reasons(self, problem: Problem) -> list[str]:
        why = []
        if problem.dtype not in self.dtypes:
            why.append(f"no {str(problem.dtype).removeprefix('torch.')}")
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if self.max_head_dim is not None and size > self.max_head_dim:
                why.append(f"{name} is {size}, at most {self.max_head_dim} is supported")
            if size % self.head_dim_multiple:
                why.append(f"{name} is {size}, must be a multiple of {self.head_dim_multiple}")
        return why


@dataclass(eq=False)
class Gradients:
    """The result of a backward: gradients in the shapes of their inputs. frozen=True would cost 2 us.

    dq, dk and dv are in ``problem.grad_dtype``, q's dtype or float32 (float64 for float64 inputs), the others in the
    dtypes of their inputs. doperands has one for each of ``Tensors.operands``, or is empty. Each is None where
    ``problem.grads`` does not request it; a backend may compute more than was requested.
    """

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None
    doperands: tuple[Tensor | None, ...] = ()


class SecondGradients(NamedTuple):
    """The gradients of a backward's results with respect to its inputs, each like its input; None where that is."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    dout: Tensor
    dlse: Tensor | None


class Forward(Protocol):
    """The plan of a forward: computes out and lse from a call's tensors.

    With ``partial``, a result over other keys of the same rows, it returns out and lse over the keys of both. Out may
    be written into ``into``, a tensor like it, contiguous and on 16 bytes, which is then returned.

    Returns:
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or ``(total_q, num_heads_q, head_dim_v)``, in
            ``problem.out_dtype``, q's or float32, contiguous.
        lse: ``problem.lse_shape``, ``problem.lse_dtype``, contiguous; natural log, -inf for a row without keys. A
            problem with ``large_scores`` has it in parts, as ``core.states.in_parts`` makes them; a partial's too. A
            problem with ``max_scores``, which has no partial, has ``core.states.with_max_scores`` of lse.
    """

    def __call__(
        self, tensors: Tensors, partial: Partial | None = None, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Out and lse."""


class Backward(Protocol):
    """The plan of a backward: computes gradients from the forward's tensors and results, of any backend.

    out and lse are results over all keys of the rows, also where the call has some of them: then what it computes is
    these keys' share of dq, and all of their dk and dv. out and dout are in q's dtype; dlse is None for zero. lse has
    the shape in which the forward returns it, without largest scores; dlse never has the dimension of its parts.

    A plan takes ``sums`` if ``problem.grad_dtype`` is lse's dtype: dq, dk and dv in that dtype, contiguous, on
    16 bytes, those that ``problem.grads`` requests. It adds to them in place and returns them. Every element is added
    to once and by nobody else, so the result is as repeatable as without. dbias and dsinks are never added to.
    """

    def __call__(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        sums: Gradients | None = None,
    ) -> Gradients:
        """The gradients that ``problem.grads`` requests."""


@dataclass(eq=False)
class Chain:
    """What backwards over other keys of the same packed rows share, each a call of ``in_chain`` of its own plan.

    That takes what ``Backward`` takes and the chain, of a backend with ``Capabilities.chain_rows``. Sums are of dk and
    dv alone; dq is None but for the last call, which returns dq of all calls in q's dtype. A call with ``heads``,
    the first of some key heads and the end of them, writes theirs into the sums, which are new if there are none.

    Attributes:
        calls: How many are still to come.
        work: What the backend keeps until the next one.
    """

    calls: int
    work: Any = None


# The plan of a cached call: appends k and v to the caches if they are given, writes tensors.out in full, and returns a
# new lse as ``Forward`` does. The
# caches' last dimension is contiguous and their other strides are any, as are page_table's first and out's; q, k, v,
# rotary_cos, rotary_sin and page_table are contiguous in their last dimension, the other tensors in all.
Decode = Callable[[CacheTensors], Tensor]

# The plan of a quantized call: returns out and lse as ``Forward`` does, out in ``problem.out_dtype``. All tensors are
# contiguous; ``quantized_call.scale_strides`` gives the scales' strides, 0 where one scale serves several blocks, heads
# or sequences.
QuantizedForward = Callable[[QuantizedTensors], tuple[Tensor, Tensor]]

# What ``Backend.plan`` returns: one of the four above.
Plan = Callable[..., Any]
# What a plan is made for besides the call's tensors: dout and dlse of a backward, nothing of other directions.
Given = tuple[()] | tuple[Tensor, Tensor | None]


# What a compiler calls when the rest of its work leaves Python free: it starts the builds that a call needs next.
MEANWHILE: ContextVar[Callable[[], None] | None] = ContextVar("MEANWHILE", default=None)
# Whether a kernel came from an archive: then it is called once all of a plan's have, unless a compiler does.
LOADED: ContextVar[bool] = ContextVar("LOADED", default=False)
# Makes the kind of call, as text, that kernels are built for; None where nobody has said.
ASKED: ContextVar[Callable[[], str] | None] = ContextVar("ASKED", default=None)
# While a plan's first run is observed: the names of kernels that it launches, each with its ``gpu.build``'s build.
LAUNCHED: ContextVar[list[tuple[str, Any]] | None] = ContextVar("LAUNCHED", default=None)


def asked_for(kind: Callable[[], str] | None, make: Callable[..., T], *args: Any) -> T:
    """Calls a function that builds, or makes a plan that will build, for this kind of call; see ``ASKED``."""
    token = ASKED.set(kind)
    try:
        return make(*args)
    finally:
        ASKED.reset(token)


def note_launched(kernel: str, build: Any) -> None:
    """A plan has found a kernel's build, or None where it is interpreted; see ``LAUNCHED``."""
    if (launched := LAUNCHED.get()) is not None:
        launched.append((kernel, build))


@dataclass(frozen=True, eq=False)
class Build:
    """One kernel that a call needs.

    Attributes:
        name: The kernel's name.
        make: Compiles it, or finds it compiled. May run in several threads at once for the builds of one call.
        source: Says where its code comes from, or would come from, without making it.
    """

    name: str
    make: Callable[[], object]
    source: Callable[[], str] = str


class Backend(Protocol):
    """One way to compute attention. Each backend's ``__init__`` defines an instance named ``BACKEND``.

    Neither importing that module nor planning a call may import Triton: only compiling a kernel does. The tensors given
    to ``plan`` show layouts: shapes, strides, dtypes, devices, and addresses modulo 16. A plan is kept and called with
    any tensors of the same layouts, so it must not keep those. It may be called from several threads at once.

    Calls of a shape class, see ``plans.class_key``, share their backends. So whether a backend can run a call must not
    depend on lengths, batch or strides; whether it is chosen depends on lengths by ``Problem.tiny`` alone.
    """

    name: str
    summary: str

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """The features that a direction supports; None if the backend does not have the direction."""

    def missing(self) -> str | None:
        """Why this machine cannot run the backend at all, in one phrase; None if it can."""

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The tiles and the algorithm a problem would run with, in one line."""

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = ()) -> Plan:
        """The plan of a direction of this problem: a ``Forward``, ``Backward``, ``Decode`` or ``QuantizedForward``.

        Args:
            direction: One that the backend has ``capabilities`` for.
            problem: A call that these capabilities cover.
            like: Tensors of the layouts that the plan will get.
            given: A backward's dout and dlse, None for zero, in the layouts that it will get, which may be any.
        """

    def builds(self, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        """The kernels that a call of this problem on the current device would build; dout is contiguous, dlse absent.

        The tensors are on the meta device; one that is given twice, as bounds of queries and of keys, is the same.
        """
