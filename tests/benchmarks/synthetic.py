"""A row as a suite saves it."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.results import Row


def row(case: Case, provider: str, median_ms: float | None, run: str = "1-a", **changes: object) -> Row:
    """A row of one cell."""
    tflops = None if median_ms is None else case.flops() / (median_ms * 1e9)
    fields = {"suite": case.direction, "error": 0.002 if median_ms else "refused: no", "spread": 0.01, **changes}
    return Row(
        run=run,
        device="Test device",
        versions={"torch": "2"},
        commit="abc",
        case=case.to_dict(),
        provider=provider,
        median_ms=median_ms,
        tflops=tflops,
        **fields,  # type: ignore[arg-type]
    )
