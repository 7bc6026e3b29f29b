"""The stages of the acceptance run, in order of worth: what each shows, how, for how long, and what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import claims
from benchmarks.claims import Judge
from benchmarks.results import ROOT

PORTABLE, HOPPER = "flashtile-portable", "flashtile-hopper"
# Files of the results folder besides the summary and the logs.
ROWS = "rows.jsonl"
SWEEPS = ("tune_hopper.jsonl", "tune_hopper_backward.jsonl", "tune_portable.jsonl")
_PROBE_LIMIT_S = 90.0


@dataclass(frozen=True)
class Machine:
    """What a stage may need to find.

    Attributes:
        cuda: Whether PyTorch finds a GPU that answers.
        facts: Device, driver, versions and whatever else is worth keeping, by name.
        why_not: Why there is no GPU to use, if so.
        tools: Executables and Python modules that are there.
    """

    cuda: bool
    facts: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""
    tools: frozenset[str] = frozenset()


_PROBE = """
import importlib.util, json, os
tools = [n for n in ("pytest", "xdist", "pytest_timeout", "hypothesis", "triton") if importlib.util.find_spec(n)]
found = {"cuda": False, "tools": tools, "FA3_SO": os.environ.get("FA3_SO", "")}
import torch
found["torch"] = torch.__version__
if torch.cuda.is_available():
    (torch.ones(8, device="cuda") + 1).sum().item()
    major, minor = torch.cuda.get_device_capability()
    found |= {"cuda": True, "device": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}
    found["cudnn"] = torch.backends.cudnn.version()
if "triton" in tools:
    import triton
    found["triton"] = triton.__version__
print(json.dumps(found))
"""


def look_around() -> Machine:
    """Asks a process of its own, so that a GPU that hangs costs a minute and this process holds no memory on it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Machine(cuda=False, why_not=f"the GPU did not answer within {_PROBE_LIMIT_S:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return Machine(cuda=False, why_not=f"PyTorch cannot use a GPU: {lines[-1][:200]}")
    facts = {name: value for name, value in json.loads(done.stdout.splitlines()[-1]).items() if value != ""}
    tools = {*facts.pop("tools"), *(name for name in ("compute-sanitizer", "nvidia-smi") if shutil.which(name))}
    if "nvidia-smi" in tools:
        query = "--query-gpu=driver_version,clocks.max.sm,power.limit,temperature.gpu"
        asked = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
        )
        facts["nvidia_smi"] = asked.stdout.strip()
    why_not = "" if facts["cuda"] else "PyTorch finds no CUDA device"
    return Machine(bool(facts.pop("cuda")), facts, why_not, frozenset(tools))


Needs = Callable[[Machine], str | None]


def a_gpu(*tools: str) -> Needs:
    """A GPU, and tools by name."""

    def why_not(machine: Machine) -> str | None:
        if not machine.cuda:
            return machine.why_not
        missing = [tool for tool in tools if tool not in machine.tools]
        return f"not installed: {', '.join(missing)}" if missing else None

    return why_not


def a_module(name: str) -> Needs:
    """A GPU, and a module of this repository."""

    def why_not(machine: Machine) -> str | None:
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        return a_gpu()(machine) or (None if path.exists() else f"there is no {name} in these sources")

    return why_not


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One thing to show, in a process of its own.

    Attributes:
        name: For ``--only``, ``--skip`` and the table.
        shows: What it is for.
        command: Words of the command. ``{out}`` is the results folder, ``{work}`` a folder of the stage's own,
            ``{budget}`` seconds that leave time to end in order, ``{commit}`` the name of the sources.
        limit_s: Seconds after which it is killed.
        least_s: It is not started with less time than this.
        alone: Whether it measures time and so must have the machine to itself; others run side by side.
        needs: Why a machine cannot run it, or None.
        judge: What it has shown, asked only if it ended with exit code 0.
        codes: Exit codes after which the judge is asked as well.
        environment: Variables on top of the driver's.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    least_s: float = 30.0
    alone: bool = True
    needs: Needs = field(default_factory=a_gpu)
    judge: Judge = claims.ended_well
    codes: tuple[int, ...] = (0,)
    environment: Mapping[str, str] = field(default_factory=dict)


