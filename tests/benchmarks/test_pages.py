"""What pages say of rows: what bounds a cell, which are lost and why, and what is stale."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import all as suites
from benchmarks import bounds, caches, latent, loop, measured, mods, page, results, selected, selections, sources, steps
from benchmarks.cases import Case, suite
from benchmarks.session import OUT_OF_TIME, complete
from benchmarks.table import LOST, Summary
from benchmarks.varlen import cases, dense_like, draw_lengths

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
CASE = Case("forward", "bfloat16", 2, 4096, 4096, 16, 4, 128)


def run_of(
    name: str = "forward", device: str = H100, commit: str = "abc", code: str = "", day: str = "01"
) -> results.Run:
    return results.Run(name, f"202611{day}T120000.0-x", device, {"torch": "2"}, commit, code)


def rows_of(times: dict[str, float], case: Any = CASE, run: results.Run | None = None) -> list[results.Row]:
    return [(run or run_of()).row(case.to_dict(), name, median_ms=ms) for name, ms in times.items()]


def share(case: Any, ms: float, device: str = H100, provider: str = "flashtile") -> tuple[float, str] | None:
    fields = case.to_dict() if isinstance(case, Case) else vars(case)
    return bounds.bound(run_of(device=device).row(fields, provider, median_ms=ms), case)


def test_work_is_counted_from_the_sizes() -> None:
    rows, keys = 2 * 4096 * 16 * 128, 2 * 4096 * 4 * 128
    assert bounds.work(CASE) == (4 * rows * 4096, 2 * (2 * rows + 2 * keys))
    assert bounds.work(CASE, eight_bits=True)[1] == 2 * rows + 2 * keys
    backward = replace(CASE, direction="backward", bias="trained")
    bias = 16 * 4096**2
    assert bounds.work(backward) == (10 * rows * 4096, 2 * (4 * rows + 4 * keys + 2 * bias))
    packed = replace(CASE, batch=2, lengths=(100, 50), seqlen_q=100, seqlen_k=100, causal=True)
    assert bounds.work(packed) == (4 * 16 * 128 * ((100**2 + 50**2) // 2), 2 * 150 * (2 * 16 + 2 * 4) * 128)


def test_caches_are_read_once_and_queries_beside_them() -> None:
    decode = caches.DecodeCase(32, 8, 128, 4, 8192)
    queries = 4 * 4 * 32 * 128
    assert bounds.work(decode) == (4 * 32 * 128 * 4 * 8192, 4 * 8192 * 8 * 128 * 4 + queries)
    assert bounds.work(replace(decode, variant="fp8"))[1] == 4 * 8192 * 8 * 128 * 2 + queries
    step = steps.StepCase("speculative", 32, 8, 128, 16)
    pairs = 32 * sum(4096 - left for left in range(5))
    assert bounds.work(step) == (4 * 32 * 128 * pairs, 32 * (4096 * 8 * 128 * 4 + 5 * 4 * 32 * 128))
    rows = latent.LatentCase(16, 1, 2, 4096)
    assert bounds.work(rows) == (2 * 16 * (576 + 512) * 2 * 4096, 2 * 4096 * 1152 + 2 * 2 * 16 * (576 + 512))


def test_a_cell_is_bound_by_what_takes_longer() -> None:
    flops, _ = bounds.work(CASE)
    assert share(CASE, 2e3 * flops / 790e12) == (pytest.approx(0.5), "products")
    assert share(CASE, 2e3 * flops / 790e12, provider="flashtile-hopper-fp8") == (pytest.approx(0.25), "products")
    big = caches.DecodeCase(32, 8, 128, 64, 8192)
    moved = bounds.work(big)[1]
    for device, rate in ((H100, 3.35e12), (H200, 4.8e12)):
        assert share(big, 1e3 * moved / 0.9 / rate, device) == (pytest.approx(0.9), "memory")
    small = replace(big, batch=1)
    assert share(small, 1e3 * bounds.work(small)[1] / 7.7e12) == (pytest.approx(1.0), "L2")
    assert (share(replace(small, measure="cold"), 1.0) or ("", ""))[1] == "memory"
    nothing = replace(CASE, dtype="float32"), replace(small, measure="host"), replace(CASE, direction="quantized")
    assert [share(case, 1.0) for case in nothing] == [None] * 3
    assert share(CASE, 1.0, "NVIDIA A100") is None
    assert bounds.shown(None, CASE) == "" and bounds.shown(rows_of({"flashtile": 1.0})[0], CASE).endswith("% products")


def test_a_cell_is_lost_under_the_one_rule() -> None:
    ratios = {"a": 1.2, "b": LOST, "c": LOST - 0.001}
    assert Summary("flashtile", "fa3", ratios).line()[:2] == ["3", "1"]
    rows = rows_of({"flashtile": 1.0, "flashtile-portable": 0.5, "fa3": 0.96, "fa2": 0.97})
    assert page.lost_cells(rows, "forward") == []
    rows = rows_of({"flashtile": 1.0, "flashtile-portable": 0.5, "fa3": 0.9, "fa2": 0.97})
    ((ratio, cell, peer),) = page.lost_cells(rows, "forward")
    assert (ratio, cell.case, peer) == (0.9, CASE, "fa3")


def test_lost_cells_have_their_reasons_and_those_without_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [replace(CASE, model=f"cross-{n}", seqlen_k=n) for n in (77, 80, 90)]
    rows = [row for case in uses for row in rows_of({"flashtile": 1.0, "fa3": 0.7}, case, run_of("uses"))]
    rows += rows_of({"flashtile": 1.0, "fa3": 0.97}) + rows_of({"flashtile": 0.5, "fa3": 0.97}, run=run_of("models"))
    monkeypatch.setattr(page, "reasons", lambda: {"uses": {"*cross-7*": "few keys"}, "forward": {"*": "no"}})
    text = page.fill_tables("<!-- table: lost -->\n<!-- end -->", rows)
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| f")]
    assert [[line[0], *line[1:5], line[-1]] for line in lines] == [
        ["forward, cross-77", "1", "1", "0.700", "fa3", "few keys"],
        ["forward, cross-80", "1", "1", "0.700", "fa3", page.UNKNOWN],
        ["forward, cross-90", "1", "1", "0.700", "fa3", page.UNKNOWN],
    ]
    assert "3 of 5 cells are lost, and 2 of them are not profiled." in text
    assert "Not measured through `flashtile`: backward, varlen" in text


def test_functions_are_held_against_flexattention_with_lists_of_blocks() -> None:
    cells = (
        mods.Cell("tree", "forward", "bfloat16", 2, 8192, 16, 64),
        mods.Cell("t5", "forward", "bfloat16", 2, 8192, 16, 64),
    )
    times = {"flashtile": 9.0, "flashtile-lists": 1.1, "flex": 1.0}, {"flashtile": 1.2, "flex": 1.0}
    run = run_of("mods")
    rows = [
        run.row(vars(cell), who, median_ms=ms) for cell, of in zip(cells, times, strict=True) for who, ms in of.items()
    ]
    assert [(round(ratio, 3), cell.case.mod) for ratio, cell, _ in page.lost_cells(rows, "mods")] == [
        (0.833, "t5"), (0.909, "tree"),
    ]  # fmt: skip


def test_every_reason_is_of_a_cell_that_is_lost() -> None:
    rows = results.saved()
    for name, patterns in page.reasons().items():
        lost = [cell.case.name for _, cell, _ in page.lost_cells(rows, name)]
        assert {each for each in patterns if not fnmatch.filter(lost, each)} == set(), name


def test_a_headline_says_what_was_not_measured_and_takes_what_users_get() -> None:
    rows = rows_of({"flashtile-hopper": 0.1, "fa3": 1.0}, run=run_of(day="02"))
    head = "| Hopper, forward | best peer | "
    text = page.fill_tables("<!-- table: headline -->\n<!-- end -->", rows)
    assert f"{head}- | - | - | - | - | - | not measured |" in text
    flops, _ = bounds.work(CASE)
    text = page.fill_tables(text, [*rows, *rows_of({"flashtile": 2e3 * flops / 790e12, "fa3": 4e3 * flops / 790e12})])
    assert f"{head}1 | 0 | 2.000 | 2.000 | 2.000 | 50% | H100, 2026-11-01 |" in text


def library_of(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / "backends" / "gpu" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_digest_is_of_code_and_not_of_words(tmp_path: Path) -> None:
    code = '"""Words."""\nimport a\n\n\ndef f(x):\n    """Words."""\n    return x + 1\n\n\nBLOCK = 3\n'
    made = {
        "as it is": {"one": code},
        "other words": {"one": code.replace("Words", "Others").replace("+ 1", "+ 1  # why")},
        "other files": {"one": "BLOCK = 3\n", "two": "import b\n\ndef f(x):\n    return x + 1\n"},
        "another number": {"one": code.replace("3", "4")},
        "another operation": {"one": code.replace("+", "-")},
    }
    digests = {}
    for name, files in made.items():
        digests[name] = sources.digest("forward", library_of(tmp_path / name.replace(" ", ""), **files))
    assert len(digests["as it is"]) == 12
    assert digests["as it is"] == digests["other words"] == digests["other files"]
    assert len(set(digests.values())) == 3
    assert sources.digest("accuracy") == "" and sources.digest("forward", tmp_path) == ""


def test_what_suites_time_is_there() -> None:
    for name, parts in sources.TIMED.items():
        assert {part for part in parts if not list(sources._files(sources.LIBRARY, part))} == set(), name
    assert set(suites.SUITES) | {"distributed"} == set(sources.TIMED)


def test_rows_of_a_gpu_say_which_code_they_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "device_name", lambda device: H100)
    run = results.new_run("decode", torch.device("cuda"), "abc")
    assert run.code == sources.digest("decode") != ""
    assert results.new_run("decode", torch.device("cpu"), "abc").code == ""


def test_a_headline_of_two_cards_or_commits_or_of_other_code_is_refused(tmp_path: Path) -> None:
    library = library_of(tmp_path, one="BLOCK = 3\n")
    code = sources.digest("forward", library)

    def wrong(*runs: results.Run) -> list[str]:
        rows = [row for run in runs for row in rows_of({"flashtile": 1.0, "fa3": 1.0}, run=run)]
        return measured.problems(measured.measured(rows, library), [run.suite for run in runs])

    good = run_of(code=code), run_of("backward", code=code)
    assert wrong(*good) == []
    assert wrong(good[0], replace(good[1], device=H200)) == [f"of 2 cards: {H100}, {H200}"]
    assert wrong(good[0], replace(good[1], commit="abd")) == ["of 2 commits: abc, abd"]
    assert wrong(good[0], replace(good[1], code="")) == ["backward: stale: no record of the code"]
    assert wrong(good[0], replace(good[1], code="0123")) == ["backward: stale: the code has changed"]
    assert measured.problems([], ["forward"]) == ["forward: no rows of ours"]
    library_of(tmp_path, one="BLOCK = 4\n")
    sources._statements.cache_clear()
    assert len(wrong(*good)) == 2


def test_a_verdict_on_machine_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = library_of(tmp_path, one="BLOCK = 3\n")
    rows = rows_of({"flashtile": 1.0}, run=run_of(code="0123"))
    assert [each.stale for each in measured.measured(rows, library)] == [True]
    monkeypatch.setitem(measured.SAME, "0123", "tools/same_code.py abc")
    assert [each.stale for each in measured.measured(rows, library)] == [False]


def test_the_suites_that_are_called_current_are() -> None:
    assert measured.problems(measured.measured(results.saved())) == []


def test_the_command_lists_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run_of(), run_of("backward", H200)
    results.append(tmp_path / "a.jsonl", [row for run in runs for row in rows_of({"flashtile": 1.0}, run=run)])
    assert measured.main(["--results", str(tmp_path), "--suites", "forward,backward"]) == 1
    printed = capsys.readouterr().out
    assert "of 2 cards: " in printed and "2026-11-01" in printed and "forward: stale" in printed
    assert measured.main(["--results", str(tmp_path), "--suites", ""]) == 0


def test_cells_have_names_of_their_own() -> None:
    def each(session: Any, cells: Any, name_of: Any) -> Any:
        return [name_of(cell) for cell in cells]

    of_loop = [(f"batch {case.batch}", case.name) for case in loop.CASES["cuda"]]
    of_groups = [[group[0].name for group in found] for found in (
        caches.groups("graph", math.inf), steps.groups("graph"), latent.groups("graph"),
    )]  # fmt: skip
    of_names = [[case.name for case in suite(name)] for name in ("forward", "models", "uses", "big-heads", "fp8")]
    of_varlen = [f"{case.name} {dense_like(case).name}" for case in cases(draw_lengths())]
    of_mods, of_selected = ([cell.name for cell in made("cuda")] for made in (mods.cells, selections.cells))
    for names in (of_loop, *of_groups, *of_names, of_varlen, of_mods, of_selected):
        assert len(set(names)) == len(names)


def test_long_lists_have_fixed_tiles_in_flexattention() -> None:
    cells = {cell.name: cell for cell in selections.cells("cuda") if isinstance(cell, selections.BlockCell)}
    assert selected.flex_tiles(cells["forward-kept-8"]) == {}
    tiles = selected.flex_tiles(cells["forward-vsa-random"])
    assert len(tiles) == 6 and set(tiles.values()) == {64}


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs all suites, made-up ones; gives the exit code, each suite's verdict and all rows."""
    monkeypatch.setattr(results, "device_name", lambda device: H100)

    def run(
        commands: dict[str, Any], *options: str, folder: str = "out"
    ) -> tuple[int, dict[str, str], list[results.Row]]:
        def started(command: list[str], limit_s: float, log: Path) -> int | None:
            name = command[2].removeprefix("benchmarks.")
            log.write_text("at work\nboom\n")
            return commands[name](limit_s)  # type: ignore[no-any-return]

        monkeypatch.setattr(suites, "SUITES", {name: (100.0, name) for name in commands})
        monkeypatch.setattr(suites, "run", started)
        out = tmp_path / folder
        code = suites.main(["--out", str(out), "--commit", "abc", *options])
        lines = [line.split(None, 3) for line in capsys.readouterr().out.splitlines() if line[6:10] == " s  "]
        path = out / "rows.jsonl"
        return code, {line[2]: line[3] for line in lines}, results.read([path] if path.exists() else [])

    return run


