"""The ``flashtile-lab`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flashtile.cli import start


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The words after ``flashtile-lab``; those of the process by default.

    Returns:
        The exit code, as of ``flashtile.cli.main``.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    return start("flashtile_lab.commands.app", "flashtile-lab", "./extras (in flashtile's repository)", words)
