"""The lines of flashtile that the figures show, read from the installed files, so that they never go stale.

Files are read and not imported: kernels need Triton, which a reader's machine may lack.
"""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import flashtile

# Where files are looked for: the library, then this package.
ROOTS = (Path(flashtile.__file__).parent, Path(__file__).parent.parent)

# For each figure, functions as file and name; None takes the file whole.
_FIGURES: dict[str, tuple[tuple[str, str | None], ...]] = {
    "time": (("analysis/compute.py", "exponential_cost"), ("analysis/traffic.py", "tiled_traffic")),
    "matrix": (
        ("core/masks.py", "Band.row_keys"), ("core/masks.py", "Band.any_keys"), ("core/masks.py", "Band.all_keys"),
        ("backends/cpu/sequences.py", "sequences"),
    ),
    "traffic": (
        ("analysis/traffic.py", "standard_traffic"), ("analysis/traffic.py", "tiled_traffic"),
        ("analysis/tiles.py", "tile_memory"), ("analysis/roofline.py", "roofline_point"),
    ),
    "tiles": (("backends/hopper/forward/roles.py", "consumer"), ("backends/hopper/forward/softmax_step.py", "step")),
    "online": (
        ("backends/gpu/device/softmax.py", "update"), ("backends/gpu/device/softmax.py", "raise_max"),
        ("backends/gpu/device/softmax.py", "finalise"), ("backends/gpu/device/softmax.py", "merge"),
        ("core/states.py", "merge"),
        ("backends/gpu/decode/work.py", "cut"), ("analysis/decode.py", "decode_splits"),
    ),
    "backward": (
        ("backends/gpu/device/softmax.py", "lse_log2_of"), ("backends/cpu/backward.py", "_add_tile_shares"),
        ("analysis/compute.py", "attention_flops"),
    ),
    "timeline": (
        ("backends/hopper/forward/roles.py", "producer"), ("backends/hopper/forward/roles.py", "consumer"),
        ("backends/hopper/forward/softmax_step.py", "step"),
    ),
    "fp8": (("explore/static/quantise.js", None),),
    "ladder": (("analysis/roofline.py", "_from_sm"), ("ops/flops.py", None)),
    "explain": (("call/backend.py", "Capabilities.reasons"), ("ops/dispatch.py", "select")),
}  # fmt: skip


@functools.cache
def _text(file: str) -> str:
    return next(root / file for root in ROOTS if (root / file).exists()).read_text(encoding="utf-8")


@functools.cache
def _functions(file: str) -> dict[str, tuple[int, list[str]]]:
    """The first line and the lines, without indentation, of each function, by its name and that of its class."""
    lines, found = _text(file).splitlines(), {}

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found[prefix + node.name] = (start, lines[start - 1 : node.end_lineno])

    look(ast.parse(_text(file)).body, "")
    return found


def of_figures() -> dict[str, list[tuple[str, str]]]:
    """For each figure, titles and texts.

    Raises:
        KeyError: A function is not where it was.
    """
    made: dict[str, list[tuple[str, str]]] = {}
    for figure, places in _FIGURES.items():
        made[figure] = []
        for file, name in places:
            text = _text(file) if name is None else inspect.cleandoc("\n" + "\n".join(_functions(file)[name][1]))
            made[figure].append((f"flashtile/{file}" + (f", {name}" if name else ""), text))
    return made


def of_lines(timeline: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each function that the recorded run went through, by file and name: its first line and its lines.

    Raises:
        ValueError: The sources are not those of the recording: no such function holds such a line.
    """
    made: dict[str, dict[str, Any]] = {}
    chains = [chain for run in timeline["runs"].values() for chain in run["lines"]]
    for file, name, line in (place for chain in chains for place in chain):
        ours = {key.rpartition(".")[2]: value for key, value in _functions(f"backends/{file}").items()}
        start, text = ours.get(name, (0, []))
        if not start <= line < start + len(text):
            raise ValueError(f"{file} has no line {line} in {name}: run tools/explorer_data.py")
        made[f"{file}:{name}"] = {"start": start, "text": text}
    return made
