"""Puts the explorer's page together: template, style, scripts, D3, and the data that Python knows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from flashtile import __version__
from flashtile.backends.gpu.decode import config as decode
from flashtile.call.problem import described
from flashtile_lab import analysis
from flashtile_lab.explore import choices, sources

STATIC = Path(__file__).parent / "static"

# In the order of the page. The figures' order is that of the story.
_SCRIPTS = (
    "ui", "model", "attention", "quantise", "replay", "dispatch",
    "figures/time", "figures/matrix", "figures/traffic", "figures/tiles", "figures/online", "figures/backward",
    "figures/timeline", "figures/fp8", "figures/ladder", "figures/explain",
)  # fmt: skip


def saved(name: str) -> Any:
    """What ``static/data`` has by this name: ``ladder``, the saved rows, or ``timeline``."""
    return json.loads((STATIC / "data" / f"{name}.json").read_text(encoding="utf-8"))


def _splitting() -> dict[str, int]:
    """The rule that cuts the keys of a decode step, for one query of 16 bits and head_dim 128 on a GPU."""
    call = described(device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, head_dim=128, head_dim_v=128)
    config = decode.choose(call)
    return {**dataclasses.asdict(config.splitting), "block_m": config.block_m, "block_n": config.block_n}


def data() -> dict[str, Any]:
    """What the page's scripts read, as JSON values."""
    timeline = saved("timeline")
    return {
        "devices": {name: dataclasses.asdict(device) for name, device in analysis.DEVICES.items()},
        "dtypeBytes": analysis.DTYPE_BYTES,
        "tileSides": analysis.TILE_SIDES,
        "decode": _splitting(),
        "timeline": timeline,
        "ladder": saved("ladder"),
        "explain": choices.table(),
        "sources": sources.of_figures(),
        "kernel": sources.of_lines(timeline),
    }


def page() -> str:
    """The whole page, which asks nothing of a network."""
    script = [(STATIC / "vendor" / "d3.min.js").read_text(encoding="utf-8")]
    script += [(STATIC / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    parts = {
        "version": __version__,
        "style": (STATIC / "style.css").read_text(encoding="utf-8"),
        "licence": (STATIC / "vendor" / "d3.LICENSE").read_text(encoding="utf-8"),
        # Of all characters only < could end the element.
        "data": json.dumps(data(), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "scripts": "\n".join(f"<script>\n{text}</script>" for text in script),
    }
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text


def write(path: Path) -> Path:
    """Writes the page.

    Args:
        path: The file, whose folder is made if it is not there.

    Returns:
        The path.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(), encoding="utf-8")
    return path
