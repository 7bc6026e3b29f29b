"""Kernels built ahead: found without Triton, the same code as is compiled here, and nothing that was slipped in."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.backends.gpu import ahead, archive, build, host
from flashtile.backends.gpu.archive import Archive
from flashtile.backends.gpu.launch import Launch, compile_kernel, lower, text_of
from flashtile.call.problem import gpu_of
from flashtile.core import trusted
from tests.archive.asked import asked, on_gpu
from tests.archive.hostile import HOSTILE, IN_PART, forget
from tests.archive.machine import Driver, attend, present
from tests.fuzz.drawn import draw
from tests.fuzz.launches import started

pytest.importorskip("triton")

CALL: dict[str, Any] = dict(shape=(2, 300, 4, 64), causal=True, backend="portable")
# The kernels of that call.
EVERYTHING = ["attention_forward", "prepare_rows", "attention_backward_dkdv", "attention_backward_dq"]


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16, device="meta")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forward and a backward for sm_80."""
    place, x = tmp_path_factory.mktemp("kernels") / "kernels.ftk", _meta(2, 500, 4, 64)
    made = flashtile.warm_up(x, x, x, causal=True, backend="portable", gpu="sm_80", into=place)
    assert [each.kernel for each in made][:2] == ["attention_forward", "prepare_rows"]
    return place


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No archive but those that a test names, and no build of another test."""
    monkeypatch.setattr(build, "_builds", {})
    for name in [name for name in os.environ if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR"]:
        monkeypatch.delenv(name)
    forget()
    yield
    forget()


def _with(monkeypatch: pytest.MonkeyPatch, place: Path | str) -> None:
    monkeypatch.setenv("FLASHTILE_KERNELS", str(place))
    archive.archives.cache_clear()


def test_launches_need_no_triton(built: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.archive.machine", str(built)], capture_output=True, text=True,
        env={name: x for name, x in os.environ.items() if not name.startswith("TRITON_")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert sorted(seen["loaded"]) == sorted(EVERYTHING)
    assert seen["launches"] == 3 * 4


def _launched(
    monkeypatch: pytest.MonkeyPatch, arch: str, place: Path | str, call: Callable[[], object]
) -> tuple[list[Any], list[str], dict[bytes, bytes]]:
    """What a call launches, the kernels that it loads, and the code that it compiles."""
    made: list[Any] = []
    compiled: dict[bytes, bytes] = {}
    lay_out = host.Launcher._lay_out

    def seen(launcher: Any, *given: Any) -> None:
        lay_out(launcher, *given)
        made.append((launcher.kernel.__name__, launcher._content, launcher._offsets, launcher._write))

    def compile_only(launch: Launch, what: Any, device: int) -> Any:
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", int(gpu_of(arch).arch), 32)
        found = compile_kernel(launch.kernel, what, launch.options, target)
        compiled[archive.key_of(arch, str(text_of(lower(launch)[0])))] = found.asm["cubin"]
        return type("Loaded", (), {"metadata": found.metadata, "asm": found.asm, "function": 7})()

    with monkeypatch.context() as patched, on_gpu(arch) as cuda:
        patched.setattr(build, "_builds", {})
        patched.setattr(host.Launcher, "_lay_out", seen)
        patched.setattr(build, "load", compile_only)
        _with(patched, place)
        call()
    return made, cuda.loaded, compiled


def _assert_same(monkeypatch: pytest.MonkeyPatch, arch: str, place: Path, call: Callable[[], object]) -> None:
    """The argument block of each launch byte for byte, and each kernel's code."""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    compiled, loaded, code = _launched(monkeypatch, arch, "off", call)
    assert compiled and code and not loaded
    from_archive, loaded, none = _launched(monkeypatch, arch, place, call)
    assert from_archive == compiled and len(loaded) == len(code) and not none
    opened = Archive(place)
    found = {key: opened.find(key) for key in code}
    assert all(each and each.code == code[key] for key, each in found.items())


