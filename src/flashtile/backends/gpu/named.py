"""Device code by name: host code names kernels and the functions that they take, and imports neither.

Modules of device code import Triton, which takes a second and is not needed where a kernel has been built ahead.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


class DeviceModule:
    """A module of device code: its attributes are ``DeviceFunction``, one object for each name."""

    def __init__(self, name: str) -> None:
        """By its dotted name."""
        self.name = name

    def load(self) -> Any:
        """The module itself."""
        return importlib.import_module(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = vars(self)[name] = DeviceFunction(self, name)
        return made


class DeviceFunction:
    """A ``@triton.jit`` or ``@gluon.jit`` function by its place; loaded when something is asked of it."""

    __slots__ = ("__name__", "_loaded", "module")

    def __init__(self, module: DeviceModule, name: str) -> None:
        """By its module and its name."""
        self.module, self.__name__, self._loaded = module, name, None

    def load(self) -> Any:
        """The function itself."""
        if self._loaded is None:
            self._loaded = getattr(self.module.load(), self.__name__)
        return self._loaded

    def __repr__(self) -> str:
        return f"{self.module.name}.{self.__name__}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def __getitem__(self, grid: Any) -> Any:
        return self.load()[grid]


@functools.cache
def device_code(name: str) -> DeviceModule:
    """The module with a dotted name, one object for each: a function's place is a part of the keys of builds."""
    return DeviceModule(name)


def loaded(value: Any) -> Any:
    """The function that a ``DeviceFunction`` names; any other value as it is."""
    return value.load() if isinstance(value, DeviceFunction) else value
