from benchmarks import table
from benchmarks.cases import suite
from tests.benchmarks.synthetic import row

FIRST = suite("forward")[0]


def test_a_cell_never_mixes_runs_and_takes_the_last_that_compares():
    rows = [
        row(FIRST, "flashtile-portable", 4.0, run="1"),
        row(FIRST, "fa2", 8.0, run="1"),
        row(FIRST, "flashtile-portable", 2.0, run="2"),
        row(FIRST, "fa2", 3.0, run="2"),
        row(FIRST, "flashtile-portable", 1.0, run="3"),
    ]
    (cell,) = table.cells(rows)
    assert cell.ratio("flashtile-portable", "fa2") == 1.5
    (alone,) = table.cells(rows[-1:])
    assert alone.time("flashtile-portable") == 1.0


def test_a_provider_without_a_time_is_left_out_of_the_mean_and_named():
    rows = [row(FIRST, "flashtile-portable", 1.0), row(FIRST, "fa2", 2.0), row(FIRST, "fa3", None, error="wrong: by 1")]
    grid = table.cells(rows)
    assert {s.against for s in table.summaries(grid)} == {"fa2", table.BEST_PEER}
    assert table.problems(grid) == [f"{FIRST.name}: fa3: wrong: by 1"]
    assert "wrong" in table.report(rows)


def test_text_and_markdown_hold_every_cell():
    lines = [["cell", "a"], ["x", "1.00"], ["long name", "2"]]
    assert table.to_text(lines).splitlines()[-1] == "long name     2"
    assert table.to_markdown(lines).splitlines() == [
        "| cell | a |",
        "| --- | ---: |",
        "| x | 1.00 |",
        "| long name | 2 |",
    ]
