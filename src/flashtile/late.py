"""Registers with modules that take long to import, when the program itself imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds one module as usual, and calls functions when the module has been executed for the first time."""

    def __init__(self, name: str) -> None:
        self.name, self.registers = name, list[Callable[[ModuleType], None]]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    for register in self.registers:
                        register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def when_imported(name: str, register: Callable[[ModuleType], None]) -> None:
    """Calls ``register`` with a module now, or as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        register(module)
        return
    # One finder for each module: a second one would not be asked.
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder) and each.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.registers.append(register)
