"""Rows made up by a formula, for tests of tables and plots."""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks.caches import DecodeCase, groups
from benchmarks.cases import Case, suite
from benchmarks.results import Row
from benchmarks.steps import StepCase
from benchmarks.steps import groups as step_groups

SPEEDS = {"flashtile-portable": 1.4, "flashtile-hopper": 2.2, "fa3": 2.1, "cudnn": 1.9, "fa2": 1.0, "eager": 0.15}


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


def suite_rows(name: str, dtype: str = "bfloat16") -> list[Row]:
    """Every provider on every cell, faster with length; eager does not fit from 8k tokens up."""
    rows = []
    for case in suite(name, dtype):
        for provider, speed in SPEEDS.items():
            tflops = 300 * speed * case.seqlen_q / (case.seqlen_q + 400) * (0.85 if case.causal else 1)
            fits = provider != "eager" or case.seqlen_q < 8192
            rows.append(row(case, provider, case.flops() / (tflops * 1e9) if fits else None))
    return rows


def memory_rows() -> list[Row]:
    """Linear for all but eager."""
    rows = []
    for direction in ("forward", "backward"):
        for seqlen in (1024, 4096, 16384):
            case = Case(direction, "bfloat16", 1, seqlen, seqlen, 16, 16, 128, causal=True)  # type: ignore[arg-type]
            for provider, size in (
                ("flashtile-portable", 64 * seqlen),
                ("fa2", 80 * seqlen),
                ("eager", 32 * seqlen**2),
            ):
                rows.append(row(case, provider, None, suite="memory", extra_bytes=size, error=None))
    return rows


def training_rows() -> list[Row]:
    """200 steps of two attentions whose losses differ by 0.05, and speeds at two contexts."""

    def made(measure: str, seqlen: int, provider: str, **values: object) -> Row:
        case = {"measure": measure, "seqlen": seqlen, "batch": 1}
        return Row(
            "train", "1-a", "Test device", {"torch": "2"}, "abc", case, provider, None, None, None, None, values=values
        )

    rows = []
    for provider, off, rate in (("flashtile-hopper", 0.05, 500000.0), ("eager", 0.0, 100000.0)):
        for start in (0, 100):
            losses = [3.95 - 0.01 * step + off for step in range(start, start + 100)]
            rows.append(made("loss", 512, provider, first_step=start, losses=losses, seconds=1.0))
        rows += [made("speed", seqlen, provider, tokens_per_s=rate) for seqlen in (512, 2048)]
    return rows


def decode_row(case: DecodeCase, provider: str, median_ms: float | None, run: str = "1-a") -> Row:
    """A row of suite decode."""
    error = 0.002 if median_ms else "refused: no"
    return Row(
        "decode", run, "Test device", {"torch": "2"}, "abc", asdict(case), provider, median_ms, 0.01, None, error
    )


def decode_rows() -> list[Row]:
    """Rates that grow with the bytes, ours 1.25 of the peer's; pages of 16 cost 3%, 8 bits take 0.6 of the time."""
    rows = []
    slower = {"": 1.0, "page16": 1.03, "page1": 1.2, "fp8": 0.6, "q4": 1.1, "append": 1.3}
    for group in groups("graph", 40):
        plain_ms = 0.008 + group[0].cache_bytes / 4.2e9
        for case in group:
            rows.append(decode_row(case, "flashtile-hopper", plain_ms * slower[case.variant]))
            rows.append(decode_row(case, "fa3", None if case.variant == "fp8" else 1.25 * plain_ms))
    return rows


def serving_rows() -> list[Row]:
    """Ours in 0.8 of the peer's 0.1 ms, of prompts alone in twice of it; dense calls 4% quicker."""
    rows = []
    for group in step_groups("graph"):
        for case in group:
            own = 0.2 if case.step == "prompts" else 0.08
            rows.append(step_row(case, "flashtile", own * (0.96 if case.variant else 1)))
            rows.append(step_row(case, "fa3", 0.1))
    return rows


def step_row(case: StepCase, provider: str, median_ms: float | None) -> Row:
    """A row of suite serving."""
    return replace(decode_row(DecodeCase(1, 1, 8, 1, 1), provider, median_ms), suite="serving", case=asdict(case))
