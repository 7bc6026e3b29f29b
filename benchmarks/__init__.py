"""Benchmarks of flashtile against its peers; see README.md in this folder."""
