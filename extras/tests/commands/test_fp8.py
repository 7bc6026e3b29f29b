"""`flashtile-lab analyze fp8`: tables, JSON, a plot, tensors of a file, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashtile_lab.commands import main
from flashtile_lab.commands.analyze import app
from flashtile_lab.fp8.errors import CHOICES, PAPER

SMALL = ("--seqlen", "256", "--rows", "128", "--heads", "2", "--head-dim", "32")


def run(*args: str) -> str:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["fp8", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_and_json_have_the_same_numbers() -> None:
    text, records = run(*SMALL), json.loads(run(*SMALL, "--json"))
    assert [each["name"] for each in records] == [each.name for each in PAPER]
    for record in records:
        line = next(line for line in text.splitlines() if f" {record['name']} " in line)
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        ratio = record["rmse"] / record["published"]
        assert cells[1:] == [
            f"{record['rmse']:.2e}", f"{record['relative']:.4f}", f"{record['published']:.1e}", f"{ratio:.2f}",
        ]  # fmt: skip
    assert 1e-4 < records[0]["rmse"] < 1e-3 < records[2]["rmse"] < 0.1


def test_every_choice_and_options() -> None:
    records = json.loads(run(*SMALL, "--inputs", "biased", "--json"))
    assert [each["name"] for each in records] == [each.name for each in CHOICES]
    causal = json.loads(run(*SMALL, "--inputs", "biased", "--json", "--causal"))
    other_seed = json.loads(run(*SMALL, "--inputs", "biased", "--json", "--seed", "1"))
    for others in (causal, other_seed):
        assert all(one["rmse"] != other["rmse"] for one, other in zip(records, others, strict=True))
    assert "seed 1" in " ".join(run(*SMALL, "--seed", "1").split()) and "seed" not in run(*SMALL)


def test_tensors_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 40, 4, 32), torch.randn(1, 90, 2, 32), torch.randn(1, 90, 2, 16)
    torch.save({"q": q, "k": k, "v": v}, tmp_path / "qkv.pt")
    assert "qkv.pt: q (1, 40, 4, 32), k (1, 90, 2, 32)" in " ".join(run("--tensors", str(tmp_path / "qkv.pt")).split())
    torch.save({"k": k}, tmp_path / "k.pt")
    (tmp_path / "text").write_text("no tensors")
    for name in ("k.pt", "text", "nothing"):
        assert main(["analyze", "fp8", "--tensors", str(tmp_path / name)]) == 2
        assert f"{name} holds no dict of q, k and v" in capsys.readouterr().err


def test_growth_and_needle(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile_lab.fp8 import errors

    monkeypatch.setattr(errors, "growth", lambda lengths, device: [[0.05, 0.05 + n / 1e6] for n in lengths])
    assert json.loads(run("--growth", "--json"))[-1] == {"keys": 65536, "block": 0.05, "one": 0.05 + 0.065536}
    assert "0.1155" in run("--growth")
    monkeypatch.setattr(errors, "needles", lambda device: {"float64": 1.0, "8 bits": 0.975})
    assert "98%" in run("--needle")
