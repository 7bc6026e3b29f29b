"""Attention over a cache of keys and values in Triton: the kernels of both GPU backends."""
