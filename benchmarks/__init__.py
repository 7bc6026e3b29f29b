"""Benchmarks of flashtile against its peers; see README.md beside this file."""
