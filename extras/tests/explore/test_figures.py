"""The numbers of the figures in Chromium, beside those of flashtile_lab.analysis, flashtile.reference and PyTorch."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
from extras.tests.explore.moving import evaluated, put
from flashtile import reference
from flashtile.backends.gpu.decode import config as decode
from flashtile.call.arguments import band_of
from flashtile.call.problem import Tensors, described
from flashtile.cli import main
from flashtile.core.masks import Band
from flashtile.core.states import merge
from flashtile_lab import analysis
from flashtile_lab.analysis import AttentionShape, Blocks, LoopOrder
from flashtile_lab.analysis.decode import DecodeShape, decode_cost, decode_splits
from tests.backends.decode.rule import cut as cut_by_rule
from tests.browser import Tab
from tests.problems import banded_problem

pytestmark = pytest.mark.slow

EPS = {"float64": 2.0**-52, "float32": 2.0**-23}


def test_the_models_are_those_of_analysis(opened: Tab) -> None:
    names = ("n", "m", "d", "problems", "bytes", "causal", "q", "k")
    sizes = ((1, 100, 4096, 16384), (1, 300, 4096), (64, 128), (1, 24), (2, 4), (False, True), (64, 192), (128,))
    grid = [dict(zip(names, values, strict=True)) for values in itertools.product(*sizes)]
    script = """(grid) => grid.map((s) => { const m = explore.model; return {
      kept: m.keptScores(s), flops: m.attentionFlops(s), standard: m.standardTraffic(s),
      kv: m.tiledTraffic(s, s.q, s.k, 'kv-outside'), qo: m.tiledTraffic(s, s.q, s.k, 'q-outside'),
      once: m.compulsoryTraffic(s), tile: m.tileMemory(s.q, s.k, s.d, s.bytes),
      fitting: m.fittingTile(65536, s.d, s.bytes), memory: m.attentionMemory(s, s.q, s.k),
      cost: m.exponentialCost(s, 'H100'), roof: m.roofline(1e12, 1e9 * s.d, 'H200') }; })"""
    found = evaluated(opened, script, grid)
    for s, got in zip(grid, found, strict=True):
        dtype = {2: "bfloat16", 4: "float32"}[s["bytes"]]
        shape = AttentionShape(s["n"], s["m"], s["d"], s["problems"], 1, dtype, bool(s["causal"]))
        blocks = Blocks(s["q"], s["k"])
        flops, standard = analysis.attention_flops(shape), analysis.standard_traffic(shape)
        assert got["kept"] == shape.kept_scores
        assert got["flops"] == {
            "forward": flops.forward_flops,
            "backward": flops.backward_flops,
            "exps": flops.forward_exps,
        }
        assert got["standard"]["own"] == standard.own_bytes and got["standard"]["scores"] == standard.scores_probs_bytes
        for name, order in (("kv", LoopOrder.KV_OUTSIDE), ("qo", LoopOrder.Q_OUTSIDE)):
            tiled = analysis.tiled_traffic(shape, blocks, order)
            assert got[name] == {
                "inputs": tiled.inputs_read_bytes, "stateRead": tiled.state_read_bytes, "write": tiled.write_bytes,
                "total": tiled.total_bytes, "rescales": tiled.rescales,
            }, (s, name)  # fmt: skip
        assert got["once"] == analysis.compulsory_traffic_bytes(shape)
        tile = analysis.tile_memory(blocks, s["d"], dtype)
        assert got["tile"]["total"] == tile.total_bytes and got["tile"]["acc"] == tile.acc_bytes
        best = analysis.fitting_tiles(65536, s["d"], dtype)[0].blocks
        assert got["fitting"] == {"blockQ": best.block_q, "blockK": best.block_k}
        memory = analysis.attention_memory(shape, blocks)
        assert got["memory"] == {
            "standard": memory.standard_scores_bytes, "out": memory.tiled_out_bytes, "lse": memory.tiled_lse_bytes,
            "tiles": memory.tiled_tiles_bytes,
        }  # fmt: skip
        if s["bytes"] == 2:
            cost = analysis.exponential_cost(shape, analysis.H100)
            assert got["cost"] == {"exp": cost.exp_seconds, "product": cost.product_seconds}
        point = analysis.roofline_point(1e12, 1e9 * s["d"], analysis.H200)
        assert got["roof"] == {
            "intensity": point.intensity_flops_per_byte, "attainable": point.attainable_flops_per_s,
            "time": point.time_s, "bound": point.bound,
        }  # fmt: skip


def shown(x: float, unit: str) -> str:
    """As the page writes a quantity."""
    steps = 0
    while x >= 1000:
        x, steps = x / 1000, steps + 1
    while x < 1:
        x, steps = x * 1000, steps - 1
    digits = 0 if x >= 100 else 1 if x >= 10 else 2
    return f"{x:.{digits}f} {('', 'k', 'M', 'G', 'T')[steps] if steps >= 0 else 'munp'[-steps - 1]}{unit}"


@pytest.mark.parametrize(("log", "d", "causal"), [(9, 64, False), (13, 128, True), (17, 256, False)])
def test_times_and_bytes_are_shown_as_python_has_them(opened: Tab, log: int, d: int, causal: bool) -> None:
    n, device = 2**log, analysis.H200
    put(opened, "time", device="H200", log=log, d=d, causal=causal, heads=8, batch=2, blockQ=192)
    shape = AttentionShape(n, n, d, 8, 2, "bfloat16", causal)
    whole = AttentionShape(n, n, d, 8, 2, "bfloat16")
    cost, full = analysis.exponential_cost(shape, device), analysis.exponential_cost(whole, device)
    moved = (
        analysis.standard_traffic(whole).own_bytes,
        analysis.tiled_traffic(shape, Blocks(192, 128), LoopOrder.Q_OUTSIDE).total_bytes,
        analysis.compulsory_traffic_bytes(shape),
    )
    standard, tiled, once = (each / device.hbm_bytes_per_s for each in moved)
    times = [full.product_seconds, full.exp_seconds, standard, cost.product_seconds, cost.exp_seconds, tiled, once]
    texts = opened.run("[...document.querySelectorAll('#time .plot svg text')].map(each => each.textContent)")
    assert texts[1::2] == [shown(each, "s") for each in times]

    put(opened, "traffic", device="H200", log=log, d=d, causal=causal, blockQ=64, blockK=32)
    one = AttentionShape(n, n, d, 1, 1, "bfloat16", causal)
    orders = [analysis.tiled_traffic(one, Blocks(64, 32), order).total_bytes for order in LoopOrder]
    total = [analysis.standard_traffic(one).own_bytes, *orders, analysis.compulsory_traffic_bytes(one)]
    points = [analysis.roofline_point(analysis.attention_flops(one).forward_flops, each, device) for each in total]
    cells = opened.run("[...document.querySelectorAll('#traffic .plot td')].map(each => each.textContent)")
    assert cells[1::5] == [shown(each, "B") for each in total]
    assert cells[2::5] == [f"{point.intensity_flops_per_byte:.1f}" for point in points]
    assert cells[3::5] == [point.bound for point in points]
    assert cells[4::5] == [shown(point.time_s, "s") for point in points]

    kept = put(opened, "backward", device="H200", log=log, d=d, causal=causal, heads=8)
    layer = AttentionShape(n, n, d, 8, 1, "bfloat16", causal)
    memory, flops = analysis.attention_memory(layer, Blocks(128, 128)), analysis.attention_flops(layer)
    assert (kept["lse"], kept["probs"]) == (memory.tiled_lse_bytes, memory.standard_scores_bytes)
    assert (kept["forward"], kept["recomputed"]) == (flops.forward_flops, flops.backward_flops)
    assert kept["stored"] == flops.backward_flops * 4 // 5
    # What the figure's sentence says, on every device and at every width.
    for name, width in itertools.product(analysis.DEVICES, (64, 128, 256)):
        times = put(opened, "backward", device=name, d=width)
        assert times["productTime"] < times["wayTime"]
        moved_bytes = 2 * 8 * n * n * 2
        assert times["wayTime"] == pytest.approx(moved_bytes / analysis.DEVICES[name].hbm_bytes_per_s, rel=1e-12)
    put(opened, "backward", device="H200", d=d)
    bars = opened.run("[...document.querySelectorAll('#backward .plot svg text')].map(each => each.textContent)")
    assert bars[5] == shown(memory.tiled_lse_bytes, "B") and bars[11] == shown(flops.backward_flops, "FLOP")


def dense_mask(kind: str, n: int, numbers: dict[str, Any]) -> torch.Tensor:
    """The mask of figure 2 by definition."""
    causal = Band(None, 0).dense(n, n)
    if kind == "documents":
        size = max(1, n // min(n, numbers["documents"]))
        document = (torch.arange(n) // size).clamp(max=min(n, numbers["documents"]) - 1)
        return causal & (document[:, None] == document[None, :])
    if kind == "prefix":
        return causal | (torch.arange(n) < n * numbers["prefix"] // 100)[None, :]
    left = max(1, n // numbers["part"])
    return {"full": Band(), "causal": Band(None, 0), "window": Band(left, 0)}[kind].dense(n, n)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents", "prefix"])
@pytest.mark.parametrize("log", [2, 5, 8, 11])
def test_masks_are_counted_as_they_are(opened: Tab, kind: str, log: int) -> None:
    n, numbers = 2**log, {"part": 5, "documents": 3, "prefix": 35}
    got = put(opened, "matrix", log=log, kind=kind, **numbers)
    mask, block = dense_mask(kind, n, numbers), min(128, n)
    tiles = mask.unfold(0, block, block).unfold(1, block, block).flatten(2)
    some, every = tiles.any(-1), tiles.all(-1)
    assert got["kept"] == int(mask.sum())
    assert (got["full"], got["cut"]) == (int(every.sum()), int((some & ~every).sum()))
    assert got["skipped"] == int((~some).sum()) and got["tiles"] == some.numel()
    colours = {True: "var(--tiled)", False: "var(--skip)"}
    if n <= 32:
        fills = opened.run("[...document.querySelectorAll('#matrix svg rect')].map(each => each.getAttribute('fill'))")
        assert fills == [colours[bool(each)] for each in mask.flatten()]
    room = analysis.H100.hbm_capacity_bytes
    assert room is not None and got["fits"] == (n * n * 2 * 32 <= room)


def exact_attention(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Out, lse and gradients of a figure's inputs by ``flashtile.reference``."""
    q, k, v, dout = (torch.tensor(inputs[name], dtype=torch.float64)[None, :, None] for name in ("q", "k", "v", "dout"))
    tensors = Tensors(*(x.requires_grad_() for x in (q, k, v)))
    problem = banded_problem(tensors, band_of(False, None), needs_grad=True)
    out, lse = reference.attention(problem, tensors)
    grads = torch.autograd.grad(out, [q, k, v], dout)
    return out[0, :, 0].detach(), lse[0, 0].detach(), [g[0, :, 0] for g in grads]