def measured_rows(path: Path, name: str, cells: list[int], of: int, commit: str = "abc", seconds: float = 5.0) -> None:
    run = run_of(name, commit=commit)
    made = [run.row({"n": n}, who, median_ms=1.0) for n in cells for who in ("flashtile", "fa3")]
    results.append(path, [replace(row, cell=str(row.case["n"]), cells=of, seconds=seconds) for row in made])


def test_all_suites_go_on_past_one_that_fails_and_from_where_others_stopped(drive: Any, tmp_path: Path) -> None:
    limits, path = [], tmp_path / "out" / "rows.jsonl"

    def works(cells: list[int], code: int) -> Any:
        def work(limit_s: float) -> int:
            limits.append(limit_s)
            measured_rows(path, "works", cells, 4, seconds=50.0)
            return code

        return work

    code, said, rows = drive({"fails": lambda limit: 1, "works": works([0, 1], OUT_OF_TIME)})
    assert code == 1 and len(rows) == 4
    assert said["fails"] == "FAILED: exit code 1; boom: 0 of unknown cells; nothing timed"
    assert said["works"] == "out of time: 2 of 4 cells, about 100 s left; flashtile, fa3"
    code, said, rows = drive({"works": works([2, 3], 0)}, "--resume", str(path))
    assert (code, len(rows), said["works"]) == (0, 8, "done: 4 of 4 cells; flashtile, fa3")
    assert limits == [100.0, 2 * 100 + 60]
    # Elsewhere, from these rows alone; rows of another commit do not count, but their seconds do.
    measured_rows(path, "other", [0, 1], 2, commit="abd", seconds=7.0)
    results.append(path, [replace(row, device=H200) for row in rows])
    code, said, rows = drive(
        {"works": works([], 1), "other": lambda limit: 75}, "--resume", str(path), folder="elsewhere"
    )
    assert (len(rows), said["works"]) == (8, "done, earlier: 4 of 4 cells; flashtile, fa3")
    assert len(limits) == 2 and said["other"].startswith("out of time: 0 of unknown cells")


