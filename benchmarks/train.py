"""``python -m benchmarks.train``: the demo's GPT trained with each attention, and its speed by context length.

Two measurements:

    loss    one small model an attention, from the same weights on the same excerpts in bfloat16, each taking its steps
            in turn; what differs is rounding alone, so the curves must lie on one another
    speed   tokens a second of a wider model at several contexts, in interleaved rounds of whole steps

Losses stay on the device until a piece of the curve is saved, so no step waits for the host.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import flashtile
from benchmarks import results, timing
from benchmarks.budget import OUT_OF_TIME, hard_stop
from benchmarks.progress import Progress
from benchmarks.providers import PROVIDERS
from benchmarks.run import DeviceLostError, failure, synchronize
from benchmarks.session import Session, add_options, numbers, open_session
from benchmarks.table import Table, in_order, to_text
from flashtile.examples.char_gpt import (
    Attention,
    CharGPT,
    GPTConfig,
    Text,
    batch_of,
    loss_of,
    shakespeare,
    standard_attention,
)

METHODS = {
    "cuda": ("flashtile-hopper", "flashtile-portable", "fa2", "eager"),
    "cpu": ("flashtile-cpu", "sdpa", "eager"),
}
SEED = 7
# Steps of a curve that are saved at once.
PIECE = 100


@dataclass(frozen=True)
class Recipe:
    """A model and its steps.

    Attributes:
        measure: ``loss`` or ``speed``.
        seqlen: Context.
        batch: Excerpts a step.
        num_layers: Blocks.
        num_heads: Attention heads a block.
        d_model: Width.
        steps: Planned steps of each attention.
        learning_rate: Peak.
    """

    measure: str
    seqlen: int
    batch: int
    num_layers: int
    num_heads: int
    d_model: int
    steps: int
    learning_rate: float


def attention_of(name: str) -> Attention:
    """Causal attention by one implementation and no other, differentiable."""
    if name == "eager":
        return standard_attention
    if name == "fa2":

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
            return out.transpose(1, 2)

        return flash
    if name == "sdpa":

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return sdpa
    backend = name.removeprefix("flashtile-")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashtile.attention(q, k, v, causal=True, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return ours


class Trainer:
    """One model with its optimiser and its stream of excerpts, both decided by ``SEED``.

    Args:
        recipe: Its sizes.
        name: Its attention.
        text: What it learns.
        device: Where.
    """

    def __init__(self, recipe: Recipe, name: str, text: Text, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        torch.manual_seed(SEED)
        sizes = GPTConfig(len(text.alphabet), recipe.seqlen, recipe.num_layers, recipe.num_heads, recipe.d_model)
        with device:
            self.model = CharGPT(sizes, attention_of(name))
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1,
            fused=device.type == "cuda",
        )  # fmt: skip
        self._draw = torch.Generator().manual_seed(SEED)
        self._tokens = text.train
        self._index = 0

    def step(self) -> Tensor:
        """One step; its loss before the update, on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._schedule(self._index)
        self._index += 1
        excerpts, following = batch_of(self._tokens, self.recipe.seqlen, self.recipe.batch, self._draw)
        excerpts, following = (self._send(x) for x in (excerpts, following))
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = loss_of(self.model, excerpts, following)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.detach()

    def _send(self, x: Tensor) -> Tensor:
        # From pageable memory a copy would wait for the steps before it.
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def _schedule(self, index: int) -> float:
        """A linear warm-up, then a cosine decay to a tenth."""
        warm_up = min(1.0, (index + 1) / min(100, self.recipe.steps))
        return warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, index / self.recipe.steps)))


def started(
    recipe: Recipe, names: Sequence[str], text: Text, session: Session
) -> tuple[dict[str, Trainer], dict[str, Tensor], list[results.Row]]:
    """Trainers after their first step, its losses, and rows with the reasons of those that cannot train.

    Raises:
        DeviceLostError: If an attention broke the device.
    """
    running: dict[str, Trainer] = {}
    losses: dict[str, Tensor] = {}
    failed = []
    for name in names:
        try:
            trainer = Trainer(recipe, name, text, session.device)
            losses[name] = trainer.step()
            synchronize(session.device, name)
            running[name] = trainer
        except DeviceLostError:
            raise
        except Exception as error:  # one attention's failure must not cost the others their row
            synchronize(session.device, name)
            losses.pop(name, None)
            failed.append(session.run.row(asdict(recipe), name, error=failure(error)))
            if session.device.type == "cuda":
                torch.cuda.empty_cache()
    session.save(failed)
    return running, losses, failed


