"""Rounding to 8 bits in one pass over each tensor."""
