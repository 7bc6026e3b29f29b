import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import acceptance, archive, results, stages
from benchmarks.acceptance import Acceptance
from benchmarks.claims import Finding, ended_well
from benchmarks.stages import Machine, Stage

HERE = Machine(cuda=True, facts={"device": "a pretended one"}, tools=frozenset())


def stage(name, code, **options):
    """A stage that runs some Python."""
    options = {"limit_s": 20.0, "least_s": 0.5, "needs": lambda machine: None, **options}
    return Stage(name=name, shows=f"shows {name}", command=("{python}", "-c", code), **options)


def drive(out, chosen, again=(), budget_s=60.0, sources="s1", machine=HERE, look=lambda: HERE):
    """One run of the driver; the records by name."""
    driver = Acceptance(out, machine, "c1", sources, budget_s, look)
    driver.run(driver.order(chosen, again))
    driver.write()
    driver.close()
    assert not driver.work.exists()
    assert len(list(out.iterdir())) <= 8
    return driver.records


# A child in a process group of its own, as `timeout` makes one, and neither minds SIGTERM.
HANG = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
                          "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                          "os.setpgid(0, 0); print('child', os.getpid(), flush=True); time.sleep(600)"])
time.sleep(600)
"""


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def log_of(out, name):
    with tarfile.open(out / "logs.tar.gz") as packed:
        return packed.extractfile(f"{name}.log").read().decode()


def test_every_end_of_a_stage_has_its_verdict(tmp_path):
    def lost(ended):
        raise KeyError("nowhere")

    claimed = [Finding("a number"), Finding("too slow (bar 1)", met=False), Finding("right", met=True)]
    chosen = [
        stage("good", "print('seen'); print('42 right')"),
        stage("bad", "import sys; print('half'); print('boom', file=sys.stderr); sys.exit(3)"),
        stage("hangs", HANG, limit_s=2.0),
        stage("dies", "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
        stage("misses", "pass", judge=lambda ended: claimed),
        stage("lost", "pass", judge=lost),
        stage("absent", "print('never')", needs=lambda machine: "no such thing here"),
        stage("short", "import sys; sys.exit(75)"),
        replace(stage("unknown", ""), command=("/no/such/program",)),
        stage("last", "print('still run')"),
    ]
    start = time.monotonic()
    records = drive(tmp_path, chosen)
    assert time.monotonic() - start < 40
    verdicts = {name: (r.verdict, r.why) for name, r in records.items()}
    assert verdicts["good"] == ("shown", "1 claims")
    assert records["good"].findings[0]["text"].endswith("last line: 42 right")
    assert verdicts["bad"] == ("failed", "exit code 3: boom")
    assert verdicts["hangs"][0] == "timed out" and "last said: child" in verdicts["hangs"][1]
    assert verdicts["dies"] == ("killed", "by SIGKILL; last said: x")
    assert verdicts["misses"] == ("missed", "1 of 2 claims not shown")
    assert verdicts["lost"] == ("failed", "cannot be judged: KeyError: 'nowhere'")
    assert verdicts["absent"] == ("not run", "no such thing here") and records["absent"].tries == 0
    assert verdicts["short"][0] == "timed out"
    assert verdicts["unknown"][0] == "failed" and "could not be started" in verdicts["unknown"][1]
    assert verdicts["last"][0] == "shown"
    child = int(log_of(tmp_path, "hangs").split()[1])
    assert gone(child), "a stage that is killed takes all of its processes along"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [s["verdict"] for s in summary["stages"]] == [r.verdict for r in records.values()]
    table = (tmp_path / "summary.txt").read_text()
    assert "2 of 10 stages shown" in table and "NO  too slow (bar 1)" in table and "yes right" in table


def test_a_gpu_that_a_killed_stage_takes_along_is_asked_for_once(tmp_path):
    asked = []

    def look():
        asked.append(1)
        return Machine(cuda=False, why_not="it does not answer")

    def gpu(machine):
        return None if machine.cuda else machine.why_not

    chosen = [
        stage("fails", "raise SystemExit(1)", needs=gpu),
        stage("dies", "import os; os.kill(os.getpid(), 9)", needs=gpu),
        stage("later", "print(1)", needs=gpu),
        stage("elsewhere", "print(1)"),
    ]
    records = drive(tmp_path, chosen, look=look)
    assert [r.verdict for r in records.values()] == ["failed", "killed", "not run", "shown"]
    assert records["later"].why == "it does not answer" and len(asked) == 1


def test_a_child_left_behind_by_a_stage_that_succeeds_is_ended(tmp_path):
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    assert drive(tmp_path, [stage("leaves", code)])["leaves"].verdict == "shown"
    assert gone(int(log_of(tmp_path, "leaves")))


def test_only_stages_that_measure_no_time_run_side_by_side(tmp_path):
    wait = "import time; print(time.time()); time.sleep(1.0); print(time.time())"
    drive(tmp_path, [stage("a", wait, alone=False), stage("b", wait, alone=False), stage("c", wait), stage("d", wait)])
    spans = {name: tuple(map(float, log_of(tmp_path, name).split())) for name in "abcd"}
    assert spans["a"][0] < spans["b"][1] and spans["b"][0] < spans["a"][1]
    assert spans["c"][0] >= max(spans["a"][1], spans["b"][1]) and spans["d"][0] >= spans["c"][1]


def test_the_budget_is_kept_and_what_it_cuts_off_is_not_shown(tmp_path):
    chosen = [stage("first", "import time; time.sleep(30)", limit_s=60.0), stage("second", "print(1)", least_s=5.0)]
    start = time.monotonic()
    records = drive(tmp_path, chosen, budget_s=12.0)
    assert time.monotonic() - start < 12
    assert records["first"].verdict == "timed out"
    assert records["second"].verdict == "not run" and "of the budget are left" in records["second"].why


COUNT = "import os, pathlib; p = pathlib.Path({!r}); p.write_text(p.read_text() + '{}' if p.exists() else '{}'); {}"


def test_a_second_run_leaves_alone_what_ended_and_tries_the_untried_first(tmp_path):
    seen, out = tmp_path / "seen", tmp_path / "out"

    def counted(name, then="pass", **options):
        return stage(name, COUNT.format(str(seen), name, name, then), **options)

    chosen = [
        counted("a"),
        counted("b", "raise SystemExit(1)"),
        counted("c", judge=lambda ended: [Finding("short", met=False)]),
        counted("d", needs=lambda machine: None if machine.tools else "a tool is missing"),
    ]
    first = drive(out, chosen)
    assert seen.read_text() == "abc"
    assert [first[n].verdict for n in "abcd"] == ["shown", "failed", "missed", "not run"]
    second = drive(out, chosen, machine=replace(HERE, tools=frozenset({"x"})))
    assert seen.read_text() == "abc" + "db"
    assert [second[n].verdict for n in "abcd"] == ["shown", "failed", "missed", "shown"]
    assert second["b"].tries == 2 and log_of(out, "a") == "", "earlier logs stay"
    drive(out, chosen, again=["c"])
    assert seen.read_text() == "abcdb" + "cb"
    third = drive(out, chosen[:1], sources="s2")
    assert seen.read_text() == "abcdbcb" + "a", "what other sources have shown counts for nothing"
    assert third["a"].verdict == "shown" and "other sources (s1)" in third["c"].why and third["c"].verdict == "not run"


def test_rows_of_these_sources_alone_are_judged_and_a_torn_row_is_cut_off(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run = results.new_run("forward", torch.device("cpu"), commit="other")
    results.append(out / "rows.jsonl", [run.row({"direction": "forward"}, "fa2", median_ms=1.0)])
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"suite": "forw')
    code = (
        "import torch; from pathlib import Path; from benchmarks import results;"
        "run = results.new_run('forward', torch.device('cpu'), '{commit}');"
        "results.append(Path('{out}') / 'rows.jsonl', [run.row({}, 'fa3', median_ms=2.0)])"
    )
    seen = []

    def judge(ended):
        seen.append(ended)
        return [Finding("rows", met=True)]

    assert drive(out, [stage("rows", code, judge=judge, limit_s=60)])["rows"].verdict == "shown"
    assert [(row.provider, row.commit) for row in seen[0].rows] == [("fa3", "c1")]
    assert [row.provider for row in results.read([out / "rows.jsonl"])] == ["fa2", "fa3"]
    assert seen[0].new_lines["rows.jsonl"] in (0, 1)


DRIVER = """
import sys
from benchmarks import acceptance, stages
from tests.benchmarks.test_acceptance import HERE, stage
hang = "import time; print('at work', flush=True); time.sleep(600)"
acceptance.look_around = stages.look_around = lambda: HERE
acceptance.all_stages = lambda machine, extra: [stage("quick", "print(1)"), stage("hangs", hang), stage("later", "1")]
sys.exit(acceptance.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_killed_leaves_what_it_knew(tmp_path, number):
    out = tmp_path / "out"
    command = [sys.executable, "-c", DRIVER, "--out", str(out), "--budget-s", "300"]
    driver = subprocess.Popen(command, cwd=results.ROOT, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            known = {}
            if (out / "summary.json").exists():
                known = {s["name"]: s["verdict"] for s in json.loads((out / "summary.json").read_text())["stages"]}
            if known.get("hangs") == "running":
                break
            time.sleep(0.1)
        assert known == {"quick": "shown", "hangs": "running", "later": "not run"}
        driver.send_signal(number)
        printed, _ = driver.communicate(timeout=30)
    finally:
        for pid in _children_of(driver.pid):
            os.kill(pid, signal.SIGKILL)
    verdicts = {s["name"]: s["verdict"] for s in json.loads((out / "summary.json").read_text())["stages"]}
    if number == signal.SIGTERM:
        assert driver.returncode == 1
        assert verdicts == {"quick": "shown", "hangs": "killed", "later": "not run"}
        assert "1 of 3 stages shown" in printed and "told to stop" in printed
    records = drive(out, [stage("hangs", "print(2)"), stage("quick", "1")], sources=results.fingerprint())
    assert records["hangs"].verdict == "shown" and records["hangs"].tries == 2 and records["quick"].tries == 1


def _children_of(parent):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.name))
    return found


