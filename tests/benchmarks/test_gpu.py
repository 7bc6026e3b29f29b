import sys

import pytest

from benchmarks import gpu

GOOD = [sys.executable, "-c", "print('42 right')"]


@pytest.fixture
def drive(tmp_path, monkeypatch, capsys):
    """Runs the driver over made-up steps; its exit code and what it printed."""

    def run(steps, *options):
        monkeypatch.setattr(gpu, "steps", lambda out, commit: steps)
        code = gpu.main(["--out", str(tmp_path / "out"), "--commit", "abc", *options])
        return code, capsys.readouterr().out

    return run


def test_every_end_of_a_step_has_its_verdict(drive, tmp_path):
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)']); "
    steps = {
        "good": (100.0, GOOD),
        "bad": (100.0, [sys.executable, "-c", "import sys; print('half'); sys.exit('boom')"]),
        "hangs": (0.5, [sys.executable, "-c", child + "time.sleep(900)"]),
        "short": (100.0, [sys.executable, "-c", "import sys; sys.exit(75)"]),
        "absent": (100.0, ["no-such-program"]),
        "last": (100.0, GOOD),
    }
    code, printed = drive(steps)
    assert code == 1
    said = dict(line.split(None, 3)[2::1] for line in printed.splitlines() if " s  " in line)
    assert said["good"] == said["last"] == "ok: 42 right"
    assert said["bad"] == "FAILED: exit code 1; boom"
    assert said["hangs"].startswith("FAILED: out of time") and said["short"].startswith("FAILED: out of time")
    assert said["absent"] == "FAILED: not run, there is no no-such-program"
    assert "2 of 6 steps ended well" in printed == (tmp_path / "out" / "summary.txt").exists() or "2 of 6" in printed
    assert (tmp_path / "out" / "bad.failed.log").read_text() == "commit abc\nhalf\nboom\n"


def test_a_second_run_leaves_alone_what_ended_well_with_the_same_sources(drive, tmp_path):
    seen = tmp_path / "seen"
    count = f"import sys; print('x', file=open({str(seen)!r}, 'a')); sys.exit('-' in sys.argv)"
    steps = {"good": (100.0, [sys.executable, "-c", count]), "bad": (100.0, [sys.executable, "-c", count, "-"])}
    runs = [drive(steps), drive(steps), drive(steps, "--again"), drive(steps, "--commit", "abd", "--only", "good")]
    assert [code for code, _ in runs] == [1, 1, 1, 0]
    assert "(earlier)" in runs[1][1] and "(earlier)" not in runs[3][1]
    assert len(seen.read_text().splitlines()) == 2 + 1 + 2 + 1