@pytest.mark.parametrize("order", ["q-outside", "kv-outside"])
@pytest.mark.parametrize(("n", "block_q", "block_k"), [(4, 1, 1), (9, 3, 3), (16, 5, 3), (13, 8, 2)])
def test_the_tile_loop_ends_at_attention(opened: Tab, order: str, n: int, block_q: int, block_k: int) -> None:
    sizes = {"order": order, "n": n, "blockQ": block_q, "blockK": block_k}
    steps = math.ceil(n / block_q) * math.ceil(n / block_k)
    for row in (0, n - 1):
        got = put(opened, "tiles", direction="forward", **sizes, row=row, step=steps)
        out, lse, grads = exact_attention(got["inputs"])
        assert got["step"] == steps and got["complete"]
        # Sums of up to n terms in another order: a rounding each.
        bound = 2 * n * EPS["float64"]
        assert torch.tensor(got["out"], dtype=torch.float64).sub(out[row]).abs().max() <= bound * out.abs().max()
        assert abs(got["lse"] - float(lse[row])) <= bound * max(1, abs(float(lse[row])))
    got = put(opened, "tiles", direction="backward", step=steps)
    for name, exact in zip(("dq", "dk", "dv"), grads, strict=True):
        error = torch.tensor(got[name], dtype=torch.float64).sub(exact).abs().max()
        assert error <= 8 * n * EPS["float64"] * exact.abs().max(), name
    lit = "document.querySelectorAll('#tiles svg rect[fill=\"var(--lit)\"]').length"
    put(opened, "tiles", direction="forward", step=1)
    assert opened.run(lit) == block_q * block_k + block_q + block_k


