"""On a GPU: kernels from an archive, in processes without Triton, and archives that are damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.backends.gpu import build
from flashtile.ops import plans
from tests.archive.hostile import HOSTILE, IN_PART, forget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("tables", "every"),
    [("small,cached,8 bits", 29), pytest.param("small,large,cached,8 bits", 1, marks=pytest.mark.slow)],
)
def test_the_case_tables_without_triton(tables: str, every: int, tmp_path: Path) -> None:
    """By the rule, without a compile, and with the bits that Triton's builds give."""
    command = [sys.executable, "-m", "tests.archive.through", str(tmp_path), "--tables", tables, "--bits"]
    done = subprocess.run(
        [*command, "--every", str(every), "--seconds", "2400"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ready"] == found["items"] and not found["failed"], found
    assert found["cases"] > 20 and found["kernels listed"] > 20 and found["load"] > 20
    assert not found.get("_compiled") and not found["modules of Triton"]
    assert found["results"]["same bits"] > 40 and not found["other bits of"], found


def _attend(inputs: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    out = flashtile.attention(*inputs, causal=True, deterministic=True, backend="portable")
    return [out, *torch.autograd.grad(out, inputs, dout)]


def test_a_damaged_archive_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "qkv"]
    dout, place = torch.randn_like(inputs[0]), tmp_path / "good.ftk"
    loaded = build._from_archive
    from_archive: list[bool] = []

    def noted(*given: object) -> build.LoadedKernel | None:
        found = loaded(*given)  # type: ignore[arg-type]
        from_archive.append(found is not None)
        return found

    def fresh(kernels: str) -> None:
        monkeypatch.setenv("FLASHTILE_KERNELS", kernels)
        monkeypatch.setattr(build, "_builds", {})
        from_archive.clear()
        forget()

    for name in [name for name in os.environ if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(build, "_from_archive", noted)
    fresh("off")
    with plans.own_plans():
        want = _attend(inputs, dout)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    flashtile.warm_up(*inputs, causal=True, deterministic=True, backend="portable", gpu=arch, into=place)
    for number, (name, (spoil, why)) in enumerate({"good": (Path.write_bytes, ""), **HOSTILE}.items()):
        bad = tmp_path / str(number) / "kernels.ftk"
        bad.parent.mkdir()
        spoil(bad, place.read_bytes())
        fresh(str(bad))
        with plans.own_plans(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got = _attend(inputs, dout)
        assert all(map(torch.equal, got, want)), name
        texts = [str(each.message) for each in seen]
        assert any(why in text for text in texts) if why else not texts, (name, texts)
        misses = {"good": 0}.get(name, 1 if name in IN_PART else len(from_archive))
        assert from_archive.count(False) == misses and len(from_archive) == 4, (name, from_archive)
    forget()
