"""The benchmark of users' functions, on a CPU: every cell's results are right, and what is wrong gets no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import mods, results


@pytest.mark.one_in(3)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mod", ["documents", "prefix", "t5", *sorted({*mods.MODS} - {"documents", "prefix", "t5"})])
def test_cells(mod: str, direction: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--rounds", "1", "--providers", "flashtile,flashtile-intervals", "--out", str(out)]
    assert mods.main([*arguments, "--cells", f"{direction}-d64-{mod}-"]) == 0
    rows = {row.provider: row for row in results.read([out])}
    assert isinstance(rows["flashtile"].error, float) and rows["flashtile"].tflops
    has_intervals = mod in ("documents", "prefix")
    assert (rows["flashtile-intervals"].median_ms is not None) == has_intervals


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = mods.Cell("alibi", "forward", "bfloat16", 1, 64, 2, 64)
    device = torch.device("cpu")
    mod, tensors = mods.mod_of(cell, device), mods.inputs_of(cell, device)
    right = mods.call_of(cell, mod, "flashtile", tensors)()
    reference = mods.Reference(cell, mod, tensors)
    assert 0 < reference.check(right) < mods.LIMIT
    wrong: tuple[Any, ...] = (right[0] * 1.05,)
    with pytest.raises(mods.NotTimedError, match="wrong: relative error"):
        reference.check(wrong)


def test_pairs_are_counted() -> None:
    device = torch.device("cpu")
    counts = {
        name: mods.kept_pairs(cell, mods.mod_of(cell, device), device)
        for name in ("full", "causal", "window", "prefix", "tree")
        for cell in [mods.Cell(name, "forward", "bfloat16", 1, 64, 2, 64)]
    }
    assert counts == {"full": 4096, "causal": 2080, "window": 2080, "prefix": 2080 + 31 * 32 // 2, "tree": 2080}
