"""Makes what the explorer's page ships: a recording of the Hopper forward in the emulator, and the saved rows.

``python tools/explorer_data.py`` writes ``timeline.json`` and ``ladder.json``; a test makes both anew and compares.

The recording holds, for every role, what it did in program order (waits, arrivals, copies, products, exponentials), at
which lines of the kernel, and in which turn of the emulator. The emulator has no clock: durations are the page's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "extras")]

import torch  # noqa: E402

import flashtile  # noqa: E402
from benchmarks import plot, results  # noqa: E402
from extras.tests.explore.recording import OPS, recording  # noqa: E402
from flashtile.backends.hopper.forward import config as tiles  # noqa: E402
from flashtile.call.problem import described  # noqa: E402
from tests.backends.hopper.emulated import on_cpu  # noqa: E402

DATA = ROOT / "extras" / "flashtile_lab" / "explore" / "static" / "data"
SEQLEN, HEAD_DIM, SEED = 512, 128, 0


def record(config: tiles.ForwardTiles) -> dict[str, Any]:
    """One head of SEQLEN queries and keys, on one multiprocessor; the output is checked against float64."""
    draw = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(1, SEQLEN, 1, HEAD_DIM, generator=draw).bfloat16() for _ in range(3))
    with recording() as recorder, on_cpu(seed=SEED, num_sms=1, forward=config):
        out = flashtile.attention(q, k, v, backend="hopper")
    assert isinstance(out, torch.Tensor)
    exact = flashtile.attention(q.double(), k.double(), v.double(), backend="cpu")
    assert isinstance(exact, torch.Tensor)
    error = float((out.double() - exact).abs().max() / exact.abs().max())
    if not error < 2 * torch.finfo(torch.bfloat16).eps:
        raise RuntimeError(f"the recorded run is wrong: relative error {error}")
    return recorder.to_json()


def variants() -> dict[str, tiles.ForwardTiles]:
    """The configuration that such a call gets, and the same with one thing taken away."""
    problem = described(
        device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, seqlen_q=SEQLEN, seqlen_k=SEQLEN,
        head_dim=HEAD_DIM, head_dim_v=HEAD_DIM, softmax_scale=HEAD_DIM**-0.5,
    )  # fmt: skip
    chosen = tiles.choose(problem)
    return {
        "chosen": chosen,
        "no tile overlap": dataclasses.replace(chosen, overlap=False),
        "one stage": dataclasses.replace(chosen, stages=1),
    }


def timeline() -> dict[str, Any]:
    """The recordings of all variants, for the page's seventh figure."""
    made = {name: {"config": str(config), **record(config)} for name, config in variants().items()}
    facts = {"seqlen": SEQLEN, "head_dim": HEAD_DIM, "seed": SEED}
    return {**facts, "ops": list(OPS), "runs": made}


def ladder() -> dict[str, Any]:
    """The last saved speed of every attention, as the plots of the performance page show it; days are ours."""
    rows = results.saved()
    runs = {(str(row.case), row.provider): row.run for row in rows}
    cells = []
    for suite in ("forward", "backward"):
        for cell in itertools.chain(*plot.speed_cells(rows, suite).values()):
            speed = {
                {"flashtile": "flashtile-hopper"}.get(name, name): round(row.tflops, 1)
                for name, row in cell.rows.items()
                if row.tflops is not None
            }
            case, own = cell.case, cell.rows["flashtile"]
            day = runs[str(own.case), own.provider][:8]
            cells.append([suite, case.head_dim, case.causal, case.seqlen_q, day, speed, own.commit])
    device = results.of_suite(rows, "forward")[-1].device
    columns = ["direction", "head_dim", "causal", "seqlen", "day", "tflops", "commit"]
    return {"device": device, "columns": columns, "cells": cells}


def main() -> None:
    """Writes both files."""
    for name, made in (("timeline", timeline()), ("ladder", ladder())):
        path = DATA / f"{name}.json"
        path.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