def test_all_suites_end_within_the_time(drive: Any) -> None:
    code, said, _ = drive({"works": lambda limit: 0}, "--budget-s", "10")
    assert (code, said["works"]) == (1, "not run, the time is spent: 0 of unknown cells; nothing timed")


def test_any_suite_resumes(command: Any) -> None:
    options = "--device cpu --rounds 1 --sample-ms 0.1 --providers flashtile,sdpa --resume"
    rows, _ = command(loop, options)
    assert len(rows) == 4 and {row.cells for row in rows} == {2} and all(row.cell for row in rows)
    again, printed = command(loop, options)
    assert again == rows and "0 rows appended" in printed and "user's loop" not in printed
    assert len(command(loop, f"{options} --commit abd")[0]) == 8


def test_a_cell_that_failed_twice_is_left() -> None:
    def rows(day: str, **measured: Any) -> list[results.Row]:
        run = run_of(day=day)
        made = [run.row({}, "flashtile", median_ms=1.0), run.row({}, "flex", **measured)]
        return [replace(row, cell="a") for row in made]

    failed = [rows(day, error="failed: no tile") for day in ("01", "02")]
    assert complete(failed[0]) == {} and complete(failed[0] + failed[1]) == {"a": failed[1]}
    good = rows("03", median_ms=2.0)
    assert complete(good + failed[0]) == {"a": good} and complete(good, ["flex"]) == {"a": good[1:]}
    assert complete(good, ["flex", "fa3"]) == {}
    assert complete([replace(row, cell="") for row in good]) == {}, "rows of before cells had names"
