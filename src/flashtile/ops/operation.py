"""An operation: a kind of call, from the tables of its arguments to its operators and to its plans.

``torch.compile``, ``FakeTensor``, ``torch.export`` and CUDA graphs see opaque operators and can infer their shapes; no
operator synchronises with a device. Calls that nothing watches go past the dispatcher: its lookup of each argument
takes 0.1 ms, more than all host work of this library.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from flashtile.call import arguments
from flashtile.call.arguments import Grads, fields_of, grads_of, table
from flashtile.call.backend import Direction, Given, Plan
from flashtile.call.problem import Problem
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError
from flashtile.core.sizes import holds, is_dense
from flashtile.ops import plans

T = TypeVar("T")
S = TypeVar("S", bound=tuple[Any, ...])
LIBRARY = torch.library.Library("flashtile", "FRAGMENT")


# What registers with those who watch calls. PyTorch's FLOP counter and DTensor take as long to import as all of
# flashtile. Who uses them has imported them before a call that they see, so each looks then whether its module has been
# imported; called again and again, so what has been done already costs little.
REGISTERS: list[Callable[[], None]] = []


def is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher is needed. Bypassing it where possible saves as much time as a kernel launch takes.

    It is needed during tracing, under a dispatch mode (FakeTensor, FLOP counter), a functorch transform, forward-mode
    differentiation or the profiler, and for tensors of a subclass or without data.
    """
    if (
        type(q) is type(k) is type(v) is Tensor
        and not q.is_meta
        and not _is_compiling()
        and _num_modes() == 0
        and _transform() is None
        and forward_ad._current_level < 0
        and not profiler._is_profiler_enabled
    ):
        return False
    if not _is_compiling():  # of what is traced the operators register, in ``transforms``
        register()
    return True


# By names of this module: each object more that another thread has used too costs the backward's thread.
_is_compiling, _num_modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def register() -> None:
    """Registers with what has been imported."""
    for each in REGISTERS:
        each()


