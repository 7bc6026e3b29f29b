"""GPUs: what the devices here are, and the one that kernels are built for on a machine without it; see ``warm_up``."""

from __future__ import annotations

import functools
import re
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from flashtile.core.errors import InvalidInputError, shown


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, in Triton's words.

    Attributes:
        backend: ``"cuda"`` or ``"hip"``.
        arch: ``90`` or ``"gfx942"``.
        warp_size: Threads of a warp.
    """

    backend: str
    arch: int | str
    warp_size: int

    @property
    def capability(self) -> tuple[int, int] | None:
        """``(major, minor)`` as problems have it, None for AMD."""
        return divmod(self.arch, 10) if isinstance(self.arch, int) else None


# The GPU that is built for in place of the one that is here; None outside of such a call.
AHEAD: ContextVar[Gpu | None] = ContextVar("AHEAD", default=None)


def gpu_of(name: object) -> Gpu:
    """The GPU of an architecture's name.

    Raises:
        InvalidInputError: It is not one.
    """
    text = name if isinstance(name, str) else ""
    if found := re.fullmatch(r"sm_?(\d{2,3})a?", text):
        return Gpu("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", text):
        return Gpu("hip", text, 64 if text.startswith("gfx9") else 32)
    raise InvalidInputError("gpu", f"is {shown(name)}, must be an architecture, like 'sm_90' or 'gfx942'")


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """``(major, minor)`` of an NVIDIA device, None for any other; that of the GPU that is built for, if one is."""
    if device.type == "cuda" and (gpu := AHEAD.get()) is not None:
        return gpu.capability
    return _compute_capability(device)


@functools.lru_cache(maxsize=64)
def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    is_here = device.type == "cuda" and not torch.version.hip and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_here else None


@functools.lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str:
    """The name of a GPU that is here, empty for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
