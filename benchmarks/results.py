"""Rows of results: one JSON object per line, appended as each cell ends and never rewritten."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import sources

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One provider on one cell."""

    suite: str  # the name of the benchmark, such as ``forward`` or ``host``
    run: str  # the process that measured it; ratios are valid only between rows of one run
    device: str
    versions: dict[str, str]
    commit: str  # the repository's, with ``-dirty`` when the sources differed from it
    case: dict[str, Any]  # the cell's definition
    provider: str
    median_ms: float | None
    spread: float | None  # interquartile range over the median
    tflops: float | None  # the case's operations over the median
    error: float | str | None  # relative to float64, if checked; text, without a time, if refused, failed or wrong
    extra_bytes: int | None = None  # peak memory of a call beyond inputs and outputs; only of suite ``memory``
    values: dict[str, Any] | None = None  # what else was measured; only of suites ``accuracy``, ``host`` and ``train``s
    code: str = ""  # the library's sources that the suite times: ``benchmarks.sources``
    cell: str = ""  # the name of what was measured in one go, and the seconds that it took in all
    seconds: float | None = None
    cells: int | None = None  # how many the whole suite has, if all were asked for

    def same_sources(self, other: Row | Run) -> bool:
        """Whether suite, commit and device are the same."""
        return (self.suite, self.commit, self.device) == (other.suite, other.commit, other.device)

    def to_json(self) -> str:
        """The row as one line."""
        fields = asdict(self)
        for name, suites in _FIELDS_OF_SUITES.items():
            if self.suite not in suites:
                del fields[name]
        for name in ("code", "cell", "seconds", "cells"):
            if fields[name] in ("", None):
                del fields[name]
        return json.dumps(fields, allow_nan=False)


_WITH_VALUES = ("accuracy", "host", "first_call", "selected", "train", "train-fp8")
_FIELDS_OF_SUITES = {"extra_bytes": ("memory",), "values": _WITH_VALUES}


@dataclass(frozen=True)
class Run:
    """The fields that all rows of one process share."""

    suite: str
    run: str
    device: str
    versions: dict[str, str]
    commit: str
    code: str = ""

    def row(self, case: dict[str, Any], provider: str, **measured: Any) -> Row:
        """A row of this run; fields not given are None."""
        values: dict[str, Any] = dict.fromkeys(("median_ms", "spread", "tflops", "error"))
        return Row(**vars(self), case=case, provider=provider, **{**values, **measured})


def new_run(suite: str, device: torch.device, commit: str | None = None) -> Run:
    """Records this process, machine and checkout; its commit comes from git if not given."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
    code = sources.digest(suite) if device.type == "cuda" else ""
    return Run(suite, f"{now}-{uuid.uuid4().hex[:8]}", device_name(device), versions(), commit or git_commit(), code)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"^model name\s*: (.*?)\s*$", about, re.MULTILINE)
    name = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    """Versions of the software that affects speed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if importlib.util.find_spec("triton"):
        found["triton"] = importlib.import_module("triton").__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def git_commit(root: Path = ROOT) -> str:
    """The commit of a checkout, with a hash of ``src`` if its sources differ; without a repository only the hash."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    digest = hashlib.sha256()
    for path in sorted((root / "src").rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "-uno", "--", "src", "benchmarks/*.py")
        return f"{commit}-dirty+{digest.hexdigest()[:12]}" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return f"sources-{digest.hexdigest()[:12]}"


def default_file(suite: str, device: str) -> Path:
    """The default file of a suite's rows: one per suite and device, some in their own folders."""
    slug = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    folder = {"memory": RESULTS / "memory", "tune": RESULTS.parent / "tuning"}.get(suite, RESULTS)
    return folder / f"{suite}-{slug}.jsonl"


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file and syncs it, so that they survive if the process dies next.

    An unfinished last line of a killed process is cut off first, since the next row would be appended to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(row.to_json() + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of all files, in the order of their runs; an invalid line is a ``ValueError`` with file and number.

    A last line without a newline is ignored.
    """
    rows = []
    for path in paths:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(Row(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a row: {error}") from error
    return sorted(rows, key=lambda row: row.run)


def saved(folder: Path = RESULTS) -> list[Row]:
    """All saved rows, except rows of our kernels in sources that are no commit's: nobody could repeat them."""
    rows = read(sorted(folder.rglob("*.jsonl")))
    return [row for row in rows if not ("-dirty" in row.commit and row.provider.startswith("flashtile"))]


def of_suite(rows: Sequence[Row], suite: str) -> list[Row]:
    """The rows of a suite on the device measured last, since rows of different devices are not comparable."""
    chosen = [row for row in rows if row.suite == suite]
    return [row for row in chosen if row.device == chosen[-1].device] if chosen else []


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each case and provider, which tables show."""
    return list({(str(row.case), row.provider): row for row in rows}.values())