# What counts the runs of calls, by the name that these carry: it gets the planned call and its tensors.
COUNTERS: dict[str, Callable[[PlannedCall, Any], None]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One operator of the library.

    Attributes:
        name: In ``torch.ops.flashtile``.
        arguments: Names of its arguments, in the order of its schema.
        results: Names of its results.
        flops: Its formula, from its arguments by name with shapes in place of tensors; None for none.
    """

    name: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    flops: Callable[[dict[str, Any]], int] | None

    @property
    def overload(self) -> Any:
        """The operator, as PyTorch's registrations take it."""
        return getattr(torch.ops.flashtile, self.name).default

    def named(self, values: Iterable[Any]) -> dict[str, Any]:
        """Values of its arguments by name."""
        return dict(zip(self.arguments, values, strict=True))

    def named_results(self, values: Iterable[Any]) -> dict[str, Any]:
        """Its results by name."""
        return dict(zip(self.results, values, strict=True))


OPERATORS: list[Operator] = []


@dataclasses.dataclass(eq=False)
class Operation(Generic[T, S]):
    """A kind of call.

    Attributes:
        what: How errors name a call.
        direction: What its plans run.
        tensors: The record of its tensors, a table of ``Argument``s.
        options: The record of its other arguments.
        problem_of: Checks the tensors against one another and makes the problem.
        check_values: Checks what tensors contain: on CPUs, or with ``FLASHTILE_CHECK``.
        key: Everything that checks and launches depend on; by default all layouts.
        has_values: Whether there is something for ``check_values``.
        besides: What plans depend on that neither the problem nor the tensors' dtypes say.
        written: The tensors that a call writes.
    """

    what: str
    direction: Direction
    tensors: type[T]
    options: type[S]
    problem_of: Callable[[T, S], Problem]
    check_values: Callable[[Problem, T], None]
    key: Callable[[T, S], tuple[Any, ...]] | None = None
    has_values: Callable[[Problem], bool] = lambda problem: True
    besides: Callable[[T], object] = lambda t: None
    written: Callable[[T], tuple[Tensor, ...]] | None = None

    def __post_init__(self) -> None:
        self.rows, self.option_rows = table(self.tensors), table(self.options)
        self.values = fields_of(self.rows)
        self.in_rows, self.whole = (
            [name for name, row in self.rows.items() if row.layout == layout] for layout in ("rows", "whole")
        )
        named = enumerate(self.option_rows.items(), len(self.rows))
        self.lengths = [(n, name) for n, (name, row) in named if row.schema == "SymInt?"]
        self.lists = {name for name, row in self.option_rows.items() if row.schema.endswith("[]?")}
        self.key_of = self.key or self._layouts

    def define(
        self,
        name: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        leading: Mapping[str, str] | None = None,
        results: Sequence[str] = ("out", "lse"),
        writes: Sequence[str] = (),
        flops: Callable[[dict[str, Any]], int] | None = None,
        tags: tuple[torch.Tag, ...] = (),
        has_derivative: bool = False,
    ) -> Operator:
        """Defines an operator.

        Args:
            name: Its name.
            kernel: Computes it, from its arguments.
            fake: Makes results of the right shapes, from its arguments.
            leading: Tensors before the operation's arguments, with their types.
            results: Names of its results, all of them tensors.
            writes: Names of the tensors that it writes.
            flops: See ``Operator``.
            tags: PyTorch's tags.
            has_derivative: Whether kernels for autograd are registered elsewhere; else derivatives are refused.
        """
        kinds = {**(leading or {}), **{name: row.schema for name, row in (self.rows | self.option_rows).items()}}
        kinds |= {written: f"Tensor({letter}!)" for written, letter in zip(writes, "abc", strict=False)}
        operator = Operator(name, tuple(kinds), tuple(results), flops)
        schema = ", ".join(f"{kind} {argument}" for argument, kind in kinds.items())
        LIBRARY.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * len(results))})", tags=tags)
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, kernel, device)
        torch.library.register_fake(f"flashtile::{name}", fake, lib=LIBRARY)
        if not has_derivative:
            LIBRARY.impl(name, self._without_derivative(operator, len(leading or ())), "Autograd", with_keyset=True)
        OPERATORS.append(operator)
        return operator

    def flatten(self, t: T, o: S) -> tuple[Any, ...]:
        """A call's arguments in the order of its operators' schema."""
        plain = ((*x.named, *x.operands) if type(x) is Grads else x for x in o)
        return *self.values(t), *plain

    def unflatten(self, args: Sequence[Any]) -> tuple[T, S]:
        """The inverse of ``flatten``; the dispatcher makes lists of tuples.

        Longest lengths are checked here: a traced call may not know them.
        """
        for n, name in self.lengths:
            self.option_rows[name].check(name, args[n])
        tensors = (tuple(x) if isinstance(x, list) else x for x in args[: len(self.rows)])
        named = zip(self.option_rows, args[len(self.rows) :], strict=True)
        lists = self.lists  # AOTInductor makes None of an empty list
        plain = (
            x if type(x) is not list and name not in lists else grads_of(name, x) if name == "grads" else tuple(x or ())
            for name, x in named
        )
        t, o = self.tensors(*tensors), self.options(*plain)
        if getattr(o, "mods", ()):
            record: Any = t
            record.operands, record.numbers = record.operands or (), record.numbers or ()
        return t, o

    def _layouts(self, t: T, o: S) -> tuple[Any, ...]:
        return o, settings.BACKEND.raw(), *[None if x is None else plans.layout(x) for x in self._single(t)]

    def _single(self, t: T) -> list[Tensor | None]:
        """A call's tensors, the mods' one by one, and None for what is not given and for numbers of mods."""
        each = [x for value in self.values(t) for x in (value if type(value) is tuple else (value,))]
        return [x if isinstance(x, Tensor) else None for x in each]

    def fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Empty out and lse of the call of these arguments."""
        t, o = self.unflatten(args)
        problem, q = self.problem_of(t, o), t.q  # type: ignore[attr-defined]
        out = q.new_empty((*q.shape[:-1], problem.head_dim_v), dtype=problem.out_dtype)
        shape = problem.lse_shape(q)
        if problem.max_scores:  # ``states.with_max_scores``, which lie one after the other
            return out, q.new_empty((2, *shape), dtype=problem.lse_dtype).movedim(0, -1)
        return out, q.new_empty(shape, dtype=problem.lse_dtype)

    def run(self, *args: Any) -> Any:
        """A kernel for ``define``: runs the call of these arguments."""
        t, call = self.planned(*self.unflatten(args))
        return call.run(t)

    def planned(self, t: T, o: S, key: tuple[Any, ...] | None = None) -> tuple[T, PlannedCall]:
        """The tensors with readable strides, and the kept ``PlannedCall``; its key may be known."""
        try:
            key = key or self.key_of(t, o)
        except (RuntimeError, AttributeError):
            self.problem_of(t, o)  # names what is no tensor, or the nested or sparse one, which has no strides
            raise
        call = plans.kept.get(key)
        if call is None:
            readable = self.readable(t)
            if readable is not t:
                return self.planned(readable, o)
            call = plans.keep(key, PlannedCall(self, key, o, *self.prepare(t, o)))
        return t, call

    def readable(self, t: T) -> T:
        """The tensors, copied where kernels need other strides, as ``Argument.layout`` says.

        Called before autograd saves the tensors, so that a training step copies once.
        """
        copies = {}
        for name in self.in_rows:
            x = getattr(t, name)
            if x is not None and x.dim() and not holds(x.stride(-1) == 1) and not holds(x.shape[-1] == 1):
                copies[name] = x.contiguous()
        for name in self.whole:
            x = getattr(t, name)
            if x is not None and not is_dense(x):
                copies[name] = x.contiguous()
        return dataclasses.replace(t, **copies) if copies else t  # type: ignore[type-var]

    def check_types(self, t: T) -> None:
        """Raises for what is no tensor and, where gradients are enabled, for the first tensor that requires grad."""
        gradients = torch.is_grad_enabled()
        for x in self.values(t):
            if x is not None and (type(x) is not Tensor or (gradients and x.requires_grad)):
                break
        else:
            return
        found = arguments.given(t, self.rows)  # names what is no tensor, and not of a subclass either
        of_mesh = [row.keyword or name for name, row, x in found if arguments.is_dtensor(x)]
        if of_mesh:  # the last one, since out is made like q
            raise InvalidInputError(of_mesh[-1], f"is a DTensor, but {self.what} takes local tensors alone")
        if gradients:
            refuse_gradients(self.rows, self.values(t), self.what)

    def prepare(self, t: Any, o: Any, **but: Any) -> tuple[Problem, plans.ShapeClass]:
        """A call's problem with other values of some fields, and its shape class."""
        problem = self.problem_of(t, o)
        problem = problem.but(**but) if but else problem
        alike = problem.but(batch=0, seqlen_q=0, seqlen_k=0)
        lengths = {name: None for name in ("max_seqlen_q", "max_seqlen_k") if name in self.option_rows}
        tensors = (
            None if x is None else (x.dim(), x.dtype, x.device, x.data_ptr() % 16 if not x.is_meta else 0)
            for x in self._single(t)
        )
        about = self.besides(t), settings.BACKEND.raw(), plans.products(t.q)
        return problem, plans.shape_class((alike, o._replace(**lengths), *about, *tensors))

    def plan(self, direction: Direction, t: T, o: S, given: Given = (), **but: Any) -> Plan:
        """A plan of a direction that is not kept here, of a problem with other values of some fields."""
        problem, shape_class = self.prepare(t, o, **but)
        return shape_class.plan(direction, problem, t, given, o.backend)  # type: ignore[attr-defined]

    def guarded(self, problem: Problem, run: Plan) -> Plan:
        """A backend's plan with what every backend's needs around it."""
        if not self.has_values(problem):
            return run
        check, always, written = self.check_values, problem.device_type == "cpu", self.written

        def guarded(t: T) -> Any:
            # An unset variable is known without decoding it.
            if always or (settings.CHECK.raw() and settings.CHECK.enabled()):
                check(problem, t)
            found = run(t)
            if written is not None:
                # Autograd finds by versions that a tensor which it saved was written; kernels do not raise them.
                torch.autograd.graph.increment_version(written(t))
            return found

        return guarded

    def _without_derivative(self, operator: Operator, first: int) -> Callable[..., Any]:
        """A kernel for the dispatcher's autograd keys: there is no derivative of any kind.

        The operation's arguments are those from number ``first`` on.
        """

        def kernel(keyset: Any, *args: Any) -> Any:
            register()
            if torch.is_grad_enabled():
                refuse_gradients(self.rows, args[first : first + len(self.rows)], self.what)
            refuse_tangents(self.rows, args[first:], self.what)
            with torch._C._AutoDispatchBelowAutograd():
                return operator.overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

        return kernel