SCORES = ("1 3 2 5 4 3.5 -2 6.25", "0.5", "-700 800 -3 2", "9 8 7 6 5 4 3 2 1 0 -1", "1e-3 2e-3 -1e4 3")


def softmax_row(scores: list[float], dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """Output and lse of a row whose values are 1, 2, 3 and so on."""
    s = torch.tensor(scores, dtype=torch.float64).to(dtype)
    values = torch.arange(1, len(scores) + 1, dtype=dtype)
    weights = torch.exp(s - s.max())
    return float((weights * values).sum() / weights.sum()), float(s.max() + weights.sum().log())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("text", SCORES)
def test_the_online_softmax_is_the_softmax(opened: Tab, text: str, dtype: str) -> None:
    scores = [float(each) for each in torch.tensor([float(x) for x in text.split()], dtype=getattr(torch, dtype))]
    out, lse = softmax_row(scores)
    plain_out, plain_lse = softmax_row(scores, getattr(torch, dtype))
    floor = 4 * EPS[dtype]

    def near(found: dict[str, Any]) -> None:
        """At most twice plain PyTorch's error in this dtype, and a few roundings."""
        assert abs(found["out"][0] - out) <= 2 * abs(plain_out - out) + floor * len(scores) * abs(out)
        assert abs(found["lse"] - lse) <= 2 * abs(plain_lse - lse) + floor * max(1, abs(lse))

    for block in (1, 2, 3, 8):
        got = put(opened, "online", view="stream", text=text, dtype=dtype, block=block, step=64)
        assert got["seen"] == len(scores)
        near(got["merged"])
        near(got["whole"])
    for cut in range(len(scores) + 1):
        got = put(opened, "online", view="halves", cut=cut)
        near(got["merged"])
    for splits in (1, 3, 32):
        got = put(opened, "online", view="splits", splits=splits)
        assert got["parts"] == min(splits, len(scores))
        near(got["merged"])
    got = put(opened, "online", view="ring", step=4)
    assert [sorted(end["order"]) for end in got["ends"]] == [[0, 1, 2, 3]] * 4
    assert len({tuple(end["order"]) for end in got["ends"]}) == 4
    for device, end in enumerate(got["ends"]):
        row = [float(torch.tensor(s * (1 - device / 4), dtype=getattr(torch, dtype))) for s in scores]
        exact, plain = softmax_row(row)[0], softmax_row(row, getattr(torch, dtype))[0]
        assert abs(end["out"] - exact) <= 2 * abs(plain - exact) + 2 * floor * len(scores) * abs(exact)


def test_equal_to_the_last_digit_shown(opened: Tab) -> None:
    """In float64 the first score rows show the same digits for both ways, in every block size and cut."""
    rows = "[...document.querySelectorAll('#online .plot table:last-of-type')].at(-1).querySelectorAll('tbody tr')"
    texts = f"[...{rows}].slice(0, 2).map(row => [...row.cells].slice(1).map(cell => cell.textContent))"
    for block in range(1, 9):
        put(opened, "online", view="stream", text=SCORES[0], dtype="float64", block=block, step=64)
        blocks, whole = opened.run(texts)
        assert [float(x) for x in blocks] == pytest.approx([float(x) for x in whole], rel=2e-15)
    merged = [torch.tensor(x, dtype=torch.float64) for x in ([[1.0]], [0.0], [[3.0]], [2.0])]
    out, lse = merge(*merged)
    made = "(a, b) => { const m = explore.attention.merge(a, b); return explore.attention.finish(m); }"
    got = evaluated(opened, made, {"max": 0, "sum": 1, "acc": [1]}, {"max": 2, "sum": 1, "acc": [3]})
    assert got["out"][0] == pytest.approx(float(out), rel=1e-15) and got["lse"] == pytest.approx(float(lse), rel=1e-15)


def test_a_decode_step_needs_splits(opened: Tab) -> None:
    got = put(opened, "online", view="splits", headsKv=8, group=1, splits=17, log=15, device="H200")["decode"]
    assert (got["sms"], got["filling"], got["programs"], got["busy"]) == (132, 17, 136, 1)
    assert got["read"] == 2 * 8 * 2**15 * 128 * 2
    assert put(opened, "online", splits=1)["decode"]["busy"] == 8 / 132


@pytest.mark.parametrize("device", analysis.DEVICES)
def test_a_decode_step_costs_what_analysis_says(opened: Tab, device: str) -> None:
    config = decode.choose(described(device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, head_dim=128))
    blocks, record = Blocks(config.block_m, config.block_n), analysis.DEVICES[device]
    for log, heads, group in itertools.product((9, 15, 20), (1, 8, 64), (1, 4, 16)):
        values = {"log": log, "headsKv": heads, "group": group, "device": device}
        shape = DecodeShape(2**log, heads * group, heads, 128)
        cost, best = decode_cost(shape, record), decode_splits(shape, record, blocks)
        got = put(opened, "online", view="splits", **values, splits=min(64, best.splits))
        splits, chunk = cut_by_rule(config.splitting, 2**log, group, 1, heads, config.block_n)
        assert got["rule"] == {"splits": splits, "chunk": chunk}
        made = got["decode"]
        assert (made["read"], made["best"]) == (cost.kv_bytes, best.splits)
        assert made["least"] == pytest.approx(cost.roofline.time_s, rel=1e-12)
        assert made["unsplit"] == pytest.approx(best.unsplit_s, rel=1e-12)
        assert dict(map(tuple, made["curve"]))[best.splits] == pytest.approx(best.split_s, rel=1e-12)
        cells = opened.run("[...document.querySelectorAll('#online table:last-of-type')].at(-1).innerText")
        assert shown(made["unsplit"], "s") in cells and shown(made["time"], "s") in cells


def test_e4m3_is_that_of_torch(opened: Tab) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()].unique()
    middles = (codes[1:] + codes[:-1]) / 2
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(3000, generator=draw, dtype=torch.float64) * 2.0 ** torch.randint(
        -12, 9, (3000,), generator=draw
    )
    x = torch.cat([codes, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), drawn.clamp(-448, 448)])
    exact = x.float().to(torch.float8_e4m3fn).double()
    # What float32 rounds is no longer a question of e4m3.
    x = torch.where(x.float().double() == x, x, x.float().double())
    got = torch.tensor(evaluated(opened, "(x) => x.map(explore.quantise.e4m3)", x.tolist()), dtype=torch.float64)
    assert torch.equal(got, exact)
    assert evaluated(opened, "(x) => x.map(explore.quantise.e4m3)", [1e9, -449]) == [448, -448]


