from typing import Any

import pytest

from benchmarks import results


@pytest.fixture
def command(tmp_path, capsys):
    """Runs a suite's command with options in one text; gives all rows that it has saved by now, and what it printed."""

    def run(suite: Any, options: str, code: int = 0) -> tuple[list[results.Row], str]:
        out = tmp_path / "rows.jsonl"
        assert suite.main(["--commit", "abc", *options.split(), "--out", str(out)]) == code
        return results.read([out]), capsys.readouterr().out

    return run
