"""``flashtile tune`` in Triton's interpreter, with made-up times: what is checked, timed, saved, and then used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import flashtile
from flashtile import tuning
from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable import tuned
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.forward import launch
from flashtile.cli import main
from flashtile.ops import plans

TABLE, FAST, TWICE = PortableTiles(16, 16, 4, 1), PortableTiles(32, 16, 4, 1), PortableTiles(16, 16, 8, 2)
SHAPE = ["tune", "--shape", "1,9,2,1,16", "--dtype", "float32", "--causal"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four candidates, since the interpreter takes its time; from the second round on one more."""
    first = [FAST, PortableTiles(16, 16, 4, 2), PortableTiles(16, 32, 4, 1), PortableTiles(16, 16, 8, 1)]
    monkeypatch.setattr(tuning, "_neighbours", lambda best, masked: first + [TWICE] * (best != TABLE))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's tiles are; the plans of others are not used."""
    monkeypatch.setenv("FLASHTILE_TILES", str(tmp_path / "tiles.json"))
    tuned.known.cache_clear()
    with plans.own_plans():
        yield tmp_path / "tiles.json"
    tuned.known.cache_clear()


def _times(
    monkeypatch: pytest.MonkeyPatch, time_ms: Callable[[str, PortableTiles], float]
) -> list[tuple[str, PortableTiles]]:
    """Makes times up from a kernel and its tiles; returns what is timed."""
    timed: list[tuple[str, PortableTiles]] = []

    def made_up(call: tuning.Run, reps: int, device_type: str) -> float:
        (found,) = on_trial()
        timed.append(found)
        return time_ms(*found)

    monkeypatch.setattr(tuning, "time_ms", made_up)
    return timed


def _launched(monkeypatch: pytest.MonkeyPatch) -> list[PortableTiles]:
    """The tiles of every forward that is launched."""
    seen: list[PortableTiles] = []
    honest = launch.forward_launch
    monkeypatch.setattr(launch, "forward_launch", lambda p, t, c, **k: seen.append(c) or honest(p, t, c, **k))
    return seen


def _call(seqlen: int, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, seqlen, 2, 16)
    k, v = torch.randn(2, 2, seqlen, 1, 16)
    out = flashtile.attention(q, k, v, causal=True, backend="portable", **options)
    return out, flashtile.attention(q.double(), k.double(), v.double(), causal=True, backend="cpu", **options)


