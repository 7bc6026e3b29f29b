"""``python -m tests.archive.through``: the case tables on a GPU through an archive, with Triton blocked.

First the kernels of each case are listed, without a compile; then they are compiled, a process a core, into an
archive, as far as ``--seconds`` reach; then fresh processes that cannot import Triton judge the cases by the tests' own
rule. With ``--bits`` others, with Triton and without the archive, compute them once more, and the bits of the results
are compared. The last line is JSON: how many cases, loaded kernels and compiles, and what failed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile.backends.gpu import ahead, archive, build, host, launch
from flashtile.backends.gpu.decode import merge
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.ops import plans
from tests import cases as plain
from tests.kvcache import cases as cached
from tests.quantization import cases as quantized

TABLES = ("small", "large", "cached", "8 bits")
_HALF, _BRAIN, _FLOAT = torch.float16, torch.bfloat16, torch.float32
_PROCESSES = 4


class Item(NamedTuple):
    """A case of a table.

    Attributes:
        name: Of table, case, dtype and backend.
        make: Its tensors and keywords.
        judge: Runs and judges them.
        results: Runs them; the results by name.
    """

    name: str
    make: Callable[[], Any]
    judge: Callable[[Any], None]
    results: Callable[[Any], dict[str, Tensor]]


def items(tables: Sequence[str], every: int) -> Iterator[Item]:
    """Every so many-th case of some tables."""
    from tests.gpu.test_gpu import LARGE

    for table, dtype in (
        ("small", _HALF), ("large", _BRAIN), ("cached", _BRAIN), ("8 bits", _BRAIN), ("small", _BRAIN),
        ("small", _FLOAT),
    ):  # fmt: skip
        if table not in tables:
            continue
        of: Any = {"cached": cached, "8 bits": quantized}.get(table, plain)
        for case in (LARGE if table == "large" else of.CASES)[::every]:
            for backend in ("hopper", "portable"):
                yield _item(table, of, case, dtype, backend)


def _item(table: str, of: Any, case: Any, dtype: torch.dtype, backend: str) -> Item:
    def make() -> Any:
        return of.build(case, "cuda") if of is quantized else of.build(case, dtype, "cuda")

    def results(call: Any) -> dict[str, Tensor]:
        out, lse = call.run(backend)
        if of is plain and call.leaves and out.requires_grad:
            dlse = torch.ones_like(lse) if call.case.lse_grad else None
            return plain.results(call, out, lse, plain.gradient_of(call), dlse).values
        return {"out": out, "lse": lse}

    name = f"{table}, {case}, {str(dtype).removeprefix('torch.')}, {backend}"
    return Item(name, make, lambda call: of.judge(call, backend), results)


def _share(args: argparse.Namespace) -> Iterator[Item]:
    """This process's part of the items that are ready."""
    ready = set(json.loads((args.folder / "ready").read_text())) if args.stage != "list" else None
    for number, item in enumerate(items(args.tables, args.every)):
        if number % _PROCESSES == args.share and (ready is None or item.name in ready):
            yield item


def _list(args: argparse.Namespace) -> dict[str, Any]:
    """The launches of each case, as lines; what is computed of them is not looked at."""
    found: dict[str, list[str]] = {}
    launches: list[launch.Launch] = []

    def keep(launcher: Any, given: launch.Launch, *call: object) -> None:
        launcher.device = None
        launches.append(given)

    patches: list[tuple[Any, str, Any]] = [(host.Launcher, "__init__", keep)]
    places = (
        (plain, "assert_right"),
        (plain, "assert_forward_right"),
        (cached, "judge_results"),
        (host.Launcher, "start"),
    )
    patches += [(place, name, lambda *given, **named: None) for place, name in places]
    with ExitStack() as entered:
        for patch in patches:
            entered.enter_context(mock.patch.object(*patch))
        for item in _share(args):
            # Nothing has written the numbers that are judged; a launch that is missed for it fails where it runs.
            merge._plan.cache_clear()
            with suppress(Exception, pytest.fail.Exception), plans.own_plans():
                item.judge(item.make())
            found[item.name] = list({ahead.as_json(each): None for each in launches if each.programs})
            launches.clear()
    return found


def _compile(folder: Path, lines: Sequence[str], seconds: float) -> tuple[ahead.Recorder, set[str]]:
    """Adds to the folder's archive; returns its builds, and the lines that are among them."""
    recorder, deadline_s = ahead.Recorder(), time.monotonic() + seconds
    major, minor = torch.cuda.get_device_capability()
    arch, done = 10 * major + minor, set()
    if (place := folder / "kernels.ftk").exists():
        recorder.take(archive.Archive(place))
    keys = {line: _key(line, arch) for line in lines}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), max_workers=os.cpu_count()) as pool:
        started = [pool.submit(_compiled, each, arch) for each in lines if keys[each] not in recorder.builds]
        try:
            for future in as_completed(started, timeout=max(deadline_s - time.monotonic(), 1)):
                recorder.add(*future.result())
        except TimeoutError:
            pool.shutdown(cancel_futures=True)
            for future in started:
                if future.done() and not future.cancelled():
                    recorder.add(*future.result())
    done = {line for line, key in keys.items() if key in recorder.builds}
    recorder.write(place)
    return recorder, done


