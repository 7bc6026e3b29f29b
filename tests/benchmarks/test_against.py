import shutil

import pytest

from benchmarks import against, results, run
from benchmarks.cases import Case
from tests.benchmarks.synthetic import row

SMALL = Case("forward", "float32", 2, 48, 48, 2, 2, 16, causal=True)


@pytest.fixture
def other(tmp_path):
    """A copy of the sources, without a repository."""
    root = tmp_path / "other"
    shutil.copytree(results.ROOT / "src", root / "src", ignore=shutil.ignore_patterns("data", "__pycache__"))
    shutil.copytree(results.ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("*.jsonl"))
    (root / "src" / "note.py").write_text("other = True\n")
    return root


@pytest.mark.slow
def test_two_checkouts_take_turns_and_each_row_is_of_its_own_sources(tmp_path, other, capsys, monkeypatch):
    monkeypatch.setattr(run, "suite", lambda name, dtype: [SMALL])
    out = tmp_path / "rows.jsonl"
    options = [
        "cpu",
        "--against",
        str(other),
        "--rounds",
        "3",
        "--burst-ms",
        "0.5",
        "--commit",
        "abc",
        "--out",
        str(out),
    ]
    assert run.main(options) == 0
    now, before = results.read([out])
    assert (now.provider, before.provider) == ("flashtile-cpu", "flashtile-cpu@before")
    assert now.suite == before.suite == "against" and now.median_ms > 0 and before.median_ms > 0
    assert now.commit == "abc" and before.commit == results.git_commit(other)
    assert 0 <= now.error == before.error < 1e-5
    assert f"{now.median_ms / before.median_ms:.4f}" in capsys.readouterr().out
    # Sources that are wrong: the other checkout's own, and no time for either.
    source = other / "benchmarks" / "providers.py"
    source.write_text(source.read_text() + "\nflashtile.attention = lambda q, k, v, **_: v * 1.01\n")
    run.main(options)
    now, before = results.read([out])[2:]
    assert before.error.startswith("RuntimeError: wrong: relative error") and now.error < 1e-5
    assert now.median_ms is before.median_ms is None


def test_the_report_puts_the_slowest_last_and_names_what_was_not_timed():
    cases = [Case("forward", "bfloat16", 1, n, n, 2, 2, 64) for n in (16, 32, 64)]
    mark = against.BEFORE
    rows = [
        row(cases[0], "flashtile-hopper", 1.05),
        row(cases[0], "flashtile-hopper" + mark, 1.0),
        row(cases[1], "flashtile-hopper", 1.0),
        row(cases[1], "flashtile-hopper" + mark, 1.0),
        row(cases[2], "flashtile-hopper", None, error="wrong: by 1"),
        row(cases[2], "flashtile-hopper" + mark, 1.0),
    ]
    lines = against.report(rows).splitlines()
    assert lines[2].endswith("1.0000") and lines[3].endswith("1.0500") and lines[3].startswith(cases[0].name)
    assert "geomean 1.0247" in lines[4] and "1 of 2 over 1.01" in lines[4]
    assert lines[5] == f"flashtile-hopper {cases[2].name}: wrong: by 1"
    assert against.report(rows[4:5]).startswith("nothing was timed by both")


def test_a_worker_that_dies_is_an_answer(tmp_path):
    worker = against.Worker(tmp_path, "cpu")  # no sources at all
    try:
        assert "failed" in worker.ask(do="prepare", case=SMALL.to_dict(), provider="flashtile-cpu")
        assert "failed" in worker.ask(do="time", reps=1)
    finally:
        worker.close()
