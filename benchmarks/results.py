"""Rows of results: one JSON object a line, appended as each cell ends and never rewritten."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One provider on one cell.

    Attributes:
        suite: ``forward``, ``backward``, ``cpu``, ``host``, ``memory``, ``accuracy``, ``varlen`` or ``train``.
        run: The process that measured it; only rows of one run may be divided by one another.
        device: Name of the GPU, or of the CPU with its threads.
        versions: Of Python, torch, triton, CUDA and cuDNN.
        commit: Of this repository, with ``-dirty`` when the sources differed from it.
        case: What defines the cell.
        provider: Who was measured.
        median_ms: Median time of a call, None if it was not timed.
        spread: Distance of the quartiles over the median.
        tflops: The case's operations over the median, None without either.
        error: Relative error against float64 of a right result, None if not checked; text, and no time, if the provider
            refused the case, failed or was wrong.
        extra_bytes: Peak memory of a call beyond inputs and outputs; in rows of suite ``memory`` alone.
        values: What else was measured, by name; in rows of suites ``accuracy`` and ``train`` alone.
    """

    suite: str
    run: str
    device: str
    versions: dict[str, str]
    commit: str
    case: dict[str, Any]
    provider: str
    median_ms: float | None
    spread: float | None
    tflops: float | None
    error: float | str | None
    extra_bytes: int | None = None
    values: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The row as one line."""
        fields = asdict(self)
        for name, suites in _FIELDS_OF_SUITES.items():
            if self.suite not in suites:
                del fields[name]
        return json.dumps(fields, allow_nan=False)


_FIELDS_OF_SUITES = {"extra_bytes": ("memory",), "values": ("accuracy", "train")}


@dataclass(frozen=True)
class Run:
    """What all rows of one process share."""

    suite: str
    run: str
    device: str
    versions: dict[str, str]
    commit: str

    def row(self, case: dict[str, Any], provider: str, **measured: Any) -> Row:
        """A row of this run; what was not measured is None."""
        values: dict[str, Any] = dict.fromkeys(("median_ms", "spread", "tflops", "error"))
        return Row(**vars(self), case=case, provider=provider, **{**values, **measured})


def new_run(suite: str, device: torch.device, commit: str | None = None) -> Run:
    """Records this process, machine and checkout.

    Args:
        suite: What will be measured.
        device: Where.
        commit: For a copy of the sources without its repository; None asks git.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
    return Run(suite, f"{now}-{uuid.uuid4().hex[:8]}", device_name(device), versions(), commit or git_commit())


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    """Versions of what decides speed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def git_commit() -> str:
    """The commit of the sources, ``-dirty`` if they differ from it, ``unknown`` outside a repository."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changed else "")


def fingerprint(folder: Path = ROOT / "src") -> str:
    """A hash of all Python sources, which names them where there is no repository to ask."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def sources_name(sources: str) -> str:
    """The commit, made to tell apart what it does not: changed files and copies without a repository."""
    commit = git_commit()
    if commit == "unknown":
        return f"sources-{sources}"
    return f"{commit}+{sources}" if commit.endswith("-dirty") else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def default_file(suite: str, device: str) -> Path:
    """Where a suite's rows go when nothing else is said: a file a suite and device, memory in a folder of its own."""
    slug = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    folder = RESULTS / "memory" if suite == "memory" else RESULTS
    return folder / f"{suite}-{slug}.jsonl"


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file and leaves them on the disk even if the process dies next.

    A last line that a killed process left unfinished is cut off first: it holds no row and would spoil the next one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _cut_unfinished(path)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(row.to_json() + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def _cut_unfinished(path: Path) -> None:
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of all files, in the order of their runs. A last line without an end is no line yet.

    Raises:
        ValueError: If a line is no row, with its file and number.
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
    """All saved rows."""
    return read(sorted(folder.rglob("*.jsonl")))
