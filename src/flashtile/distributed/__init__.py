"""Attention over one sequence on many devices: each rank holds some of the rows, and keys travel."""
