"""Attention over a cache of keys and values: ``flashtile.attention_with_kvcache``, by the layers of a regular call."""
