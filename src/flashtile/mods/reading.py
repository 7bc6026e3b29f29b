"""The operations that a function may do on a captured tensor: read its metadata, view it, and index it."""

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
# A function's name, its arguments and its keywords, made of names and numbers alone.
Step = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


class Refused(Exception):
    """Raised for an operation that a function may not do."""


class TraceError(Exception):
    """Raised for a function that is not a mod; says why, and names the user's line."""


class View(NamedTuple):
    """An operand: a captured tensor, or a view of it that the function makes before it indexes it.

    Attributes:
        tensor: The tensor's place among the captured tensors.
        steps: The steps that make the view, one after another.
    """

    tensor: int
    steps: tuple[Step, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a captured tensor."""
        for step in self.steps:
            tensor = taken(tensor, step)
        return tensor


def is_metadata(func: Any, name: str) -> bool:
    """Whether a function of a tensor reads only metadata and no element."""
    if name == "__get__":
        return any(func == getattr(Tensor, each).__get__ for each in _GETTERS if hasattr(Tensor, each))
    return name in _METADATA


def of_metadata(recorder: Any, x: Tensor, view: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The result of a metadata function. Lengths that may vary become numbers of the graph."""
    if name in ("dim", "ndimension", "is_floating_point") or func == _NDIM:  # the same for all calls with a graph
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
    """A view's lengths."""
    recorder.asked_lengths = True
    if recorder.lifts:
        return tuple(recorder.size(view, d) for d in dims)
    return torch.Size(x.shape[d] for d in dims)


def viewed(recorder: Any, x: Tensor, view: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The view or the load that a function of a captured tensor makes; None for other functions."""
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
        # These views depend on lengths. A step holds no tensor.
        lengths_of(recorder, view, x, [])
        if recorder.lifts:
            raise Refused(f"asks for {name} of a captured tensor")
        if name != "squeeze":
            name, args = name[:-3], (tuple(args[0].shape),)
    return _view(recorder, x, view, (name, tuple(args), tuple(kwargs.items())))


def untransformed(x: Tensor) -> Tensor:
    """x; under a transform, which sees no views while a function is traced, a tensor of x's shape."""
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
    """Applies one step of a view. torch.compile can trace it."""
    name, args, named = step
    if name == "[]":
        return x[tuple(slice(*each[1:]) if isinstance(each, tuple) else each for each in args)]
    made: Tensor = getattr(x, args[0]) if name == "." else getattr(x, name)(*args, **dict(named))
    return made


def _plain(index: Sequence[Any]) -> tuple[Any, ...]:
    """An index with slices as tuples."""
    return tuple(("slice", each.start, each.stop, each.step) if isinstance(each, slice) else each for each in index)


class Reading:
    """A captured tensor with some dimensions indexed: ``table[h]`` in ``table[h][q]``."""

    def __init__(self, recorder: Any, view: Any, tensor: Tensor, index: list[Any]) -> None:
        self._recorder, self._view, self._tensor, self._index = recorder, view, tensor, index

    def at(self, given: tuple[Any, ...]) -> Any:
        """Indexes further dimensions; once all are indexed, returns the element."""
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
        """The shape of the dimensions that are left."""
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
