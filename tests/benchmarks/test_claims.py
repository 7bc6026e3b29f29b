from dataclasses import replace

import pytest

from benchmarks import claims, varlen
from benchmarks.cases import Case, suite
from benchmarks.claims import Ended
from benchmarks.results import Row
from tests.benchmarks.synthetic import SPEEDS, memory_rows, row, suite_rows

BETTER = ("fa3", "cudnn")
FORWARD = claims.speed("forward", "bfloat16", "flashtile-hopper", BETTER, 36, (1.0, 0.93))


def seen(rows=(), log="", tmp=None, **lines):
    return Ended(log, tmp, list(rows), lines)


def made(suite_name, case, provider, median_ms=None, error=None, run="1", **values):
    return Row(suite_name, run, "d", {}, "c", case, provider, median_ms, None, None, error, values=values or None)


def test_speed_is_shown_by_all_cells_against_the_better_peer():
    (finding,) = FORWARD(seen(suite_rows("forward")))
    ratio = SPEEDS["flashtile-hopper"] / SPEEDS["fa3"]
    assert (
        finding.met and f"36 of 36 cells: geomean {ratio:.3f} (bar 1.00), least {ratio:.3f} (bar 0.93" in finding.text
    )


def test_a_slow_cell_a_missing_cell_and_a_missing_peer_are_not_shown():
    rows = suite_rows("forward")
    slow = suite("forward")[7]

    def slower(r):
        return replace(r, median_ms=r.median_ms * 1.2) if r.provider == "flashtile-hopper" else r

    (finding,) = FORWARD(seen([slower(r) if r.case == slow.to_dict() else r for r in rows]))
    assert not finding.met and slow.name in finding.text and "geomean 1.042" in finding.text
    (finding,) = FORWARD(seen([r for r in rows if r.case != slow.to_dict()]))
    assert not finding.met and "35 of 36 cells" in finding.text
    (finding,) = FORWARD(seen([r for r in rows if r.provider != "fa3"]))
    assert not finding.met and "no cell was timed with all of them" in finding.text
    (finding,) = FORWARD(seen(suite_rows("forward", "float16")))
    assert not finding.met, "another dtype is another table"


def test_peers_are_compared_within_one_run_only():
    rows = suite_rows("forward")
    moved = [replace(r, run="2-b") if r.provider == "fa3" else r for r in rows]
    (finding,) = FORWARD(seen(moved))
    assert not finding.met


def test_without_bars_all_cells_are_enough():
    half = claims.speed("forward", "float16", "flashtile-hopper", BETTER, 36, None)
    (finding,) = half(seen(suite_rows("forward", "float16")))
    assert finding.met and "bar" not in finding.text


def test_a_wrong_result_of_ours_is_named_and_a_refusal_is_none():
    judge = claims.nothing_wrong("forward", "bfloat16")
    case = suite("forward")[0]
    refused, wrong = row(case, "flashtile-hopper", None), row(case, "flashtile-portable", None, error="wrong: by 3")
    peer = row(case, "fa2", None, error="failed: x")
    assert [f.met for f in judge(seen([refused, peer]))] == [True]
    (finding,) = judge(seen([refused, wrong, peer]))
    assert finding.met is False and finding.text == "forward: flashtile-portable: wrong: by 3"
    assert judge(seen([wrong, row(case, "flashtile-portable", 1.0)]))[0].met, "the last word counts"
    assert not judge(seen([]))[0].met


def test_memory_must_reach_64k_and_grow_with_the_length():
    longest = [replace(r, case={**r.case, "seqlen_q": 65536, "seqlen_k": 65536}) for r in memory_rows()[-3:]]
    longest = [replace(r, extra_bytes=64 * 65536) for r in longest]
    short, long = (claims.memory_is_linear(seen(rows)) for rows in (memory_rows(), memory_rows() + longest))
    assert [f.met for f in short] == [False, False] and "exponent 1.00" in short[0].text
    assert [f.met for f in long] == [False, True], "the forward stopped at 16k"
    square = [replace(r, extra_bytes=r.case["seqlen_k"] ** 2) for r in memory_rows() + longest]
    assert not any(f.met for f in claims.memory_is_linear(seen(square)))
    assert claims.memory_is_linear(seen())[0].met is False


def test_host_time_is_held_against_sdpa_and_first_calls_against_four_seconds():
    warm, first = "host time of a warm call", "first call, empty cache"

    def rows(ours_us, first_s):
        return [
            made("host", {"measure": warm, "direction": "forward"}, "sdpa", 0.012),
            made("host", {"measure": warm, "direction": "forward"}, "flashtile-hopper", ours_us / 1e3),
            made("host", {"measure": warm, "direction": "forward and backward"}, "sdpa", 0.03),
            made("host", {"measure": warm, "direction": "forward and backward"}, "flashtile-hopper", 9.0),
            made("host", {"measure": first, "direction": "forward"}, "flashtile-hopper", first_s * 1e3),
        ]

    assert [f.met for f in claims.host_is_quick(seen(rows(26, 3.9)))] == [True, None, True]
    assert [f.met for f in claims.host_is_quick(seen(rows(28, 4.1)))] == [False, None, False]
    assert claims.host_is_quick(seen())[0].met is False


def accuracy_rows(ours, theirs):
    case = Case("backward", "float16", 1, 64, 64, 2, 2, 64).to_dict() | {"inputs": "outliers"}
    both = (("flashtile-hopper", ours), ("fa3", theirs))
    return [made("accuracy", case, name, dq={"rmse": x}, dk={"rmse": 2 * x}, dv={"rmse": 3 * x}) for name, x in both]