@pytest.mark.long
def test_the_winner_is_saved_and_the_next_call_runs_with_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _times(monkeypatch, lambda kernel, config: 0.5 if config == FAST else 1.0)
    assert main([*SHAPE, "--forward", "--seconds", "60", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tiles"], row["gain"], row["left_out"]) == ("32x16x4x1", pytest.approx(2.0), {})
    assert row["timed"] > 8
    (entry,) = tuned.read(place)
    assert (entry.kernel, entry.head_dims, entry.mask, entry.tiles) == ("forward", "16/16", "causal", "32x16x4x1")
    seen = _launched(monkeypatch)
    out, want = _call(37)
    assert seen == [FAST] and seen[0].source == str(place)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    out, want = _call(37, softcap=5.0)
    assert seen[1] == TABLE
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    assert f"tuned ({place})" in flashtile.explain(*(torch.zeros(1, 9, 1, 16),) * 3, causal=True, backend="portable")
    # The list, and none any more.
    assert main(["tune", "--list"]) == 0
    line = "Triton's interpreter: forward float32 16/16 causal: 32x16x4x1 instead of 16x16x4x1, 2.0 times as fast; used"
    assert capsys.readouterr().out == f"1 in {place}\n{line}\n"
    tuned.write(place, [entry._replace(triton="2.0.0")])
    assert main(["tune", "--list"]) == 0
    assert "; not used: measured with flashtile " in capsys.readouterr().out
    assert main(["tune", "--clear"]) == 0
    with plans.own_plans():
        _call(37)
    assert seen[2] == TABLE and tuned.read(place) == []


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_each_kernel_of_the_backward_has_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"dkdv": PortableTiles(16, 16, 4, 2), "dq": PortableTiles(16, 32, 4, 1)}
    timed = _times(monkeypatch, lambda kernel, config: 0.9 if config == best[kernel] else 1.0)
    assert main([*SHAPE, "--backward", "--seconds", "60"]) == 0
    assert {entry.kernel: entry.tiles for entry in tuned.read(place)} == {k: c.name for k, c in best.items()}
    assert {kernel for kernel, _ in timed} == set(best)


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_a_gain_below_three_percent_or_of_one_shape_alone_is_not_saved(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _times(monkeypatch, lambda kernel, config: 0.98 if config == FAST else 1.0)
    assert main([*SHAPE, "--forward", "--seconds", "60"]) == 0
    assert tuned.read(place) == []
    # Twice as fast for one of two shapes, and slower for the other: every call has the same tiles.
    calls: list[tuning.Run] = []

    def uneven(call: tuning.Run, reps: int, device_type: str) -> float:
        if call not in calls:
            calls.append(call)
        return (0.5, 1.1)[calls.index(call) % 2] if dict(on_trial()) == {"forward": FAST} else 1.0

    monkeypatch.setattr(tuning, "time_ms", uneven)
    assert main([*SHAPE, "--shape", "2,7,2,1,16", "--forward", "--seconds", "60"]) == 0
    assert len(calls) == 2 and tuned.read(place) == []


@pytest.mark.usefixtures("few")
def test_a_first_time_that_was_luck_is_not_saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lucky = iter([0.5] * (2 + tuning._ROUNDS))
    _times(monkeypatch, lambda kernel, config: next(lucky, 1.0) if config == FAST else 1.0)
    assert main([*SHAPE, "--forward", "--seconds", "60"]) == 0
    assert next(lucky, None) is None and tuned.read(place) == []


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fault", ["wrong", "unwritten", "infinite", "raises"])
def test_wrong_tiles_are_not_timed(
    fault: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of the odd call differs: of packed sequences, so that no other result is wrong."""
    honest = tuning._runner

    def broken(problem: object, kernel: str) -> tuning.Run:
        run = honest(problem, kernel)

        def call() -> tuple[torch.Tensor, ...]:
            out, *others = run()
            if problem.varlen and dict(on_trial())[kernel] == FAST:
                if fault == "raises":
                    raise RuntimeError("out of resource: shared memory\nmore")
                # Memory that held the right numbers before, if it is not poisoned.
                unwritten = torch.where(torch.empty(16).isnan(), math.nan, out[3, 1])
                out[3, 1] = {"wrong": 1.1 * out[3, 1], "unwritten": unwritten, "infinite": math.inf}[fault]
            return out, *others

        return call

    monkeypatch.setattr(tuning, "_runner", broken)
    timed = _times(monkeypatch, lambda kernel, config: 0.5 if config == FAST else 1.0)
    assert main([*SHAPE, "--forward", "--seconds", "60", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    said = {"raises": "RuntimeError: out of resource: shared memory"}.get(fault, "a row differs by ")
    assert list(row["left_out"]) == [FAST.name] and row["left_out"][FAST.name].startswith(said)
    assert ("forward", FAST) not in timed and tuned.read(place) == []


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_ctrl_c_keeps_what_is_known(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second round of dq ends it: the first one's winner is timed again and saved, as that of dkdv was before."""
    honest = tuning._built
    begun: list[str] = []

    def interrupted(task: tuning.Task, new: list[PortableTiles]) -> Iterator[tuple[PortableTiles, str]]:
        begun.append(task.kernel)
        if begun.count("dq") == 2:
            raise KeyboardInterrupt
        yield from honest(task, new)

    monkeypatch.setattr(tuning, "_built", interrupted)
    _times(monkeypatch, lambda kernel, config: 0.5 if config.num_stages == 2 and config.block_m == 16 else 1.0)
    assert main([*SHAPE, "--backward", "--seconds", "60"]) == 130
    assert [entry.kernel for entry in tuned.read(place)] == ["dkdv", "dq"]
    assert {PortableTiles.parse(entry.tiles).num_stages for entry in tuned.read(place)} == {2}
    assert "dq float32 16/16 causal" in capsys.readouterr().out


def test_time_that_is_over_begins_no_round(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = _times(monkeypatch, lambda kernel, config: 1.0)
    assert main([*SHAPE, "--seconds", "0"]) == 0
    assert timed == [] and tuned.read(place) == []


REFUSED = [
    ([], "--shape: is missing"),
    (["--shape", "1,20,2"], "--shape: is 1,20,2, must be batch,seqlen,heads,head_dim"),
    (["--shape", "1,20,3,2,16"], "--shape: has 3 heads, must be a multiple of its 2 key heads"),
    (["--shape", "1,x,2,16"], "'x' is not a whole number"),
    (["--shape", "1,20,2,600"], "head_dim is 600, at most 512 is supported"),
    (["--shape", "1,20,2,16", "--dtype", "float64"], "no float64"),
    (["--shape", "1,20,2,16", "--window", "-3"], "--window"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_tuned_is_one_line(
    arguments: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_a_file_that_is_not_to_be_used_is_refused_before_anything_is_measured(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = _times(monkeypatch, lambda kernel, config: 1.0)
    place.write_text("{")
    assert main(SHAPE) == 2 and "is not of flashtile tune" in capsys.readouterr().err
    monkeypatch.setenv("FLASHTILE_TILES", str(place / "below"))
    assert main(SHAPE) == 2 and str(place / "below") in capsys.readouterr().err
    monkeypatch.setenv("FLASHTILE_TILES", "off")
    assert main(SHAPE) == 2 and "FLASHTILE_TILES: is off" in capsys.readouterr().err
    assert timed == []
