"""flashtile: exact attention in pure Python."""

import importlib
from typing import TYPE_CHECKING, Any

from flashtile.api.attention import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    backends,
    merge_states,
    support_table,
)
from flashtile.api.prepare import explain, warm_up
from flashtile.core.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from flashtile.api.blocks import create_block_mask
    from flashtile.api.quantize import quantize
    from flashtile.api.support import supports
    from flashtile.audits import audit
    from flashtile.call.events import Compilation, on_compile
    from flashtile.call.quantized import Quantized
    from flashtile.mods.block_mask import BlockMask
    from flashtile.ops.log import log
    from flashtile.ops.plain import decompositions

__version__ = "0.1.0"

# Loaded on first use, so that `import flashtile` stays fast.
_SUBMODULES = ("analysis", "compat", "distributed", "masks", "mods", "nn", "serving")
_OTHERS = {
    "BlockMask": "flashtile.mods.block_mask",
    "Compilation": "flashtile.call.events",
    "Quantized": "flashtile.call.quantized",
    "audit": "flashtile.audits",
    "create_block_mask": "flashtile.api.blocks",
    "decompositions": "flashtile.ops.plain",
    "log": "flashtile.ops.log",
    "on_compile": "flashtile.call.events",
    "quantize": "flashtile.api.quantize",
    "supports": "flashtile.api.support",
}

__all__ = [
    "BlockMask",
    "Compilation",
    "InvalidInputError",
    "Quantized",
    "UnsupportedError",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "audit",
    "backends",
    "create_block_mask",
    "decompositions",
    "explain",
    "log",
    "merge_states",
    "on_compile",
    "quantize",
    "support_table",
    "supports",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"flashtile.{name}")
    if name in _OTHERS:
        return getattr(importlib.import_module(_OTHERS[name]), name)
    raise AttributeError(f"module 'flashtile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))))
