"""The README's picture of a CPU: peak memory and time of causal attention against sequence length, on one thread.

``python docs/images/make_picture.py measure`` replaces the rows in ``attention.json``; without ``measure`` it draws
``attention.png`` from the rows that are there. Measuring reads memory from ``/proc``, so it needs Linux.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import flashtile
from flashtile_lab.examples.char_gpt import standard_attention

HERE = Path(__file__).resolve().parent
ROWS, PICTURE = HERE / "attention.json", HERE / "attention.png"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS, HEAD_DIM, WINDOW = 2, 64, 256
# Standard attention stops where its scores, their masked copy and the probabilities would pass this.
BUDGET_BYTES = 2 * 2**30
ROUNDS = 5


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: bool = False) -> torch.Tensor:
    """PyTorch's own function, which takes a window as a mask of all pairs, made once a length."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = window_mask(q.shape[2]) if window else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not window).transpose(1, 2)


@cache
def window_mask(seqlen: int) -> torch.Tensor:
    """True for the pairs of the causal window: ``(seqlen, seqlen)``."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool).tril_().triu_(1 - WINDOW)


PROVIDERS: dict[str, Callable[..., Any]] = {
    "standard": standard_attention,
    "SDPA": sdpa,
    "flashtile": partial(flashtile.attention, causal=True),
    "SDPA, window of 256": partial(sdpa, window=True),
    "flashtile, window of 256": partial(flashtile.attention, causal=True, window_size=(WINDOW - 1, 0)),
}
STYLES: dict[str, dict[str, Any]] = {
    "standard": {"color": "#888888", "linestyle": ":"},
    "SDPA": {"color": "#E69F00", "linestyle": "--"},
    "flashtile": {"color": "#D55E00"},
    "SDPA, window of 256": {"color": "#56B4E9", "linestyle": "--"},
    "flashtile, window of 256": {"color": "#0072B2"},
}


def fits(provider: str, seqlen: int) -> bool:
    """Whether a cell is measured."""
    return provider != "standard" or 3 * HEADS * seqlen**2 * 4 <= BUDGET_BYTES


def inputs(seqlen: int) -> list[torch.Tensor]:
    """q, k and v: ``(1, seqlen, HEADS, HEAD_DIM)`` float32, the same each time."""
    torch.manual_seed(0)
    return [torch.randn(1, seqlen, HEADS, HEAD_DIM) for _ in range(3)]


def peak_bytes(provider: str, seqlen: int) -> int:
    """Resident memory that one call adds at its peak, the output included. For a fresh process."""
    torch.set_num_threads(1)
    call, tensors = PROVIDERS[provider], inputs(seqlen)
    call(*inputs(64))  # loads what the first call loads
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    call(*tensors)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure() -> None:
    """Checks the numbers, measures every cell and saves the rows."""
    torch.set_num_threads(1)
    rows = []
    for seqlen in LENGTHS:
        cells = [name for name in PROVIDERS if fits(name, seqlen)]
        tensors = inputs(seqlen)
        for name in cells:
            own = "flashtile, window of 256" if "window" in name else "flashtile"
            torch.testing.assert_close(PROVIDERS[own](*tensors), PROVIDERS[name](*tensors))
        times: dict[str, list[float]] = {name: [] for name in cells}
        for _ in range(ROUNDS):
            for name in cells:
                start = time.perf_counter()
                PROVIDERS[name](*tensors)
                times[name].append(1e3 * (time.perf_counter() - start))
        for name in cells:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak = pool.apply(peak_bytes, (name, seqlen))
            row = {"provider": name, "seqlen": seqlen, "peak_bytes": peak, "median_ms": statistics.median(times[name])}
            rows.append(row)
            print(row, flush=True)
    machine = {
        "threads": 1,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "flashtile": flashtile.__version__,
    }
    case = {
        "batch": 1,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
        "mask": "causal",
        "direction": "forward",
    }
    ROWS.write_text(json.dumps({"machine": machine, "case": case, "rounds": ROUNDS, "rows": rows}, indent=1) + "\n")


def draw() -> None:
    """Draws the saved rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    saved = json.loads(ROWS.read_text())
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), dpi=150)
    panels_of = (("peak_bytes", 2**20, "peak memory of a call, MiB"), ("median_ms", 1.0, "time of a call, ms"))
    for panel, (field, unit, title) in zip(panels, panels_of, strict=True):
        for name, style in STYLES.items():
            points = [(row["seqlen"], row[field] / unit) for row in saved["rows"] if row["provider"] == name]
            panel.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2, markersize=4, **style)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_xlabel("sequence length")
        panel.set_title(title, loc="left", fontsize=11)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    stopped = max((row for row in saved["rows"] if row["provider"] == "standard"), key=lambda row: row["seqlen"])
    panels[0].annotate(
        "stopped: the next would\nneed over 2 GiB",
        (stopped["seqlen"], stopped["peak_bytes"] / 2**20),
        xytext=(-10, -2), textcoords="offset points", fontsize=8, color="#666666", ha="right",
    )  # fmt: skip
    case, machine = saved["case"], saved["machine"]
    figure.suptitle(
        f"Causal attention, {case['direction']}, {case['heads']} heads of {case['head_dim']}, {case['dtype']}, "
        f"one {machine['machine']} CPU thread, PyTorch {machine['torch'].partition('+')[0]}",
        x=0.01, ha="left", fontsize=9, color="#444444",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="lower center", ncols=len(STYLES))
    figure.savefig(PICTURE)
    print(f"drew {PICTURE}")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    draw()
