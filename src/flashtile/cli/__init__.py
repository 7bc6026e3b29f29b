"""The ``flashtile`` command. Importing flashtile never imports this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# The packages of the extra, and those that Typer depends on.
_EXTRA = ("typer", "click", "rich", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The words after ``flashtile``; those of the process by default.

    Returns:
        The exit code: 0, 2 for invalid input or too little memory, 130 when interrupted, and 1 if one of the command's
        checks fails.
    """
    try:
        from flashtile.cli.app import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f'flashtile: {missing} is not installed: pip install "flashtile[cli]"', file=sys.stderr)
        return 2
