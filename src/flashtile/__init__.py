"""flashtile: exact attention in pure Python."""

import importlib
from types import ModuleType

from flashtile.api import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    backends,
    explain,
    merge_states,
    support_table,
    warm_up,
)
from flashtile.errors import InvalidInputError, UnsupportedError

__version__ = "0.1.0"

# Loaded on first use, so that `import flashtile` stays fast.
_SUBMODULES = ("analysis", "compat", "distributed", "nn", "serving")

__all__ = [
    "InvalidInputError",
    "UnsupportedError",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "backends",
    "explain",
    "merge_states",
    "support_table",
    "warm_up",
]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"flashtile.{name}")
    raise AttributeError(f"module 'flashtile' has no attribute {name!r}")
