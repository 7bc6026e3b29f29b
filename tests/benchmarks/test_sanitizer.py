import re

import pytest

from benchmarks import gpu, sanitizer
from benchmarks.results import ROOT

KERNEL = ROOT / "src" / "flashtile" / "backends" / "hopper" / "forward" / "kernel.py"


def line_of(name):
    lines = KERNEL.read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.startswith(f"def {name}("))


def race(*places):
    """A report of racecheck: one access and those it may meet."""
    head = f"========= Error: Race reported between Write access at {places[0]}"
    rest = [
        f"=========     and Read access at {place} [{8 * n} hazards]" for n, place in enumerate(places[1:], start=1)
    ]
    return "\n".join([head, *rest])


def judged(*reports, summary=None):
    counted = f"RACECHECK SUMMARY: {len(reports)} hazards displayed ({len(reports)} errors, 0 warnings)"
    return sanitizer.verdict("\n=========\n".join([*reports, f"========= {summary or counted}"]))


def test_races_of_the_words_that_start_warps_are_left_out_and_no_others():
    start = line_of("attention_forward")
    read, write = f"attention_forward+0x140 in kernel.py:{start}", f"attention_forward+0xf9c0 in kernel.py:{start + 90}"
    mine = [race(write, read), race(read, read)]
    found = judged(*mine)
    assert found.summed and not found.errors and found.text == "2 left out"
    # Another line on both sides, another kernel, file, and an access whose line is not known.
    for other in (
        race(write, write),
        race(write, read.replace("attention_forward", "attention_backward")),
        race(read.replace("kernel.py", "roles.py"), write),
        race(read, write, "attention_forward_other+0x10"),
        race("attention_forward+0x9370", write),
    ):
        found = judged(*mine, other)
        assert found.errors == 1 and found.text.startswith("Error: Race reported between"), other
    assert judged(*mine, summary="RACECHECK SUMMARY: 9 hazards displayed (9 errors, 0 warnings)").errors == 7
    assert judged(*mine[:1], summary="ERROR SUMMARY: 2 errors").errors == 1


def read_by(kernel, line=" in preprocess.py:140"):
    return (
        "========= Uninitialized __global__ memory read of size 4 bytes\n"
        f"=========     at {kernel}+0x6b0{line}\n=========     by thread (0,0,0) in block (0,0,0)\n"
        "=========     Address 0x7f3c7ec000fc\n=========     Saved host backtrace up to driver entry point\n"
        "=========         Host Frame: launch at kernel+0x10 in libcuda.so.1"
    )


def test_reads_of_what_nobody_wrote_count_in_our_kernels():
    theirs = read_by("void at::native::vectorized_elementwise_kernel<(int)4, at::native::Mul<float>>(int, T2, T3)", "")
    assert judged(theirs, theirs, summary="ERROR SUMMARY: 2 errors").errors == 0
    for kernel in ("attention_forward", "attention_backward_dq"):
        found = judged(theirs, read_by(kernel), summary="ERROR SUMMARY: 2 errors")
        assert found.errors == 1 and found.text.endswith(f"read of size 4 bytes at {kernel}")
    # 1.5 million, of which some were printed, and what is no read.
    assert judged(theirs, summary="ERROR SUMMARY: 1500000 errors").errors == 1499999
    outside = theirs.replace("Uninitialized __global__ memory read", "Invalid __global__ write")
    assert judged(outside, summary="ERROR SUMMARY: 1 error").errors == 1
    assert judged("========= Program hit cudaErrorX", summary="ERROR SUMMARY: 1 error").errors == 1


@pytest.mark.slow
def test_what_sanitize_prints_is_what_the_driver_reads(capsys):
    from tests.gpu import sanitize

    sanitize.main(["cpu", "hopper"], device="cpu")
    log = capsys.readouterr().out + "========= ERROR SUMMARY: 0 errors"
    calls = len(sanitize.CASES) + len(sanitize.CACHED) + len(sanitize.QUANTIZED)
    calls += len(sanitize.BLOCKS) + len(sanitize.NAMED)
    assert gpu.judge("memcheck-cpu", 0, log).startswith(f"ok: 0 errors in {calls} calls")
    refused = log.replace("cpu: ", "other: ")
    for name, code, text in (
        ("memcheck-cpu", 1, log),
        ("memcheck-cpu", None, log),
        ("memcheck-cpu", 0, refused),
        ("memcheck-cpu", 0, log.replace("ERROR SUMMARY: 0", "ERROR SUMMARY: 1")),
        ("memcheck-cpu", 0, re.sub("=.*", "", log)),
    ):
        assert gpu.judge(name, code, text).startswith("FAILED"), text
