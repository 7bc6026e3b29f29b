"""`flashtile-lab analyze fp8`: the error of 8-bit attention, choice by choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import torch
import typer

from flashtile.cli.options import AsJson
from flashtile.core.errors import InvalidInputError
from flashtile_lab.commands.options import show

if TYPE_CHECKING:
    from flashtile_lab.fp8.errors import Error

Inputs = Literal["paper", "normal", "outliers", "biased"]
_COLORS = ("#1f6feb", "#d1603d")
_CHOICES = (
    "Distance from attention in float64 over the tensors as given, root mean square; relative: over that of the exact "
    "output. Probabilities are rounded to e4m3, sums are float32. Paper: arXiv:2407.08608, table 3, without a shape."
)
_GROWTH = (
    "One scale a head, 32 queries, 2 heads. Products of probabilities and values are added as Hopper's matrix "
    "instructions do, which keep 13 bits below the largest."
)
_NEEDLE = (
    "32 queries, each with one key that has seven tenths of its probability, at all depths among normal keys; found: "
    "the output is nearer to its value than to all others."
)


def fp8(
    inputs: Annotated[
        Inputs, typer.Option(help="paper: outliers, the choices of FlashAttention-3's table 3. Others: every choice.")
    ] = "paper",
    tensors: Annotated[
        Path | None, typer.Option(help="A file of torch.save with a dict of q, k and v instead.")
    ] = None,
    seqlen: Annotated[int, typer.Option(min=1, help="Keys.")] = 8192,
    rows: Annotated[int, typer.Option(min=1, help="Queries, at most as many as keys with --causal.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 16,
    head_dim: Annotated[int, typer.Option(min=16, max=256, help="Width of one head, a multiple of 16.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of the generated numbers.")] = 0,
    causal: Annotated[bool, typer.Option("--causal", help="Query i sees the keys up to its own.")] = False,
    growth: Annotated[bool, typer.Option("--growth", help="The error from 512 to 64k keys instead.")] = False,
    needle: Annotated[bool, typer.Option("--needle", help="One key among 128k that matters instead.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(help="Draw the errors into this file, .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """The error of 8-bit attention against float64: scales, rotation, smoothing; with the kernels' roundings."""
    from flashtile_lab.fp8 import errors

    if inputs not in get_args(Inputs):
        raise InvalidInputError("--inputs", f"is {inputs!r}, must be one of {', '.join(get_args(Inputs))}")
    if growth:
        lengths = (512, 8192, 65536)
        found = errors.growth(lengths, device=device)
        cells = [[f"{n:,}", *(f"{x:.4f}" for x in row)] for n, row in zip(lengths, found, strict=True)]
        records = [dict(keys=n, block=row[0], one=row[1]) for n, row in zip(lengths, found, strict=True)]
        columns = ("keys", "added after each block", "one accumulator")
        show(as_json, "Relative error, normal tensors, head_dim 128", _GROWTH, columns, cells, records)
    elif needle:
        shares = errors.needles(device=device)
        cells = [[name, f"{share:.0%}"] for name, share in shares.items()]
        show(as_json, "Keys that were found among 131,072", _NEEDLE, ("attention", "found"), cells, [shares])
    else:
        q, k, v, about = _read(tensors) if tensors else _made(inputs, rows, seqlen, heads, head_dim, seed)
        choices = errors.PAPER if inputs == "paper" and tensors is None else errors.CHOICES
        results = errors.measure(q.to(device), k.to(device), v.to(device), choices, causal=causal)
        headers = ("choice", "RMSE", "relative", *("paper", "ours / paper") * (choices is errors.PAPER))
        title = f"Error of 8-bit attention, {about}{', causal' * causal}"
        show(as_json, title, _CHOICES, headers, [_cells(x) for x in results], [_record(x) for x in results])
        if plot is not None:
            _draw(results, title, plot)


def _made(inputs: Inputs, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    from flashtile_lab.fp8 import errors

    rows, seqlen, heads, head_dim, seed = shape
    kind: errors.Kind = "outliers" if inputs == "paper" else inputs
    about = (
        f"{kind}: {rows:,} queries, {seqlen:,} keys, {heads} heads, head_dim {head_dim}{f', seed {seed}' * (seed > 0)}"
    )
    return *errors.generated(kind, *shape), about


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        q, k, v = (found[name] for name in ("q", "k", "v"))
    except Exception as error:  # what torch.load raises is of many classes
        raise InvalidInputError("--tensors", f"{path} holds no dict of q, k and v: {error}") from None
    return q, k, v, f"{path.name}: q {tuple(q.shape)}, k {tuple(k.shape)}"


def _cells(error: Error) -> list[str]:
    cells = [error.choice.name, f"{error.rmse:.2e}", f"{error.relative:.4f}"]
    if error.choice.published is not None:
        cells += [f"{error.choice.published:.1e}", f"{error.rmse / error.choice.published:.2f}"]
    return cells


def _record(error: Error) -> dict[str, object]:
    return {**error.choice._asdict(), "rmse": error.rmse, "relative": error.relative}


def _draw(results: Sequence[Error], title: str, path: Path) -> None:
    """Points from left to right, the larger the error; the paper's beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.4 + 0.33 * len(results)), layout="constrained", facecolor="white")
    panel, places = figure.subplots(), range(len(results))
    panel.scatter([each.rmse for each in results], places, s=46, color=_COLORS[0], label="flashtile", zorder=3)
    published = [each.choice.published for each in results if each.choice.published is not None]
    if len(published) == len(results):
        panel.scatter(published, places, s=90, facecolor="none", edgecolor=_COLORS[1], label="FlashAttention-3's paper")
        panel.legend(frameon=False)
    panel.set(xscale="log", xlabel="root mean square error", ylim=(len(results) - 0.5, -0.5))
    panel.set_yticks(list(places), [each.choice.name for each in results])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panel.grid(True, color="#d8dee4", linewidth=0.7)
    panel.set_axisbelow(True)
    figure.savefig(path, dpi=130)
