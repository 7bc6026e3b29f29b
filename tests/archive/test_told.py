"""What users see of kernels built ahead: explain, info, the list of what was missed; and a backward beside a hit."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import flashtile
from flashtile.api import prepare
from flashtile.backends.gpu import ahead, archive, build, host
from flashtile.backends.gpu.archive import Archive
from flashtile.call.backend import MEANWHILE
from flashtile.call.problem import Problem, Tensors
from flashtile.cli import build as command
from flashtile.core.masks import Band
from flashtile.ops import dispatch, plans
from tests.archive.machine import Driver, attend, present
from tests.problems import banded_problem

pytest.importorskip("triton")

SM_80 = (8, 0)
CALL: dict[str, Any] = dict(shape=(2, 300, 4, 64), causal=True, backend="portable")
BACKWARD = ["prepare_rows", "attention_backward_dkdv", "attention_backward_dq"]


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a forward for sm_80."""
    place, x = tmp_path_factory.mktemp("kernels") / "forward.ftk", torch.empty(2, 500, 4, 64, device="meta").half()
    flashtile.warm_up(x, x, x, causal=True, backend="portable", gpu="sm_80", backward=False, into=place)
    return place


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No archive but those that a test names, no build of another test, and nothing that is really compiled."""

    def forget() -> None:
        for name in ("archives", "_warn_once", "why_off", "_arch", "_is_for_a_device"):
            getattr(archive, name).cache_clear()

    monkeypatch.setattr(build, "_builds", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(host.Launcher, "start", lambda *call: None)
    monkeypatch.setattr(build, "load", lambda launch, what, device: None)
    monkeypatch.setattr(build, "make_build", lambda what, compiled: build.LoadedKernel(None, (), "a test", 0, None, []))
    for name in ("TRITON_INTERPRET", "FLASHTILE_RECORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHTILE_KERNELS", "off")
    forget()
    yield
    forget()


def _with(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    monkeypatch.setenv("FLASHTILE_KERNELS", ":".join(map(str, places)))
    archive.archives.cache_clear()


def _call() -> tuple[Problem, Tensors]:
    x = torch.zeros(2, 300, 4, 64, dtype=torch.float16)
    tensors = Tensors(x, x.clone(), x.clone())
    problem = banded_problem(tensors, Band(None, 0), needs_grad=True)
    return replace(problem, device_type="cuda", compute_capability=SM_80), tensors


def _said() -> dict[str, str]:
    """What explain says of each kernel of a call, and last of the process."""
    problem, tensors = _call()
    lines = prepare.explained("portable", torch.device("cuda"), [(problem, tensors, None)]).splitlines()
    found = [line.strip().removeprefix("kernel ").split(": ", 1) for line in lines if "kernel " in line]
    return {**dict(found), "": lines[-1]}


def test_explain_says_where_each_kernel_comes_from(forward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, forward)
    with present(SM_80, Driver()):
        said = _said()
        assert said["attention_forward"] == f"from an archive ({forward})"
        assert said["attention_backward_dq"] == "will be compiled (about 2 s, unless Triton's cache has it)"
        assert list(said) == ["attention_forward", *BACKWARD, ""] and not build._builds and "process" not in said[""]
        attend(SM_80, **CALL)
        said = _said()
    assert said["attention_forward"] == f"from an archive ({forward}), loaded already"
    assert {said[name] for name in BACKWARD} == {"compiled already in this process"}
    assert said[""] == f"this process so far: 1 from archives, 3 compiled ({', '.join(BACKWARD)})"


def test_explain_says_what_cannot_be_compiled(forward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    build._no_compiler.cache_clear()
    _with(monkeypatch, forward)
    try:
        with present(SM_80, Driver()):
            said = _said()
    finally:
        build._no_compiler.cache_clear()
    assert said["attention_forward"] == f"from an archive ({forward})"
    assert said["prepare_rows"] == "in no archive, and to be compiled it needs Triton, which is not installed"


@pytest.mark.parametrize("stale", [False, True])
def test_the_command_looks_for_another_gpu(
    forward: Path, stale: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In what is named, and in what is installed for it; of info, what is stale."""
    main = pytest.importorskip("flashtile.cli").main
    folder = tmp_path / "site" / archive.WHEEL
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sm_80.ftk").write_bytes(forward.read_bytes())
    (folder / "sm_90a.ftk").write_bytes(b"none")
    monkeypatch.syspath_prepend(str(folder.parent))
    digest = archive.digest_of
    if stale:
        monkeypatch.setattr(archive, "digest_of", lambda file: "new" if "forward" in file else digest(file))
    flags = ["--causal", "--seqlen", "300", "--heads", "4", "--head-dim", "64", "--dtype", "float16", "--grad"]
    for value, place in (("", folder / "sm_80.ftk"), (str(forward), forward), ("off", None)):
        monkeypatch.setenv("FLASHTILE_KERNELS", value)
        archive.archives.cache_clear()
        archive._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="that file has changed") if stale and place else nullcontext():
            assert main(["explain", "--arch", "8.0", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(f"from an archive ({place})" in line for line in lines) == (place is not None and not stale)
        assert sum("will be compiled (about 2 s" in line for line in lines) == 3 - (place is not None and not stale)
        assert sum("prepare_rows: will be compiled (about 1 s" in line for line in lines) == 1
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        assert main(["info", "--json"]) == 0
        listed = {row["place"]: row for row in json.loads(capsys.readouterr().out)["kernels"]}
        assert len(listed) == {"": 2, "off": 0}.get(value, 1)
        if place is not None:
            size = forward.stat().st_size
            assert listed[str(place)] == {
                "place": str(place), "why_not": "no such GPU is here", "archs": ["sm_80"], "entries": 1,
                "stale": int(stale), "damaged": 0, "size": size,
            }  # fmt: skip


def test_info_says_why_not(
    forward: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main = pytest.importorskip("flashtile.cli").main
    data = bytearray(forward.read_bytes())
    data[-100] ^= 16
    (tmp_path / "damaged.ftk").write_bytes(data)
    (tmp_path / "cut.ftk").write_bytes(data[:200])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: SM_80)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("FLASHTILE_RECORD", str(tmp_path / "missed"))
    (tmp_path / "missed").write_text('[["function","a",null,"one"]]\n[["function","a",null,"one"]]\n')
    _with(monkeypatch, forward, tmp_path / "damaged.ftk", tmp_path / "cut.ftk", Path("relative.ftk"))

    def table() -> dict[str, list[str]]:
        with pytest.warns(UserWarning):
            assert main(["info"]) == 0
        out = capsys.readouterr().out
        assert "missed: 1 one had to be compiled" in out and "Kernels built ahead (FLASHTILE_KERNELS)" in out
        cells = ([cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if ".ftk" in line)
        return {Path(place).name: rest for place, *rest in cells}

    megabytes = f"{forward.stat().st_size / 1e6:.2f}"
    rows = table()
    assert rows["forward.ftk"] == ["sm_80", "1", "0", megabytes, "yes"]
    assert rows["damaged.ftk"] == ["sm_80", "1", "0, 1 damaged", megabytes, "yes"]
    assert rows["cut.ftk"][-1] == "no: is cut off: its index ends past the file"
    assert rows["relative.ftk"] == ["", "?", "?", "?", "no: is not an absolute path"]
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    archive.why_off.cache_clear()
    archive.archives.cache_clear()
    assert table()["forward.ftk"][-1] == "no: TRITON_F32_DEFAULT is set, which may change what kernels are"


def _planned() -> int:
    """How many threads a forward's plan starts, once it is made; they have ended."""
    (problem, tensors), started, start = _call(), [], threading.Thread.start

    def note(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is threading.main_thread():
            started.append(thread)

    backward = dispatch.select(problem, "backward", "portable")
    with mock.patch.object(threading.Thread, "start", note):
        with plans.building_ahead(backward, problem, tensors):
            dispatch.select(problem, "forward", "portable").plan("forward", problem, tensors)(tensors)
            assert not started  # nothing takes turns with what plans
        for each in started:
            each.join()
    assert MEANWHILE.get() is None
    return len(started)


def test_a_backward_in_no_archive_is_compiled_beside_its_forward(
    forward: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def note(launch: Any, device: int) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        compiled.append(launch.kernel.__name__)
        return build.LoadedKernel(None, (), "a test", 0, None, [])

    monkeypatch.setattr(build, "_compiled", note)
    _with(monkeypatch, forward)
    with present(SM_80, Driver()) as cuda:
        assert _planned() and sorted(compiled) == sorted(BACKWARD) and cuda.loaded == ["attention_forward"]
        assert not _planned()  # of what this process has


def test_nothing_is_compiled_beside_a_full_hit(forward: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(build, "_compiled", never)
    monkeypatch.setattr(build, "start_hashing", never)
    # Stand-ins for code that nobody runs.
    recorder, kept = ahead.Recorder(), Archive(forward)
    (key,) = kept
    (hit,) = [found for found in [kept.find(key)] if found]
    problem, tensors = _call()
    with present(SM_80, Driver()) as cuda:
        for made in dispatch.backend("portable").builds(problem, tensors, "backward"):
            launch = made.make.args[0]
            key = archive.key_of("sm_80", str(build.text_of(build.lower(launch)[0])))
            leaves = [[name, kind] for name, kind in build.specialise(launch).signature.items()]
            about = {**hit.about, "key": key.hex(), "name": hit.about["name"], "leaves": leaves, "maps": []}
            recorder.add(key, archive.Found(about, hit.code))
        recorder.take(kept)
        recorder.write(tmp_path / "all.ftk")
        _with(monkeypatch, tmp_path / "all.ftk")
        assert _planned() and len(cuda.loaded) == 4 == len(build._builds)
        assert not _planned()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--model", "gpt2", "--cache", "fp8"), "--cache"),
        (("--model", "gpt2", "--no-append"), "--append"),
        (("--model", "gpt2", "--pages", "16", "--precision", "fp8"), "--precision"),
        (("--model", "gpt2", "--pages", "16", "--serving", "--packed"), "--packed"),
        (("--model", "gpt2", "--causal"), "--heads"),
    ],
    ids=str,
)
def test_no_option_is_ignored(options: tuple[str, ...], named: str, tmp_path: Path, capsys: Any) -> None:
    from flashtile.cli import main

    assert main(["build", "--arch", "sm_80", "-o", str(tmp_path / "kernels.ftk"), *options]) != 0
    assert named in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """The other kernels are written."""
    from flashtile.cli import main

    monkeypatch.setattr(command, "_compile", lambda recorder, *_: recorder.add(b"", ahead.Failed("k did not compile")))
    assert main(["build", "--arch", "sm_80", "--model", "gpt2", "--forward", "-o", str(tmp_path / "kernels.ftk")]) == 1
    assert "left out: k did not compile" in capsys.readouterr().err and (tmp_path / "kernels.ftk").exists()


def test_what_was_missed_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``FLASHTILE_RECORD``, then ``flashtile build --missed``, then the same call."""
    main = pytest.importorskip("flashtile.cli").main
    missed, out = tmp_path / "missed", tmp_path / "kernels.ftk"
    monkeypatch.setenv("FLASHTILE_RECORD", str(missed))
    with present(SM_80, Driver()):
        attend(SM_80, **CALL)
        attend(SM_80, **CALL)
    lines = missed.read_text().splitlines()
    assert [json.loads(line)[0][-1] for line in lines] == ["attention_forward", *BACKWARD]
    assert missed.stat().st_mode & 0o777 == 0o644
    missed.write_text(f"{lines[1]}\n{lines[1]}\n{lines[2][:100]}")  # the shortest one, twice, and one that was cut off
    monkeypatch.setattr("flashtile.cli.build.ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # which a process of its own keeps to itself
    assert main(["build", "--arch", "sm_80", "--missed", str(missed), "-o", str(out)]) == 0
    monkeypatch.setattr(build, "_builds", {})
    missed.unlink()
    _with(monkeypatch, out)
    with present(SM_80, Driver()) as cuda:
        attend(SM_80, **CALL)
    assert cuda.loaded == ["prepare_rows"]
    assert [json.loads(line)[0][-1] for line in missed.read_text().splitlines()] == ["attention_forward", *BACKWARD[1:]]


def test_a_line_is_one_write_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So those of several processes stay whole."""
    write, written = os.write, list[bytes]()

    def note(file: int, data: bytes) -> int:
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_APPEND
        written.append(data)
        return write(file, data)

    monkeypatch.setattr(os, "write", note)
    monkeypatch.setattr(ahead, "as_json", lambda launch: str(launch) * 20_000)
    for n in (1, 2):
        build._record(n, str(tmp_path / "missed"))  # type: ignore[arg-type]
    assert written == [b"1" * 20_000 + b"\n", b"2" * 20_000 + b"\n"]
    assert (tmp_path / "missed").read_bytes() == b"".join(written)


def test_a_line_calls_nothing_but_records(tmp_path: Path) -> None:
    call = ["record", "flashtile.backends.portable.tuned", "write", str(tmp_path / "written"), ["tuple"]]
    kernel = ["function", "flashtile.backends.gpu.decode.states", None, "merge_states"]
    with pytest.raises(ValueError, match="is no launch of this release"):
        ahead.from_json(json.dumps([kernel, 1, [["a", call]], []]))
    assert not list(tmp_path.iterdir())


def test_a_list_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHTILE_RECORD", str(tmp_path / "none" / "missed"))
    with present(SM_80, Driver()), pytest.warns(UserWarning, match=r"^FLASHTILE_RECORD: .* cannot be written: No such"):
        attend(SM_80, **CALL)
    assert len(build._builds) == 4
