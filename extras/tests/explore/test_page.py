"""The page without a browser: what it holds, that what it ships is what the tools make, and the command."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import flashtile
from benchmarks.results import saved
from flashtile.core import masks, states
from flashtile_lab import analysis
from flashtile_lab.commands import main
from flashtile_lab.explore import document, page, sources
from tools import explorer_data

BACKENDS = Path(flashtile.__file__).parent / "backends"


@pytest.fixture(scope="module")
def text() -> str:
    return page()


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    return document.data()["timeline"]


def test_the_page_is_one_file_that_asks_for_nothing(text: str) -> None:
    assert len(text.encode()) < 2e6
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    asked = re.findall(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"([^\"]*)\"", text)
    assert asked == ["data:,"]
    assert "Mike Bostock" in text and "Permission to use, copy, modify" in text
    for name in document._SCRIPTS:
        assert (document.STATIC / f"{name}.js").read_text(encoding="utf-8") in text
    on_disk = {path.relative_to(document.STATIC).with_suffix("").as_posix() for path in document.STATIC.rglob("*.js")}
    assert on_disk == {*document._SCRIPTS, "vendor/d3.min"}


@pytest.mark.parametrize("path", sorted(document.STATIC.glob("**/*.js")), ids=lambda path: path.stem)
def test_scripts_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert path.parent.name == "vendor" or (len(lines) < 400 and max(map(len, lines)) <= 120)


@pytest.mark.parametrize(
    ("figure", "function"),
    [
        ("time", analysis.exponential_cost),
        ("time", analysis.tiled_traffic),
        ("traffic", analysis.roofline_point),
        ("online", states.merge),
        ("matrix", masks.Band.row_keys),
    ],
)
def test_figures_show_the_lines_that_run(figure: str, function: Any) -> None:
    shown = [source for _, source in sources.of_figures()[figure]]
    assert inspect.cleandoc("\n" + inspect.getsource(function)) in shown


def test_a_function_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch, shipped: dict[str, Any]) -> None:
    monkeypatch.setitem(sources._FIGURES, "time", (("core/masks.py", "Band.gone"),))
    with pytest.raises(KeyError, match=r"Band\.gone"):
        sources.of_figures()
    run = {"lines": [[["hopper/forward/roles.py", "producer", 1]]]}
    with pytest.raises(ValueError, match="no line 1 in producer: run tools/explorer_data.py"):
        sources.of_lines({"runs": {"chosen": run}})


def test_the_recording_is_that_of_the_kernel_as_it_is(shipped: dict[str, Any]) -> None:
    made = json.loads(json.dumps(explorer_data.timeline()))
    for name in made["runs"]:
        assert made["runs"][name] == shipped["runs"][name], f"{name}: run tools/explorer_data.py"
    assert made == shipped


def test_the_recording_has_the_work_of_the_call(shipped: dict[str, Any]) -> None:
    """Sums over the events are those of the call: products, exponentials and bytes."""
    ops, seqlen, head_dim = shipped["ops"], shipped["seqlen"], shipped["head_dim"]
    shape = analysis.AttentionShape(seqlen, seqlen, head_dim, dtype="bfloat16")
    flops = analysis.attention_flops(shape)
    rows = 128
    loads = analysis.tiled_traffic(shape, analysis.Blocks(rows, 128), analysis.LoopOrder.Q_OUTSIDE).inputs_read_bytes
    for name, run in shipped["runs"].items():

        def total(op: str, column: int, events: list[list[int]] = run["events"]) -> int:
            return sum(event[column] for event in events if ops[event[1]] == op)

        # After the last tile each warpgroup scores one block more, of stale buffers that nobody reads.
        extra = 2 * (2 * 64 * 128 * head_dim)
        assert total("product", 3) == flops.forward_flops + extra, name
        assert total("exp", 3) == flops.forward_exps + 2 * 64 * 128, name
        assert total("load", 4) == loads, name
        assert total("store", 4) == shape.q_bytes, name
        assert sorted(run["roles"]) == ["consumer", "consumer", "producer", "scheduler"]


def test_the_recorded_lines_are_those_operations(shipped: dict[str, Any]) -> None:
    """Each event's innermost line calls what the event says."""
    calls = {
        "wait": "mbarrier.wait", "arrive": "mbarrier.arrive", "expect": "mbarrier.expect", "load": "tma_load",
        "product": "warpgroup_mma(", "product_wait": "warpgroup_mma_wait", "store": "tma_store(",
        "store_wait": "tma_store_wait", "exp": "exp2",
    }  # fmt: skip
    for run in shipped["runs"].values():
        for _, op, line, *_ in run["events"]:
            file, _, number = run["lines"][line][-1]
            text = (BACKENDS / file).read_text(encoding="utf-8").splitlines()[number - 1]
            assert calls[shipped["ops"][op]] in text, (shipped["ops"][op], file, number, text)


def test_the_ladder_is_the_saved_rows() -> None:
    shipped = document.data()["ladder"]
    assert shipped == json.loads(json.dumps(explorer_data.ladder()))
    rows: dict[tuple[Any, ...], set[float]] = {}
    days: dict[tuple[Any, ...], set[str]] = {}
    for row in saved():
        if row.tflops is not None and row.case.get("dtype") == "bfloat16" and row.device == shipped["device"]:
            case = row.case
            key = (row.suite, case.get("head_dim"), case.get("causal"), case.get("seqlen_q"))
            provider = "flashtile-hopper" if row.provider == "flashtile" else row.provider
            rows.setdefault((*key, provider), set()).add(round(row.tflops, 1))
            days.setdefault((*key, row.run[:8]), set()).add(row.provider)
    assert all("flashtile" in days[tuple(cell[:5])] for cell in shipped["cells"])
    speeds = [(tuple(cell[:4]), name, tflops) for cell in shipped["cells"] for name, tflops in cell[5].items()]
    assert len(speeds) > 200
    for cell, name, tflops in speeds:
        assert tflops in rows[*cell, name]


@pytest.mark.long
def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    out = tmp_path / "made" / "page.html"
    assert main(["explore", "--no-open", "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == text
    assert str(out) in capsys.readouterr().out


@pytest.mark.long
def test_the_command_opens_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_page(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", open_page)
    assert main(["explore", "--out", str(tmp_path / "page.html")]) == 0
    assert opened == [(tmp_path / "page.html").as_uri()]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["explore", "--no-open", "--out", str(tmp_path / "file" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("flashtile-lab: --out: cannot write to")


@pytest.mark.long
def test_the_page_is_served_until_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "flashtile_lab", "explore", "--serve", "--no-open", "--port", "0"]
    # A shell's background jobs ignore the signal, and so would what they start.
    server = subprocess.Popen(
        [*command, "--out", str(tmp_path / "page.html")],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert server.stdout is not None
    try:
        assert "page.html" in server.stdout.readline()
        address = server.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert answer.read() == (tmp_path / "page.html").read_bytes()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}other", timeout=60)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.stdout.close()
