"""Tuned tiles: which calls take them, what of the file is believed, which candidates there are."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashtile import tuning
from flashtile.backends.gpu.trial import on_trial, trial
from flashtile.backends.portable import BACKEND, tuned
from flashtile.backends.portable import config as tiles
from flashtile.backends.portable.backward import config as backward
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.forward import config as forward
from flashtile.call.backend import Build
from flashtile.call.problem import Problem, Tensors, described
from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from flashtile_lab.kernels import portable as builds
from flashtile_lab.kernels import report as all_builds

CAUSAL, NEW = Band(None, 0), PortableTiles(32, 128, 8, 2, tma=True)
CAPABILITIES = {"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": None}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's tiles are."""
    monkeypatch.setenv("FLASHTILE_TILES", str(tmp_path / "own" / "tiles.json"))
    tuned.known.cache_clear()
    yield tmp_path / "own" / "tiles.json"
    tuned.known.cache_clear()


def _problem(arch: str = "sm_90", **values: object) -> Problem:
    usual = {"device_type": "cuda", "compute_capability": CAPABILITIES[arch], "gpu": "GPU 1", "dtype": torch.bfloat16}
    sizes = {"batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128, "head_dim_v": 128, "band": CAUSAL}
    return described(**usual | sizes | values)


def _choose(problem: Problem, kernel: str = "forward", arch: str | None = None) -> PortableTiles:
    return forward.choose(problem, arch) if kernel == "forward" else backward.choose(problem, kernel, arch)


def _entry(problem: Problem, kernel: str = "forward", new: PortableTiles = NEW) -> tiles.Entry:
    key = tuned.key_of(problem, kernel, _choose(problem, kernel, tiles.arch_of(problem)))
    return tiles.Entry(*key, new.name, 1.25, *tuned.versions())


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_only_the_calls_of_an_entry_take_its_tiles(kernel: str, place: Path) -> None:
    problem = _problem(needs_grad=True)
    before = _choose(problem, kernel)
    tuned.write(place, [_entry(problem, kernel)])
    same = [
        {},
        {"batch": 77},
        {"seqlen_q": 5, "seqlen_k": 9000},
        {"num_heads_q": 8, "num_heads_kv": 8},
        {"sinks": True},
        {"band": Band(None, 3)},
    ]
    for changes in same:
        assert _choose(problem.but(**changes), kernel) == NEW, changes
    others = [
        {"gpu": "GPU 2"}, {"gpu": ""}, {"aligned": False}, {"dtype": torch.float16}, {"head_dim": 120},
        {"head_dim_v": 64}, {"band": Band()}, {"band": Band(128, 0)}, {"softcap": 9.0}, {"alibi": True}, {"mask": True},
        {"dropout_p": 0.1}, {"bias_dtype": torch.bfloat16}, {"out_dtype": torch.float32}, {"grad_dtype": torch.float32},
    ]  # fmt: skip
    for changes in others:
        other = problem.but(**changes)
        assert _choose(other, kernel) == _choose(other, kernel, "sm_90") != NEW, changes
    for each in {"forward", "dkdv", "dq"} - {kernel}:
        assert _choose(problem, each) == _choose(problem, each, "sm_90")
    assert _choose(problem, kernel, "sm_90") == before
    for override in (PortableTiles(16, 16, 4, 1), before):
        with trial(**{kernel: override}):
            assert _choose(problem, kernel) == override


@pytest.mark.parametrize("changes", [{"softcap": 9.0}, {"alibi": True}, {"mask": True}, {"dropout_p": 0.1}], ids=str)
def test_features_have_no_tuned_tiles_even_where_the_tables_have_no_rows_for_them(
    changes: dict[str, object], place: Path
) -> None:
    problem = _problem("gfx942")
    tuned.write(place, [_entry(problem)])
    assert _choose(problem) == NEW != _choose(problem.but(**changes)) == _choose(problem, arch="gfx942")


@pytest.mark.parametrize("arch", CAPABILITIES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_that_share_tiles_share_tuned_ones(arch: str, head_dim: int, place: Path) -> None:
    """Packed or dense, of whatever length: the forward's bits are the same where they were."""
    new = PortableTiles(128, 32, 4, 1)
    for band in (Band(), CAUSAL, Band(100, 0)):
        made = _problem(arch, head_dim=head_dim, head_dim_v=head_dim, band=band)
        tuned.write(place, [_entry(made, new=new)])
        for changes in ({"varlen": True}, {"seqlen_q": 100}, {"varlen": True, "seqlen_q": 100}, {"batch": 1}):
            other = made.but(**changes)
            shares = _choose(other, arch=tiles.arch_of(other)) == _choose(made, arch=tiles.arch_of(made))
            assert (_choose(other) == new) == shares
            assert shares or arch in ("sm_90", "sm_100")


def test_explain_names_the_file(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _problem(needs_grad=True)
    before = BACKEND.describe(problem, "forward"), BACKEND.describe(problem, "backward")
    assert "tuned" not in "".join(before)
    tuned.write(place, [_entry(problem), _entry(problem, "dq")])
    assert BACKEND.describe(problem, "forward") == f"Triton, tiles 32x128, 8 warps, 2 stages, TMA, tuned ({place})"
    assert BACKEND.describe(problem, "backward").count(f"tuned ({place})") == 1
    from flashtile.api import prepare
    from flashtile.cli import main

    # The command on a machine with that GPU; one that is named by its capability has no tuned tiles.
    monkeypatch.setattr(prepare, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(prepare, "gpu_name", lambda device: "GPU 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "reasons", lambda *_: [])
    asked = ["explain", "--causal", "--dtype", "bfloat16", "--backend", "portable"]
    assert main(asked) == 0 and f"tuned ({place})" in capsys.readouterr().out
    assert main([*asked, "--arch", "9.0"]) == 0 and "tuned" not in capsys.readouterr().out


def test_the_file_is_the_owners_alone_and_replaced_at_once(place: Path) -> None:
    entries = [_entry(_problem()), _entry(_problem(), "dq")]
    old = os.umask(0)
    try:
        tuned.write(place, entries[:1])
        linked = place.with_name("old.json")
        os.link(place, linked)
        tuned.write(place, entries)
    finally:
        os.umask(old)
    assert place.stat().st_mode & 0o777 == 0o600 and place.parent.stat().st_mode & 0o777 == 0o700
    assert tuned.read(place) == entries and tuned.read(linked) == entries[:1]
    assert sorted(path.name for path in place.parent.iterdir()) == ["old.json", "tiles.json"]


def _ignored(place: Path, why: str) -> None:
    """A call has the tables' tiles, after one warning; the command refuses the file."""
    tuned.known.cache_clear()
    with pytest.warns(UserWarning, match=why) as caught:
        assert _choose(_problem()) == _choose(_problem(), arch="sm_90")
        assert _choose(_problem(batch=3)) != NEW
    assert len(caught) == 1 and str(place) in str(caught[0].message)
    with pytest.raises(InvalidInputError, match=why):
        tuned.read(place)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_read(mode: int, place: Path) -> None:
    tuned.write(place, [_entry(_problem())])
    place.chmod(mode)
    _ignored(place, f"may be written by others, its mode is {mode:o}")
    place.chmod(0o644)
    tuned.known.cache_clear()
    assert _choose(_problem()) == NEW


def test_a_file_of_another_user_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.write(place, [_entry(_problem())])
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    _ignored(place, f"belongs to user {owner}, you are {owner + 1}")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"tiles": 3}', '{"tiles": [3]}', '{"tiles": [{"gpu": "x"}]}', "\x00\x01", "[" * 100_000,
     '{"tiles": [{"more": 1}]}', "9" * 5000, '"\\ud800'],
)  # fmt: skip
def test_a_file_of_something_else_is_not_read(text: str, place: Path) -> None:
    place.parent.mkdir()
    place.write_text(text)
    place.chmod(0o600)
    _ignored(place, "is not of flashtile tune")


def test_what_is_no_file_is_not_read(place: Path) -> None:
    assert tuned.read(place) == []
    place.parent.mkdir()
    os.mkfifo(place, 0o600)
    _ignored(place, "is no regular file")
    place.unlink()
    place.mkdir()
    _ignored(place, "cannot be read: Is a directory")
    with pytest.raises(InvalidInputError, match="cannot be written"):
        tuned.write(place, [])


WRONG = [
    ({"tiles": "48x64x4x2"}, "block_m is 48"), ({"tiles": "64x64x3x2"}, "num_warps is 3"),
    ({"tiles": "64x64x4x99"}, "num_stages is 99"), ({"tiles": "256x64x8x2"}, "more than 128"),
    ({"tiles": "-64x64x4x2"}, "'-64x64x4x2' is not rows"), ({"tiles": "64x64x4x2 A 999"}, "maxnreg is 999"),
    ({"tiles": "64x64x4x2 X"}, "is not rows"), ({"tiles": 5}, "tiles: "), ({"tiles": None}, "tiles: "),
    ({"kernel": "dbias"}, "kernel is 'dbias'"), ({"kernel": 7}, "kernel is 7"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "why"), WRONG)
def test_wrong_numbers_are_named_and_the_other_entries_used(values: dict[str, object], why: str, place: Path) -> None:
    entry = _entry(_problem())
    tuned.write(place, [entry._replace(**values), _entry(_problem(), "dq")])
    with pytest.warns(UserWarning, match=why) as caught:
        assert _choose(_problem()) == _choose(_problem(), arch="sm_90")
    assert len(caught) == 1
    assert _choose(_problem(), "dq") == NEW


def test_entries_of_other_versions_are_ignored_and_named(place: Path) -> None:
    entry = _entry(_problem())
    for other in (entry._replace(flashtile="0.0.1"), entry._replace(triton="2.1.0")):
        tuned.write(place, [other])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _choose(_problem()) == _choose(_problem(), arch="sm_90")
        assert tuned.why_not(other) == f"measured with flashtile {other.flashtile}, Triton {other.triton}"
    assert tuned.why_not(entry) == ""


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_TILES", "OFF")
    assert tuned.path() is None
    monkeypatch.setenv("FLASHTILE_TILES", "~/Tiles.json")
    monkeypatch.setenv("HOME", "/home/Me")
    assert tuned.path() == Path("/home/Me/Tiles.json")
    monkeypatch.setenv("FLASHTILE_TILES", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/Mine")
    assert tuned.path() == Path("/etc/Mine/flashtile/tiles.json")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert tuned.path() == Path("/home/Me/.config/flashtile/tiles.json")


def test_it_is_read_once_and_not_at_all_where_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.write(place, [_entry(_problem())])
    reads = []
    honest = tuned.read
    monkeypatch.setattr(tuned, "read", lambda path: reads.append(path) or honest(path))
    assert [_choose(_problem(batch=n)) for n in (1, 2, 3)] == [NEW] * 3
    assert reads == [place]
    monkeypatch.setenv("FLASHTILE_TILES", "off")
    tuned.known.cache_clear()
    assert _choose(_problem()) != NEW and reads == [place]


def test_a_build_that_fails_with_tuned_tiles_is_made_without(place: Path) -> None:
    tuned.write(place, [_entry(_problem())])

    def make() -> PortableTiles:
        chosen = _choose(_problem())
        if chosen == NEW:
            raise RuntimeError("out of resource")
        return chosen

    with pytest.warns(UserWarning, match="not used any more.*out of resource"):
        assert tuned.or_tables(make) == _choose(_problem(), arch="sm_90")
    assert _choose(_problem()) != NEW
    with pytest.raises(ZeroDivisionError):
        tuned.or_tables(lambda: PortableTiles(1 // 0, 16, 4, 1))


@pytest.mark.parametrize("name", ["64x128x4x2", "64x128x8x3 TA 168", "16x32x4x1 O", "128x64x8x3 T", "64x64x4x3 168"])
def test_a_name_says_everything_about_tiles(name: str) -> None:
    assert PortableTiles.parse(name).name == name


def _tasks(arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> list[tuning.Task]:
    monkeypatch.setattr(dispatch, "select", lambda *_: BACKEND)
    problem = _problem(arch, head_dim=head_dim, head_dim_v=head_dim, needs_grad=True, num_heads_q=8, num_heads_kv=8)
    return tuning.tasks([problem], ["forward", "backward"])


@pytest.mark.parametrize("arch", CAPABILITIES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_candidates_are_many_and_legal(arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _tasks(arch, head_dim, monkeypatch)
    apart = head_dim == 256 and arch in ("sm_90", "sm_100")
    assert [task.kernel for task in found] == ["forward", *(["dk", "dv"] if apart else ["dkdv"]), "dq"]
    for task in found:
        row = tiles.arch_of(task.odd)
        assert task.table == _choose(task.problems[0], task.kernel, row)
        made = tuning.candidates(task, task.table, row)
        assert len(made) == len(set(made)) > 5
        assert len({(each.block_m, each.block_n) for each in made}) > 2
        for each in made:
            assert each.name == PortableTiles.parse(each.name).name
            assert max(each.block_m, each.block_n) <= 128
            assert not each.tma or row in ("sm_90", "sm_100")
            moving = each.block_n if task.kernel in ("forward", "dq") else each.block_m
            least = 2 * moving * tiles.in_parts(head_dim, torch.bfloat16) * 2 * (each.num_stages - 1)
            assert least <= tiles.SHARED_BYTES[row]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "gfx942"])
def test_candidates_compile(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first whose shape is not the tables', of one kernel each."""
    found = _tasks({"sm_90a": "sm_90"}.get(arch, arch), 64, monkeypatch)
    task = found[("sm_80", "sm_89", "sm_90a", "gfx942").index(arch) % len(found)]
    made = tuning.candidates(task, task.table, tiles.arch_of(task.odd))
    new = next(each for each in made if each.block_m != task.table.block_m)
    direction = "forward" if task.kernel == "forward" else "backward"
    with trial(**{task.kernel: new}):
        record = next(b for b in builds.builds_of(task.problems[0], direction) if b.name.endswith(task.kernel))
    report = all_builds.compile_build(record, arch)
    assert report.config["tiles"].startswith(f"{new.block_m}x{new.block_n}") and not report.problems


def test_calls_of_one_key_are_tuned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "select", lambda *_: BACKEND)
    made = [_problem("sm_80", seqlen_q=n, seqlen_k=n, needs_grad=True) for n in (512, 8192, 512)]
    found = tuning.tasks([*made, made[0].but(head_dim=64, head_dim_v=64)], ["forward"])
    assert [[p.seqlen_q for p in task.problems] for task in found] == [[512, 8192], [512]]
    # What is checked besides is packed where that takes the same tiles.
    assert all(task.odd.varlen for task in found)
    short = _problem("sm_90", head_dim=256, head_dim_v=256, seqlen_q=512, seqlen_k=512)
    dense = tuning.tasks([short], ["forward"])[0]
    assert not dense.odd.varlen and dense.odd.seqlen_q % 16


def test_a_saved_result_replaces_its_own_kind_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = _tasks("sm_90", 128, monkeypatch)[0]
    other, older = _entry(_problem(), "dq"), _entry(_problem())._replace(triton="2.0.0")
    tuned.write(place, [_entry(_problem()), other, older])
    new = PortableTiles(64, 32, 4, 2)
    tuning.save(tuning.Result(task, new, 1.5))
    assert tuned.read(place) == [other, older, _entry(_problem(), new=new)._replace(gain=1.5)]
    tuning.save(tuning.Result(task, task.table))
    assert tuned.read(place) == [other, older]
    assert [row["tiles"] for row in json.loads(place.read_text())["tiles"]] == [NEW.name, NEW.name]


def test_candidates_are_built_with_their_own_tiles_and_failures_said(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _tasks("sm_90", 128, monkeypatch)[2]
    asked: list[tuple[Problem, str, PortableTiles]] = []
    made: list[PortableTiles] = []

    def build(problem: Problem, tensors: Tensors, direction: str) -> list[Build]:
        (held,) = on_trial()
        assert held[0] == "dq" and tensors.q.is_meta
        asked.append((problem, direction, held[1]))

        def make() -> None:
            made.append(held[1])
            if held[1].num_stages == 5:
                raise RuntimeError("out of resource: shared memory\nmore")

        return [Build("dq", make)]

    monkeypatch.setattr(tuning, "BACKEND", SimpleNamespace(builds=build))
    new = [PortableTiles(64, 64, 4, 5), PortableTiles(64, 64, 4, 2)]
    found = dict(tuning._built(task, new))
    assert found == {new[0]: "RuntimeError: out of resource: shared memory", new[1]: ""}
    wanted = [(problem, "backward", each) for each in new for problem in (*task.problems, task.odd)]
    assert asked == wanted and made.count(new[1]) == 2 and made.count(new[0]) == 1
    assert not on_trial()
