"""flashtile: exact attention in pure Python."""

from flashtile.api import attention, attention_varlen, backends, explain, merge_states, support_table
from flashtile.errors import InvalidInputError, UnsupportedError

__version__ = "0.1.0"

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
