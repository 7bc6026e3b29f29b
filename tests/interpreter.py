"""Triton's interpreter without work that changes no result and takes most of its time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def without_needless_work() -> Iterator[None]:
    """Within, the interpreter computes what it computes, and some things no more.

    It patches its functions into ``triton.language`` at each call of a device function: once per launch is enough for
    each module that a function uses. It computes each sum and product of integers once more in 64 bits, compares that
    with the type's range, and drops what comes out unless it debugs. It makes the table of NumPy's types at each look
    into it, the type of a block and its name anew for each tensor, and looks for constants in four ways everywhere.
    """
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    with (
        mock.patch.object(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang)),
        mock.patch.object(interpreter, "_get_np_dtype", _looked_up_once(interpreter._get_np_dtype)),
        mock.patch.object(tl.tensor, "__init__", _made_alike(tl.tensor.__init__)),
        mock.patch.object(tl.block_type, "__init__", _shaped_alike(tl.block_type.__init__)),
        mock.patch.object(tl.core, "_unwrap_if_constexpr", _unwrapped_by_kind(tl.core._unwrap_if_constexpr)),
        mock.patch.object(builder, "options", options),
    ):
        yield


def _patched_once(patch: Any) -> Any:
    patched: set[str] = set()

    @functools.cache
    def modules(function: Any) -> set[str]:
        seen = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        return {lang.__name__ for lang in (tl, tl.core) if lang in seen}

    class Scope:
        """The patch scope of a launch, which restores the modules at its end."""

        def __init__(self, own: Any) -> None:
            self.own = own

        def restore(self) -> None:
            patched.clear()
            self.own.restore()

    def patch_once(function: Any) -> Scope | None:
        if modules(function) <= patched:
            return None
        patched.update(modules(function))
        return Scope(patch(function))

    return patch_once


def _looked_up_once(look_up: Any) -> Any:
    found: dict[str, Any] = {}

    def look_up_once(of: Any) -> Any:
        if of.name not in found:
            found[of.name] = look_up(of)
        return found[of.name]

    return look_up_once


def _made_alike(make: Any) -> Any:
    alike: dict[str, dict[str, Any]] = {}

    def make_alike(self: Any, handle: Any, type: Any) -> None:
        if type.name not in alike:
            make(self, handle, type)
            alike[type.name] = dict(vars(self))
        vars(self).update(alike[type.name], handle=handle, type=type)

    return make_alike


def _shaped_alike(make: Any) -> Any:
    alike: dict[tuple[Any, ...], dict[str, Any]] = {}

    def shape_alike(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(x.value if type(x) is tl.constexpr else x for x in shape)
        if key not in alike:
            make(self, element_ty, shape)
            alike[key] = dict(vars(self))
        vars(self).update(alike[key], element_ty=element_ty)

    return shape_alike


def _unwrapped_by_kind(unwrap: Any) -> Any:
    stays: dict[type, bool] = {}

    def unwrap_by_kind(x: Any) -> Any:
        kind = type(x)
        if kind is tl.constexpr:
            return x.value
        if kind not in stays:
            stays[kind] = not issubclass(kind, (list, tuple, tl.tuple, tl.constexpr))
        return x if stays[kind] else unwrap(x)

    return unwrap_by_kind
