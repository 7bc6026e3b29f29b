"""Attention over one sequence on many devices: each rank holds some of the rows, and keys travel."""

from flashtile.distributed.attention import attention
from flashtile.errors import ExchangeError

__all__ = ["ExchangeError", "attention"]
