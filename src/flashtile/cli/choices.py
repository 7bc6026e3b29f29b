"""Choices that several commands offer."""

from __future__ import annotations

import enum

# The input dtypes, as PyTorch calls them.
DtypeName = enum.StrEnum("DtypeName", ["float16", "bfloat16", "float32", "float64"])
# Where the tensors lie; auto is a GPU where this machine has one.
DeviceType = enum.StrEnum("DeviceType", ["auto", "cpu", "cuda"])