def _module(name: str, *options: str, rows: bool = True) -> tuple[str, ...]:
    saved = ("--out", f"{{out}}/{ROWS}", "--commit", "{commit}", "--budget-s", "{budget}") if rows else ()
    return ("{python}", "-m", name, *options, *saved)


def _tests(machine: Machine) -> Stage:
    # Some cores are left to the sanitizer's processes.
    workers = str(max(2, min(12, (os.cpu_count() or 4) - 4)))
    side_by_side = ("-n", workers, "--max-worker-restart", "12") if "xdist" in machine.tools else ()
    # A call that waits for a kernel that hangs notices nothing but the end of its process.
    patience = ("--timeout", "150", "--timeout-method", "thread") if "pytest_timeout" in machine.tools else ()
    return Stage(
        name="pytest",
        shows="every test that needs a GPU",
        command=("{python}", "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--tb=short", "-rfEs", "-p",
                 "no:cacheprovider", "--junit-xml", "{work}/junit.xml", *side_by_side, *patience),
        limit_s=300,
        alone=False,
        needs=a_gpu("pytest", "hypothesis"),
        judge=claims.tests_pass,
        codes=(0, 1),
    )  # fmt: skip


_SANITIZER = {
    "memcheck": "no access out of bounds",
    "racecheck": "no race in shared memory",
    "initcheck": "no read of memory never written",
}


