"""Runs a Typer command line; errors become one line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer

from flashtile import __version__
from flashtile.core.errors import InvalidInputError, UnsupportedError

# Typer's exception for a wrong command line. The base class is click's, or Typer's own copy of click's, so it is taken
# from a class that every version exports.
_UsageError: Any = typer.BadParameter.__base__
_CommandError: Any = _UsageError.__base__


def new_app(summary: str, epilog: str) -> typer.Typer:
    """A Typer app without commands. It prints its help, or with ``--version`` the version."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=epilog,
    )

    @app.callback(invoke_without_command=True, help=summary)
    def alone(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")] = False,
    ) -> None:
        if version:
            typer.echo(__version__)
        elif context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def examples(title: str, *lines: str) -> str:
    """Text below a command's options; the control character preserves its line breaks."""
    return "\n".join(["\b", f"{title}:", *(f"  {line}" for line in lines)])


def run(app: typer.Typer, name: str, arguments: list[str]) -> int:
    """Runs the command line.

    Args:
        app: The commands.
        name: The name of the command.
        arguments: The words after the name.

    Returns:
        The exit code. Every error that a user can cause is one line on stderr and code 2; other errors are raised.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:
        return _fail("interrupted", name, 130)
    except _CommandError as error:
        return _usage(error, name)
    except (InvalidInputError, UnsupportedError) as error:
        return _fail(str(error), name)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _fail(f"not enough memory: {str(error) or 'an allocation failed'}", name)
    except RuntimeError as error:
        # PyTorch's CPU allocator raises no specific error class.
        if "DefaultCPUAllocator" not in str(error):
            raise
        return _fail(f"not enough memory: {str(error).partition('DefaultCPUAllocator: ')[2]}", name)
    return code if isinstance(code, int) else 0


def _usage(error: Any, name: str) -> int:
    """One line for a wrong command line; the help for a group called without a command."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        typer.echo(context.get_help())
        return 0
    where = context.command_path if context is not None else name
    return _fail(f"{error.format_message()} (see {where} --help)", where)


def _fail(message: str, where: str, code: int = 2) -> int:
    print(f"{where}: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(message: str) -> str:
    """Joins the lines of a message: a list after its heading by colons and semicolons, prose by spaces."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) > 1 and message.splitlines()[1].startswith("  "):
        return f"{lines[0]}: {'; '.join(lines[1:])}"
    return " ".join(lines)
