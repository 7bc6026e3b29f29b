"""Backends: one folder each, folder name = backend name = key of the dispatch table."""
