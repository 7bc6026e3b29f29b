"""What a function may do to a tensor that it captures: ask for its shape, view it, and index it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_METADATA = {
    "dim", "size", "numel", "stride", "__len__", "is_floating_point", "get_device", "element_size", "is_complex",
    "ndimension", "nelement", "is_contiguous", "data_ptr", "storage_offset",
}  # fmt: skip
_GETTERS = (
    "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_leaf", "is_meta", "is_cpu",
    "is_sparse", "is_quantized", "is_nested", "names", "itemsize", "nbytes", "grad_fn",
)  # fmt: skip
_SHAPE, _NDIM = Tensor.shape.__get__, Tensor.ndim.__get__  # type: ignore[attr-defined]
_VIEWS = {
    "transpose", "permute", "view", "unsqueeze", "squeeze", "expand", "select", "narrow", "detach", "movedim",
    "diagonal", "t", "unflatten", "view_as", "swapaxes", "swapdims", "moveaxis", "expand_as", "alias", "adjoint",
}  # fmt: skip
_VIEW_GETTERS = ("T", "mT", "H", "mH", "data")
# A function's name, its arguments and its keywords: of names and numbers alone.
Step = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


class Refused(Exception):
    """What a function may not do."""


class TraceError(Exception):
    """A function that is no mod; says why, and where the user's code does it."""


class View(NamedTuple):
    """An operand: a captured tensor, or a view of one that the function takes before it indexes it.

    Attributes:
        tensor: Its place among the captured tensors.
        steps: What makes the view, one after another.
    """

    tensor: int
    steps: tuple[Step, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a captured tensor."""
        for step in self.steps:
            tensor = taken(tensor, step)
        return tensor


def is_metadata(func: Any, name: str) -> bool:
    """Whether a function of a tensor reads none of its elements."""
    if name == "__get__":
        return any(func == getattr(Tensor, each).__get__ for each in _GETTERS if hasattr(Tensor, each))
    return name in _METADATA


def of_metadata(recorder: Any, x: Tensor, view: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The result of such a function; where lengths may vary they are numbers of the graph."""
    if name in ("dim", "ndimension", "is_floating_point") or func == _NDIM:  # one graph has one
        return func(x, *args, **kwargs)
    if func == _SHAPE or (name == "size" and not args and not kwargs):
        return lengths_of(recorder, view, x, range(x.dim()))
    if name == "size" and len(args) == 1 and type(args[0]) is int and -x.dim() <= args[0] < x.dim():
        return lengths_of(recorder, view, x, [args[0] % x.dim()])[0]
    if recorder.lifts:
        raise Refused(f"asks for {name} of a captured tensor")
    recorder.asked_lengths = True
    recorder.asked_more |= name not in ("__len__", "numel", "nelement", "size")
    return func(x, *args, **kwargs)


def lengths_of(recorder: Any, view: View, x: Tensor, dims: Sequence[int]) -> Any:
    """Lengths of a view."""
    recorder.asked_lengths = True
    if recorder.lifts:
        return tuple(recorder.size(view, d) for d in dims)
    return torch.Size(x.shape[d] for d in dims)


def viewed(recorder: Any, x: Tensor, view: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The view or the load that a function of a captured tensor makes; None for what is neither."""
    if func is Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if any(isinstance(each, (Tensor, Reading)) for each in index):
            return Reading(recorder, view, x, [None] * x.dim()).at(index)
        return _view(recorder, x, view, ("[]", _plain(index), ()))
    if name == "__get__":
        getter = next((each for each in _VIEW_GETTERS if func == getattr(Tensor, each).__get__), None)
        return None if getter is None else _view(recorder, x, view, (".", (getter,), ()))
    if name not in _VIEWS:
        return None
    if name in ("view_as", "expand_as", "squeeze"):
        # What they make depends on lengths. A step holds no tensor.
        lengths_of(recorder, view, x, [])
        if recorder.lifts:
            raise Refused(f"asks for {name} of a captured tensor")
        if name != "squeeze":
            name, args = name[:-3], (tuple(args[0].shape),)
    return _view(recorder, x, view, (name, tuple(args), tuple(kwargs.items())))


def untransformed(x: Tensor) -> Tensor:
    """x, or under a transform, which sees no views while a function is traced, a tensor of its shape."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x


def _view(recorder: Any, x: Tensor, view: View, step: Step) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        x = untransformed(x)
        made = taken(x, step)
        if made.untyped_storage()._cdata != x.untyped_storage()._cdata:
            raise Refused("copies a captured tensor: do it outside of the function")
    recorder.add_view(made, View(view.tensor, (*view.steps, step)))
    return made


def taken(x: Tensor, step: Step) -> Tensor:
    """One step of a view; torch.compile can follow it."""
    name, args, named = step
    if name == "[]":
        return x[tuple(slice(*each[1:]) if isinstance(each, tuple) else each for each in args)]
    made: Tensor = getattr(x, args[0]) if name == "." else getattr(x, name)(*args, **dict(named))
    return made


def _plain(index: Sequence[Any]) -> tuple[Any, ...]:
    """An index whose slices are tuples."""
    return tuple(("slice", each.start, each.stop, each.step) if isinstance(each, slice) else each for each in index)


class Reading:
    """A captured tensor of which some dimensions are indexed: ``table[h]`` of ``table[h][q]``."""

    def __init__(self, recorder: Any, view: Any, tensor: Tensor, index: list[Any]) -> None:
        self._recorder, self._view, self._tensor, self._index = recorder, view, tensor, index

    def at(self, given: tuple[Any, ...]) -> Any:
        """More dimensions indexed; if all are, what is there."""
        free = [d for d, x in enumerate(self._index) if x is None]
        if Ellipsis in [x for x in given if not isinstance(x, Tensor)]:
            n = next(n for n, x in enumerate(given) if x is Ellipsis)
            given = (*given[:n], *[slice(None)] * (len(free) - len(given) + 1), *given[n + 1 :])
        if len(given) > len(free):
            raise Refused(f"indexes {len(free)} dimensions of a captured tensor with {len(given)} indices")
        index = list(self._index)
        for d, x in zip(free, given, strict=False):
            if isinstance(x, slice) and x == slice(None):
                continue
            if type(x) is not int and not (isinstance(x, Tensor) and not x.dim()):
                raise Refused(f"indexes a captured tensor by {type(x).__name__} beside a score's own indices")
            index[d] = self._loaded(x)
        if any(x is None for x in index):
            return Reading(self._recorder, self._view, self._tensor, index)
        return self._recorder.load(self._view, index, self._tensor.dtype)

    def _loaded(self, x: Any) -> Any:
        """An index that is itself a captured tensor without dimensions is loaded."""
        is_captured = self._recorder.is_captured(x)
        return self._recorder.load(self._recorder.view_of(x), (), x.dtype) if is_captured else x

    def __getitem__(self, index: Any) -> Any:
        return self.at(index if isinstance(index, tuple) else (index,))

    @property
    def shape(self) -> Any:
        """Of the dimensions that are left."""
        left = [d for d, x in enumerate(self._index) if x is None]
        return lengths_of(self._recorder, self._view, self._tensor, left)

    def __getattr__(self, name: str) -> Any:
        raise Refused(
            f"{name} of a captured tensor of which {self._index.count(None)} dimensions are not indexed: "
            "index these too"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise Refused(f"{name} of a captured tensor of which dimensions are not indexed: index these too")

    def _refuse(self, *_: Any) -> Any:
        raise Refused("computes with a captured tensor of which dimensions are not indexed: index these too")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = __neg__ = __invert__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __len__ = _refuse
