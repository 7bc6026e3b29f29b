"""The recipes of docs/design.md, followed: what they name is all that must change."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# File -> (what stands there, what is put before it), in the order of the recipe.
Recipe = dict[str, list[tuple[str, str]]]
# A divisor of the scores.
ARGUMENT: Recipe = {
    "call/arguments.py": [
        (
            "    # No keywords: what score_mod",
            '    temperature: Annotated[float, Argument("Divisor.", check=finite)] = 1.0\n',
        ),
        ("\n\ndef table(", "    temperature: Any = 1.0\n"),
    ],
    "api/keywords.py": [("\n\nclass PackedKeywords(", "    temperature: float\n")],
    "api/attention.py": [
        ("    **_unknown: Any,\n", "    temperature: float = 1.0,\n"),
        (")\n    if not (precision is None", ", temperature"),
        (")\n    longest = ", ", temperature"),
        (" and return_lse is False\n", " and temperature == 1.0"),
        (" and not _is_compiling():", " and temperature == 1.0"),
    ],
    "call/problem.py": [
        (" if o.softmax_scale is None else o.softmax_scale,", " / o.temperature"),
    ],
}
CALL = """
import torch
import flashtile

assert flashtile.__file__.startswith({place!r}), flashtile.__file__
q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))
for _ in range(2):
    for temperature in (1.0, 2.0):
        got = flashtile.attention(q, k, v, causal=True, temperature=temperature)
        want = flashtile.attention(q, k, v, causal=True, softmax_scale=16**-0.5 / temperature)
        assert torch.equal(got, want), temperature
        grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want))
        assert all(map(torch.equal, *grads)), temperature
bounds = torch.tensor([0, 10, 40], dtype=torch.int32)
packed = [x[0] for x in (q, k, v)]
got = flashtile.attention_varlen(*packed, bounds, bounds, 30, 30, temperature=4.0)
assert torch.equal(got, flashtile.attention_varlen(*packed, bounds, bounds, 30, 30, softmax_scale=0.0625))
try:
    flashtile.attention(q, k, v, temperature="warm")
except flashtile.InvalidInputError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("no check")
"""


# The square of a score, times a number, is added between the softcap and ALiBi.
MOD: Recipe = {
    "call/arguments.py": [
        ("    # No keywords: what score_mod", '    bend: Annotated[float, Argument("Bend.", check=finite)] = 0.0\n'),
        ("\n\ndef table(", "    bend: Any = 0.0\n"),
    ],
    "api/keywords.py": [("\n\nclass PackedKeywords(", "    bend: float\n")],
    "api/attention.py": [
        ("    **_unknown: Any,\n", "    bend: float = 0.0,\n"),
        (")\n    if not (precision is None", ", bend"),
        (")\n    longest = ", ", bend"),
        (" and return_lse is False\n", " and bend == 0.0"),
        (" and not _is_compiling():", " and bend == 0.0"),
    ],
    "call/problem.py": [
        ("    alibi: bool = False\n", "    bend: float = 0.0\n"),
        ("alibi=t.alibi_slopes is not None, bias_dtype", "bend=o.bend, "),
    ],
    "call/backend.py": [('    Feature("alibi"', '    Feature("bend", "bend", lambda p: p.bend != 0),\n')],
    "reference.py": [
        ("    if t.alibi_slopes is not None:  # rule 3\n", "    scores = scores + p.bend * scores * scores\n"),
    ],
    "backends/cpu/paths.py": [("problem.softcap == 0 and", "problem.bend == 0 and ")],
    "backends/cpu/tiles.py": [
        (
            "    if problem.large_scores and seq.slopes",
            "    slope, final = 1 + 2 * problem.bend * final, final + problem.bend * final * final\n"
            "    cap_slope = slope if cap_slope is None else cap_slope * slope\n",
        ),
    ],
    "backends/cpu/tangents.py": [
        (
            "    if seq.slopes is not None:\n",
            "    tangent = None if tangent is None else tangent * (1 + 2 * p.bend * scores)\n"
            "    scores = scores + p.bend * scores * scores\n",
        ),
    ],
    "backends/cpu/__init__.py": [('    "alibi", "chunk", "mask",', '    "bend",\n')],
    "backends/gpu/device/mods.py": [
        (
            "@triton.jit\ndef quick_softcap(",
            "@triton.jit\ndef bend(scores, factor, at):\n    return scores + factor * scores * scores\n\n\n"
            "@triton.jit\ndef bend_linear(scores, factor, at):\n"
            "    return bend(scores, factor, at), 1.0 + 2.0 * factor * scores\n\n\n",
        ),
        (
            "    if count(mods.MASKS) == 1:\n",
            "    if NUM == 5:\n        scores = (\n"
            + "".join(f"            _of_head(mods.scores[{n}], at),\n" for n in range(5))
            + "        )\n",
        ),
    ],
    "backends/portable/records.py": [
        (
            "    transforms, names = named(score_mod=",
            "    bend = Mod(mods.bend, mods.bend_linear, None, p.bend) if p.bend else None\n",
        ),
        (" alibi=alibi, bias=bias)", " bend=bend,"),
    ],
    "backends/portable/kernels.py": [('    "alibi", "chunk", "mask",', '    "bend",\n')],
}
BENT = """
import torch
from torch.autograd import forward_ad