def curves(
    recipe: Recipe, names: Sequence[str], text: Text, session: Session, deadline_s: float | None
) -> list[results.Row]:
    """Trains a model an attention, step by step in turn, and saves their losses piece by piece.

    Args:
        recipe: Of every model.
        names: The attentions.
        text: What they learn.
        session: Where rows go.
        deadline_s: Instant of ``time.monotonic()`` at which all stop, after the same number of steps.

    Returns:
        The rows: for each piece of the curve and attention one, with ``values`` holding ``first_step``, ``losses``
        (nats a character) and ``seconds`` of the piece over all attentions.
    """
    running, first, rows = started(recipe, names, text, session)
    with Progress(math.ceil(recipe.steps / PIECE)) as progress:
        for start in range(0, recipe.steps if running else 0, PIECE):
            progress.begin(f"step {start} of {recipe.steps}")
            start_s = time.monotonic()
            losses: dict[str, list[Tensor]] = {name: [] if start else [first[name]] for name in running}
            for _ in range(min(PIECE, recipe.steps - start) - (start == 0)):
                if deadline_s is not None and time.monotonic() > deadline_s:
                    break
                for name, trainer in running.items():
                    losses[name].append(trainer.step())
            piece = {name: [round(x, 5) for x in torch.stack(of).tolist()] for name, of in losses.items() if of}
            seconds = time.monotonic() - start_s
            found = [_curve_row(session.run, recipe, name, start, of, seconds) for name, of in piece.items()]
            session.save(found)
            rows += found
            shown = ", ".join(f"{name} {sum(of[-20:]) / len(of[-20:]):.4f}" for name, of in piece.items())
            progress.end(f"step {start + max(map(len, piece.values()), default=0)}: {shown}")
            if any(len(of) < min(PIECE, recipe.steps - start) for of in losses.values()):
                progress.note("out of time: all curves end here")
                break
    return rows


def _curve_row(
    run: results.Run, recipe: Recipe, name: str, start: int, losses: list[float], seconds: float
) -> results.Row:
    if not all(map(math.isfinite, losses)):
        bad = next(i for i, x in enumerate(losses) if not math.isfinite(x))
        return run.row(asdict(recipe), name, error=f"wrong: the loss of step {start + bad} is {losses[bad]}")
    values = {"first_step": start, "losses": losses, "seconds": round(seconds, 3)}
    return run.row(asdict(recipe), name, values=values)


def speeds(recipe: Recipe, names: Sequence[str], text: Text, session: Session, rounds: int) -> list[results.Row]:
    """Times whole steps side by side; a row an attention, with ``values`` holding ``tokens_per_s``."""
    running, _, rows = started(recipe, names, text, session)
    found = []
    calls = {name: trainer.step for name, trainer in running.items()}
    for name, t in timing.measure(calls, session.device, rounds=rounds, burst_ms=50.0).items():
        tokens_per_s = recipe.batch * recipe.seqlen / (t.median_ms * 1e-3)
        values = {"tokens_per_s": round(tokens_per_s, 1)}
        found.append(session.run.row(asdict(recipe), name, median_ms=t.median_ms, spread=t.spread, values=values))
    session.save(found)
    return rows + found


@dataclass(frozen=True)
class Training:
    """What the saved rows of one run say.

    Attributes:
        losses: By attention, of every step.
        tokens_per_s: By context and attention.
        errors: Of attentions that could not train.
    """

    losses: dict[str, list[float]]
    tokens_per_s: dict[int, dict[str, float]]
    errors: dict[str, str]


def training_of(rows: Sequence[results.Row]) -> Training:
    """The curves of the last run that has any, and the last speeds; rows are of one device."""
    runs = [row.run for row in rows if row.values and "losses" in row.values]
    losses: dict[str, list[float]] = {}
    speed: dict[int, dict[str, float]] = {}
    found_errors: dict[str, str] = {}
    for row in rows:
        if row.case["measure"] == "speed" and row.values:
            speed.setdefault(row.case["seqlen"], {})[row.provider] = row.values["tokens_per_s"]
        elif row.values and row.run == runs[-1]:
            curve = losses.setdefault(row.provider, [])
            if row.values["first_step"] == len(curve):
                curve += row.values["losses"]
        if isinstance(row.error, str) and row.run == rows[-1].run:
            found_errors[f"{row.provider}, context {row.case['seqlen']}"] = row.error.splitlines()[0]
    return Training(losses, speed, found_errors)


