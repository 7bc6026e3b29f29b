"""The kernels that quantise which are built without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.portable.rounding.launch import launches
from flashtile.call.quantized import Choices, Inputs
from flashtile_lab.kernels.build import KernelBuild, build_of


def builds(backend: str, capability: tuple[int, int] | None) -> list[KernelBuild]:
    """Every kernel: the usual head dims, packed sequences, and each choice once; bfloat16."""
    calls: list[dict[str, Any]] = [
        {},
        {"head_dim": 64},
        {"head_dim": 256},
        {"packed": True, "rotary_dim": 128},
        {"head_dim": 96, "rotary_dim": 64, "scales": "head", "rotary_interleaved": True},
        {"rotate": False, "smooth_k": False, "scales": "tensor"},
    ]
    return [build for call in calls for build in _builds(backend, capability, **call)]


def _builds(
    backend: str,
    capability: tuple[int, int] | None,
    *,
    head_dim: int = 128,
    packed: bool = False,
    rotary_dim: int = 0,
    **choices: Any,
) -> list[KernelBuild]:
    def empty(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    rows = (8192,) if packed else (4, 2048)
    bounds = empty(5, of=torch.int32) if packed else None
    angles = empty(2048, rotary_dim // 2, of=torch.float32) if rotary_dim else None
    q, kv = empty(*rows, 16, head_dim), empty(*rows, 8, head_dim)
    about: dict[str, object] = {"dtype": "bf16", "head_dim": head_dim, **choices}
    about |= {"packed": True} if packed else {}
    about |= {"rotary_dim": rotary_dim} if rotary_dim else {}
    # Of queries whose next head is loaded meanwhile: 64 bytes on Triton 3.6, none on 3.7, 160 on 3.9.
    limit = 192 if capability == (9, 0) and head_dim <= 128 else None
    made = launches(Inputs(q, kv, kv, bounds, bounds, angles, angles), Choices(**choices), capability)
    return [
        build_of(launch, name=name, backend=backend, direction="quantize", config=about, spill_limit=limit)
        for name, launch in made.items()
    ]
