"""flashtile: exact attention in pure Python."""

import importlib
from types import ModuleType

from flashtile.api import attention, attention_varlen, backends, explain, merge_states, support_table
from flashtile.errors import InvalidInputError, UnsupportedError

__version__ = "0.1.0"

# Loaded when first asked for, so that `import flashtile` stays quick.
_SUBMODULES = ("analysis", "compat", "nn")

__all__ = [
    "InvalidInputError",
    "UnsupportedError",
    "attention",
    "attention_varlen",
    "backends",
    "explain",
    "merge_states",
    "support_table",
]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"flashtile.{name}")
    raise AttributeError(f"module 'flashtile' has no attribute {name!r}")