def test_the_rotation_is_hadamards(opened: Tab) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    got = put(opened, "fp8", scheme="tensor", outlier=40, share=1, size=10)
    signs = torch.tensor(got["signs"], dtype=torch.float64)
    q = torch.tensor(got["inputs"]["q"], dtype=torch.float64)
    turned = evaluated(
        opened, "(q, s) => q.map(row => explore.quantise.rotate(row, s))", got["inputs"]["q"], got["signs"]
    )
    exact = (q * signs) @ matrix / 8
    assert torch.tensor(turned, dtype=torch.float64).sub(exact).abs().max() < 64 * EPS["float64"] * q.abs().max()
    assert got["score"] == pytest.approx(got["rotatedScore"], rel=1e-12)
    assert set(got["signs"]) == {-1, 1}


@pytest.mark.parametrize(("outlier", "share", "size"), [(0, 0, 1), (12, 2, 10), (55, 0.5, 30)])
def test_the_errors_of_fp8_are_those_of_torch(opened: Tab, outlier: float, share: float, size: float) -> None:
    got = put(opened, "fp8", scheme="tensor", outlier=outlier, share=share, size=size)
    q, k, v = (torch.tensor(got["inputs"][name], dtype=torch.float64) for name in "qkv")
    assert q[5, 20] == outlier
    signs = got["signs"]
    turn = "(x, s) => x.map(row => explore.quantise.rotate(row, s))"
    turned = [torch.tensor(evaluated(opened, turn, x.tolist(), signs), dtype=torch.float64) for x in (q, k)]

    def rounded(x: torch.Tensor, rows: int) -> torch.Tensor:
        parts = []
        for part in x.split(rows):
            scale = part.abs().max() / 448
            parts.append((part / scale).to(torch.float8_e4m3fn).double() * scale)
        return torch.cat(parts)

    def attend(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.T / 8
        return scores, scores.softmax(-1) @ v

    scores, out = attend(q, k)
    for name, pair, rows in (
        ("tensor", (q, k), 128),
        ("block", (q, k), 32),
        ("rotated", turned, 128),
        ("both", turned, 32),
    ):
        made = attend(*(rounded(x, rows) for x in pair))
        errors = got["errors"][name]
        for key, mine, exact in (("scores", made[0], scores), ("out", made[1], out)):
            relative = float((mine - exact).norm() / exact.norm())
            assert errors[key] == pytest.approx(relative, rel=1e-6), (name, key)
        assert errors["worst"] == pytest.approx(float((made[0] - scores).abs().max()), rel=1e-6)
    if outlier == 12:
        # What the figure's sentence says, at its first values.
        assert got["errors"]["rotated"]["worst"] < 0.7 * got["errors"]["tensor"]["worst"]
        assert got["errors"]["rotated"]["out"] < 0.8 * got["errors"]["tensor"]["out"]
        assert abs(got["errors"]["block"]["out"] / got["errors"]["tensor"]["out"] - 1) < 0.1


def test_an_outlier_can_be_dragged(opened: Tab) -> None:
    put(opened, "fp8", outlier=40)
    opened.run("document.querySelector('#fp8 .grip').scrollIntoView({ block: 'center' })")
    x, y = opened.run(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector('#fp8 .grip').getBoundingClientRect())"
    )
    mouse = opened.page.mouse
    mouse.move(x, y)
    mouse.down()
    mouse.move(x, y + 40)
    mouse.up()
    dragged = opened.run("explore.figures.fp8.state.outlier")
    assert 0 < dragged < 40
    assert opened.run("explore.numbers.fp8.inputs.q[5][20]") == dragged
    assert float(opened.run("document.querySelector('#fp8 [name=outlier]').value")) == dragged


