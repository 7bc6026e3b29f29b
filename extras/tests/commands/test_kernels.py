"""`flashtile-lab kernels` prints what the builds say, and its exit code says whether all is well."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("typer")

import typer
from typer.testing import CliRunner, Result

from extras.tests.kernels import toy_builds
from flashtile_lab.commands.kernels import kernels
from flashtile_lab.kernels import report as builds

app = typer.Typer()
app.command()(kernels)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the toy kernels where a backend's would be, built in this process."""
    name = "flashtile_lab.kernels.cpu"
    monkeypatch.setitem(sys.modules, name, toy_builds)
    monkeypatch.setattr(builds.importlib.util, "find_spec", lambda asked: asked in ("triton", name) or None)
    monkeypatch.setattr(builds.os, "cpu_count", lambda: 1)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.usefixtures("toys")
def test_json_is_a_row_a_build() -> None:
    result = _run("--arch", "sm_90a", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    todo = toy_builds.builds("sm_90a")
    assert [(row["name"], row["config"]) for row in rows] == [(build.name, build.config) for build in todo]
    direct = builds.compile_build(todo[0], "sm_90a")
    assert rows[0] == {
        "name": "matmul",
        "backend": "toy",
        "direction": "forward",
        "arch": "sm_90a",
        "triton": direct.triton,
        "config": {"block": 64, "scale": None},
        "registers": direct.registers,
        "spill_bytes": 0,
        "shared_bytes": direct.shared_bytes,
        "instructions": direct.instructions,
    }


@pytest.mark.long
@pytest.mark.usefixtures("toys")
def test_kernels_with_problems_are_named_and_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_builds, "builds", toy_builds.broken)
    builds._builds.cache_clear()
    result = _run("--arch", "sm_80", "--json")
    builds._builds.cache_clear()
    assert result.exit_code == 1
    assert [row["name"] for row in json.loads(result.stdout)] == ["matmul", "hold_all", "matmul"]
    assert "sm_80: toy/wrong: does not build: CompilationError" in result.stderr
    assert "sm_80: toy/hold_all n=16384: spills" in result.stderr
    assert "bytes of shared memory, sm_80 has 166912" in result.stderr
