"""``python -m benchmarks.selected``: attention over keys that data select, blocks of them or single ones.

Cells of blocks, forward and backward, as VSA, MoBA and NSA choose them: ``dense`` and ``fa3`` are the same attention
without lists, ``lists`` is the time to make them. Cells ``dsa`` are DeepSeek's sparse attention: each query over a
cache of latent rows names 2,048 of its sequence's keys. TFLOPS count the pairs that a provider is asked for.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import flashtile
from benchmarks import bounds, results
from benchmarks.cases import Inputs, make_inputs, select
from benchmarks.checks import Call, Outputs, poison
from benchmarks.providers import PROVIDERS, Attend, prepared
from benchmarks.selections import (
    BlockCell,
    SelectedReference,
    TokenCell,
    cells,
    chosen_blocks,
    judged,
    kept_blocks,
    kept_pairs,
    token_inputs,
    token_pairs,
)
from benchmarks.session import NotTimedError, Session, attempt, new_parser, run_command
from benchmarks.table import BOUND, Table, case_of, to_text
from benchmarks.timing import measure
from flashtile import masks
from flashtile.core.errors import UnsupportedError

DENSE = ("dense", "fa3")
OF_BLOCKS = ("flashtile", "flashtile-portable", "flex", *DENSE, "lists")
OF_TOKENS = ("flashtile", "flashtile-padded")
# The longest sequence for which FlexAttention races its tiles: for one cell that took 132 s.
_TUNED = 65536
# Heads of ``flashtile-padded``.
_PADDED = 64


def flex_mask(cell: BlockCell, kept: Tensor) -> BlockMask:
    """PyTorch's mask of the same blocks: full ones, and under a causal mask those partial that a row of it cuts."""

    def ordered(some: Tensor) -> tuple[Tensor, Tensor]:
        return some.sum(-1).int(), some.int().argsort(dim=-1, descending=True, stable=True).int()

    is_cut = torch.zeros_like(kept)
    if cell.causal:
        i, j = (torch.arange(n, device=kept.device) for n in kept.shape[1:])
        is_cut = kept & ((j + 1) * cell.keys - 1 > i[:, None] * cell.rows)
    lists = *ordered(is_cut[None]), *ordered((kept & ~is_cut)[None])
    mod = (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx) if cell.causal else None
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(cell.rows, cell.keys), mask_mod=mod)


def flex_tiles(cell: BlockCell) -> dict[str, int]:
    """FlexAttention's tiles by the names of its options; none for cells short enough that it may try them all.

    Its usual tiles are too large for blocks of 64.
    """
    rows, keys = min(cell.rows, 64), min(cell.keys, 64)
    forward, backward = {"BLOCK_M": rows, "BLOCK_N": keys}, {"BLOCK_M1": rows, "BLOCK_N1": keys}
    return {} if cell.seqlen <= _TUNED else {**forward, **backward, "BLOCK_M2": rows, "BLOCK_N2": keys}


def flex(cell: BlockCell, kept: Tensor) -> Attend:
    """FlexAttention, compiled, with ``flex_tiles`` or the best of all that it tries."""
    if kept.device.type != "cuda":
        raise NotTimedError("refused: reads lists only if compiled for a GPU")
    if cell.rows < 16:
        raise NotTimedError("refused: has no tile of fewer than 16 rows")
    torch.compiler.reset()
    tiles: Any = flex_tiles(cell)
    call = torch.compile(flex_attention, dynamic=False, mode=None if tiles else "max-autotune-no-cudagraphs")
    mask = flex_mask(cell, kept)
    more: dict[str, Any] = {"enable_gqa": cell.heads != cell.heads_kv, "kernel_options": tiles or None}
    attention: Any = functools.partial(call, block_mask=mask, **more)

    def attend(*given: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in given)
        out: Tensor = attention(q, k, v)
        return out.transpose(1, 2)

    return attend