REPLAYS = """() => {
  const made = [], { RATES, play } = explore.replay;
  for (const [key, run] of Object.entries(explore.data.timeline.runs))
    for (const options of [{}, { eager: true }, { merged: true }])
      for (const rates of [RATES, { ...RATES, bytes: 4 }, { ...RATES, latency: 0 }])
        made.push({ key, options, rates, ...play(run, rates, options), barriers: run.barriers });
  return made;
}"""


def test_replays_keep_to_the_recording(opened: Tab) -> None:
    """Nobody passes a barrier before its phase is complete, and an engine does one thing at a time."""
    made = evaluated(opened, REPLAYS)
    assert len(made) == 27
    for replay in made:
        events, rates = replay["events"], replay["rates"]
        for e in events:
            assert e["end"] >= e["start"] >= 0
            if e["op"] == "wait" and e["b"]:
                assert e["end"] >= max(events[i]["end"] for i in replay["phases"][e["a"]][e["b"] - 1])
        for op, rate in (("product", rates["flops"]), ("exp", rates["exps"])):
            busy = sorted((e["busyFrom"], e["busyFrom"] + e["a"] / rate) for e in events if e["op"] == op)
            assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(busy))
            assert sum(b - a for a, b in busy) == pytest.approx(sum(e["a"] for e in events if e["op"] == op) / rate)
        for role in {e["role"] for e in events}:
            starts = [e["start"] for e in events if e["role"] == role]
            assert starts == sorted(starts)
        total = sum(e["a"] for e in events if e["op"] == "product")
        assert replay["tensor"] == pytest.approx(total / rates["flops"] / replay["cycles"]) and replay["tensor"] <= 1
    # Without what hides latency there is less of it hidden, at the rates that the page starts with.
    cycles = opened.run("explore.numbers.timeline.cycles")
    assert cycles["oneStage"] > 1.05 * cycles["chosen"] and cycles["merged"] > 1.05 * cycles["chosen"]
    assert cycles["eager"] > cycles["chosen"]


