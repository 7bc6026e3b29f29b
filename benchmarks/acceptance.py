"""``python -m benchmarks.acceptance --out DIR --budget-s N``: everything that a GPU must show, by one command.

Each stage of ``stages.py`` is a process of its own under its own time limit. What it printed is kept, what it measured
is judged by ``claims.py``, and a table is printed last. Nothing is taken on trust: a stage that cannot run here, that
is killed or that the budget leaves no time for counts as not shown, with the reason.

DIR holds at most eight files: ``summary.json``, ``summary.txt``, ``rows.jsonl`` (all saved rows), ``tune_*.jsonl`` (the
sweeps) and ``logs.tar.gz``. Run again on the same DIR with the same sources, stages that ran to their end are left
alone, those never tried come first, and suites take up where they stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from types import FrameType
from typing import Any

from benchmarks import archive, results
from benchmarks.budget import OUT_OF_TIME
from benchmarks.claims import Ended, Finding, ended_well
from benchmarks.process import Outcome, run_process
from benchmarks.stages import ROWS, SWEEPS, Machine, Stage, all_stages, also, look_around

SHOWN, MISSED, FAILED, TIMED_OUT, KILLED, NOT_RUN = "shown", "missed", "failed", "timed out", "killed", "not run"
# A stage that ended by itself and was judged would say the same again.
COMPLETE = (SHOWN, MISSED)
KNOWN_FILES = ("summary.json", "summary.txt", "logs.tar.gz", ROWS, *SWEEPS)
# For writing the summary after the last stage was killed.
_RESERVE_S = 8.0


@dataclass
class Record:
    """What is known about a stage.

    Attributes:
        name: The stage's.
        shows: What it is for.
        verdict: ``shown``, ``missed`` (ran, but a bar was not reached), ``failed``, ``timed out``, ``killed`` or
            ``not run``.
        why: One line.
        findings: What its judge saw.
        seconds: How long it ran the last time.
        tries: How often it was started with these sources.
        sources: Fingerprint of src/ when it ran.
        ended: UTC time.
    """

    name: str
    shows: str
    verdict: str = NOT_RUN
    why: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    tries: int = 0
    sources: str = ""
    ended: str = ""


class Acceptance:
    """One run of the driver over a results folder.

    Args:
        out: The results folder.
        machine: What there is.
        commit: Name of the sources in rows.
        sources: Their fingerprint.
        budget_s: Seconds for everything.
        look: Asks again what there is, after a stage that had to be killed.
    """

    def __init__(
        self,
        out: Path,
        machine: Machine,
        commit: str,
        sources: str,
        budget_s: float,
        look: Callable[[], Machine] = look_around,
    ) -> None:
        self.out, self.machine, self.commit, self.sources, self._look = out, machine, commit, sources, look
        self.deadline_s = time.monotonic() + budget_s - _RESERVE_S
        self.start_s = time.monotonic()
        self.stopped = Event()
        self._lock = Lock()
        out.mkdir(parents=True, exist_ok=True)
        # What others keep there is none of this driver's business.
        self._known = {*KNOWN_FILES, *(path.name for path in out.iterdir())}
        self.work = Path(tempfile.mkdtemp(prefix="flashtile-acceptance-"))
        archive.unpack(out / "logs.tar.gz", self.work)
        self.records = self._earlier()
        self.notes: list[str] = []

    def _earlier(self) -> dict[str, Record]:
        """The records of earlier runs; of other sources only the names stay, so that nothing old counts."""
        path = self.out / "summary.json"
        if not path.exists():
            return {}
        found = {}
        for entry in json.loads(path.read_text(encoding="utf-8"))["stages"]:
            record = Record(**entry)
            if record.sources and record.sources != self.sources:
                why = f"was {record.verdict!r} with other sources ({record.sources})"
                record = Record(record.name, record.shows, why=why)
            elif record.verdict == "running":
                record = dataclasses.replace(record, verdict=KILLED, why="the driver was killed with it")
            found[record.name] = record
        return found

    def order(self, stages: Sequence[Stage], again: Sequence[str]) -> list[Stage]:
        """The stages still to run: those never tried first, each part in order of worth."""
        left = []
        for stage in stages:
            record = self.records.setdefault(stage.name, Record(stage.name, stage.shows))
            if stage.name in again:
                record.tries, record.verdict = 0, NOT_RUN
            if record.verdict not in COMPLETE:
                left.append(stage)
        return sorted(left, key=lambda stage: self.records[stage.name].tries > 0)

    def run(self, stages: Sequence[Stage]) -> None:
        """Runs stages one by one, those that measure no time in groups."""
        self.write()
        for group in _groups(stages):
            with ThreadPoolExecutor(len(group)) as pool:
                killed = [ended for ended in pool.map(self._stage, group) if ended in (TIMED_OUT, KILLED)]
            if killed and self.machine.cuda and not self.stopped.is_set() and time.monotonic() < self.deadline_s:
                # A kernel that hangs can take the GPU with it; then every later stage would hang until its limit.
                found = self._look()
                if not found.cuda:
                    self.machine = dataclasses.replace(self.machine, cuda=False, why_not=found.why_not)
                    print(f"the GPU is lost: {found.why_not}", flush=True)

    def _stage(self, stage: Stage) -> str | None:
        """Runs one stage; how it ended, None if it was not started."""
        record = self.records[stage.name]
        why = stage.needs(self.machine)
        left_s = self.deadline_s - time.monotonic()
        if why is None and self.stopped.is_set():
            why = "the driver was told to stop"
        if why is None and left_s < stage.least_s:
            why = f"{max(0.0, left_s):.0f} s of the budget are left, it wants {stage.least_s:.0f} at least"
        if why is not None:
            if not record.tries:
                record.verdict, record.why = NOT_RUN, why
            self._say(record)
            return None
        record.tries += 1
        record.verdict, record.sources = "running", self.sources
        self.write()
        work = self.work / stage.name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        before = self._lines()
        outcome = run_process(
            self._command(stage, min(stage.limit_s, left_s), work),
            limit_s=min(stage.limit_s, left_s),
            log=self.work / f"{stage.name}.log",
            environment={**stage.environment, "OUT": str(work)},
            stopped=self.stopped,
        )
        self._judge(stage, record, outcome, work, before)
        self._say(record)
        return record.verdict

    def _command(self, stage: Stage, limit_s: float, work: Path) -> list[str]:
        # Time to start a process and import PyTorch, and to end in order.
        budget_s = max(5.0, limit_s - min(20.0, 0.2 * limit_s))
        values = {
            "{out}": str(self.out), "{work}": str(work), "{budget}": f"{budget_s:.0f}", "{commit}": self.commit,
            "{python}": sys.executable,
        }  # fmt: skip
        words = []
        for word in stage.command:
            for name, value in values.items():
                word = word.replace(name, value)
            words.append(word)
        return words

    def _judge(self, stage: Stage, record: Record, outcome: Outcome, work: Path, before: dict[str, int]) -> None:
        record.seconds, record.findings = round(outcome.seconds, 1), []
        record.ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record.verdict, record.why = _verdict(outcome, stage)
        if record.verdict != SHOWN and stage.judge is ended_well:
            return
        try:
            findings = stage.judge(self._ended(outcome, work, before))
        except Exception as error:  # a judge must not cost the stages after it their run
            why = f"cannot be judged: {type(error).__name__}: {error}"[:300]
            record.verdict, record.why = (FAILED, why) if record.verdict == SHOWN else (record.verdict, record.why)
            return
        record.findings = [dataclasses.asdict(finding) for finding in findings]
        missed = [finding for finding in findings if finding.met is False]
        if record.verdict == SHOWN and missed:
            record.verdict, record.why = MISSED, f"{len(missed)} of {_barred(findings)} claims not shown"
        elif record.verdict == SHOWN and not _barred(findings):
            record.verdict, record.why = MISSED, "nothing was claimed"
        elif record.verdict == SHOWN:
            record.why = f"{_barred(findings)} claims"

    def _ended(self, outcome: Outcome, work: Path, before: dict[str, int]) -> Ended:
        path = self.out / ROWS
        rows = [row for row in results.read([path] if path.exists() else []) if row.commit == self.commit]
        added = {name: count - before.get(name, 0) for name, count in self._lines().items()}
        return Ended(outcome.text(), work, rows, added)

    def _lines(self) -> dict[str, int]:
        return {
            name: len((self.out / name).read_bytes().splitlines())
            for name in (ROWS, *SWEEPS)
            if (self.out / name).exists()
        }

    def _say(self, record: Record) -> None:
        with self._lock:
            print(
                f"{time.monotonic() - self.start_s:6.0f} s  {record.name}: {record.verdict}: {record.why}", flush=True
            )
            for finding in record.findings:
                print(f"          {_mark(finding['met'])} {finding['text']}", flush=True)
        self.write()

    def write(self) -> None:
        """Writes summary and logs, so that whatever kills this process next finds them on the disk."""
        with self._lock:
            summary = {
                "machine": self.machine.facts,
                "commit": self.commit,
                "sources": self.sources,
                "stages": [dataclasses.asdict(record) for record in self.records.values()],
            }
            archive.replace(self.out / "summary.json", json.dumps(summary, indent=1) + "\n")
            archive.replace(self.out / "summary.txt", self.report() + "\n")
            self.notes = archive.tidy(self.out, self._known, self.work)
            self.notes += archive.pack(self.work, self.out / "logs.tar.gz")

    def report(self, names: Sequence[str] | None = None) -> str:
        """The table of all stages, what was not shown, and what the logs leave out."""
        chosen = [record for record in self.records.values() if names is None or record.name in names]
        lines = [["stage", "verdict", "seconds", "tries", "why"]]
        lines += [[r.name, r.verdict, f"{r.seconds:.0f}", str(r.tries), r.why[:110]] for r in chosen]
        parts = [_left_aligned(lines)]
        for record in chosen:
            if record.findings:
                marked = (f"  {_mark(finding['met'])} {finding['text']}" for finding in record.findings)
                parts.append("\n".join([f"{record.name} ({record.verdict})", *marked]))
        shown = sum(record.verdict == SHOWN for record in chosen)
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.facts.items())
        parts.append(f"{shown} of {len(chosen)} stages shown; {machine or self.machine.why_not}; commit {self.commit}")
        return "\n\n".join([*parts, *self.notes])

    def close(self) -> None:
        """Removes the folder of the logs, unless some of it is packed nowhere."""
        if any(note.startswith(archive.LEFT_OUT) for note in self.notes):
            print(f"kept: {self.work}", flush=True)
        else:
            shutil.rmtree(self.work, ignore_errors=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Lets SIGTERM, SIGHUP and SIGINT end the stage under way and still write the summary."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopped.set()

        earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)


def _verdict(outcome: Outcome, stage: Stage) -> tuple[str, str]:
    """From how a process ended to a verdict, before anyone looks at what it measured."""
    if outcome.ending == "limit":
        return TIMED_OUT, f"killed after {outcome.seconds:.0f} s; last said: {outcome.last_line()}"
    if outcome.ending == "stopped":
        return KILLED, "the driver was told to stop"
    if outcome.code == OUT_OF_TIME:
        return TIMED_OUT, f"stopped by its own budget after {outcome.seconds:.0f} s"
    if outcome.code is None:
        return FAILED, f"could not be started: {outcome.last_line()}"
    if outcome.code < 0:
        return KILLED, f"by {signal.Signals(-outcome.code).name}; last said: {outcome.last_line()}"
    if outcome.code not in stage.codes:
        return FAILED, f"exit code {outcome.code}: {outcome.last_line()}"
    return SHOWN, ""


def _groups(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Neighbours that need not be alone, together."""
    groups: list[list[Stage]] = []
    for stage in stages:
        if groups and not stage.alone and not groups[-1][-1].alone:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _barred(findings: Sequence[Finding]) -> int:
    return sum(finding.met is not None for finding in findings)