def test_the_command_prints_the_table_last_and_fails_unless_all_is_shown(tmp_path, capsys, monkeypatch):
    listed = [stage("a", "print(1)"), stage("b", "raise SystemExit(2)"), stage("c", "print(1)")]
    monkeypatch.setattr(acceptance, "all_stages", lambda machine, extra: [*listed, *extra])
    monkeypatch.setattr(acceptance, "look_around", lambda: HERE)
    out = ["--out", str(tmp_path / "out"), "--commit", "c1"]
    assert acceptance.main([*out, "--only", "a,c", "--skip", "c"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("1 of 1 stages shown; device a pretended one; commit c1")
    assert acceptance.main([*out, "--also", "mine:9=echo told; exit 4"]) == 1
    printed = capsys.readouterr().out
    assert "exit code 4: told" in printed and printed.rstrip().endswith("commit c1")
    assert "2 of 4 stages shown" in printed
    for wrong in (["--only", "nothing"], ["--also", "no command"], ["--also", "x:soon=true"]):
        assert acceptance.main([*out, *wrong]) == 2
    assert "no such stage: nothing" in capsys.readouterr().err
    assert acceptance.main([*out, "--list"]) == 0 and "shows b" in capsys.readouterr().out


def test_an_external_command_has_a_folder_whose_files_are_kept(tmp_path):
    records = drive(tmp_path / "out", [stages.also("mine=echo kept > $OUT/file.txt; echo done")])
    assert records["mine"].verdict == "shown"
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as packed:
        assert packed.extractfile("mine/file.txt").read() == b"kept\n"


def test_the_folder_stays_small_and_what_lay_there_stays(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("not the driver's")
    code = "import pathlib; [pathlib.Path('{out}', str(i)).write_text('x' * 9) for i in range(20)]"
    drive(out, [stage("strews", code)])
    assert sorted(path.name for path in out.iterdir()) == ["logs.tar.gz", "mine.txt", "summary.json", "summary.txt"]
    with tarfile.open(out / "logs.tar.gz") as packed:
        assert packed.extractfile("strays/7").read() == b"x" * 9


def test_archives_cut_long_logs_and_leave_out_what_is_too_large(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "long.log").write_bytes(b"head" + os.urandom(5 * 2**20) + b"tail")
    (folder / "short.log").write_bytes(b"short")
    made = tmp_path / "logs.tar.gz"
    assert archive.pack(folder, made) == []
    archive.unpack(made, tmp_path / "back")
    back = (tmp_path / "back" / "long.log").read_bytes()
    assert back.startswith(b"head") and back.endswith(b"tail") and b"bytes left out" in back
    assert 4 * 2**20 < len(back) < 4.1 * 2**20
    monkeypatch.setattr(archive, "MOST_BYTES", 2**20)
    assert archive.pack(folder, made) == ["left out of logs.tar.gz: long.log"]
    assert made.stat().st_size < 2**20
    with tarfile.open(made) as packed:
        assert packed.getnames() == ["short.log"]


def test_the_real_stages_say_what_they_need_and_name_real_modules():
    bare = Machine(cuda=False, why_not="no GPU at all")
    full = Machine(cuda=True, tools=frozenset({"pytest", "xdist", "pytest_timeout", "hypothesis", "compute-sanitizer"}))
    known = stages.all_stages(full, [stages.also("fuzz=true")])
    assert len({s.name for s in known}) == len(known)
    assert [s.name for s in known[:3]] == ["pytest", "compile", "memcheck-hopper"] and known[8].name == "fuzz"
    for each in known:
        assert each.needs(bare) == (None if each.name == "fuzz" else "no GPU at all")
        words = " ".join(each.command)
        if "{python} -m benchmarks." in words:
            module = words.split("-m ")[1].split()[0]
            exists = results.ROOT.joinpath(*module.split(".")).with_suffix(".py").exists()
            assert (each.needs(full) is None) == exists
    sanitizer = next(s for s in known if s.name == "racecheck-hopper")
    assert "compute-sanitizer" in sanitizer.needs(replace(full, tools=frozenset({"pytest"})))
    assert sum(s.limit_s for s in known if s.alone) + 300 < 45 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they would run")
def test_real_commands_are_understood_where_they_cannot_run(tmp_path):
    names = ["compile", "forward", "backward", "forward-fp16", "memory", "host", "accuracy", "varlen", "train"]
    chosen = [replace(s, needs=lambda machine: None, alone=False) for s in stages.all_stages(HERE) if s.name in names]
    records = drive(tmp_path, chosen, budget_s=300.0)
    assert list(records) == names
    for record in records.values():
        assert record.verdict == "failed" and record.why.startswith("exit code 2: ") and "CUDA device" in record.why
        assert all(finding["met"] is not True for finding in record.findings)
        assert record.findings or record.name == "compile"


@pytest.mark.slow
def test_real_benchmarks_in_small_go_through_the_driver(tmp_path):
    """The commands, their budgets, their rows and the folder, on the CPU; what they claim cannot be shown here."""
    small = {
        "accuracy": ("--seqlen", "48", "--hidden", "16", "--head-dims", "16", "--dtypes", "float16"),
        "varlen": ("--tokens", "100", "--shortest", "5", "--longest", "60", "--hidden", "16", "--head-dims", "16",
                   "--dtype", "float32", "--rounds", "1", "--burst-ms", "0.1"),
        "train": ("--tokens", "32", "--seqlen", "16", "--contexts", "16", "--width", "64", "--speed-width", "64",
                  "--layers", "1", "--rounds", "1", "--steps", "2"),
    }  # fmt: skip
    chosen = [
        replace(s, command=(*s.command, "--device", "cpu", *small[s.name]), needs=lambda machine: None, least_s=1.0)
        for s in stages.all_stages(HERE)
        if s.name in small
    ]
    records = drive(tmp_path, chosen, budget_s=300.0)
    assert [records[name].verdict for name in small] == ["missed"] * 3
    rows = results.read([tmp_path / "rows.jsonl"])
    assert {row.suite for row in rows} == set(small) and {row.commit for row in rows} == {"c1"}
    texts = {name: " | ".join(finding["text"] for finding in records[name].findings) for name in small}
    assert "forward rmse, flashtile-hopper over fa3, 0 of 12" in texts["accuracy"]
    assert "accuracy: nothing of ours wrong or failed in 4 rows" in texts["accuracy"]
    assert "packed over dense, flashtile-hopper forward, 0 of 4 cells" in texts["varlen"]
    assert "steps of flashtile-hopper, fa2, eager: [0, 0, 2] (bar 2000)" in texts["train"]


def test_looking_around_finds_this_machine():
    machine = stages.look_around()
    assert machine.cuda == torch.cuda.is_available() and bool(machine.why_not) != machine.cuda
    assert {"pytest"} <= machine.tools and machine.facts["torch"] == torch.__version__


def test_sources_are_named_by_their_contents(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("1")
    first = results.fingerprint(tmp_path)
    assert results.fingerprint(tmp_path) == first
    (tmp_path / "a.py").write_text("2")
    assert results.fingerprint(tmp_path) != first
    for commit, name in (("abc", "abc"), ("abc-dirty", f"abc-dirty+{first}"), ("unknown", f"sources-{first}")):
        monkeypatch.setattr(results, "git_commit", lambda commit=commit: commit)
        assert results.sources_name(first) == name


def test_ended_well_claims_what_the_log_said_last(tmp_path):
    from benchmarks.claims import Ended

    assert "all 400 right" in ended_well(Ended("x\nall 400 right\n\n", tmp_path, [], {}))[0].text
