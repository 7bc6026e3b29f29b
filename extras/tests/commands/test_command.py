"""The command itself: its help, and how it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("typer")

from flashtile_lab.commands import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


BAD = [
    (["analyze", "memory", "--seqlen", "0"], "--seqlen"),
    (["analyze", "nonsense"], "nonsense"),
    (["kernels", "--arch", "z80"], "z80"),
    (["demo", "--threads", "0"], "--threads"),
    (["demo", "--device", "toaster"], "toaster"),
    (["demo", "--memory-budget-mb", "0"], "--memory-budget-mb"),
    (["demo", "--memory-budget-mb", "-5"], "--memory-budget-mb"),
    (["demo", "--out"], "--out"),
]


@pytest.mark.parametrize(
    ("arguments", "word"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("flashtile-lab") and word in err


@pytest.mark.parametrize("arguments", [[], ["demo", "--help"], ["analyze"], ["kernels", "-h"]])
def test_help_shows_usage_and_examples(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: flashtile-lab")
    if arguments != ["analyze"]:
        assert any(line.strip().startswith("flashtile-lab ") for line in out.splitlines())


@pytest.mark.long
def test_a_missing_package_is_named_with_its_remedy() -> None:
    without = "import sys; sys.modules['matplotlib'] = None; from flashtile_lab.commands import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{without}; sys.exit(main(['demo']))"], capture_output=True, text=True
    )
    assert done.returncode == 2
    remedy = "pip install ./extras (in flashtile's repository)"
    assert done.stderr == f"flashtile-lab: matplotlib is not installed: {remedy}\n"
