"""Attention over a cache on Hopper, for key heads that many rows share."""