class PlannedCall:
    """The plans of calls with the same layouts and options.

    Attributes:
        operation: What they are calls of.
        key: What its ``key`` says of them.
        options: The calls' options.
        problem: Their problem.
        shape_class: What they share with calls of other lengths.
        run: The plan, made by the first call.
        backwards: The backward's plans, by the layouts of what it gets.
    """

    __slots__ = ("backwards", "key", "operation", "options", "problem", "run", "shape_class")

    def __init__(
        self,
        operation: Operation[Any, Any],
        key: tuple[Any, ...],
        options: Any,
        problem: Problem,
        shape_class: plans.ShapeClass,
    ) -> None:
        self.operation, self.key, self.options = operation, key, options
        self.problem, self.shape_class = problem, shape_class
        self.run: Plan = self._plan
        self.backwards: dict[Any, Plan] = {}

    def _plan(self, t: Any) -> Any:
        operation, problem, shape_class, name = self.operation, self.problem, self.shape_class, self.options.backend
        ahead: Any = contextlib.nullcontext()
        if operation.direction == "forward" and problem.needs_grad:
            ahead = plans.building_ahead(shape_class.backend("backward", problem, name), problem, t)
        with ahead:
            run = shape_class.plan(operation.direction, problem, t, (), name)
            run = operation.guarded(problem, run)
            self.run = self._counted(run) if getattr(self.options, "counted_by", "") else run
            return self.run(t)

    def _counted(self, run: Plan) -> Plan:
        """A plan that tells what counts the call. A process that loads an exported program may have no counter."""

        def counted(t: Any) -> Any:
            found, count = run(t), COUNTERS.get(self.options.counted_by)
            if count is not None:
                count(self, t)
            return found

        return counted


def refuse_gradients(rows: Iterable[str], given: Iterable[Any], what: str) -> None:
    """Raises for the first of a call's tensors, in the order of ``rows``, that requires grad."""
    for name, x in zip(rows, given, strict=False):
        for each in x if isinstance(x, (tuple, list)) else (x,):
            if isinstance(each, Tensor) and each.requires_grad:
                who = "score_mod" if name == "operands" else name
                raise InvalidInputError(who, f"requires grad, but {what} has no gradient: use torch.no_grad()")


def refuse_tangents(rows: Iterable[str], given: Iterable[Any], what: str) -> None:
    """Raises for the first of a call's tensors, in the order of ``rows``, that is a dual one."""
    for name, x in zip(rows, given, strict=False):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x, level=0).tangent is not None:
            raise InvalidInputError(name, f"has a tangent, but {what} has no derivative")
