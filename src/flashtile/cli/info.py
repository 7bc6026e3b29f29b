"""``flashtile info``: the machine, the versions, and what each backend can do here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashtile import __version__
from flashtile.backends.gpu import archive, build
from flashtile.call.backend import Capabilities
from flashtile.call.problem import Problem, described
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError
from flashtile.ops import dispatch


def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """This machine, and the backends that can run on it."""
    by_triton = f"{settings.LAUNCHER.name} is triton" if settings.LAUNCHER.get() else ""
    kernels = [each._asdict() | {"why_not": each.why_not or by_triton} for each in archive.listed()]
    facts = {**machine(), "backends": [_backend(name) for name in dispatch.NAMES], "kernels": kernels, **_recorded()}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console()
    console.print(_machine_table(facts))
    console.print(_backend_table(facts["backends"]))
    console.print("Which one a call takes, and why not another: flashtile explain", style="dim")
    if kernels:
        console.print(_kernel_table(kernels))
    else:
        off = settings.KERNELS.text() and f", {settings.KERNELS.name} is {settings.KERNELS.text()}"
        console.print(f"Kernels built ahead: none{off or ', no package of them is installed'}", highlight=False)
    if facts["recorded"] is not None:
        names = ", ".join(f"{count} {name}" for name, count in facts["recorded"].items())
        console.print(f"{settings.RECORD.text()}: {names or 'nothing'} had to be compiled", highlight=False)


def machine() -> dict[str, Any]:
    """The machine and the relevant versions, as JSON values."""
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "flashtile": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": _version("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "launcher": launcher(),
    }


def launcher() -> str:
    """The launcher of GPU kernels on this machine: the driver directly, or Triton with the reason."""
    missing = dispatch.backend("portable").missing()
    if missing or not torch.cuda.is_available():
        return f"not applicable ({missing or 'no GPU that torch can use'})"
    return "triton (AMD)" if torch.version.hip else build.launcher()


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(name: str) -> dict[str, Any]:
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    reasons = min((why_unusable(name, device) for device in here), key=len)
    return {"name": name, "runs_on": dispatch.backend(name).summary, "usable": not reasons, "reasons": reasons}


def why_unusable(name: str, device_type: str) -> list[str]:
    """The reasons why a backend cannot run any call on a device of this machine; empty if it can.

    Args:
        name: The backend.
        device_type: ``cpu``, or ``cuda`` on a machine that has it.
    """
    backend = dispatch.backend(name)
    capabilities = backend.capabilities("forward")
    if capabilities is None:
        return ["has no kernels yet"]
    if device_type not in capabilities.device_types:
        missing = backend.missing()
        return [missing or f"needs a {' or '.join(capabilities.device_types)} device"]
    return dispatch.reasons(name, _simplest(capabilities, device_type), "forward")


def _simplest(capabilities: Capabilities, device_type: str) -> Problem:
    """A call that uses no feature, so that only the machine can rule it out."""
    gpu = device_type == "cuda" and not torch.version.hip
    return described(
        device_type=device_type,
        compute_capability=torch.cuda.get_device_capability() if gpu else None,
        dtype=capabilities.dtypes[0],
    )


def _recorded() -> dict[str, Any]:
    """The number of kernels of each name that runs have compiled, from their record; None if there is no record."""
    if not (place := settings.RECORD.text()):
        return {"recorded": None}
    try:
        lines = set(Path(place).expanduser().read_text().splitlines())
        return {"recorded": dict(Counter(sorted(json.loads(line)[0][-1] for line in lines)))}
    except FileNotFoundError:
        return {"recorded": {}}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidInputError(settings.RECORD.name, f"names {place}, which is no list of kernels: {error}") from None


def _machine_table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key in ("flashtile", "python", "torch", "triton"):
        table.add_row(key, facts[key] or "not installed")
    table.add_row("system", facts["system"])
    table.add_row("cpu", f"{facts['cpu_cores']} cores, {facts['cpu_threads']} threads used by torch")
    for gpu in facts["gpus"]:
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        table.add_row("gpu", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}")
    if not facts["gpus"]:
        table.add_row("gpu", "none that torch can use")
    table.add_row("launcher", facts["launcher"])
    return table


def _backend_table(backends: list[dict[str, Any]]) -> Table:
    table = Table(title="Backends, fastest first", title_justify="left")
    for column in ("backend", "runs on", "usable here", "why not"):
        table.add_column(column)
    for row in backends:
        table.add_row(row["name"], row["runs_on"], "yes" if row["usable"] else "no", "; ".join(row["reasons"]) or "-")
    return table


def _kernel_table(kernels: list[dict[str, Any]]) -> Table:
    where = settings.KERNELS.name if settings.KERNELS.text() else "installed"
    table = Table(title=f"Kernels built ahead ({where})", title_justify="left")
    for column in ("archive", "for", "kernels", "stale", "MB", "used here"):
        table.add_column(column, overflow="fold")
    for row in kernels:
        stale = f"{row['stale']}, {row['damaged']} damaged" if row["damaged"] else str(row["stale"])
        counts = (str(row["entries"]), stale, f"{row['size'] / 1e6:.2f}") if row["size"] else ("?", "?", "?")
        used = f"no: {row['why_not']}" if row["why_not"] else "yes"
        table.add_row(row["place"], ", ".join(row["archs"]), *counts, used)
    return table
