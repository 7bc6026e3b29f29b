"""Rows and cells: how they are saved, read, compared and shown."""

import json
import re
from dataclasses import replace

import pytest
import torch

from benchmarks import page as pages
from benchmarks import results, table
from benchmarks.cases import Case, make_inputs, suite
from flashtile.core.masks import Band


@pytest.fixture
def run():
    return results.new_run("forward", torch.device("cpu"), commit="abc")


def test_rows_come_back_as_they_were(run, tmp_path):
    case, path = suite("cpu")[4].to_dict(), tmp_path / "deep" / "forward.jsonl"
    timed = {"median_ms": 1.25, "spread": 0.01, "tflops": 300.0, "error": 0.002}
    rows = [run.row(case, "fa2", **timed), run.row(case, "fa3", error="failed: because")]
    for each in rows:
        results.append(path, [each])
    assert results.read([path]) == rows == results.saved(tmp_path)


def test_a_line_that_a_killed_process_left_unfinished_is_no_row_and_is_cut_off(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    first, second = (run.row({"cell": i}, "fa2", median_ms=1.0) for i in range(2))
    results.append(path, [first])
    with path.open("a") as file:
        file.write(second.to_json()[:40])
    assert results.read([path]) == [first]
    results.append(path, [second])
    assert results.read([path]) == [first, second]


def test_rows_of_ours_from_a_changed_tree_are_left_out(run, tmp_path):
    changed = replace(run, commit="abc-dirty+123")
    rows = [each.row({}, name) for each in (run, changed) for name in ("flashtile", "flashtile-portable", "fa3")]
    results.append(tmp_path / "a.jsonl", rows)
    assert results.saved(tmp_path) == [*rows[:3], rows[5]], "a peer's code is not ours"


def test_a_cell_never_mixes_runs_and_takes_the_last_that_compares(run):
    case, ours = suite("forward")[0].to_dict(), "flashtile-portable"
    times = [("1", ours, 4.0), ("1", "fa2", 8.0), ("2", ours, 2.0), ("2", "fa2", 3.0), ("3", ours, 1.0)]
    rows = [replace(run, run=name).row(case, who, median_ms=ms) for name, who, ms in times]
    (cell,) = table.cells(rows)
    assert cell.ratio(ours, "fa2") == 1.5
    (alone,) = table.cells(rows[-1:])
    assert alone.time(ours) == 1.0


def test_operations_follow_the_stated_formula():
    full = Case("forward", "bfloat16", 2, 512, 512, 3, 3, 64)
    assert full.flops() == 4 * 2 * 3 * 512 * 512 * 64
    assert replace(full, causal=True).flops() == full.flops() / 2
    assert replace(full, direction="backward").flops() == 2.5 * full.flops()


def test_cells_count_the_pairs_they_keep():
    assert Case("forward", "float32", 2, 7, 7, 1, 1, 8, lengths=(3, 7)).kept_pairs() == 9 + 49
    window = Case("forward", "float32", 1, 32, 32, 1, 1, 8, causal=True, window=(4, 0))
    assert window.kept_pairs() == int(Band(4, 0).dense(32, 32).sum())
    case = Case("forward", "float32", 5, 40, 64, 2, 2, 16, padded=True)
    mask = make_inputs(case, torch.device("cpu")).mask
    assert mask is not None and mask.shape == (5, 1, 1, 64)
    assert mask.sum(-1).flatten().tolist() == case.key_lengths == [64, 44, 57, 37, 50]
    assert case.kept_pairs() == 40 * sum(case.key_lengths)


@pytest.mark.parametrize("name", ["forward", "backward", "models", "uses", "big-heads", "fp8", "cpu"])
def test_every_case_has_a_name_and_survives_json(name):
    cases = suite(name)
    assert len(cases) == len({case.name for case in cases})
    assert [Case.from_dict(json.loads(json.dumps(case.to_dict()))) for case in cases] == list(cases)


def test_inputs_are_random_and_laid_out_as_the_case_says():
    case = Case("forward", "float32", 3, 9, 9, 4, 2, 8, lengths=(1, 9, 5))
    inputs = make_inputs(case, torch.device("cpu"), seed=3)
    assert inputs.q.shape == (15, 4, 8) and inputs.k.shape == inputs.v.shape == (15, 2, 8)
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 1, 10, 15]
    assert 0.8 < inputs.q.std() < 1.2 and not torch.equal(inputs.k, inputs.v)
    assert torch.equal(inputs.q, make_inputs(case, torch.device("cpu"), seed=3).q)


@pytest.mark.parametrize("path", pages.DOCS_PAGES, ids=lambda path: path.name)
def test_the_pages_show_what_the_saved_rows_say(path):
    page = path.read_text(encoding="utf-8")
    assert page == pages.fill_tables(page, results.saved()), "run python -m benchmarks.plot"


def test_every_saved_file_is_named():
    section = pages.DOCS_PAGES[1].read_text(encoding="utf-8").partition("### What is saved")[2]
    named = set(re.findall(r"^\| `([\w/-]+\.jsonl)`", section, re.MULTILINE))
    assert named == {path.relative_to(results.RESULTS).as_posix() for path in results.RESULTS.rglob("*.jsonl")}
