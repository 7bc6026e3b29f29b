"""What the expressions of ``published.toml`` say about costs and speeds, beside ``flashtile_lab.analysis`` itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.benchmark import Timer

import flashtile
from flashtile_lab import analysis
from flashtile_lab.analysis import A100, H100, AttentionShape, Blocks, LoopOrder
from flashtile_lab.explore.document import saved

KB, MB, GB, KIB, MIB, GIB = 1e3, 1e6, 1e9, 2**10, 2**20, 2**30
B64, B128 = Blocks(64, 64), Blocks(128, 128)
PEAK_A100, PEAK_H100 = A100.peak_flops_per_s / 1e12, H100.peak_flops_per_s / 1e12


def square(seqlen: int, dtype: str = "float16", head_dim: int = 64, heads: int = 1, **more: Any) -> AttentionShape:
    """A call with as many queries as keys."""
    return AttentionShape(seqlen, seqlen, head_dim, heads, dtype=dtype, **more)


def flops(seqlen: int, **more: Any) -> int:
    """FLOPs of a forward."""
    return analysis.attention_flops(square(seqlen, **more)).forward_flops


def traffic(seqlen: int, block: int = 64, order: LoopOrder = LoopOrder.Q_OUTSIDE) -> analysis.TiledTraffic:
    """Traffic of tiled attention, by default with Q in the outer loop."""
    return analysis.tiled_traffic(square(seqlen), Blocks(block, block), order)


def fields(record: object, unit: float, *names: str) -> list[float]:
    """Some fields of a record, in a unit."""
    return [getattr(record, name) / unit for name in names]


def rows(direction: str, head_dim: int, causal: bool, provider: str) -> list[float]:
    """The saved TFLOPS of one attention, by growing length."""
    ladder = saved("ladder")
    cells = [dict(zip(ladder["columns"], cell, strict=True)) for cell in ladder["cells"]]
    wanted = (direction, head_dim, causal)
    found = [cell for cell in cells if (cell["direction"], cell["head_dim"], cell["causal"]) == wanted]
    return [cell["tflops"][provider] for cell in sorted(found, key=lambda cell: cell["seqlen"])]


def ends(direction: str, head_dim: int, causal: bool) -> list[float]:
    """First and last saved row of FA3, FA2 and cuDNN."""
    return [rows(direction, head_dim, causal, provider)[i] for provider in ("fa3", "fa2", "cudnn") for i in (0, -1)]


def rows_from() -> str:
    """The device and the commits of the saved rows."""
    ladder = saved("ladder")
    commits = {cell[ladder["columns"].index("commit")].partition("-")[0] for cell in ladder["cells"]}
    return f"one {ladder['device']} (commits {', '.join(sorted(commits))})"


def live(device: str = "cuda", seqlen: int = 8192, megabytes: int = 1024) -> str:
    """What this machine's GPU does now: a copy, and a bfloat16 forward of the published grid, beside its saved row."""
    x = torch.empty(megabytes * MIB, dtype=torch.uint8, device=device)
    q = torch.randn(2, seqlen, 16, 128, dtype=torch.bfloat16, device=device)
    names = {"x": x, "y": torch.empty_like(x), "q": q, "attention": flashtile.attention}
    timers = [Timer(code, globals=names) for code in ("y.copy_(x)", "attention(q, q, q)")]
    copy_s, forward_s = (timer.blocked_autorange(min_run_time=0.3).median for timer in timers)
    speed = flops(seqlen, head_dim=128, heads=32) / forward_s / 1e12
    row = rows("forward", 128, False, "flashtile-hopper")[-2]
    return (
        f"Measured now: copies at {2 * x.numel() / copy_s / 1e12:.3g} TB/s; a forward of {seqlen} tokens, head_dim "
        f"128, at {speed:.3g} TFLOPS. The saved row of 8192 has {row}."
    )
