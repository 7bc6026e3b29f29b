"""Lets ``import flash_attn`` and ``import flash_attn_interface`` find flashtile in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from flashtile.core.errors import InvalidInputError

# Code that compares versions reads this. The local part names flashtile.
FLASH_ATTN_VERSION = "2.8.4+flashtile"

_Contents = dict[str, dict[str, object]]


def install(package: str = "flash_attn") -> ModuleType:
    """Puts modules into ``sys.modules`` under another package's name, so that its users get flashtile's functions.

    After ``install("flash_attn")`` these work in this process: ``import flash_attn``, ``from flash_attn import
    flash_attn_func``, ``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding``, ``flash_attn.layers.rotary``,
    ``flash_attn.ops.triton.rotary``. After ``install("flash_attn_interface")``, which is FlashAttention-3:
    ``import flash_attn_interface``, and ``flash_attn_3.flash_attn_interface`` with the same functions. Any other
    submodule is missing (a ModuleNotFoundError that lists these), and so are names that flashtile does not have.

    Call it before anything imports the package. A copy on disk that is not yet imported is shadowed. Only imports
    change: code that asks ``importlib.metadata`` whether a distribution of that name is installed gets the same answer
    as before.

    Args:
        package: ``"flash_attn"`` or ``"flash_attn_interface"``.

    Returns:
        The package's module.

    Raises:
        InvalidInputError: flashtile has no modules for that package.
        RuntimeError: The real package is already imported: other modules may already use its functions.
    """
    if package not in _PACKAGES:
        known = ", ".join(map(repr, _PACKAGES))
        raise InvalidInputError("package", f"is {package!r}, must be one of {known}")
    contents = _PACKAGES[package]()
    for name in contents:
        present = sys.modules.get(name)
        if present is not None and not getattr(present, "__flashtile__", False):
            where = getattr(present, "__file__", None) or "an unknown place"
            raise RuntimeError(
                f"{name} is already imported from {where}; call flashtile.compat.install before it is imported"
            )
    if package in sys.modules:
        return sys.modules[package]
    modules = {name: _module(name, values, is_package=_is_package(name, contents)) for name, values in contents.items()}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    if _Missing not in sys.meta_path:
        sys.meta_path.append(_Missing)
    return modules[package]


class _Missing:
    """The last finder: its error lists the modules of the package that flashtile has."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        package = name.partition(".")[0]
        if name != package and getattr(sys.modules.get(package), "__flashtile__", False):
            has = ", ".join(each for each in sys.modules if each.startswith(f"{package}."))
            raise ModuleNotFoundError(f"flashtile has no {name}; it stands in for {package} with {has}", name=name)


def _is_package(name: str, contents: _Contents) -> bool:
    return any(other.startswith(f"{name}.") for other in contents)


def _module(name: str, values: dict[str, object], *, is_package: bool) -> ModuleType:
    module = ModuleType(name, f"flashtile's functions under the name {name}.")
    # With a spec importlib.util.find_spec works; with an empty path unknown submodules fail as they should.
    module.__spec__ = ModuleSpec(name, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__package__ = name if is_package else name.rpartition(".")[0]
    module.__dict__.update(values, __flashtile__=True)
    return module


def _public(module: str) -> dict[str, object]:
    found = importlib.import_module(f"flashtile.compat.{module}")
    return {name: getattr(found, name) for name in found.__all__}


def _flash_attn() -> _Contents:
    functions, rotary = _public("flash_attn_2"), _public("rotary")
    return {
        "flash_attn": {**functions, "__version__": FLASH_ATTN_VERSION},
        "flash_attn.flash_attn_interface": {**functions, **_public("_private")},
        "flash_attn.bert_padding": {**_einops(), **_public("bert_padding")},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": rotary,
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.rotary": {"apply_rotary": rotary["apply_rotary"]},
    }


def _einops() -> dict[str, object]:
    """Names that flash-attn's modules import from einops, a dependency, and that verl imports from these modules."""
    try:
        from einops import rearrange, repeat
    except ImportError:
        return {}
    return {"rearrange": rearrange, "repeat": repeat}


def _flash_attn_interface() -> _Contents:
    functions = _public("flash_attn_3")
    places = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
    return {"flash_attn_3": {}, **dict.fromkeys(places, functions)}


_PACKAGES: dict[str, Callable[[], _Contents]] = {
    "flash_attn": _flash_attn,
    "flash_attn_interface": _flash_attn_interface,
}
