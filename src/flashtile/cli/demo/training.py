"""Part three of the demo: one character GPT trained twice from one seed, differing in its attention alone."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from flashtile.examples.char_gpt import (
    Attention,
    CharGPT,
    GPTConfig,
    Text,
    batch_of,
    flash_attention,
    loss_of,
    standard_attention,
)

ATTENTIONS: dict[str, Attention] = {"standard": standard_attention, "flashtile": flash_attention}
SEED = 7


@dataclass(frozen=True)
class Recipe:
    """How the model is trained.

    Attributes:
        seqlen: Characters it sees.
        num_layers: Transformer blocks.
        num_heads: Attention heads a block.
        d_model: Width.
        batch: Excerpts a step.
        learning_rate: Peak, after a linear warm-up and before a cosine decay to a tenth.
        max_steps: Steps of each run on a machine that is fast enough.
        min_steps: Steps on one that is not.
        budget_s: Seconds that one run should take.
    """

    seqlen: int
    num_layers: int
    num_heads: int
    d_model: int
    batch: int
    learning_rate: float
    max_steps: int
    min_steps: int
    budget_s: float

    @property
    def tokens_per_step(self) -> int:
        """Characters that one step learns from."""
        return self.batch * self.seqlen


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        method: ``standard`` or ``flashtile``.
        losses: Training loss of each step, nats a character.
        held_out_loss: Loss on text that was not trained on, nats a character.
        tokens_per_s: Characters trained on a second: the median step's.
        parameters: Numbers in the model.
        sample: What the model writes after ``PROMPT``.
    """

    method: str
    losses: list[float]
    held_out_loss: float
    tokens_per_s: float
    parameters: int
    sample: str


PROMPT = "\nROMEO:\n"


def choose_threads(recipe: Recipe, text: Text) -> float:
    """Halves PyTorch's CPU threads as long as that makes steps faster.

    It does where other programs keep the cores busy, or where a container may use fewer cores than it sees: threads
    that wait for one another then cost more than they give.

    Returns:
        Seconds of a step with the threads that are now set.
    """
    cpu = torch.device("cpu")
    seconds = step_seconds(recipe, text, cpu)
    while (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(threads // 2)
        fewer_s = step_seconds(recipe, text, cpu)
        if fewer_s >= seconds:
            torch.set_num_threads(threads)
            break
        seconds = fewer_s
    return seconds


def step_seconds(recipe: Recipe, text: Text, device: torch.device) -> float:
    """The median of a few steps of a model that is thrown away."""
    trainer = _Trainer(recipe, text, device, standard_attention, steps=1000)
    times: list[float] = []
    while len(times) < 5 and sum(times) < 2:
        times.append(trainer.step(len(times))[1])
    return statistics.median(times)


def choose_steps(recipe: Recipe, seconds: float) -> int:
    """As many steps of so many seconds as fit the recipe's time, within its bounds."""
    return max(recipe.min_steps, min(recipe.max_steps, int(recipe.budget_s / seconds)))


def train(
    recipe: Recipe,
    text: Text,
    device: torch.device,
    steps: int,
    sample_length: int,
    on_step: Callable[[dict[str, float]], None],
) -> list[Run]:
    """Trains one model by each method: the same first weights and the same excerpts.

    The runs know nothing of each other, but take their steps in turn, so that whatever else the machine does slows
    both alike.

    Args:
        recipe: How.
        text: What they learn.
        device: Where.
        steps: How many steps.
        sample_length: Characters that each writes at the end.
        on_step: Told the losses by method after each step.

    Returns:
        A run for each of ``ATTENTIONS``.
    """
    trainers = {method: _Trainer(recipe, text, device, each, steps) for method, each in ATTENTIONS.items()}
    losses: dict[str, list[float]] = {method: [] for method in trainers}
    times: dict[str, list[float]] = {method: [] for method in trainers}
    for i in range(steps):
        for method, trainer in trainers.items():
            loss, seconds = trainer.step(i)
            losses[method].append(loss)
            times[method].append(seconds)
        on_step({method: losses[method][-1] for method in trainers})
    return [
        Run(
            method=method,
            losses=losses[method],
            held_out_loss=trainer.held_out_loss(),
            tokens_per_s=recipe.tokens_per_step / statistics.median(times[method]),
            parameters=sum(p.numel() for p in trainer.model.parameters()),
            sample=trainer.sample(sample_length),
        )
        for method, trainer in trainers.items()
    ]


class _Trainer:
    """A model, its optimiser and its stream of excerpts."""

    def __init__(self, recipe: Recipe, text: Text, device: torch.device, attention: Attention, steps: int) -> None:
        self.recipe, self.text, self.device, self.steps = recipe, text, device, steps
        torch.manual_seed(SEED)
        sizes = GPTConfig(len(text.alphabet), recipe.seqlen, recipe.num_layers, recipe.num_heads, recipe.d_model)
        self.model = CharGPT(sizes, attention).to(device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._draw = torch.Generator().manual_seed(SEED)

    def step(self, index: int) -> tuple[float, float]:
        """One step: its loss before the update, and how many seconds it took."""
        start = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._schedule(index)
        loss = self._loss(self.text.train, self._draw)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item(), time.perf_counter() - start

    def _schedule(self, index: int) -> float:
        warm_up = min(1.0, (index + 1) / min(20, self.steps))
        return warm_up * (0.55 + 0.45 * math.cos(math.pi * index / self.steps))

    def _loss(self, tokens: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        excerpts, following = batch_of(tokens, self.recipe.seqlen, self.recipe.batch, draw)
        with self._precision():
            return loss_of(self.model, excerpts.to(self.device), following.to(self.device))

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        """bfloat16 products on a GPU, where they are what people train with; float32 on a CPU."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean over eight batches of text kept apart."""
        draw = torch.Generator().manual_seed(SEED)
        return sum(self._loss(self.text.held_out, draw).item() for _ in range(8)) / 8

    def sample(self, length: int) -> str:
        """What the model writes after the prompt, the prompt included."""
        torch.manual_seed(SEED)
        with self._precision():
            written = self.model.write(self.text.encode(PROMPT)[None].to(self.device), length)
        return self.text.decode(written[0]).strip()
