"""Traces a user's function to its graph: one run over numbers without values records every operator.

The function runs on fake tensors without dimensions. Indexing a captured tensor becomes a load, and a view of it a
view; everything else done to it is an error with the operator and the user's line. Autograd computes the derivative in
the same run, and it is recorded too, so that functions with their own backward keep it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flashtile.mods.build import GraphBuilder, finished
from flashtile.mods.graph import INPUTS, Graph, LoadDerivative, kind_of
from flashtile.mods.operators import record
from flashtile.mods.reading import Refused, TraceError, View, is_metadata, of_metadata, untransformed, viewed

# Folders of code that is not the user's. A frame names a file as it was imported, and a package may be behind a link.
_FOLDERS = (Path(__file__).parent.parent, Path(torch.__file__).parent)
_NOT_THE_USERS = tuple(str(each) for folder in _FOLDERS for each in (folder, folder.resolve()))


class Traced(NamedTuple):
    """A function's graph, its operands, and the places of its numbers among the captured numbers.

    Attributes:
        graph: The graph.
        operands: The graph's operands.
        numbers: The places of the graph's numbers.
        asked_lengths: Whether the function reads a captured tensor's lengths.
        asked_more: Whether it reads more metadata, or reads a tensor that is not among the captured ones.
        tensors: The captured tensors, and other tensors that the function reads.
    """

    graph: Graph
    operands: tuple[View, ...]
    numbers: tuple[int, ...]
    asked_lengths: bool
    asked_more: bool
    tensors: list[Tensor]


_DTYPES = {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}


def trace(
    bound: Callable[[Callable[[int], Any]], Callable[..., Any]],
    what: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[float] | None = None,
) -> Traced:
    """The graph of a function.

    Args:
        bound: Returns a score mod or a mask mod that takes its n-th number from the given function.
        what: "score" or "mask".
        tensors: The tensors that it captures.
        numbers: The numbers that it captures; the graph then holds for all numbers and lengths. None for a graph with
            their present values.

    Raises:
        TraceError: The function does something that a mod may not.
    """
    with nothing_else(), GraphRecorder(tensors) as recorder:
        try:
            return recorder.run(bound, what, numbers)
        except Exception as error:
            raise TraceError(f"{_why(error)}{_line_of(error)}") from error


@contextlib.contextmanager
def nothing_else() -> Iterator[None]:
    """A context without transforms, modes and autocast, and with gradients."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with (
        temporarily_clear_interpreter_stack(), _disable_current_modes(), torch._C._DisableAutocast(),
        torch.inference_mode(False), torch.enable_grad(),
    ):  # fmt: skip
        yield


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"


def _line_of(error: Exception) -> str:
    """The last line of the user's code that led to an error."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS) and not frame.filename.startswith("<"):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""


class Unknown(Tensor):
    """One number without a value. PyTorch's own fake tensors would load its compiler, which takes two seconds."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype) -> Unknown:
        """A number of a dtype."""
        return Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=torch.device("cpu"))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unknown({self.dtype})"

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> Unknown:
        """The result of an operator on such numbers.

        Raises:
            Refused: The result is more than one number.
        """

        def described(x: Any) -> Any:
            if isinstance(x, Tensor) and not x.dim():
                return torch.ones((), dtype=x.dtype)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        with torch._C._DisableTorchDispatch():
            out = func(*_mapped(args, described), **{key: _mapped(x, described) for key, x in kwargs.items()})
        if not isinstance(out, Tensor) or out.dim():
            raise Refused(
                f"{func} in it makes {tuple(out.shape) if isinstance(out, Tensor) else type(out)}, not one number"
            )
        return cls(out.dtype)


class _Number(Unknown):
    """A number that a function captures. Only operations that the graph can record are allowed on it."""

    def __hash__(self) -> int:
        raise Refused("looks up a number")

    def __repr__(self) -> str:  # type: ignore[override]
        raise Refused("makes a text of a number")


