"""Kernels built ahead: found without Triton, the same code as is compiled here, and nothing that was slipped in."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.backends.gpu import ahead, archive, build, host
from flashtile.backends.gpu.archive import ENTRY, HEAD, MAGIC, Archive
from flashtile.backends.gpu.launch import Launch, lower, text_of
from tests.archive.machine import Driver, attend, present
from tests.fuzz.drawn import draw
from tests.fuzz.launches import started

pytest.importorskip("triton")

CALL: dict[str, Any] = dict(shape=(2, 300, 4, 64), causal=True, backend="portable")


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

    def forget() -> None:
        for name in ("archives", "_warn_once", "why_off", "digest_of", "_arch", "_is_for_a_device"):
            if hasattr(cached := getattr(archive, name), "cache_clear"):
                cached.cache_clear()

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
    names = {"attention_forward", "prepare_rows", "attention_backward_dkdv", "attention_backward_dq"}
    assert set(seen["loaded"]) == names and len(seen["loaded"]) == 4
    assert seen["launches"] == 3 * 4


def test_what_is_launched_is_what_is_compiled_here(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument block of each launch byte for byte, and each kernel's code."""
    made: dict[bool, list[Any]] = {True: [], False: []}
    lay_out = host.Step._lay_out

    def seen(step: Any, leaves: Any, layout: Any) -> None:
        lay_out(step, leaves, layout)
        made[with_archive].append((step.kernel.__name__, step._content, step._addresses, step._numbers))

    compiled: dict[bytes, bytes] = {}

    def compile_only(launch: Launch, what: Any, device: int) -> Any:
        from triton.backends.compiler import GPUTarget

        from flashtile.backends.gpu.launch import compile_kernel

        found = compile_kernel(launch.kernel, what, launch.options, GPUTarget("cuda", 80, 32))
        compiled[archive.key_of("sm_80", str(text_of(lower(launch)[0])))] = found.asm["cubin"]
        return type("Loaded", (), {"metadata": found.metadata, "asm": found.asm, "function": 7})()

    monkeypatch.setattr(host.Step, "_lay_out", seen)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    monkeypatch.setattr(build, "load", compile_only)
    with_archive = False
    _with(monkeypatch, "off")
    with present((8, 0), Driver()):
        attend((8, 0), **CALL)
    monkeypatch.setattr(build, "_builds", {})
    with_archive = True
    _with(monkeypatch, built)
    with present((8, 0), Driver()) as cuda:
        attend((8, 0), **CALL)
    assert made[True] == made[False] and len(made[True]) == 4 == len(cuda.loaded)
    opened = Archive(built)
    found = {key: opened.find(key) for key in compiled}
    assert len(found) == 4 and all(each and each.code == compiled[key] for key, each in found.items())


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
    monkeypatch.setattr(build, "make_build", lambda what, compiled: build.Build(None, (), "a test", 0, None, []))
    monkeypatch.setattr(host.Step, "start", lambda step, tensors, stream: None)
    _with(monkeypatch, "off")
    with present((8, 0), Driver()):
        attend((8, 0), **CALL)
        attend((8, 0), **CALL)
    lines = (tmp_path / "missed").read_text().splitlines()
    names = ["attention_forward", "prepare_rows", "attention_backward_dkdv", "attention_backward_dq"]
    assert [ahead.from_json(line).kernel.__name__ for line in lines] == names


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


Spoil = Callable[[Path, bytes], None]


def _bytes(change: Callable[[bytearray], object]) -> Spoil:
    def spoil(place: Path, given: bytes) -> None:
        data = bytearray(given)
        found = change(data)
        place.write_bytes(bytes(found) if isinstance(found, (bytes, bytearray)) else bytes(data))

    return spoil


def _index(data: bytearray, change: Callable[[list[Any]], None]) -> None:
    """Changes each entry of the index, and makes its digest right again."""
    _, _, count, size = HEAD.unpack_from(data)
    for n in range(count):
        entry = list(ENTRY.unpack_from(data, HEAD.size + n * ENTRY.size))
        change(entry)
        ENTRY.pack_into(data, HEAD.size + n * ENTRY.size, *entry)
    end = HEAD.size + count * ENTRY.size + size
    HEAD.pack_into(data, 0, MAGIC, hashlib.sha256(data[HEAD.size : end]).digest(), count, size)


def _flipped(data: bytearray) -> None:
    data[-100] ^= 16


def _swapped(data: bytearray) -> None:
    """Each build under the key of another."""
    _, _, count, _ = HEAD.unpack_from(data)
    rest = [ENTRY.unpack_from(data, HEAD.size + n * ENTRY.size)[1:] for n in range(count)]
    places = iter([*rest[1:], rest[0]])

    def change(entry: list[Any]) -> None:
        entry[1:] = next(places)

    _index(data, change)


def _linked(place: Path, given: bytes) -> None:
    (place.parent / "elsewhere").write_bytes(given)
    place.symlink_to(place.parent / "elsewhere")
    (place.parent / "elsewhere").chmod(0o666)


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "cut in the builds": (_bytes(lambda data: data[: len(data) // 2]), "is damaged: a build has another digest"),
    "cut in the index": (_bytes(lambda data: data[:200]), "is cut off"),
    "cut in the head": (_bytes(lambda data: data[:9]), "is too short"),
    "a bit of a build": (_bytes(_flipped), "is damaged: a build has another digest"),
    "a bit of the index": (_bytes(lambda data: data.__setitem__(100, data[100] ^ 1)), "its index has another digest"),
    "wrong magic": (_bytes(lambda data: b"PK" + data[2:]), "is no archive of kernels"),
    "another form": (_bytes(lambda data: data.replace(MAGIC, b"FTKERN9\n", 1)), "is an archive of another form"),
    "an index past the end": (_bytes(lambda d: _index(d, lambda e: e.__setitem__(2, 2**40))), "is damaged"),
    "a build too long": (_bytes(lambda d: _index(d, lambda e: e.__setitem__(4, 2**31))), "would have 2147483648 bytes"),
    "another kernel's place": (_bytes(_swapped), "a build lies under another's key"),
    "written by others": (lambda place, given: (place.write_bytes(given), place.chmod(0o666))[1], "written by others"),
    "a link to such a file": (_linked, "written by others"),
    "a folder": (lambda place, given: place.mkdir(), "cannot be read: Is a directory"),
    "a pipe": (lambda place, given: os.mkfifo(place), "no regular file"),
    "nothing": (lambda place, given: None, "cannot be read: No such file"),
}


# The other builds are used.
SPOILED_IN_PART = ("cut in the builds", "a bit of a build")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_hostile_file_is_not_used(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A warning says what is wrong, and the kernels are compiled."""
    spoil, why = HOSTILE[name]
    spoil(tmp_path / "bad.ftk", built.read_bytes())
    compiled = _compiled_with(monkeypatch, tmp_path / "bad.ftk", why)
    everything = ["attention_forward", "prepare_rows", "attention_backward_dkdv", "attention_backward_dq"]
    assert compiled == everything if name not in SPOILED_IN_PART else compiled and set(compiled) < set(everything)


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
        return build.Build(None, (), "a test", 0, None, [])

    monkeypatch.setattr(build, "_compiled", note)
    monkeypatch.setattr(host.Step, "start", lambda step, tensors, stream: None)
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


def test_another_architecture_finds_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_compiled_with(monkeypatch, built, "", (8, 9))) == 4


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
