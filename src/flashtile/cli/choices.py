"""Choices that several commands offer."""

from __future__ import annotations

import enum


class DtypeName(enum.StrEnum):
    """The input dtypes, as PyTorch calls them."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class DeviceType(enum.StrEnum):
    """Where the tensors lie; auto is a GPU where this machine has one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
