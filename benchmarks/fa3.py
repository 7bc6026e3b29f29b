"""FlashAttention-3's operators: its library, and autograd over them."""

from __future__ import annotations

import ctypes
import functools
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Up to so many rows of a sequence it chooses the number of splits itself.
_FEW_ROWS = 128


@functools.cache
def load(path: str) -> None:
    """Loads the library, and the ``libcudart.so.12`` beside it first."""
    library = Path(path)
    runtime = library.with_name("libcudart.so.12")
    if library.suffix == ".xz":
        # Unpacked into the temporary folder, once per machine.
        target = Path(tempfile.gettempdir()) / f"flashtile-benchmarks-{os.getuid()}" / library.stem
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            partial = target.with_suffix(f".partial-{os.getpid()}")
            with lzma.open(library) as packed, partial.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 24)
            partial.rename(target)
        library = target
    if runtime.exists():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))


class FlashAttention3(torch.autograd.Function):
    """Autograd over FlashAttention-3's two operators; one split, like its own package, or as it likes of few rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, features: dict[str, Any]) -> Tensor:
        ctx.features = {"softmax_scale": q.shape[-1] ** -0.5, **features}
        splits = 0 if q.dim() == 4 and q.shape[1] <= _FEW_ROWS else 1
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=splits, **ctx.features)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(dout, *ctx.saved_tensors, **ctx.features)
        return dq, dk, dv, None