def _mark(met: bool | None) -> str:
    return {True: "yes", False: "NO ", None: "   "}[met]


def _left_aligned(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("acceptance"), metavar="DIR", help="results folder")
    parser.add_argument("--budget-s", type=float, default=3600.0, metavar="N", help="seconds for everything")
    parser.add_argument("--only", default="", metavar="A,B", help="these stages alone")
    parser.add_argument("--skip", default="", metavar="A,B", help="all but these")
    parser.add_argument("--again", default="", metavar="A,B", help="these also if they ran to their end before")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME[:S]=COMMAND", help="an external command as a stage"
    )
    parser.add_argument("--commit", help="name of the sources; by default the commit, or a fingerprint")
    parser.add_argument("--list", action="store_true", help="print the stages and stop")
    return parser


def _names(text: str, stages: Sequence[Stage]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = set(names) - {stage.name for stage in stages}
    if unknown:
        raise ValueError(f"no such stage: {', '.join(sorted(unknown))}; stages: {', '.join(s.name for s in stages)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages; returns 0 only if every one that was asked for is shown."""
    start_s = time.monotonic()
    args = _parser().parse_args(argv)
    try:
        extra = [also(text) for text in args.also]
        known = all_stages(Machine(cuda=False), extra)
        only, skip, again = (_names(text, known) for text in (args.only, args.skip, args.again))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        lines = [["stage", "limit, s", "shows"], *([s.name, f"{s.limit_s:.0f}", s.shows] for s in known)]
        print(_left_aligned(lines))
        return 0
    machine = look_around()
    chosen = [
        stage for stage in all_stages(machine, extra) if stage.name not in skip and (not only or stage.name in only)
    ]
    sources = results.fingerprint()
    budget_s = args.budget_s - (time.monotonic() - start_s)
    acceptance = Acceptance(
        args.out.resolve(), machine, args.commit or results.sources_name(sources), sources, budget_s
    )
    print(f"{acceptance.commit} on {machine.facts.get('device', machine.why_not)}, {budget_s:.0f} s", flush=True)
    if machine.cuda and not machine.facts.get("FA3_SO"):
        print("FA3_SO names no library: what is claimed against fa3 will not be shown", flush=True)
    try:
        with acceptance.listening():
            acceptance.run(acceptance.order(chosen, again))
        acceptance.write()
        names = [stage.name for stage in chosen]
        print(f"\n{acceptance.report(names)}", flush=True)
        return 0 if all(acceptance.records[name].verdict == SHOWN for name in names) else 1
    finally:
        acceptance.close()


if __name__ == "__main__":
    sys.exit(main())
