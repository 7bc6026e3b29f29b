from dataclasses import replace

import pytest

from benchmarks import claims, sanitizer, varlen
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


def line_of(backend, file, start):
    lines = (sanitizer.BACKENDS / backend / file).read_text().splitlines()
    return max(n for n, line in enumerate(lines, 1) if line.startswith(start))


def race(*places):
    """As racecheck prints it: a read, and the writes that it races with."""
    first, *others = (f"{kind} access at {at}" for kind, at in zip(["Read"] + ["Write"] * 9, places, strict=False))
    return "\n".join(
        [f"========= Error: Race reported between {first}", *(f"=========     and {x} [8 hazards]" for x in others)]
    )


def judged(backend, *reports, summary=None):
    counted = summary or f"RACECHECK SUMMARY: {len(reports)} hazards displayed ({len(reports)} errors, 0 warnings)"
    log = "\n=========\n".join([f"{backend}: 5 calls right, 2 refused", *reports, counted and f"========= {counted}"])
    (finding,) = claims.sanitizer_is_silent(backend)(seen(log=log))
    return finding


def test_races_of_the_compilers_own_words_are_left_out_and_no_others():
    start = line_of("hopper", "forward.py", "def attention_forward(")
    end = line_of("hopper", "forward.py", "    if HAS_LEFT or HAS_RIGHT:")
    read, write = f"attention_forward+0x140 in forward.py:{start}", f"attention_forward+0x9370 in forward.py:{start}"
    stop = f"attention_forward+0xf9c0 in forward.py:{end}"
    back, last = sanitizer.lines_of_starts("hopper")["attention_backward", "backward.py"]
    assert back == line_of("hopper", "backward.py", "def attention_backward(") < last
    gradient = [f"attention_backward+0x{n} in backward.py:{n}" for n in (back, back, last)]
    mine = [race(read, write, stop), race(read, stop), race(*gradient)]
    finding = judged("hopper", *mine)
    assert finding.met and "0 errors" in finding.text
    assert finding.text.endswith("the words by which the compiler starts and ends warps: 3")
    # The same lines of another kernel, file or backend, another line, and an access whose line is not known.
    for other in (
        race(read, f"attention_forward+0x9370 in forward.py:{start + 1}"),
        race(read, stop, "attention_forward+0x8000 in pipeline.py:80"),
        race(read, write.replace("attention_forward", "finish")),
        race(read, write.replace("forward.py", "backward.py")),
        race(read, "attention_forward+0x9370"),
        race(f"attention_backward+0x140 in forward.py:{start}", write),
    ):
        finding = judged("hopper", *mine, other)
        assert not finding.met and "1 errors" in finding.text and "warps: 3; the first: Error: Race" in finding.text
    assert not judged("portable", *mine).met
    unprinted = judged("hopper", *mine, summary="RACECHECK SUMMARY: 9 hazards displayed (9 errors, 0 warnings)")
    assert not unprinted.met and "6 errors" in unprinted.text
    assert not judged("hopper", *mine, summary="ERROR SUMMARY: 1 error").met


def read_by(kernel, line=" in backward_rows.py:140"):
    return (
        "========= Uninitialized __global__ memory read of size 4 bytes\n"
        f"=========     at {kernel}+0x6b0{line}\n=========     by thread (0,0,0) in block (0,0,0)\n"
        "=========     Address 0x7f3c7ec000fc\n=========     Saved host backtrace up to driver entry point\n"
        "=========         Host Frame: launch at kernel+0x10 in libcuda.so.1"
    )


def test_reads_of_what_nobody_wrote_count_in_our_kernels():
    theirs = read_by("void at::native::vectorized_elementwise_kernel<(int)4, at::native::Mul<float>>(int, T2, T3)", "")
    finding = judged("hopper", theirs, theirs, summary="ERROR SUMMARY: 2 errors")
    assert finding.met and "0 errors" in finding.text
    assert "such as void at::native::vectorized_elementwise_kernel" in finding.text and finding.text.endswith(": 2")
    for kernel in ("prepare_rows", "attention_forward", "attention_backward_dq"):
        finding = judged("hopper", theirs, read_by(kernel), summary="ERROR SUMMARY: 2 errors")
        assert (
            not finding.met
            and "1 errors" in finding.text
            and finding.text.endswith(f"read of size 4 bytes at {kernel}")
        )
    # 1.5 million, of which some were printed, and what is no read.
    assert not judged("hopper", theirs, summary="ERROR SUMMARY: 1500000 errors").met
    outside = theirs.replace("Uninitialized __global__ memory read", "Invalid __global__ write")
    assert not judged("hopper", outside, summary="ERROR SUMMARY: 1 error").met
    assert not judged("hopper", "========= Program hit cudaErrorX", summary="ERROR SUMMARY: 1 error").met


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
