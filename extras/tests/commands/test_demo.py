"""The demo, small but whole: its numbers, its files, and what it measures memory with."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import torch
from torch import Tensor

from flashtile_lab import explore
from flashtile_lab.commands import main
from flashtile_lab.commands.demo import command, exactness, probe, scaling, training
from flashtile_lab.commands.demo.probe import Point, Setting


@dataclass
class Demo:
    code: int
    printed: str
    folder: Path
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    printed, threads = io.StringIO(), torch.get_num_threads()
    # How long a call or a step takes here decides nothing.
    size = dataclasses.replace(command._SIZES["cpu", True], patience_s=math.inf)
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setitem(command._SIZES, ("cpu", True), size)
        patch.setattr(training, "step_seconds", lambda *_: 0.01)
        code = main(["demo", "--quick", "--device", "cpu", "--threads", "1", "--out", str(folder)])
    torch.set_num_threads(threads)
    yield Demo(code, printed.getvalue(), folder, json.loads((folder / "results.json").read_text()))


@pytest.mark.long
def test_every_case_is_exact(demo: Demo) -> None:
    rows = demo.facts["rows"]
    assert demo.code == 0 and demo.facts["passed"] is True
    assert len(rows) == 2 * len(exactness.CASES)
    for row in rows:
        limit = 5e-6 if row["dtype"] == "float32" else 2e-2
        assert not row["refused"] and row["passed"]
        assert 0 < row["flashtile_out"] < limit and 0 < row["flashtile_grad"] < 2 * limit
        # The other column is a measurement of its own, not a copy of a bound.
        assert 0 < row["pytorch_out"] < 5 * limit


@pytest.mark.long
def test_standard_attention_runs_out_of_memory_and_flashtile_does_not(demo: Demo) -> None:
    budget = demo.facts["budget_bytes"]
    for backward in (False, True):
        points = [p for p in demo.facts["points"] if p["backward"] == backward]
        standard = {p["seqlen"]: p for p in points if p["method"] == "standard"}
        tiled = {p["seqlen"]: p for p in points if p["method"] == "flashtile"}
        last = max(standard)
        assert [n for n, p in standard.items() if not p["fits"]] == [last]
        assert all(p["fits"] and 0 < p["peak_bytes"] <= budget and p["time_s"] > 0 for p in tiled.values())
        assert max(tiled) >= last
        # Twice the length: four times the score matrix.
        assert standard[last // 2]["peak_bytes"] > 3 * standard[last // 4]["peak_bytes"]
        assert standard[last // 2]["peak_bytes"] >= 4 * (last // 2) ** 2 * 4
        assert tiled[last]["peak_bytes"] < standard[last // 2]["peak_bytes"] / 3
        # Twice the length: twice the rows, with room for what does not grow.
        assert tiled[last]["peak_bytes"] < 2.5 * tiled[last // 2]["peak_bytes"]
        # A window, which SDPA takes as a mask of all pairs.
        masked, windowed = (
            {p["seqlen"]: p["peak_bytes"] for p in points if p["method"] == f"{name}, window" and p["fits"]}
            for name in ("SDPA", "flashtile")
        )
        assert max(windowed) >= max(masked) and masked[max(masked)] > 2 * windowed[max(masked)]


@pytest.mark.long
def test_all_runs_learn_the_same(demo: Demo) -> None:
    standard, sdpa, tiled = demo.facts["runs"]
    assert (standard["method"], sdpa["method"], tiled["method"]) == ("standard", "SDPA", "flashtile")
    assert standard["losses"][0] == pytest.approx(math.log(61), abs=1e-3)
    for run in (standard, sdpa, tiled):
        assert sum(run["losses"][-5:]) / 5 < 3.0
        assert run["held_out_loss"] < 3.0
        assert run["tokens_per_s"] > 0
    gaps = [abs(a - b) for a, b in zip(standard["losses"], tiled["losses"], strict=True)]
    assert max(gaps) < 1e-3
    assert demo.facts["loss_gap"] == max(gaps)
    # A curve that is a copy of the other would have no rounding of its own.
    assert max(gaps) > 0
    assert len(tiled["sample"]) > 40 and tiled["sample"].startswith("ROMEO")


@pytest.mark.long
def test_the_report_holds_everything_by_itself(demo: Demo) -> None:
    page = (demo.folder / "report.html").read_text()
    sources = re.findall(r'src="([^"]*)"', page)
    pictures = [demo.folder / f"{name}.png" for name in ("exactness", "scaling", "training")]
    for source, picture in zip(sources, pictures, strict=True):
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == picture.read_bytes()
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    assert "<link" not in page and "<script" not in page
    assert (
        'href="explore.html"' in page and (demo.folder / "explore.html").read_text(encoding="utf-8") == explore.page()
    )
    assert str(demo.folder / "report.html") in demo.printed.replace("\n", "")
    assert f"{demo.facts['runs'][-1]['held_out_loss']:.3f}" in page
    seconds = f"Took {demo.facts['seconds']:.0f} s."
    assert seconds in page and seconds in demo.printed


def test_a_forced_backend_that_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    assert main(["demo", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "hopper" in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(("megabytes", "why"), [("1", "too small"), (str(2**30), "are free here")])
def test_a_budget_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, megabytes: str, why: str
) -> None:
    monkeypatch.setattr(exactness, "CASES", exactness.CASES[:1])
    arguments = ["demo", "--quick", "--device", "cpu", "--out", str(tmp_path), "--memory-budget-mb", megabytes]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert f"--memory-budget-mb: is {megabytes}" in captured.err and why in captured.err
    assert captured.err.count("\n") == 1


def _allocate_64_mib(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + torch.ones(16 << 20).sum()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are reset by Linux alone")
def test_the_probe_measures_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.METHODS, "flashtile", _allocate_64_mib)
    enough_room = Setting(1, 8, "float32", "cpu", 128 << 20, torch.get_num_threads())
    enough = probe.measure(enough_room, "flashtile", False, 8)
    assert enough.fits and enough.time_s > 0
    assert 60 << 20 < enough.peak_bytes < 80 << 20
    too_little = probe.measure(dataclasses.replace(enough_room, budget_bytes=32 << 20), "flashtile", False, 8)
    assert not too_little.fits
    # The limit is gone again.
    assert torch.ones(32 << 20).sum() == 32 << 20


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _broken(*_: object) -> None:
    os._exit(3)


def test_a_child_killed_for_memory_is_a_call_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    child = scaling.Probe(Setting(2, 16, "float32", "cpu", 64 << 20, 1))
    monkeypatch.setattr(scaling, "serve", _killed)
    assert child.measure("standard", False, 256) == Point("standard", False, 256, fits=False)
    monkeypatch.setattr(scaling, "serve", _broken)
    with pytest.raises(RuntimeError, match="code 3"):
        child.measure("standard", False, 256)
    monkeypatch.undo()
    point = child.measure("standard", False, 256)
    assert point.fits and point.time_s > 0


def test_threads_are_halved_while_that_is_faster_and_steps_fit_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {8: 4.0, 4: 2.0, 2: 1.0, 1: 1.5}
    now = [8]
    monkeypatch.setattr(training.torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(training.torch, "set_num_threads", lambda threads: now.__setitem__(0, threads))
    monkeypatch.setattr(training, "step_seconds", lambda *_: seconds[now[0]])
    recipe = training.Recipe(32, 2, 2, 64, 8, 8e-3, max_steps=60, min_steps=30, budget_s=50.0)
    assert training.choose_threads(recipe, None) == 1.0
    assert now == [2]
    assert [training.choose_steps(recipe, s) for s in (1.0, 0.1, 10.0)] == [50, 60, 30]
