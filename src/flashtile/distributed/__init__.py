"""Attention over one sequence on many devices: each rank holds some of the rows, and keys travel."""

from flashtile.core.errors import ExchangeError
from flashtile.distributed.attention import attention
from flashtile.distributed.cache import attention_with_sharded_kvcache
from flashtile.distributed.layouts import Layout
from flashtile.distributed.shards import deal, positions, shard, unshard

__all__ = [
    "ExchangeError", "Layout", "attention", "attention_with_sharded_kvcache", "deal", "positions", "shard", "unshard",
]  # fmt: skip