def smooth(losses: Sequence[float], width: int = 50) -> list[float]:
    """Means over windows of so many steps, one after the other; a last shorter one is left out unless it is alone."""
    pieces = [losses[i : i + width] for i in range(0, len(losses), width)]
    whole = [piece for piece in pieces if len(piece) == width] or pieces
    return [sum(piece) / len(piece) for piece in whole if piece]


def tables(training: Training, against: str = "eager") -> list[Table]:
    """Losses with their distance from standard attention, and tokens a second."""
    names = in_order(training.losses)
    base = smooth(training.losses.get(against, []))
    head = ["attention", "steps", "first loss", "last loss", f"largest distance from {against}", "mean distance"]
    lines = []
    for name in names:
        curve = smooth(training.losses[name])
        gaps = [abs(a - b) for a, b in zip(curve, base, strict=False)]
        shown = [f"{max(gaps):.4f}", f"{sum(gaps) / len(gaps):.4f}"] if gaps else ["", ""]
        first, last = training.losses[name][0], curve[-1]
        lines.append([name, str(len(training.losses[name])), f"{first:.4f}", f"{last:.4f}", *shown])
    found = [[head, *lines]] if lines else []
    if training.tokens_per_s:
        names = in_order({name for by_name in training.tokens_per_s.values() for name in by_name})
        speeds = [
            [f"context {seqlen}", *(f"{by_name[n]:,.0f}" if n in by_name else "-" for n in names)]
            for seqlen, by_name in sorted(training.tokens_per_s.items())
        ]
        found.append([["tokens/s", *names], *speeds])
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--steps", type=int, default=2000, help="of each attention; 0 leaves the curves out")
    parser.add_argument("--seqlen", type=int, default=512, help="context of the curves")
    parser.add_argument("--contexts", type=numbers, default=[512, 2048, 8192], metavar="A,B", help="of the speeds")
    parser.add_argument("--tokens", type=int, default=16384, help="a step")
    parser.add_argument("--width", type=int, default=384, help="d_model of the curves; head_dim is 64")
    parser.add_argument("--speed-width", type=int, default=1024, help="d_model of the speeds; head_dim is 128")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8, help="samples a speed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures speeds, then curves; returns the process's exit code."""
    start_s = time.monotonic()
    args = _parser().parse_args(argv)
    session = open_session(args, "train")
    if session is None:
        return 2
    names = []
    for name in args.providers or METHODS[args.device]:
        missing = PROVIDERS[name].missing("backward", session.device)
        print(f"without {name}: {missing}" if missing else f"{name}: {PROVIDERS[name].runs('backward')}", flush=True)
        names += [] if missing else [name]
    text = shakespeare()
    left_s = None if args.budget_s is None else args.budget_s - (time.monotonic() - start_s)
    deadline_s = None if left_s is None else time.monotonic() + left_s - min(5.0, 0.1 * left_s)
    rows: list[results.Row] = []
    code = 0
    with hard_stop(left_s):
        try:
            for seqlen in args.contexts:
                heads = max(1, args.speed_width // 128)
                batch = max(1, args.tokens // seqlen)
                wide = Recipe("speed", seqlen, batch, args.layers, heads, args.speed_width, 1000, 1e-3)
                rows += speeds(wide, names, text, session, args.rounds)
                print(f"context {seqlen}: {_shown(rows, seqlen)}", flush=True)
            batch = max(1, args.tokens // args.seqlen)
            heads = max(1, args.width // 64)
            small = Recipe("loss", args.seqlen, batch, args.layers, heads, args.width, args.steps, 2e-3)
            if args.steps:
                rows += curves(small, names, text, session, deadline_s)
        except DeviceLostError as error:
            print(f"stopped: {error}", flush=True)
            code = 1
    training = training_of(rows)
    print("".join(f"\n{to_text(each)}\n" for each in tables(training)))
    print(
        "".join(f"{who}: {why}\n" for who, why in training.errors.items())
        + f"{len(rows)} rows appended to {session.out}"
    )
    if not code and any(len(losses) < args.steps for losses in training.losses.values()):
        code = OUT_OF_TIME
    return code if rows else code or 1


def _shown(rows: Sequence[results.Row], seqlen: int) -> str:
    found = training_of(rows).tokens_per_s.get(seqlen, {})
    return ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in found.items()) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