def _compiled(line: str, arch: int) -> tuple[bytes, ahead.Found | str]:
    try:
        return ahead.compiled_line(line, arch)
    except Exception as error:
        return b"", f"{line[:200]}: {type(error).__name__}: {error}"


def _key(line: str, arch: int) -> bytes:
    return archive.key_of(f"sm_{arch}", str(launch.text_of(launch.lower(ahead.from_json(line))[0])))


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Judges cases; with Triton blocked unless this is the stage that compares bits."""
    counts: Counter[str] = Counter()
    failed: dict[str, str] = {}
    bits: dict[str, dict[str, str]] = {}
    if args.stage == "run":
        sys.modules["triton"] = None  # type: ignore[assignment]
    for place, name in ((archive, "load"), (build, "_compiled")):
        _count(counts, place, name)
    for item in _share(args):
        try:
            if args.stage == "run":
                item.judge(item.make())
                counts["cases"] += 1
            bits[item.name] = {name: _digest(x) for name, x in item.results(item.make()).items()}
        except (UnsupportedError, InvalidInputError) as error:
            counts["refused"] += 1
            if "in no archive" in str(error):
                failed[item.name] = str(error)
        except (Exception, pytest.fail.Exception) as error:
            failed[item.name] = f"{type(error).__name__}: {str(error)[:300]}"
    counts["modules of Triton"] = sum(name.startswith("triton.") for name in sys.modules)
    return {"counts": counts, "failed": failed, "bits": bits}


def _count(counts: Counter[str], place: Any, name: str) -> None:
    function = getattr(place, name)

    def counted(*given: Any) -> Any:
        counts[name] += 1
        return function(*given)

    setattr(place, name, counted)


def _digest(x: Tensor) -> str:
    here = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().flatten())
    return hashlib.sha256(here.view(torch.uint8).numpy().tobytes()).hexdigest()


def _stage(args: argparse.Namespace, stage: str, kernels: str) -> list[dict[str, Any]]:
    """Runs a stage in fresh processes, side by side; what each of them says."""
    env = {name: x for name, x in os.environ.items() if not name.startswith(("TRITON_", "FLASHTILE_"))}
    # The Triton cache of the compile, and the code that it made.
    env |= {"FLASHTILE_KERNELS": kernels, "TRITON_CACHE_DIR": os.environ["TRITON_CACHE_DIR"]}
    env |= {"FLASHTILE_TILES": "off", "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", "tests.archive.through", str(args.folder), "--every", str(args.every)]
    command += ["--tables", ",".join(args.tables), "--stage", stage]
    children = [
        subprocess.Popen([*command, "--share", str(share)], env=env, stdout=subprocess.PIPE, text=True)
        for share in range(_PROCESSES)
    ]
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"a process of the stage {stage} failed: {[child.returncode for child in children]}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def _all(args: argparse.Namespace) -> dict[str, Any]:
    """Every stage; what the last line says."""
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(args.folder / "triton")
    times = [time.monotonic()]
    listed: dict[str, list[str]] = {}
    for part in _stage(args, "list", "off"):
        listed |= part
    order = [item.name for item in items(args.tables, args.every)]
    lines = list(dict.fromkeys(line for name in order for line in listed[name]))
    times.append(time.monotonic())
    recorder, done = _compile(args.folder, lines, args.seconds)
    times.append(time.monotonic())
    ready = [name for name in order if done.issuperset(listed[name])]
    (args.folder / "ready").write_text(json.dumps(ready))
    ran = _stage(args, "run", str((args.folder / "kernels.ftk").resolve()))
    times.append(time.monotonic())
    counts, failed, bits = Counter[str](), dict[str, str](), dict[str, dict[str, str]]()
    for part in ran:
        counts.update(part["counts"])
        failed |= part["failed"]
        bits |= part["bits"]
    found = {
        "items": len(order), "ready": len(ready), "kernels listed": len(lines), "built": len(recorder.builds),
        "bytes": (args.folder / "kernels.ftk").stat().st_size, **counts, "failed": failed,
        "left out": recorder.left_out[:5],
    }  # fmt: skip
    if args.bits:
        with_triton = {name: each for part in _stage(args, "bits", "off") for name, each in part["bits"].items()}
        both = [(x, name, bits[x][name] == with_triton[x][name]) for x in bits for name in bits[x] if x in with_triton]
        found["results"] = dict(Counter("same bits" if same else f"other bits of {name}" for _, name, same in both))
        found["other bits of"] = [x for x, name, same in both if not same and name in ("out", "lse")]
        times.append(time.monotonic())
    return found | {"seconds": [round(b - a) for a, b in itertools.pairwise(times)]}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all stages, or the one that a process of its own is started for."""
    parser = argparse.ArgumentParser("python -m tests.archive.through", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the archive and Triton's cache; what is there already is kept")
    parser.add_argument("--tables", type=lambda text: text.split(","), default=TABLES, metavar="A,B")
    parser.add_argument("--every", type=int, default=1, help="of so many cases one")
    parser.add_argument("--seconds", type=float, default=600, help="for compiling")
    parser.add_argument("--bits", action="store_true", help="compares with what Triton compiles in the run itself")
    parser.add_argument("--stage", choices=("list", "run", "bits"), help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    found = _all(args) if args.stage is None else (_list if args.stage == "list" else _run)(args)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
