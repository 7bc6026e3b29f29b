import math

import pytest

from benchmarks import table
from benchmarks.cases import suite
from tests.benchmarks.synthetic import SPEEDS, row, suite_rows

FIRST, SECOND = suite("forward")[:2]


def test_geomean():
    assert table.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert table.geomean([1.5]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="of nothing"):
        table.geomean([])


def test_ratios_are_those_of_times_and_the_best_peer_is_the_fastest_of_the_cell():
    rows = [row(FIRST, "flashtile-portable", 2.0), row(FIRST, "fa2", 3.0), row(FIRST, "fa3", 1.0)]
    (cell,) = table.cells(rows)
    assert cell.ratio("flashtile-portable", "fa2") == 1.5
    assert cell.ratio("flashtile-portable", table.BEST_PEER) == 0.5
    assert cell.ratio("flashtile-portable", "cudnn") is None


def test_another_of_our_backends_is_no_peer():
    rows = [row(FIRST, "flashtile-portable", 2.0), row(FIRST, "flashtile-hopper", 1.0), row(FIRST, "fa2", 3.0)]
    (cell,) = table.cells(rows)
    assert cell.time(table.BEST_PEER) == 3.0


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


def test_summaries_give_geomean_and_worst_cell():
    rows = [
        row(FIRST, "flashtile-portable", 1.0),
        row(FIRST, "fa2", 2.0),
        row(SECOND, "flashtile-portable", 1.0),
        row(SECOND, "fa2", 0.5),
    ]
    (found,) = (s for s in table.summaries(table.cells(rows)) if s.against == "fa2")
    assert found.line() == ["2", "1", "1.000", "2.000", "0.500", SECOND.name]


def test_a_provider_without_a_time_is_left_out_of_the_mean_and_named():
    rows = [row(FIRST, "flashtile-portable", 1.0), row(FIRST, "fa2", 2.0), row(FIRST, "fa3", None, error="wrong: by 1")]
    grid = table.cells(rows)
    assert {s.against for s in table.summaries(grid)} == {"fa2", table.BEST_PEER}
    assert table.problems(grid) == [f"{FIRST.name}: fa3: wrong: by 1"]
    assert "wrong" in table.report(rows)


def test_the_whole_suite_shows_its_ratios():
    grid = table.cells(suite_rows("forward"))
    assert len(grid) == 36
    ratio = SPEEDS["flashtile-portable"] / SPEEDS["fa3"]
    (found,) = (s for s in table.summaries(grid) if (s.provider, s.against) == ("flashtile-portable", "fa3"))
    assert list(found.ratios.values()) == pytest.approx([ratio] * 36)
    lines = table.speed_table(grid)
    assert lines[0][:3] == ["cell (TFLOPS)", "portable", "hopper"]
    assert lines[1][lines[0].index("portable / best peer")] == f"{ratio:.2f}"
    assert all(len(line) == len(lines[0]) for line in lines)


def test_losses_are_the_cells_where_even_our_fastest_is_behind():
    slower = [row(FIRST, "flashtile-portable", 3.0), row(FIRST, "flashtile-hopper", 2.0), row(FIRST, "fa3", 1.5)]
    faster = [row(SECOND, "flashtile-portable", 1.0), row(SECOND, "fa3", 1.5)]
    lost = table.losses_table(table.cells(slower + faster))
    assert lost[1:] == [[FIRST.name, "flashtile-hopper", "fa3", "0.750"]]


def test_text_and_markdown_hold_every_cell():
    lines = [["cell", "a"], ["x", "1.00"], ["long name", "2"]]
    assert table.to_text(lines).splitlines()[-1] == "long name     2"
    assert table.to_markdown(lines).splitlines() == [
        "| cell | a |",
        "| --- | ---: |",
        "| x | 1.00 |",
        "| long name | 2 |",
    ]


def test_a_report_of_nothing_says_so():
    assert table.report([]) == "no cells"
    assert math.isclose(table.geomean([1, 1, 1]), 1)