def call_of(cell: BlockCell, provider: str, inputs: Inputs, indices: Tensor, kept: Tensor) -> Call:
    """A provider's timed call: (out,), (dq, dk, dv), or the lists' tensors."""
    make = functools.partial(masks.selected_blocks, indices, block_size=(cell.rows, cell.keys), seqlen_q=cell.seqlen)
    if provider == "lists":
        mask = make()
        if not torch.equal(mask.dense()[1][0], kept):
            raise NotTimedError("wrong: lists of other blocks")
        return lambda: (make().row_items,)
    if provider in DENSE:
        dense = PROVIDERS["flashtile" if provider == "dense" else provider]
        why = dense.missing(cell.direction, inputs.q.device)
        if why is not None:
            raise NotTimedError(f"refused: {why}")
        return prepared(dense, cell.case, inputs)
    if provider == "flex":
        attend = flex(cell, kept)
    else:
        features: dict[str, Any] = {"backend": "portable" if provider.endswith("portable") else None}
        attend = functools.partial(flashtile.attention, block_mask=make(), causal=cell.causal, **features)
    given = inputs.q, inputs.k, inputs.v
    if cell.direction == "forward":
        return lambda: (attend(*given),)
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def measure_blocks(
    cell: BlockCell, providers: Sequence[str], session: Session, rounds: int, burst: float
) -> list[results.Row]:
    """Checks and times a cell of blocks; a row for each provider."""
    device = session.device
    inputs, indices = make_inputs(cell.case, device), chosen_blocks(cell, device)
    kept = kept_blocks(cell, indices)
    reference = functools.cache(lambda is_dense: SelectedReference(cell, inputs, None if is_dense else kept))

    def checked(provider: str) -> tuple[Call, float | None]:
        call = call_of(cell, provider, inputs, indices, kept)
        if provider == "lists":
            return call, None
        poison(call())
        return call, reference(provider in DENSE).check(call())

    pairs = cell.heads * cell.case.kept_pairs()
    flops: dict[str, float] = dict.fromkeys(OF_BLOCKS, cell.case.flops() * kept_pairs(cell, kept) / pairs)
    flops |= dict.fromkeys(DENSE, cell.case.flops()) | {"lists": 0.0}
    return timed_rows(cell, providers, checked, flops, session, rounds, burst)


def token_call(cell: TokenCell, provider: str, given: dict[str, Tensor]) -> Call:
    """The timed call; ``flashtile-padded`` has zeros for further heads, which it adds and drops itself."""
    if "selected" not in inspect.signature(flashtile.attention_with_kvcache).parameters:
        raise NotTimedError("refused: attention_with_kvcache has no keyword selected")
    others: dict[str, Any] = {name: x for name, x in given.items() if name != "q"}
    if provider == "flashtile":
        return lambda: (flashtile.attention_with_kvcache(given["q"], **others, causal=True),)

    def padded() -> Outputs:
        q = functional.pad(given["q"], (0, 0, 0, _PADDED - cell.heads))
        return (flashtile.attention_with_kvcache(q, **others, causal=True)[:, :, : cell.heads],)

    return padded


def measure_tokens(
    cell: TokenCell, providers: Sequence[str], session: Session, rounds: int, burst: float
) -> list[results.Row]:
    """Checks and times a cell of single keys; a row for each provider."""
    given = token_inputs(cell, session.device)

    def checked(provider: str) -> tuple[Call, float]:
        call = token_call(cell, provider, given)
        try:
            poison(call())
        except UnsupportedError as error:
            # The library has the keyword, so a call that it cannot run is no answer.
            raise RuntimeError(str(error)) from error
        (out,) = call()
        return call, judged((out,), token_pairs(cell, given, out))

    return timed_rows(cell, providers, checked, dict.fromkeys(OF_TOKENS, cell.flops), session, rounds, burst)


def timed_rows(
    cell: BlockCell | TokenCell,
    providers: Sequence[str],
    checked: Callable[[str], tuple[Call, float | None]],
    flops: dict[str, float],
    session: Session,
    rounds: int,
    burst: float,
) -> list[results.Row]:
    """A row for each provider; those that ``checked`` gives a call for are timed."""
    made = {name: attempt(session.device, name, functools.partial(checked, name)) for name in providers}
    calls = {name: of[0] for name, of in made.items() if not isinstance(of, str)}
    timings = measure(calls, session.device, rounds=rounds, burst_ms=burst, deadline=session.deadline)
    rows = []
    for name, of in made.items():
        measured: dict[str, Any] = {"error": of if isinstance(of, str) else of[1]}
        if name in timings:
            measured |= vars(timings[name])
            measured["tflops"] = flops[name] / (timings[name].median_ms * 1e9) or None
            if name == "flex" and isinstance(cell, BlockCell):
                measured["values"] = {"tiles": flex_tiles(cell) or "the best of max-autotune"}
        rows.append(session.run.row(asdict(cell), name, **measured))
    return rows


