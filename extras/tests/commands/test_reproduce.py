"""`flashtile-lab reproduce`: ours by another way, verdicts that fail when they must, the page, and the notebook."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import flashtile
from benchmarks import results
from docs.blocks import ROOT
from flashtile_lab import reproduce
from flashtile_lab.commands import main
from flashtile_lab.reproduce import _rounding, _softmax, report

ENTRIES = {entry.name: entry for _, section in report.sections().values() for entry in section}
COMPUTED = [entry for entry in ENTRIES.values() if entry.check != "left out"]
GIB, H100 = 2**30, 132 * 4096 * 1.83e9 / 1e12


def again(entry: report.Entry, **changes: str) -> report.Result:
    """An entry with something changed, computed anew."""
    return report.run.__wrapped__(dataclasses.replace(entry, **changes))


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest number with 4 bits of significand, ties to even, exponents from -6, at most 448."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-9))), -6)
    unit = 2.0 ** (exponent - 3)
    return np.clip(np.round(x / unit) * unit, -448, 448)


def _numpy_sums() -> list[float]:
    x = np.random.RandomState(42).randn(100).astype(np.float32)
    return [float(each.sum()) for each in (x, x[::-1], np.sort(x))]


def _trace() -> list[float]:
    x, found, old = np.random.RandomState(42).randn(12), [], -np.inf
    for end in (4, 8, 12):
        found += [x[:end].max(), np.exp(old - x[:end].max()), np.exp(x[:end] - x[:end].max()).sum()]
        old = x[:end].max()
    return found


def _causal_tiles() -> int:
    return sum(1 for i in range(64) for j in range(64) if j * 64 <= i * 64 + 63)


def _flash(n: int) -> float:
    """MB of FlashAttention-2 with tiles of 128: Q and O once, K and V for each block of Q, a float32 a row."""
    return (2 * n * 64 * 2 + n / 128 * 2 * n * 64 * 2 + 4 * n) / 1e6


def _naive(n: int) -> float:
    return (4 * n * 64 * 2 + 4 * n * n * 2) / 1e6


# Numbers by another way: the first ones of an entry, or all of them.
BY_HAND: dict[str, Callable[[], list[float]]] = {
    "A1": lambda: [sum(math.exp(x - 5) for x in (1, 3, 2, 5, 4, 3.5)), sum(math.exp(x - 3) for x in (1, 3, 2))],
    "C1": _trace,
    "C4": _numpy_sums,
    "C5": lambda: [math.fsum(float(x) for x in np.random.RandomState(42).randn(100).astype(np.float32))],
    "A5": lambda: [32768**2 * 4 / GIB],
    "A6": lambda: [4, 65.536, 8, 4 * GIB / (65536 + 8 * 2**20)],
    "A7": lambda: [2 * 32 * 2048**2 * 4 / 2**20, 32 * 2048 * 64 * 2 / 2**20],
    "B2": lambda: [16384**2 / 2**20],
    "B3": lambda: [1],
    "C7": lambda: [4096**2 * 4 / 2**20, 32 * 4096**2 * 4 / GIB],
    "C8": lambda: [16.777216],
    "C9": lambda: [(3 * 64 * 64 + 512 * 64 + 2 * 512 + 64**2) * 2 / 1e6],
    "C10": lambda: [(327680 * 66 + 16384) / (32768 * 66 + 16384), 4],
    "C11": lambda: [3 * 4096 * 32 * 4096 * 2 / 1e9, 2 * 4096 * 32 * 4096 * 2 / 1e9],
    "C12": lambda: [3 * 4096 * 32 * 32768 * 2 / 1e9],
    "C13": lambda: [4 * (512 * 512 + 512), 64],
    "E3": lambda: [67.108864],
    "E4": lambda: [4096**2, 128 * 128 + 128 * 64 + 256],
    "E5": lambda: [1024**2 / 24832],
    "E6": lambda: [64, 32000**2 * 2 / 1e9],
    "A9": lambda: [2 * 32768**2 * 64 * 4 / 1e9, 4 * 32768**2 * 4 / 1e9],
    "A10": lambda: [4],
    "A11": lambda: [4096 / 64],
    "B4": lambda: [_flash(16384) / _flash(2048)],
    "C14": lambda: [3 * 4096 * 768 * 4 / 1e6, 4 * 4096**2 * 4 / 1e6],
    "C15": lambda: [(2 * 4096 + 64 * 4096) * 64 * 2 / 1e6, (4096 + 2 * 64 * 4096) * 64 * 2 / 1e6, 64],
    "C16": lambda: [1, 2, 32],
    "C17": lambda: [2.039, 108 * 128 * 1.41e9 / 1e12],
    "A12": lambda: [16, 16, 16, 32, 32, 112],
    "A13": lambda: [164, 20.25],
    "C18": lambda: [math.floor(math.sqrt(192 * 1024 / 2 / 68)), 38 * 128 / 1024],
    "C20": lambda: [40.25],
    "C21": lambda: [19 / 2.039, 80e9 / 192e3],
    "B5": lambda: [4],
    "C23": lambda: [64 * 64, 64, 64],
    "C24": lambda: [_causal_tiles(), 64 * 64],
    "D1": lambda: [4, 0.5, 2.5],
    "D2": lambda: [32, 32, 16, 8, 4 * 16384**2 * 2048 / 1e12],
    "D3": lambda: [H100],
    "D4": lambda: [100 * (1 / 16) / (4 * 128 / 4096)],
    "E7": lambda: [4 * 4096**2 * 64 / (_naive(4096) * 1e6), 4 * 4096**2 * 64 / (_flash(4096) * 1e6), 2048],
    "C25": lambda: [5 / 4],
    "A15": lambda: [4 * 32 * 2048**2 * 64 / 2.1e-3 / 1e12],
    "A16": lambda: [180e12 * 12.4e-3 / (4 * 8192**2 * 128)],
    "A17": lambda: [100 * 180 / H100],
    "A18": lambda: [700 / 385, 1180 / 700],
    "B7": lambda: [100 * 225 / (108 * 2048 * 1.41e9 / 1e12), 100 * 740 / H100, 100 * 1200 / (2 * H100)],
    "C26": lambda: [124 / 3.12],
    "C27": lambda: [185 / 124],
    "C28": lambda: [102 / 3.12, 128 / 3.12, 185 / 3.12, 235 / 3.12],
    "D8": lambda: [100 * 50 / 570],
    "D9": lambda: [661 / 582],
    "D15": lambda: [197 / 180, 756 / 326],
    "D15-backward": lambda: [272 / 198, 561 / 322],
    "D16": lambda: [100 * 756 / H100],
    "A19": lambda: [1.75 * 2**8],
    "B9": lambda: [8, math.ceil(132 / 8)],
    "E9-time": lambda: [8 * 32768 * 2 * 128 * 2 / 1e6, 1e6 * 8 * 32768 * 2 * 128 * 2 / 4.8e12],
    "E11": lambda: [2 * 4096 * 128 * 2 / 1e6, 4096 * 130 * 4 / 1e6],
    "E12": lambda: [1 / (0.5 + 0.5 / 3)],
    "C34": lambda: [8 * 32],
    "F01": lambda: [64, 8 * 64],
    "F02": lambda: [512**2 * 2 / 1e6],
    "F02-traffic": lambda: [_naive(512), _naive(2048), _naive(16384), _flash(512), _flash(2048), _flash(16384)],
}
N = 8192
SQUARE, TRIANGLE = N * N, N * (N + 1) / 2


def _ring(gpu: str, backward: bool) -> list[float]:
    """Entries G1 to G4: seconds of a first causal step and seven more, of passes over memory, of the last sums."""
    full, causal, back, hbm, link = {"H800": (370, 325, 288, 3.35, 160), "A100": (225, 205, 174, 2.04, 240)}[gpu]
    a_pair = 4 * 128 * 32 / 1e12
    more = {"ring": (SQUARE, full), "zigzag": (SQUARE / 2, full), "stripe": (TRIANGLE, causal)}
    rows = N * 32 * 128 / (0.7 * hbm * 1e12)
    shares = []
    for layout, (pairs, rate) in more.items():
        ideal = [8 * N * (8 * N + 1) / 2 / 8 * a_pair / causal, 8 * N * (8 * N + 1) / 2 / 8 * 2.5 * a_pair / back]
        forward = TRIANGLE * a_pair / causal + 7 * (pairs * a_pair / rate + 38 * rows)
        keys = 0.5 if layout == "zigzag" else 1  # of dk and dv, of 8 heads each, against 32 of dq
        behind = 7 * 10 * rows * (1 + keys * 16 / 32) + 10e-6 + N * 8 * 256 * 4 / (link * 1e9)
        total = [forward, 2.5 * a_pair * (TRIANGLE + 7 * pairs) / back + behind]
        shares.append(100 * sum(ideal[: 1 + backward]) / sum(total[: 1 + backward]))
    return shares


def _magi(scheme: str, backward: bool) -> list[float]:
    """Entries G5 to G11, from 64/8 heads of 128."""
    rate, products, shard = 592e12 if backward else 632e12, 10 if backward else 4, N * 8 * 256 * 2
    passes = (10 * N * (64 + 8) if backward else 38 * N * 64) * 128 / (0.7 * 3.35e12)
    speeds = []
    for world in (8, 64):
        flops = products * 128 * 64 * world * N * (world * N + 1) / 2
        seconds, near = flops / world / rate, lambda size: 10e-6 + size / 370e9
        far = lambda size: 20e-6 + size / 50e9 if size else 0  # noqa: E731
        last = (near, far)[world > 8](2 * shard) if backward else 0
        rows = N * 256 * 2 * (64 + 8 * max(1, world // 8)) / world
        if scheme == "ring":
            seconds += (world - 1) * passes + last
        elif scheme == "usp":
            seconds += 2 * near(7 * N * 256 * 2 * (64 + 8) / 8 / 2) + (world > 8) * (7 * passes + last)
        elif scheme == "ulysses":
            seconds += 2 * max(near(7 * rows / 2), far((world - 8) * rows / 2))
        else:
            sizes = (shard, 2 * shard)[: 1 + backward]
            seconds += sum(max(near((world - world // 8) * x), far((world // 8 - 1) * x)) for x in sizes)
        speeds.append(flops / world / seconds / 1e12)
    return speeds


BY_HAND |= {
    "G1": lambda: _ring("H800", False),
    "G2": lambda: _ring("A100", False),
    "G3": lambda: _ring("H800", True),
    "G4": lambda: _ring("A100", True),
    "G5": lambda: _magi("ulysses", False),
    "G6": lambda: _magi("usp", False),
    "G7": lambda: _magi("gather", False),
    "G8": lambda: _magi("ring", False),
    "G9": lambda: _magi("ulysses", True) + _magi("usp", True),
    "G10": lambda: _magi("gather", True),
    "G11": lambda: _magi("ring", True),
}
ROWS = {"D7", *(name for name in ENTRIES if re.match(r"D1[0-3]", name))}
ERRORS = {"A20", "D17", "D18", "D19"}


@pytest.mark.long
def test_every_entry_is_good_and_none_is_unexplained() -> None:
    assert len(COMPUTED) > 90
    assert {entry.name: report.run(entry).verdict for entry in COMPUTED if not report.run(entry).good} == {}
    for entry in ENTRIES.values():
        if entry.check.split()[0] in ("differs", "left"):
            assert entry.why, entry.name
    numbers = {entry.name for entry in COMPUTED if entry.check.split()[0] not in ("below", "holds", "fails")}
    assert numbers == set(BY_HAND) | ROWS | ERRORS


@pytest.mark.parametrize("name", BY_HAND)
def test_numbers_by_another_way(name: str) -> None:
    shown, expected = report.run(ENTRIES[name]).ours.split(), BY_HAND[name]()
    for text, number in zip(shown, expected, strict=False):
        digits = len(text.partition(".")[2])
        near = 0.5 * 10.0**-digits if "." in text or number < 1000 else 0.5
        assert abs(float(text) - number) <= near * (1 + 1e-6), (text, number)


@functools.cache
def saved_rows() -> list[results.Row]:
    return results.saved()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(ROWS - {"D7"}))
def test_speeds_are_saved_rows(name: str) -> None:
    found = re.fullmatch(r"ends\('(\w+)', (\d+), (\w+)\)", ENTRIES[name].ours)
    assert found is not None
    direction, head_dim, causal = found.groups()
    shown = report.run(ENTRIES[name]).ours.split()
    for at, (provider, seqlen) in enumerate((p, n) for p in ("fa3", "fa2", "cudnn") for n in (512, 16384)):
        speeds = {
            f"{round(row.tflops, 1):.3g}"
            for row in saved_rows()
            if row.suite == direction and row.provider == provider and row.case["head_dim"] == int(head_dim)
            if str(row.case["causal"]) == causal and row.case["seqlen_q"] == seqlen and row.tflops is not None
        }
        assert shown[at] in speeds


def test_the_best_saved_row_of_fa2() -> None:
    speeds = [
        row.tflops
        for row in saved_rows()
        if (row.suite, row.provider, row.case.get("dtype")) == ("forward", "fa2", "bfloat16")
        if row.case["head_dim"] == 128
        and not row.case["causal"]
        and row.case["window"] is None
        and row.tflops is not None
    ]
    assert any(f"{100 * speed / H100:.3g}" == report.run(ENTRIES["D7"]).ours for speed in speeds)


def test_draws_are_numpys() -> None:
    made = _softmax.published_draws(7, 31).numpy()
    np.testing.assert_array_equal(made, np.random.RandomState(42).randn(7, 31))


def test_rounding_to_8_bits_and_rotation() -> None:
    x = torch.randn(256, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 5
    scale = float(x.abs().max()) / 448
    np.testing.assert_allclose(_rounding.rounded(x, (0, 1)).numpy(), e4m3(x.numpy() / scale) * scale, rtol=1e-12)
    parts = [float(part.abs().max()) / 448 for part in x.split(128)]
    by_hand = np.concatenate([e4m3(p.numpy() / s) * s for p, s in zip(x.split(128), parts, strict=True)])
    np.testing.assert_allclose(_rounding.by_block(x).numpy(), by_hand, rtol=1e-12)
    turn = _rounding.rotation(128)
    np.testing.assert_allclose((turn @ turn.T).numpy(), np.eye(128), atol=1e-14)
    np.testing.assert_allclose(turn.abs().numpy(), 128**-0.5, rtol=1e-14)


def test_errors_of_8_bits_by_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rounding, "_SEQLEN", 256)
    monkeypatch.setattr(_rounding, "_ROWS", 256)
    found = _rounding.rms_errors.__wrapped__(1)
    q, k, v = (x.numpy() for x in _rounding._outliers(0))

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        s = q @ k.T / math.sqrt(128)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        return to(p) @ v / p.sum(axis=1, keepdims=True)

    exact, halves = attention(q, k, v, lambda p: p), [x.astype(np.float16).astype(np.float64) for x in (q, k, v)]
    eighths = [e4m3(x * 448 / np.abs(x).max()) * np.abs(x).max() / 448 for x in halves]
    for name, made in {
        "tiled": attention(*halves, lambda p: p.astype(np.float16).astype(np.float64)).astype(np.float16),
        "tensor": attention(*eighths, e4m3),
    }.items():
        assert found[name] == pytest.approx(np.sqrt(((made - exact) ** 2).mean()), rel=1e-3)


@pytest.mark.one_in(100)
@pytest.mark.parametrize("entry", COMPUTED, ids=lambda entry: entry.name)
def test_a_verdict_can_fail(entry: report.Entry) -> None:
    kind = entry.check.split()[0]
    published = entry.published.split()
    match kind:
        case "equal" | "within":
            worse = {"published": " ".join([str(3 * float(published[0]) + 1), *published[1:]])}
        case "implies":
            worse = {"published": " ".join([str(3 * float(published[0])), *published[1:]])}
        case "differs" | "ours":
            first, *rest = entry.right.split()
            worse = {"right": " ".join([str(3 * float(first) + 1), *rest])}
        case "below":
            worse = {"check": "below 0"}
        case _:
            worse = {"check": "fails" if kind == "holds" else "holds"}
    result = again(entry, **worse)
    assert not result.good and result.verdict.startswith("FAILS")
    if kind == "differs":
        assert not again(entry, published=entry.right).good


def _without_correction(scores: torch.Tensor, v: torch.Tensor, block: int) -> list[Any]:
    steps = list(zip(scores.split(block, -1), v.split(block), strict=True))
    top = scores.amax(-1)
    probs = [torch.exp(tile - tile.amax(-1, keepdim=True)) for tile, _ in steps]
    return [(top, top * 0, sum(p.sum(-1) for p in probs), sum(p @ x for p, (_, x) in zip(probs, steps, strict=True)))]


def test_a_wrong_softmax_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_softmax, "online", _without_correction)
    monkeypatch.setitem(report._NAMES, "online", _without_correction)
    assert [name for name in ("A2", "A3", "B1", "B6", "C3") if again(ENTRIES[name]).good] == []


def test_a_wrong_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashtile.attention

    def wrong(*args: Any, **options: Any) -> Any:
        made = right(*args, **options)
        return (made[0] * (1 + 1e-9), *made[1:]) if isinstance(made, tuple) else made * (1 + 1e-9)

    monkeypatch.setattr(flashtile, "attention", wrong)
    monkeypatch.setitem(report._NAMES, "attention", wrong)
    assert [name for name in ("E1", "C29", "D22", "E13") if again(ENTRIES[name]).good] == []


def test_a_wrong_merge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Any:
        return (a + b) / 2, torch.logaddexp(a_lse, b_lse)

    monkeypatch.setattr(flashtile, "merge_states", mean)
    monkeypatch.setitem(report._NAMES, "merge", mean)
    assert [name for name in ("C2", "E9", "E10") if again(ENTRIES[name]).good] == []


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["reproduce", "tiles"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("C20", "40.25", "differs: 24 are Q, K and V alone"))
    assert main(["reproduce", "nothing"]) == 2
    assert "'nothing' is neither an entry" in capsys.readouterr().err
    wrong = dataclasses.replace(ENTRIES["A5"], published="4 4 9")
    monkeypatch.setattr(report, "sections", lambda: {"memory": ("Memory", (wrong,))})
    assert main(["reproduce"]) == 1
    assert "FAILS: 11.1% apart" in capsys.readouterr().out


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--markdown"]) == 0
    page = (ROOT / "docs" / "reproduced.md").read_text(encoding="utf-8")
    assert page == f"<!-- begin reproduced -->\n{capsys.readouterr().out}<!-- end reproduced -->\n"
    assert all(f"\n| {name} | " in page for name in ENTRIES) and "FAILS" not in page


def test_a_device_is_measured() -> None:
    found = re.fullmatch(
        r"Measured now: copies at (\S+) TB/s; .* 64 tokens.* at (\S+) TFLOPS.* has (\S+)\.",
        reproduce.live("cpu", 64, 1),
    )
    assert found is not None and 0 < float(found[1]) < 10 and 0 < float(found[2]) < 100 and float(found[3]) > 700


def _cells() -> list[str]:
    cells = json.loads((ROOT / "docs" / "derivation.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 20
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs() -> None:
    names: dict[str, Any] = {}
    for cell in _cells():
        assert "assert" in cell
        exec(cell, names)
    assert {"tiled", "tiled_backward", "np"} <= set(names) and "torch" not in names


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("np.exp(m_b - m) * l_b", "l_b"),
        ("correction * o + p @ v", "o + p @ v"),
        ("correction[:, None] * o", "o"),
        ("m + np.log(l)", "m + l"),
        ("dS = P * (dP - D[:, None])", "dS = P * dP"),
        ("dQ[rows] += dS", "dQ[rows] = dS"),
        ("V[: row + 1], 1", "V[1 : row + 2], 1"),
    ],
)
def test_a_mistake_in_the_notebook_is_seen(right: str, wrong: str) -> None:
    code = "\n".join(_cells())
    assert code.count(right) == 1
    with pytest.raises((AssertionError, ValueError)):
        exec(code.replace(right, wrong), {})