import flashtile
from tests.interpreter import without_needless_work

assert flashtile.__file__.startswith({place!r}), flashtile.__file__
quick = without_needless_work()
quick.__enter__()
generator = torch.Generator().manual_seed(0)
made = [torch.randn(1, 40, 2, 16, generator=generator) for _ in range(4)]
q, k, v = (x.requires_grad_() for x in made[:3])
bias, slopes = torch.randn(40, 40, generator=generator).requires_grad_(), torch.tensor([0.5, 0.25])
i = torch.arange(40)


def twice(score, b, h, q_idx, kv_idx):
    return 2 * score


def by_definition(bend, score_mod=None, softcap=0.0, alibi_slopes=None, attn_bias=None):
    q_, k_, v_ = (x.double().transpose(1, 2) for x in (q, k, v))
    s = q_ @ k_.mT / 4
    s = s if score_mod is None else 2 * s
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s + bend * s * s
    s = s if alibi_slopes is None else s - alibi_slopes[:, None, None] * (i[:, None] - i).abs()
    s = s if attn_bias is None else s + attn_bias
    return (s.masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ v_).transpose(1, 2)


every = dict(score_mod=twice, softcap=3.0, alibi_slopes=slopes, attn_bias=bias)
runs = ("cpu", 0.3, {{}}), ("cpu", -0.2, every), ("portable", 0.3, every), ("portable", -0.2, {{}})
for backend, bend, others in runs:
    inputs = (q, k, v, bias) if "attn_bias" in others else (q, k, v)
    got = flashtile.attention(q, k, v, causal=True, bend=bend, backend=backend, **others)
    want = by_definition(bend, **others)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    grads = (torch.autograd.grad(x.double().square().sum(), inputs) for x in (got, want))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
with forward_ad.dual_level():
    dual = forward_ad.make_dual(q.detach(), made[3])
    got = forward_ad.unpack_dual(flashtile.attention(dual, k.detach(), v.detach(), causal=True, bend=0.3)).tangent
by_q = lambda x: flashtile.attention(x, k.detach(), v.detach(), causal=True, bend=0.3)
near = (by_q(q.detach() + 1e-3 * made[3]) - by_q(q.detach() - 1e-3 * made[3])) / 2e-3
torch.testing.assert_close(got, near, atol=2e-3, rtol=2e-3)
said = flashtile.explain(q, k, v, bend=0.3)
assert "hopper" in said and "bend" in said, said
row = next(row for row in flashtile.support_table().splitlines() if row.startswith("| bend"))
assert row == "| bend | no | yes | yes |", row
"""


def follow(recipe: Recipe, script: str, tmp_path: Path, **env: str) -> None:
    """Runs a script with a copy of the library in which a recipe was followed."""
    place = tmp_path / "flashtile"
    shutil.copytree(ROOT / "src" / "flashtile", place, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in recipe.items():
        text = (place / name).read_text()
        for before, new in changes:
            assert before in text, f"{name} has no {before!r}"
            text = text.replace(before, new + before)
        (place / name).write_text(text)
    (tmp_path / "call.py").write_text(script.format(place=str(tmp_path)))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **env}
    done = subprocess.run([sys.executable, "call.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_argument(tmp_path: Path) -> None:
    follow(ARGUMENT, CALL, tmp_path)


def test_a_mod(tmp_path: Path) -> None:
    """A transform of scores on the CPU, and in Triton's interpreter beside all others."""
    pytest.importorskip("triton")
    follow(MOD, BENT, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.parametrize("first", [True, False])
def test_a_kernel(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table is chosen by its place, planned, described and built."""
    pytest.importorskip("triton")
    from flashtile.backends.gpu import table
    from flashtile.backends.portable import BACKEND
    from flashtile.call.problem import described

    package = SimpleNamespace(
        plan=lambda problem, like: SimpleNamespace(launches=lambda *_, **__: {"ones": "the launch"}),
        choose=lambda problem: "1x1",
    )
    real = table.module
    monkeypatch.setattr(table, "module", lambda name: package if name.startswith("ones.") else real(name))
    row = table.Kernel(
        "ones", "forward", "ones", "all ones, {}", takes=lambda p: p.head_dim <= 32,
        reasons=lambda p: ["softcap"] if p.softcap else [],
    )  # fmt: skip
    rows = (row, *BACKEND.kernels) if first else (*BACKEND.kernels, row)
    backend = dataclasses.replace(BACKEND, kernels=rows)
    small = described(device_type="cuda", compute_capability=(8, 0), dtype=torch.float16, head_dim=32, head_dim_v=32)
    kinds = (small, small.but(softcap=2.0), small.but(head_dim=64, head_dim_v=64))
    assert [backend.kernel("forward", p) is row for p in kinds] == [first, False, False]
    if first:
        assert backend.describe(small, "forward") == "all ones, 1x1"
        assert "not the kernel for ones: softcap" in backend.describe(kinds[1], "forward")
        assert backend.launches(small, None, "forward") == {"ones": "the launch"}