@pytest.mark.parametrize(("ours", "count", "met"), [(1.0e-4, 3, True), (1.02e-4, 3, False), (0.9e-4, 4, False)])
def test_errors_are_no_worse_than_the_peers_in_every_tensor(ours, count, met):
    (finding,) = claims.accuracy_is_as_good("flashtile-hopper", "fa3", {"backward": count})(
        seen(accuracy_rows(ours, 1e-4))
    )
    assert finding.met is met and f"3 of {count}" in finding.text and "outliers" in finding.text


def test_packing_must_keep_nine_tenths_in_every_forward_cell():
    def rows(tflops):
        found = []
        for causal in (False, True):
            packed = Case("forward", "bfloat16", 3, 900, 900, 2, 2, 64, causal, lengths=(100, 900, 500))
            for case, rate in ((packed, tflops), (varlen.dense_like(packed), 600)):
                found.append(row(case, "flashtile-hopper", case.flops() / 1e9 / rate, suite="varlen"))
        return found

    judge = claims.packing_is_cheap("flashtile-hopper", 2)
    assert [f.met for f in judge(seen(rows(550)))] == [True, None]
    assert [f.met for f in judge(seen(rows(530)))] == [False, None]
    assert [f.met for f in judge(seen(rows(550)[:2]))] == [False, None]


def training(gap, steps=100):
    names = {"flashtile-hopper": gap, "fa2": 0.001, "eager": 0.0}
    rows = []
    for name, off in names.items():
        losses = [2.0 + off] * steps
        rows.append(made("train", {"measure": "loss", "seqlen": 512}, name, first_step=0, losses=losses, seconds=1.0))
        rows.append(made("train", {"measure": "speed", "seqlen": 512}, name, tokens_per_s=5.0))
    return rows


def test_training_must_agree_last_and_have_speeds():
    judge = claims.training_agrees("flashtile-hopper", 100, (512,))
    assert [f.met for f in judge(seen(training(0.005)))] == [True, True, True]
    assert [f.met for f in judge(seen(training(0.02)))] == [True, False, True]
    assert [f.met for f in judge(seen(training(0.0, steps=99)))] == [False, True, True]
    alone = [r for r in training(0.0) if r.provider != "fa2"]
    assert [f.met for f in judge(seen(alone))] == [False, False]


JUNIT = """<testsuites><testsuite><testcase classname="t" name="a"/><testcase classname="t" name="b">{}</testcase>
<testcase classname="t" name="c"><skipped message="no"/></testcase></testsuite></testsuites>"""


def test_tests_must_run_and_none_may_fail(tmp_path):
    report = tmp_path / "junit.xml"
    assert claims.tests_pass(seen(tmp=tmp_path))[0].met is False
    report.write_text(JUNIT.format(""))
    (finding,) = claims.tests_pass(seen(tmp=tmp_path))
    assert finding.met and finding.text == "2 tests passed, 0 failed, 1 skipped or expected to fail"
    report.write_text(JUNIT.format("<failure/>"))
    assert [f.text for f in claims.tests_pass(seen(tmp=tmp_path)) if not f.met][1] == "t::b"
    report.write_text(JUNIT.format("").replace('name="a"/>', 'name="a"><skipped/></testcase>').replace(
        'name="b">', 'name="b"><skipped/>'))  # fmt: skip
    assert claims.tests_pass(seen(tmp=tmp_path))[0].met is False, "a run that skips everything shows nothing"


@pytest.mark.parametrize(
    ("log", "met"),
    [
        ("hopper: 5 calls right, 2 refused\n========= ERROR SUMMARY: 0 errors", True),
        ("hopper: 5 calls right, 2 refused\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", True),
        ("hopper: 5 calls right, 2 refused\n========= RACECHECK SUMMARY: 3 hazards displayed (1 errors)", False),
        ("hopper: 0 calls right, 7 refused\n========= ERROR SUMMARY: 0 errors", False),
        ("portable: 5 calls right, 2 refused\n========= ERROR SUMMARY: 0 errors", False),
        ("hopper: 5 calls right, 2 refused", False),
        ("hopper: 5 calls right, 2 refused\n========= Device not supported\n========= ERROR SUMMARY: 0 errors", False),
    ],
)  # fmt: skip
def test_the_sanitizer_must_have_seen_calls_and_complain_of_none(log, met):
    assert claims.sanitizer_is_silent("hopper")(seen(log=log))[0].met is met


@pytest.mark.slow
def test_what_sanitize_prints_is_what_is_read(capsys):
    from tests.gpu import sanitize

    sanitize.main(["cpu", "hopper"], device="cpu")
    log = capsys.readouterr().out + "========= ERROR SUMMARY: 0 errors"
    assert claims.sanitizer_is_silent("cpu")(seen(log=log))[0].met
    (refused,) = claims.sanitizer_is_silent("hopper")(seen(log=log))
    assert not refused.met and "0 calls of hopper" in refused.text


def test_a_sweep_must_add_rows_and_end_well_in_all_parts():
    judge = claims.sweep_is_whole("tune.jsonl")
    good = "smoke: exit codes {'d64': 0} after 9 s\ntime: exit codes {'d64': 0, 'd128': 0} after 70 s"
    assert [f.met for f in judge(seen(log=good, **{"tune.jsonl": 3}))] == [True, True]
    assert [f.met for f in judge(seen(log=good, other=3))] == [False, True]
    bad = good.replace("'d128': 0", "'d128': 124")
    found = judge(seen(log=bad, **{"tune.jsonl": 3}))
    assert [f.met for f in found] == [True, False] and "'d128': 124" in found[1].text
    assert [f.met for f in judge(seen(log="", **{"tune.jsonl": 3}))] == [True]
