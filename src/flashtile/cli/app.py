"""The commands of ``flashtile``; errors become one line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer

from flashtile import __version__
from flashtile.cli import analyze, explain, explore, info, kernels, reproduce, tune
from flashtile.cli.demo.command import demo
from flashtile.errors import InvalidInputError, UnsupportedError

# Typer's exception for a wrong command line. Its base class is click's or Typer's own copy of it, so it is taken from a
# class that every version exports.
_UsageError: Any = typer.BadParameter.__base__
_CommandError: Any = _UsageError.__base__


def _examples(title: str, *lines: str) -> str:
    """Text below a command's options; the control character preserves its line breaks."""
    return "\n".join(["\b", f"{title}:", *(f"  {line}" for line in lines)])


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples(
        "Start here",
        "flashtile demo                    exactness, memory, time and a trained model",
        "flashtile info                    what this machine can run",
        "flashtile explain --seqlen 4096   which backend and tiles a call would take",
        "flashtile analyze memory          what attention costs, and why",
        "flashtile explore                 attention at work, in a browser",
        "flashtile reproduce               published figures beside ours",
    ),
)
app.command(
    short_help="Exactness, memory, time and a trained model.",
    epilog=_examples(
        "Examples",
        "flashtile demo",
        "flashtile demo --quick --out /tmp/demo",
        "flashtile demo --device cpu --threads 2 --memory-budget-mb 512",
    ),
)(demo)
app.command(
    short_help="What this machine can run.",
    epilog=_examples("Examples", "flashtile info", "flashtile info --json"),
)(info.info)
app.command(
    short_help="Which backend a call takes, and why.",
    epilog=_examples(
        "Examples",
        "flashtile explain --seqlen 8192 --causal --grad",
        "flashtile explain --seqlen 32768 --window 256 0 --kv-heads 4",
        "flashtile explain --arch 9.0 --dtype bfloat16 --softcap 30 --grad",
    ),
)(explain.explain)
app.add_typer(analyze.app, name="analyze", short_help="What attention costs, in tables.")
app.command(
    short_help="Attention at work, on a page in a browser.",
    epilog=_examples("Examples", "flashtile explore", "flashtile explore --serve --no-open --port 8000"),
)(explore.explore)
app.command(
    short_help="Published figures beside ours.",
    epilog=_examples("Examples", "flashtile reproduce", "flashtile reproduce fp8", "flashtile reproduce D15"),
)(reproduce.reproduce)
app.command(
    short_help="Faster tiles for your shapes, measured here.",
    epilog=_examples(
        "Examples",
        "flashtile tune --shape 4,4096,32,8,128 --causal",
        "flashtile tune --shape 1,8k,16,64 --shape 8,1k,16,64 --dtype float16 --forward --seconds 120",
        "flashtile tune --list",
    ),
)(tune.tune)
app.command(
    short_help="What the compiler makes of GPU kernels.",
    epilog=_examples("Examples", "flashtile kernels --arch sm_90a --quick"),
)(kernels.kernels)


@app.callback(invoke_without_command=True)
def _flashtile(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    """Exact attention in pure Python, on any machine."""
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: list[str]) -> int:
    """Runs the command line.

    Returns:
        The exit code. Everything a user can cause is one line on stderr and code 2; other errors are raised.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="flashtile", standalone_mode=False)
    except typer.Abort:
        return _fail("interrupted", 130)
    except _CommandError as error:
        return _usage(error)
    except (InvalidInputError, UnsupportedError) as error:
        return _fail(str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _fail(f"not enough memory: {str(error) or 'an allocation failed'}")
    except RuntimeError as error:
        # PyTorch's CPU allocator raises no specific error class.
        if "DefaultCPUAllocator" not in str(error):
            raise
        return _fail(f"not enough memory: {str(error).partition('DefaultCPUAllocator: ')[2]}")
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> int:
    """One line for a wrong command line; the help for a group called without a command."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        typer.echo(context.get_help())
        return 0
    where = context.command_path if context is not None else "flashtile"
    return _fail(f"{error.format_message()} (see {where} --help)", where=where)


def _fail(message: str, code: int = 2, where: str = "flashtile") -> int:
    print(f"{where}: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(message: str) -> str:
    """The lines of a message joined: a list after its heading by colons and semicolons, prose by spaces."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) > 1 and message.splitlines()[1].startswith("  "):
        return f"{lines[0]}: {'; '.join(lines[1:])}"
    return " ".join(lines)