def test_what_is_launched_is_what_is_compiled_here(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_same(monkeypatch, "sm_80", built, lambda: attend((8, 0), **CALL))


@pytest.mark.long
def test_kernels_of_hopper_are_those_that_another_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and a step of a server, as ``flashtile build`` compiles what a run missed."""
    q, cache = torch.empty(2, 300, 4, 128, dtype=torch.bfloat16), torch.empty(64, 16, 2, 128, dtype=torch.bfloat16)
    lengths, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)

    def call() -> None:
        flashtile.attention(q, q, q, causal=True)
        flashtile.attention_with_kvcache(q[:, :1], cache, cache, cache_seqlens=lengths, page_table=table)

    with asked("sm_90") as found:
        call()
    recorder = ahead.Recorder()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for key, each in pool.map(ahead.compiled_line, map(ahead.as_json, found.values()), [90] * len(found)):
            recorder.add(key, each)
    assert recorder.builds.keys() == found.keys() and not recorder.left_out
    recorder.write(tmp_path / "kernels.ftk")
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")  # not what that process left in Triton's cache
    _assert_same(monkeypatch, "sm_90", tmp_path / "kernels.ftk", call)


def test_a_python_without_lzma_says_so(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "lzma", None)
    with pytest.raises(ValueError, match="needs Python's module lzma"):
        Archive(built)
    with pytest.raises(UnsupportedError, match="module lzma"), ahead.into(tmp_path / "kernels.ftk"):
        pass


def test_a_source_that_changes_while_kernels_are_compiled_makes_them_stale(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, file = ahead.Recorder(), "backends/portable/forward/kernel.py"
    recorder.take(Archive(built))
    before = archive.digest_of.__wrapped__
    monkeypatch.setattr(archive.digest_of, "__wrapped__", lambda each: "new" if each == file else before(each))
    recorder.write(tmp_path / "kernels.ftk")
    made = Archive(tmp_path / "kernels.ftk")
    changed = {found.about["name"]: made.changed(found) for key in made if (found := made.find(key)) is not None}
    assert changed["attention_forward"] == file and changed["prepare_rows"] == ""


def test_the_same_calls_make_the_same_file(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ahead.Recorder()
    assert recorder.take(Archive(built)) == 4
    size = recorder.write(tmp_path / "again.ftk")
    assert (tmp_path / "again.ftk").read_bytes() == built.read_bytes() and size == built.stat().st_size
    assert size < 60_000 and built.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_a_launch_as_text_is_the_launch(capability: tuple[int, int]) -> None:
    """Of random calls of every kind, functions of users' among them."""
    calls = [draw(seed) for seed in range(24)]
    launches = [each.launch for call in calls for each in started(call, capability)]
    for launch in launches:
        again = ahead.from_json(ahead.as_json(launch))
        assert text_of(lower(again)[0]) == text_of(lower(launch)[0]) != None  # noqa: E711
        assert again.programs == launch.programs and ahead.as_json(again) == ahead.as_json(launch)
    assert len({launch.kernel.__name__ for launch in launches}) > 8


def test_text_that_is_no_launch_is_refused() -> None:
    line = next(ahead.as_json(each.launch) for each in started(draw(0), (8, 0)))
    for other in (line.replace("flashtile.backends", "os.path"), line.replace("Call", "Cell"), "[1]", '["function"'):
        with pytest.raises(ValueError):
            ahead.from_json(other)


def test_what_a_run_misses_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHTILE_RECORD", str(tmp_path / "missed"))
    monkeypatch.setattr(build, "load", lambda launch, what, device: None)
    monkeypatch.setattr(build, "make_build", lambda what, compiled: build.LoadedKernel(None, (), "a test", 0, None, []))
    monkeypatch.setattr(host.Launcher, "start", lambda *call: None)
    _with(monkeypatch, "off")
    with present((8, 0), Driver()):
        attend((8, 0), **CALL)
        attend((8, 0), **CALL)
    lines = (tmp_path / "missed").read_text().splitlines()
    assert [ahead.from_json(line).kernel.__name__ for line in lines] == EVERYTHING


def test_without_triton_a_miss_says_so(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    build._no_compiler.cache_clear()
    try:
        _with(monkeypatch, built)
        with present((8, 0), Driver()), pytest.raises(UnsupportedError, match=r"(?s)in no archive.*not installed"):
            attend((8, 0), **(CALL | {"shape": (1, 40, 2, 80)}))
        _with(monkeypatch, "off")
        with present((8, 0), Driver()), pytest.raises(UnsupportedError, match="needs Triton"):
            attend((8, 0), **CALL)
    finally:
        build._no_compiler.cache_clear()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_hostile_file_is_not_used(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A warning says what is wrong, and the kernels are compiled."""
    spoil, why = HOSTILE[name]
    spoil(tmp_path / "bad.ftk", built.read_bytes())
    compiled = _compiled_with(monkeypatch, tmp_path / "bad.ftk", why)
    assert len(compiled) == 1 if name in IN_PART else compiled == EVERYTHING


def _compiled_with(
    monkeypatch: pytest.MonkeyPatch,
    place: Path | str,
    why: str,
    capability: tuple[int, int] = (8, 0),
    refuses: bool = False,
) -> list[str]:
    """The kernels that a call compiles with an archive, all of which it warns about."""
    compiled: list[str] = []

    def note(launch: Launch, device: int) -> Any:
        compiled.append(launch.kernel.__name__)
        return build.LoadedKernel(None, (), "a test", 0, None, [])

    monkeypatch.setattr(build, "_compiled", note)
    monkeypatch.setattr(host.Launcher, "start", lambda *call: None)
    _with(monkeypatch, place)
    with warnings.catch_warnings(record=True) as seen, present(capability, Driver(refuses)):
        warnings.simplefilter("always")
        attend(capability, **CALL)
    texts = [str(each.message) for each in seen]
    assert texts and all(why in text for text in texts) if why else not texts, texts
    return compiled


def test_a_changed_source_sends_its_kernels_back_to_the_compiler(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = archive.digest_of
    changed = "backends/portable/backward/preprocess.py"
    monkeypatch.setattr(archive, "digest_of", lambda file: "other" if file == changed else digest(file))
    assert _compiled_with(monkeypatch, built, "preprocess.py is compiled anew, since that file has changed") == [
        "prepare_rows"
    ]


def test_no_source_of_a_kernel_is_the_hosts() -> None:
    """An edit to planning, to archives or to a table of kernels leaves the kernels of an archive fresh."""
    launches = [each.launch for of in ((8, 0), (9, 0)) for n in range(30) for each in started(draw(n), of)]
    modules = {module for launch in launches for module in ahead._modules(lower(launch)[0])}
    files = {file for module in modules for file in ahead.files_of(module)}
    assert {"backends/portable/device/tiles.py", "backends/portable/rounding/kernels.py"} < files

    def is_device_code(file: str) -> bool:
        lines = (archive.PACKAGE / file).read_text(encoding="utf-8").splitlines()
        return any(line.startswith(("import triton", "from triton")) for line in lines)

    others = {
        file for file in files if not is_device_code(file) and Path(file).name not in ("__init__.py", "records.py")
    }
    assert others <= {"backends/gpu/decode/call.py", "call/blocks.py"}
    assert not {"backends/gpu/__init__.py", "backends/hopper/__init__.py", "backends/portable/__init__.py"} & files


def test_an_archive_for_another_architecture_is_not_used(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f"no archive of kernels is for this GPU, sm_89: {built} is for sm_80"
    assert _compiled_with(monkeypatch, built, why, (8, 9)) == EVERYTHING
    # Its builds under the keys that this architecture asks for.
    keys = {key.hex(): archive.key_of("sm_89", text) for text, key in _texts(monkeypatch).items()}
    recorder = ahead.Recorder()
    recorder.take(Archive(built))
    recorder.builds = {keys[key.hex()]: found for key, found in recorder.builds.items()}
    for found in recorder.builds.values():
        found.about["arch"] = "sm_89"
    recorder.write(tmp_path / "moved.ftk")
    monkeypatch.setattr(build, "_builds", {})
    why = "a build lies under another's key"
    assert _compiled_with(monkeypatch, tmp_path / "moved.ftk", why, (8, 9)) == EVERYTHING


def _texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The texts of the call's launches, with their keys."""
    found: dict[str, bytes] = {}

    def seen(text: str, device: int) -> None:
        found[text] = archive.key_of("sm_80", text)

    with monkeypatch.context() as patched:
        patched.setattr(build, "_builds", {})
        patched.setattr(archive, "look_up", seen)
        patched.setattr(archive, "archives", lambda: (None,))
        patched.setattr(build, "_compiled", lambda launch, device: build.LoadedKernel(None, (), "a test", 0, None, []))
        patched.setattr(host.Launcher, "start", lambda *call: None)
        with present((8, 0), Driver()):
            attend((8, 0), **CALL)
    return found


def test_what_is_cut_while_it_is_open_is_compiled(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process's copy over it does for a moment; a mapped file would end this process."""
    place = tmp_path / "cut.ftk"
    place.write_bytes(built.read_bytes())
    opened = Archive(place)
    os.truncate(place, 100)
    monkeypatch.setattr(archive, "archives", lambda: (opened,))
    monkeypatch.setattr(archive.archives, "cache_clear", lambda: None, raising=False)
    assert _compiled_with(monkeypatch, place, "cut.ftk: a kernel is compiled instead: the archive is damaged") == (
        EVERYTHING
    )


def test_a_file_of_another_user_is_not_used(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's is."""
    fstat = os.fstat

    def owned(file: int, by: int) -> os.stat_result:
        about = list(fstat(file))
        about[4] = by
        return os.stat_result(about)

    monkeypatch.setattr(trusted.os, "fstat", lambda file: owned(file, 0))
    assert _compiled_with(monkeypatch, built, "") == []
    monkeypatch.setattr(build, "_builds", {})
    monkeypatch.setattr(trusted.os, "fstat", lambda file: owned(file, 12345))
    assert _compiled_with(monkeypatch, built, "belongs to user 12345, you are ") == EVERYTHING


def test_what_the_driver_refuses_is_compiled(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_compiled_with(monkeypatch, built, "REFUSED", refuses=True)) == 4


def test_variables_that_change_code_turn_archives_off(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert len(_compiled_with(monkeypatch, built, "TRITON_F32_DEFAULT is set")) == 4


def test_relative_paths_are_not_taken(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(built.parent)
    assert len(_compiled_with(monkeypatch, built.name, "not an absolute path")) == 4


def test_the_installed_package_is_found_but_not_in_the_current_folder(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / archive.WHEEL
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sm_80.ftk").write_bytes(built.read_bytes())
    (folder / "sm_90a.ftk").write_bytes(b"not opened for a GPU that is not here")
    monkeypatch.syspath_prepend(str(folder.parent))
    assert _compiled_with(monkeypatch, "", "") == []
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(build, "_builds", {})
    assert len(_compiled_with(monkeypatch, "", "")) == 4


def test_into_refuses(tmp_path: Path) -> None:
    x = _meta(1, 8, 1, 16)
    (tmp_path / "text").write_text("no archive")
    for place, why in ((tmp_path / "text", "too short"), (tmp_path / "none" / "k.ftk", "cannot be written")):
        with pytest.raises(InvalidInputError, match=f"^into: .*{why}"):
            flashtile.warm_up(x, x, x, backend="portable", gpu="gfx942", backward=False, into=place)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInputError, match="^into: .*gpu='sm_90'"):
            flashtile.warm_up(x, x, x, device="cpu", into=tmp_path / "k.ftk")
