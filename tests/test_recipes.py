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
# A divisor of the scores. File -> (what stands there, what is put before it), in the order of the recipe.
ARGUMENT: dict[str, list[tuple[str, str]]] = {
    "call/arguments.py": [
        (
            "    # Not a keyword: what score_mod",
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


def test_an_argument(tmp_path: Path) -> None:
    place = tmp_path / "flashtile"
    shutil.copytree(ROOT / "src" / "flashtile", place, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in ARGUMENT.items():
        text = (place / name).read_text()
        for before, new in changes:
            assert before in text, f"{name} has no {before!r}"
            text = text.replace(before, new + before)
        (place / name).write_text(text)
    script = tmp_path / "call.py"
    script.write_text(CALL.format(place=str(tmp_path)))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


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
