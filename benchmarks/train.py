"""``python -m benchmarks.train``: the demo's GPT trained with each attention, and its speed by context length.

Two measurements:

    loss    one small model per attention, from the same weights on the same excerpts in bfloat16, in alternating
            steps; only rounding differs, so the curves must coincide
    speed   tokens per second of a wider model at several contexts, in interleaved rounds of whole steps

``--steps``, ``--seqlen`` and ``--width`` apply to the curves, at head_dim 64; ``--contexts`` and ``--speed-width`` to
the speeds, at head_dim 128; ``--tokens`` (per step) and ``--layers`` to both. ``--suite`` names the rows.

Losses stay on the device until a part of the curve is saved, so no step waits for the host.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import results, timing
from benchmarks.cases import Case, make_inputs
from benchmarks.providers import PROVIDERS, choose_providers
from benchmarks.results import Row
from benchmarks.session import Session, attempt, new_parser, run_command, synchronize
from benchmarks.table import Table, in_order, to_text
from flashtile_lab.examples import char_gpt
from flashtile_lab.examples.char_gpt import Attention, Text

METHODS = {
    "cuda": ("flashtile-hopper", "flashtile-portable", "fa2", "eager"),
    "cpu": ("flashtile-cpu", "sdpa", "eager"),
}
SEED = 7
# Nine times the excerpt in the package, so that a long curve does not learn its text by heart.
PLAYS = Path(__file__).parent / "data" / "tinyshakespeare.txt"
# Steps of a curve that are saved at once.
PIECE = 100
_SAMPLE_MS = 200.0


@dataclass(frozen=True)
class Recipe:
    """A model and its steps: ``measure`` is ``loss`` or ``speed``, ``seqlen`` the context, ``batch`` its excerpts."""

    measure: str
    seqlen: int
    batch: int
    num_layers: int
    num_heads: int
    d_model: int
    steps: int
    learning_rate: float


def attention_of(name: str) -> Attention:
    """Causal attention by exactly one implementation, ``(batch, seqlen, num_heads, head_dim)``."""
    if name == "eager":
        return char_gpt.standard_attention
    provider, case = PROVIDERS[name], Case("backward", "bfloat16", 1, 1, 1, 1, 1, 64, causal=True)
    attend = provider.attend(case, make_inputs(case, torch.device("cpu")))
    if not provider.heads_first:
        return attend
    return lambda q, k, v: attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class Trainer:
    """One model with its optimiser and its stream of excerpts, both seeded with ``SEED``."""

    def __init__(self, recipe: Recipe, name: str, text: Text, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        torch.manual_seed(SEED)
        sizes = char_gpt.GPTConfig(
            len(text.alphabet), recipe.seqlen, recipe.num_layers, recipe.num_heads, recipe.d_model
        )
        with device:
            self.model = char_gpt.CharGPT(sizes, attention_of(name))
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1,
            fused=device.type == "cuda",
        )  # fmt: skip
        self._draw = torch.Generator().manual_seed(SEED)
        self._tokens = text.train
        self._index = 0

    def step(self) -> Tensor:
        """Runs one step; returns its loss before the update, on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._schedule(self._index)
        self._index += 1
        excerpts, following = char_gpt.batch_of(self._tokens, self.recipe.seqlen, self.recipe.batch, self._draw)
        if self.device.type == "cuda":
            # A copy from pageable memory would wait for the steps before it.
            excerpts, following = (x.pin_memory().to(self.device, non_blocking=True) for x in (excerpts, following))
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = char_gpt.loss_of(self.model, excerpts, following)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.detach()

    def _schedule(self, index: int) -> float:
        """A linear warm-up, then a cosine decay to a tenth."""
        warm_up = min(1.0, (index + 1) / min(100, self.recipe.steps))
        return warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, index / self.recipe.steps)))


def started(
    recipe: Recipe, names: Sequence[str], text: Text, session: Session
) -> tuple[dict[str, tuple[Trainer, Tensor]], list[Row]]:
    """Trainers and losses after the first step, and rows with the reasons of those that cannot train."""

    def begin(name: str) -> tuple[Trainer, Tensor]:
        trainer = Trainer(recipe, name, text, session.device)
        loss = trainer.step()
        synchronize(session.device, name)
        return trainer, loss

    begun = {name: attempt(session.device, name, functools.partial(begin, name)) for name in names}
    failed = [session.run.row(asdict(recipe), name, error=of) for name, of in begun.items() if isinstance(of, str)]
    return {name: of for name, of in begun.items() if not isinstance(of, str)}, failed


