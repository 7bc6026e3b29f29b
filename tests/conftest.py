"""Shared test settings."""

from __future__ import annotations

from hypothesis import settings

# Timings on a shared machine say nothing about correctness, and a fixed seed makes a red run repeatable.
settings.register_profile("flashtile", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("flashtile")