def test_the_line_under_the_cursor_is_the_kernels(opened: Tab) -> None:
    folder = Path(flashtile.__file__).parent / "backends"
    names = set()
    for axis, step in itertools.product(("cycles", "turns"), range(0, 485, 37)):
        code = put(opened, "timeline", variant="chosen", axis=axis, step=step)["code"]
        lines = (folder / code["file"]).read_text(encoding="utf-8").splitlines()
        assert lines[code["line"] - 1].strip() == code["text"]
        lit = opened.run("document.querySelector('#timeline .code-line.here').textContent")
        assert lit.split(None, 1) == [str(code["line"]), code["text"]]
        names.add(code["name"])
    assert {"producer", "consumer"} <= names


def test_the_ladder_shows_the_rows(opened: Tab) -> None:
    cells = opened.run("explore.data.ladder.cells")
    peak = analysis.H200.peak_flops_per_s / 1e12
    for direction, d, causal in {tuple(cell[:3]) for cell in cells}:
        for unit in ("tflops", "share"):
            got = put(opened, "ladder", direction=direction, d=d, causal=causal, unit=unit)
            wanted = [[cell[3], cell[5]] for cell in cells if tuple(cell[:3]) == (direction, d, causal)]
            assert got["rows"] == wanted and got["peak"] == pytest.approx(peak)
            first = opened.run("document.querySelector('#ladder tbody tr').cells[1].textContent")
            speed = wanted[0][1]["flashtile-hopper"]
            assert float(first.rstrip("%")) == pytest.approx(
                speed if unit == "tflops" else 100 * speed / peak, abs=0.51
            )
    # Shares of published figures that their papers do not state.
    shares = opened.run("[...document.querySelectorAll('#ladder table:last-of-type')].at(-1).innerText")
    assert all(each in shares for each in ("58.8%", "57.6%", "66.8%", "60.6%", "25-40%", "75%"))


