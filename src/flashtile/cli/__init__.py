"""The ``flashtile`` command. Importing flashtile never imports this package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# The packages of the extra, the packages that Typer depends on, and those which flashtile-lab's commands also need.
_EXTRA = ("typer", "click", "rich", "matplotlib")
# Commands that are part of flashtile-lab. Some users expect them here.
_OF_LAB = ("demo", "analyze", "explore", "reproduce", "kernels")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The words after ``flashtile``; by default the process's own arguments.

    Returns:
        The exit code: 0, 2 for invalid input or too little memory, 130 when interrupted, and 1 if one of the command's
        checks fails.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in _OF_LAB:
        where = f"pip install ./extras (in flashtile's repository), then flashtile-lab {words[0]}"
        print(f"flashtile: {words[0]} is a command of flashtile-lab: {where}", file=sys.stderr)
        return 2
    return start("flashtile.cli.app", "flashtile", "typer rich", words)


def start(module: str, name: str, package: str, arguments: list[str]) -> int:
    """Runs the ``app`` of a module. If a package is missing, prints one line that says how to install it.

    Args:
        module: The module with the commands.
        name: The name of the command.
        package: The pip package that installs everything the commands need.
        arguments: The words after the name.
    """
    try:
        from flashtile.cli.run import run

        return run(importlib.import_module(module).app, name, arguments)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"{name}: {missing} is not installed: pip install {package}", file=sys.stderr)
        return 2