class GraphRecorder(TorchDispatchMode):
    """Records the operators of a run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch wraps a mode so that its first call loads the compiler.
        return False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.made, self.tensors = GraphBuilder(), list(tensors)
        self._nodes: dict[int, int] = {}
        self._alive: list[Any] = []
        self.operands: list[View] = []
        self._views = {id(x): View(n) for n, x in enumerate(tensors)}
        self._of_views: dict[Any, int] = {}
        self.leaves: list[tuple[int, Tensor]] = []
        self.asked_lengths = self.asked_more = self.lifts = False

    def run(self, bound: Any, what: str, open_: Sequence[float] | None) -> Traced:
        """Runs the function and its derivative."""
        numbers = open_ or ()
        kinds = ["f" if isinstance(x, (float, torch.SymFloat)) else "i" for x in numbers]
        self.lifts = open_ is not None
        lifted = [self.new(self.made.add("number", kind, n), kind, _Number) for n, kind in enumerate(kinds)]
        f = bound(lifted.__getitem__)
        given = {name: self.new(self.made.add(name, kind), kind) for name, kind in INPUTS.items()}
        score = given["score"].requires_grad_(what == "score")
        if what == "mask":
            del given["score"]
        with _Reads(self):
            out = f(*given.values())
        if isinstance(out, (bool, int, float)):
            out = self.new(self.made.const(out, "b" if type(out) is bool else "f"), "b" if type(out) is bool else "f")
        if not isinstance(out, Tensor) or out.dim():
            raise Refused(f"returns {type(out).__name__}, must return one {'score' if what == 'score' else 'bool'}")
        result = self.made.cast(self.node(out), "f" if what == "score" else "b")
        slope: int | None = None
        partials: list[LoadDerivative] = []
        if what == "score":
            slope, partials = self._derivative(out, score)
        sized = {n: f"{kind_of(self.of(v).dtype)}{self.of(v).dim()}" for n, v in enumerate(self.operands)}
        graph, operands, places = finished(
            self.made, what, result, slope, partials, sized, dict(enumerate(kinds)),
        )  # fmt: skip
        return Traced(graph, tuple(self.operands[n] for n in operands), tuple(places), self.asked_lengths,
                      self.asked_more, self.tensors)  # fmt: skip

    def _derivative(self, out: Tensor, score: Tensor) -> tuple[int, list[LoadDerivative]]:
        """The result's derivatives with respect to the score, and to each load."""
        zero = self.made.const(0.0, "f")
        if not out.requires_grad:
            return zero, []
        leaves = [leaf for _, leaf in self.leaves]
        first, *others = torch.autograd.grad(out, [score, *leaves], allow_unused=True)
        sums: dict[int, int] = {}
        for (load, _), found in zip(self.leaves, others, strict=True):
            if found is not None:
                slope = self.made.cast(self.node(found), "f")
                sums[load] = self.made.add("add", "f", sums[load], slope) if load in sums else slope
        slope = zero if first is None else self.made.cast(self.node(first), "f")
        return slope, [LoadDerivative(load, slope) for load, slope in sums.items()]

    def of(self, view: View) -> Tensor:
        """The view itself."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return view.of(untransformed(self.tensors[view.tensor]))

    def new(self, node: int, kind: str, of: type[Unknown] = Unknown) -> Tensor:
        """A tensor without a value that represents a node."""
        made = of(_DTYPES[kind])
        self.stands_for(made, node)
        return made

    unknown = staticmethod(Unknown.of)

    def stands_for(self, x: Tensor, node: int) -> None:
        """Records that a tensor has a node's value."""
        self._nodes[id(x)] = node
        self._alive.append(x)

    def node(self, x: Any, kind: str | None = None) -> int:
        """The node of an argument of an operator, as another kind if one is given."""
        if isinstance(x, Tensor):
            found = self._nodes.get(id(x))
            if found is None and id(x) in self._views and not x.dim():
                found = self.node(self.load(self._views[id(x)], (), x.dtype))
            if found is None:
                if isinstance(x, Unknown) or x.dim():
                    raise Refused("uses a tensor that it makes or finds in a way that cannot be followed")
                with _disable_current_modes():
                    found = self.made.const(x.item(), kind_of(x.dtype))
            return found if kind is None else self.made.cast(found, kind)
        own = kind or ("b" if type(x) is bool else "f" if type(x) is float else "i")
        return self.made.const(x, own)

    def is_captured(self, x: Any) -> bool:
        """Whether something is a real tensor."""
        return isinstance(x, Tensor) and not isinstance(x, Unknown)

    def view_of(self, x: Tensor) -> View:
        """The operand that a real tensor is; no function makes real tensors."""
        if id(x) not in self._views:
            self.add_view(x, View(len(self.tensors)))
            self.tensors.append(x)
            self.asked_more = True
        return self._views[id(x)]

    def add_view(self, x: Tensor, view: View) -> None:
        """Records that a real tensor is a view of an operand."""
        self._views[id(x)] = view
        self._alive.append(x)

    def operand(self, view: View) -> int:
        """The place of an operand."""
        key = repr(view.steps), view.tensor
        if key not in self._of_views:
            self._of_views[key] = len(self.operands)
            self.operands.append(view)
        return self._of_views[key]

    def load(self, view: View, index: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A load of a tensor's element at an index."""
        kind, nodes = kind_of(dtype), []
        for x in index:
            node = self.node(x)
            if self.made.nodes[node].kind not in "il":
                raise Refused("indexes a captured tensor by what is no integer")
            nodes.append(node)
        node = self.made.add("load", kind, self.operand(view), *nodes)
        made = self.new(node, kind)
        if kind == "f":
            made.requires_grad_()
            self.leaves.append((node, made))
        return made

    def size(self, view: View, dim: int) -> Tensor:
        """An operand's length along a dimension, as a number that may vary."""
        return self.new(self.made.add("size", "i", self.operand(view), dim), "i")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return record(self, func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Turns indexing into loads and views into views; any other use of a captured tensor is an error."""

    def __init__(self, recorder: GraphRecorder) -> None:
        super().__init__()
        self.recorder, self._is_captured = recorder, recorder.is_captured
        self._scalars: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(self._is_captured(x) for x in _flat((args, tuple(kwargs.values())))):
            return func(*args, **kwargs)
        first: Any = args[0] if args else None
        name = getattr(func, "__name__", str(func))
        if self._is_captured(first):
            view = self.recorder.view_of(first)
            if is_metadata(func, name):
                return of_metadata(self.recorder, first, view, func, name, args[1:], kwargs)
            made = viewed(self.recorder, first, view, func, name, args[1:], kwargs)
            if made is not None:
                return made
        args = _mapped(args, self._loaded(name))
        return func(*args, **{key: _mapped(x, self._loaded(name)) for key, x in kwargs.items()})

    def _loaded(self, name: str) -> Callable[[Any], Any]:
        """Returns a function that replaces an argument by a load if it is a captured tensor without dimensions."""

        def loaded(x: Any) -> Any:
            if not self._is_captured(x):
                return x
            if x.dim() or name in ("item", "__bool__", "__int__", "__float__", "__index__", "tolist"):
                raise Refused(f"{name} of a captured tensor: index it instead, or compute this outside of the function")
            if id(x) not in self._scalars:
                self._scalars[id(x)] = self.recorder.load(self.recorder.view_of(x), (), x.dtype)
            return self._scalars[id(x)]

        return loaded


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from _flat(each)
    else:
        yield x


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(_mapped(each, change) for each in x)
    return change(x)