def selected_table(rows: Sequence[results.Row]) -> Table:
    """A line a cell: milliseconds of each, ours in TFLOPS, beside attention without lists, and its share of the bound.

    ``ideal`` is the share of kept pairs times the speed-up: 1 where time falls as pairs do.
    """
    names, lines = list(dict.fromkeys(row.provider for row in rows)), []
    for case in dict.fromkeys(str(row.case) for row in rows):
        found = {row.provider: row for row in rows if str(row.case) == case}
        about = next(iter(found.values())).case
        label = " ".join(filter(None, (about.get("direction"), about["kind"])))
        line = [label, *("" if n not in found or not (t := found[n].median_ms) else f"{t:.4g}" for n in names)]
        own, dense = found.get("flashtile"), [r for n, r in found.items() if n in DENSE and r.median_ms]
        figures = [""] * 6
        if own is not None and own.median_ms and own.tflops:
            figures[0], figures[5] = f"{own.tflops:.4g}", bounds.shown(own, case_of(own))
            if "queries" in about:
                figures[4] = f"{TokenCell(**about).selected_bytes / (own.median_ms * 1e6):.4g}"
            if dense:
                best = min(dense, key=lambda row: row.median_ms or 0.0)
                speedup = (best.median_ms or 0.0) / own.median_ms
                # Both rates and times are there, so their ratio is the share of pairs.
                ideal = own.tflops / (best.tflops or 1.0)
                figures[1:4] = f"{ideal / speedup:.4f}", f"{speedup:.2f}", f"{ideal:.2f}"
        lines.append([*line, *figures])
    return [["cell (ms)", *names, "TFLOPS", "kept", "over dense", "ideal", "GB/s", BOUND], *lines]


def report(rows: Sequence[results.Row]) -> str:
    """The table, and what failed."""
    bad = [row for row in rows if str(row.error).startswith(("wrong", "failed"))]
    labels = (" ".join(filter(None, (row.case.get("direction"), row.case["kind"]))) for row in bad)
    failed = [f"{label}: {row.provider}: {row.error}" for label, row in zip(labels, bad, strict=True)]
    return "\n\n".join([to_text(selected_table(rows)), *(["\n".join(failed)] if failed else [])])


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[results.Row], int, str]:
    unknown = {*(args.providers or ())} - {*OF_BLOCKS, *OF_TOKENS}
    if unknown:
        known = ", ".join(dict.fromkeys((*OF_BLOCKS, *OF_TOKENS)))
        raise ValueError(f"provider is {min(unknown)!r}, must be one of {known}")
    chosen = [x for x in select(cells(args.device), args.cells) if _asked(x, args.providers)]

    def timed(cell: BlockCell | TokenCell) -> list[results.Row]:
        names = _asked(cell, args.providers)
        if isinstance(cell, BlockCell):
            return measure_blocks(cell, names, session, args.rounds, args.burst_ms)
        return measure_tokens(cell, names, session, args.rounds, args.burst_ms)

    rows, code = session.each(chosen, lambda cell: cell.name, timed)
    return rows, code, report(rows)


def _asked(cell: BlockCell | TokenCell, providers: Sequence[str] | None) -> list[str]:
    every = OF_BLOCKS if isinstance(cell, BlockCell) else OF_TOKENS[: 1 + (cell.heads < _PADDED)]
    return [name for name in every if providers is None or name in providers]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the cells; returns the process's exit code."""
    parser = new_parser("selected", __doc__, {"rounds": 7, "burst_ms": 6.0})
    parser.add_argument("--cells", metavar="PATTERN", help="globs or parts of cell names, separated by commas")
    return run_command(parser.parse_args(argv), "selected", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
