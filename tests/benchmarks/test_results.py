import dataclasses
import json

import pytest
import torch

from benchmarks import results
from benchmarks.cases import suite

KEYS = ["suite", "run", "device", "versions", "commit", "case", "provider", "median_ms", "spread", "tflops", "error"]


@pytest.fixture
def run():
    return results.new_run("forward", torch.device("cpu"), commit="abc")


def test_rows_come_back_as_they_were(run, tmp_path):
    case = suite("cpu")[4].to_dict()
    rows = [
        run.row(case, "fa2", median_ms=1.25, spread=0.01, tflops=300.0, error=0.002),
        run.row(case, "fa3", error="failed: because"),
    ]
    path = tmp_path / "deep" / "forward.jsonl"
    results.append(path, rows[:1])
    results.append(path, rows[1:])
    assert results.read([path]) == rows == results.saved(tmp_path)


def test_a_line_has_exactly_the_documented_keys(run):
    line = json.loads(run.row({"direction": "forward"}, "fa2", median_ms=1.0).to_json())
    assert list(line) == KEYS
    memory = dataclasses.replace(run, suite="memory").row({}, "fa2", extra_bytes=5)
    assert list(json.loads(memory.to_json())) == [*KEYS, "extra_bytes"]


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"suite": "forward"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: not a row"):
        results.read([path])


def test_runs_differ_and_say_where_they_ran(run):
    other = results.new_run("forward", torch.device("cpu"), commit="abc")
    assert other.run > run.run, "rows are read in the order of their runs"
    assert run.versions["torch"] == torch.__version__
    assert f"{torch.get_num_threads()} thread" in run.device


def test_rows_are_read_in_the_order_of_their_runs(run, tmp_path):
    late, early = (dataclasses.replace(run, run=name).row({}, "fa2") for name in ("2-b", "1-a"))
    results.append(tmp_path / "a.jsonl", [late])
    results.append(tmp_path / "b.jsonl", [early])
    assert results.saved(tmp_path) == [early, late]


def test_a_line_that_a_killed_process_left_unfinished_is_no_row_and_is_cut_off(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    first, second = (run.row({"cell": i}, "fa2", median_ms=1.0) for i in range(2))
    results.append(path, [first])
    with path.open("a") as file:
        file.write(second.to_json()[:40])
    assert results.read([path]) == [first]
    results.append(path, [second])
    assert results.read([path]) == [first, second]


def test_sources_without_a_repository_are_named_by_their_text(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    first = results.git_commit(tmp_path)
    (tmp_path / "src" / "a.py").write_text("a = 2\n")
    assert first.startswith("sources-") and results.git_commit(tmp_path) not in (first, results.git_commit())


def test_rows_of_ours_from_a_changed_tree_are_left_out(run, tmp_path):
    changed = dataclasses.replace(run, commit="abc-dirty+123")
    rows = [each.row({}, name) for each in (run, changed) for name in ("flashtile", "flashtile-portable", "fa3")]
    results.append(tmp_path / "a.jsonl", rows)
    assert results.saved(tmp_path) == [*rows[:3], rows[5]], "a peer's code is not ours"