def curves(recipe: Recipe, names: Sequence[str], text: Text, session: Session) -> tuple[list[Row], int]:
    """Trains one model per attention in alternating steps and saves losses piecewise; returns rows and exit code.

    ``values`` of a row: ``first_step``, ``losses`` (nats per character), ``seconds`` of the piece over all attentions.
    """
    running, failed = started(recipe, names, text, session)
    results.append(session.out, failed)

    def piece(start: int) -> list[Row]:
        start_s = time.monotonic()
        losses: dict[str, list[Tensor]] = {name: [] if start else [first] for name, (_, first) in running.items()}
        for _ in range(min(PIECE, recipe.steps - start) - (start == 0)):
            for name, (trainer, _) in running.items():
                losses[name].append(trainer.step())
        found = {name: [round(x, 5) for x in torch.stack(of).tolist()] for name, of in losses.items()}
        seconds = round(time.monotonic() - start_s, 3)
        return [curve_row(session, recipe, name, start, of, seconds) for name, of in found.items()]

    starts = range(0, recipe.steps, PIECE) if running else ()
    rows, code = session.each(starts, lambda start: f"from step {start}", piece)
    return failed + rows, code


def curve_row(session: Session, recipe: Recipe, name: str, start: int, losses: list[float], seconds: float) -> Row:
    """A row of a piece of a curve, or of the step at which the loss became NaN or infinite."""
    bad = next((i for i, x in enumerate(losses) if not math.isfinite(x)), None)
    if bad is not None:
        return session.run.row(asdict(recipe), name, error=f"wrong: the loss of step {start + bad} is {losses[bad]}")
    values = {"first_step": start, "losses": losses, "seconds": seconds}
    return session.run.row(asdict(recipe), name, values=values)


def speeds(recipe: Recipe, names: Sequence[str], text: Text, session: Session, rounds: int) -> list[Row]:
    """Times consecutive whole steps, host and device overlapping; ``values`` of a row hold ``tokens_per_s``."""
    running, rows = started(recipe, names, text, session)
    samples = {}
    for name, (trainer, _) in running.items():
        reps = timing.reps_for(timing.loop_ms(trainer.step, session.device, 2), _SAMPLE_MS)
        samples[name] = functools.partial(timing.loop_ms, trainer.step, session.device, reps)
    for name, found in timing.interleaved(samples, rounds, session.deadline).items():
        t = timing.summarise(found)
        values = {"tokens_per_s": round(recipe.batch * recipe.seqlen / (t.median_ms * 1e-3), 1)}
        rows.append(session.run.row(asdict(recipe), name, **vars(t), values=values))
    return rows


@dataclass(frozen=True)
class Training:
    """Data of saved rows: losses of every step by attention, tokens per second by context and attention, failures."""

    losses: dict[str, list[float]]
    tokens_per_s: dict[int, dict[str, float]]
    errors: dict[str, str]


def training_of(rows: Sequence[Row]) -> Training:
    """The curves of the last run that has any, and the last speeds; all rows must be of one device."""
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
    """Means over consecutive windows of ``width`` steps; a shorter last one is left out unless it is the only one."""
    pieces = [losses[i : i + width] for i in range(0, len(losses), width)]
    whole = [piece for piece in pieces if len(piece) == width] or pieces
    return [sum(piece) / len(piece) for piece in whole if piece]


def tables(training: Training, against: str = "eager") -> list[Table]:
    """Losses with their difference from standard attention, and tokens per second."""
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


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[Row], int, str]:
    chosen = choose_providers(args.providers or METHODS[args.device], "backward", session.device)
    names = [provider.name for provider in chosen]
    text = Text(PLAYS.read_text(encoding="utf-8")) if PLAYS.exists() else char_gpt.shakespeare()

    def recipe(measure: str, seqlen: int, width: int, head_dim: int, steps: int, learning_rate: float) -> Recipe:
        batch, heads = max(1, args.tokens // seqlen), max(1, width // head_dim)
        return Recipe(measure, seqlen, batch, args.layers, heads, width, steps, learning_rate)

    rows, code = session.each(
        [recipe("speed", seqlen, args.speed_width, 128, 1000, 1e-3) for seqlen in args.contexts],
        lambda wide: f"context {wide.seqlen}",
        functools.partial(speeds, names=names, text=text, session=session, rounds=args.rounds),
    )
    if args.steps and (not code or not args.contexts):
        found, code = curves(recipe("loss", args.seqlen, args.width, 64, args.steps, 2e-3), names, text, session)
        rows += found
    training = training_of(rows)
    failed = (f"{who}: {why}" for who, why in training.errors.items())
    return rows, code, "\n\n".join([*map(to_text, tables(training)), *failed])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures speeds, then curves; returns the process's exit code."""
    defaults = {
        "steps": 2000, "seqlen": 512, "width": 384, "tokens": 16384, "layers": 6,
        "contexts": [512, 2048, 8192], "speed_width": 1024, "rounds": 8, "suite": "train",
    }  # fmt: skip
    args = new_parser("train", __doc__, defaults, resumes=False).parse_args(argv)
    return run_command(args, args.suite, _measure_all)


if __name__ == "__main__":
    sys.exit(main())