def test_the_form_says_what_explain_says(opened: Tab, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that the page shows prints the page's lines, for calls drawn at random."""
    draw = random.Random(0)
    form = opened.run("explore.data.explain.form")
    flags = [
        "grad",
        "grouped",
        "softcap",
        "alibi",
        "attn_mask",
        "attn_bias",
        "sinks",
        "dropout",
        "varlen",
        "deterministic",
    ]
    chosen = set()
    for _ in range(250):
        values = {name: draw.choice(each) for name, each in form.items()}
        values |= {name: draw.random() < 0.25 for name in flags}
        got = put(opened, "explain", **values)
        code = main(got["command"].split()[1:])
        out, error = capsys.readouterr()
        if code:
            assert code == 2 and error.startswith("flashtile: no backend supports this"), (got, error)
            direction = error.split("supports this ")[1].split(":")[0]
            assert f"no backend supports this {direction}" in got["lines"]
            continue
        printed = out.splitlines()[1:]
        if values["device"] == "cpu":
            printed = [line.replace(", cpu comes first", ", but cpu was taken") for line in printed]
        assert printed == got["lines"], got["command"]
        chosen |= {line.split(": ")[1] for line in printed if not line.startswith(" ")}
    assert chosen == {"hopper", "portable", "cpu"}