def _sanitizer(tool: str, backend: str) -> Stage:
    # What the judge leaves out it must have read. The kernels are not told apart by the tool's own filters: its manual
    # does not say whether it sees what kernels write that it does not check. Nor do copies to main memory count, as it
    # does not see what TMA stores.
    options = ["--print-limit", "400", *(["--check-api-memory-access", "no"] if tool == "initcheck" else [])]
    return Stage(
        name=f"{tool}-{backend}",
        shows=f"{backend}: {_SANITIZER[tool]}",
        command=("compute-sanitizer", "--tool", tool, *options, "{python}", "-m", "tests.gpu.sanitize", backend),
        limit_s=260,
        alone=False,
        needs=a_gpu("compute-sanitizer", "pytest"),
        judge=claims.sanitizer_is_silent(backend),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip


def _compiling() -> Stage:
    return Stage(
        name="compile",
        shows="every cell of ours runs; what it compiles is there for the stages after it",
        command=("{python}", "-m", "benchmarks.warm", "--budget-s", "{budget}"),
        limit_s=260,
        alone=False,
    )


def _sweeps() -> list[Stage]:
    hopper = ("tune-hopper", "benchmarks.tune_hopper", "the Hopper forward right and its variants timed", SWEEPS[0])
    backward = (
        "tune-hopper-backward", "benchmarks.tune_hopper_backward", "the same of the Hopper backward", SWEEPS[1]
    )  # fmt: skip
    both = [
        Stage(name=name, shows=shows, command=_module(module, "--out", "{out}", rows=False), limit_s=220, least_s=60,
              needs=a_module(module), judge=claims.sweep_is_whole(file))
        for name, module, shows, file in (hopper, backward)
    ]  # fmt: skip
    weak = ("--suite", "weak", "--limit-s", "80", "--out", f"{{out}}/{SWEEPS[2]}")
    portable = Stage(
        name="tune-portable",
        shows="tiles for the portable kernels' weak cells",
        command=_module("benchmarks.tune_portable", *weak, rows=False),
        limit_s=130,
        judge=claims.sweep_is_whole(SWEEPS[2]),
    )
    return [*both, portable]


def _suites() -> list[Stage]:
    better = ("fa3", "cudnn")
    forward = claims.all_of(
        claims.speed("forward", "bfloat16", HOPPER, better, 36, (1.0, 0.93)),
        claims.speed("forward", "bfloat16", PORTABLE, ("fa2",), 36, (1.3, 1.05)),
        claims.nothing_wrong("forward", "bfloat16"),
    )
    backward = claims.all_of(
        claims.speed("backward", "bfloat16", HOPPER, better, 24, (0.95, 0.85)),
        claims.speed("backward", "bfloat16", PORTABLE, ("fa2",), 24, (1.1, 0.85)),
        claims.nothing_wrong("backward", "bfloat16"),
    )
    half = claims.all_of(
        claims.speed("forward", "float16", HOPPER, better, 36, None),
        claims.speed("forward", "float16", PORTABLE, ("fa2",), 36, None),
        claims.nothing_wrong("forward", "float16"),
    )
    return [
        Stage(name="forward", shows="36 forward cells in bf16 beside all peers", limit_s=200, judge=forward,
              command=_module("benchmarks.run", "forward", "--resume")),
        Stage(name="backward", shows="24 backward cells in bf16 beside all peers", limit_s=200, judge=backward,
              command=_module("benchmarks.run", "backward", "--resume")),
        Stage(name="forward-fp16", shows="36 forward cells in fp16", limit_s=200, judge=half,
              command=_module("benchmarks.run", "forward", "--dtype", "float16", "--resume")),
    ]  # fmt: skip


def _clean(suite: str, judge: Judge) -> Judge:
    return claims.all_of(judge, claims.nothing_wrong(suite))


def _others() -> list[Stage]:
    # Two distributions, two dtypes, three head dims; one tensor forward, three backward.
    tensors = {"forward": 12, "backward": 36}
    accurate = claims.all_of(
        claims.accuracy_is_as_good(HOPPER, "fa3", tensors),
        claims.accuracy_is_as_good(PORTABLE, "fa2", tensors),
        claims.nothing_wrong("accuracy"),
    )
    return [
        Stage(name="memory", shows="extra memory of a call, 1k to 64k tokens", limit_s=80,
              judge=_clean("memory", claims.memory_is_linear), command=_module("benchmarks.memory")),
        Stage(name="host", shows="host time of a warm call, time of a first call", limit_s=150,
              judge=_clean("host", claims.host_is_quick), command=_module("benchmarks.host")),
        Stage(name="accuracy", shows="errors against float64, with outliers and without", limit_s=180,
              judge=accurate, command=_module("benchmarks.accuracy")),
        Stage(name="varlen", shows="packed sequences against the dense rate", limit_s=80,
              judge=_clean("varlen", claims.packing_is_cheap(HOPPER, 4)), command=_module("benchmarks.varlen")),
        Stage(name="train", shows="a GPT's loss over 2,000 steps, tokens/s by context", limit_s=320, least_s=60,
              judge=_clean("train", claims.training_agrees(HOPPER, 2000, (512, 2048, 8192))),
              command=_module("benchmarks.train")),
    ]  # fmt: skip


def also(text: str) -> Stage:
    """A stage from ``NAME=COMMAND`` or ``NAME:SECONDS=COMMAND``; the command is given to bash.

    Raises:
        ValueError: If the text is neither.
    """
    head, equals, command = text.partition("=")
    name, _, limit = head.partition(":")
    if not (name.replace("-", "").replace("_", "").isalnum() and equals and command.strip()):
        raise ValueError(f"--also is {text!r}, must be NAME=COMMAND or NAME:SECONDS=COMMAND")
    try:
        limit_s = float(limit or 240)
    except ValueError:
        raise ValueError(f"--also is {text!r}: {limit!r} is no number of seconds") from None
    return Stage(
        name=name,
        shows=f"external: {command.strip()}",
        command=("bash", "-c", command),
        limit_s=limit_s,
        least_s=min(30.0, limit_s),
        alone=False,
        needs=lambda machine: None,
    )


def all_stages(machine: Machine, extra: Sequence[Stage] = ()) -> list[Stage]:
    """Every stage in order of worth; external ones run beside the tests."""
    checks = [
        _tests(machine),
        _compiling(),
        *(_sanitizer(tool, name) for name in ("hopper", "portable") for tool in _SANITIZER),
    ]
    return [*checks, *extra, *_sweeps(), *_suites(), *_others()]
