"""Part three of the demo: one character GPT trained from one seed with each attention, and nothing else changed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from flashtile_lab.examples import char_gpt
from flashtile_lab.examples.char_gpt import Attention, Text

ATTENTIONS: dict[str, Attention] = {
    "standard": char_gpt.standard_attention,
    "SDPA": char_gpt.sdpa_attention,
    "flashtile": char_gpt.flash_attention,
}
SEED = 7
PROMPT = "\nROMEO:\n"


@dataclass(frozen=True)
class Recipe:
    """How the model is trained, on which excerpts, and how long that should take."""

    seqlen: int
    num_layers: int
    num_heads: int
    d_model: int
    batch: int
    learning_rate: float  # peak, after a linear warm-up and before a cosine decay to a tenth
    max_steps: int  # on a machine that is fast enough
    min_steps: int  # on one that is not
    budget_s: float  # of one run


@dataclass(frozen=True)
class Run:
    """One training run; losses are in nats a character."""

    method: str
    losses: list[float]
    held_out_loss: float
    tokens_per_s: float  # of the median step
    parameters: int
    sample: str


def choose_threads(recipe: Recipe, text: Text) -> float:
    """Halves PyTorch's CPU threads as long as that makes steps faster; the seconds of a step with those now set.

    It does where other programs keep the cores busy, or where a container may use fewer cores than it sees: threads
    that wait for one another then cost more than they give.
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
    trainer = _Trainer(recipe, text, device, char_gpt.standard_attention, steps=1000)
    while len(trainer.times) < 5 and sum(trainer.times) < 2:
        trainer.step(len(trainer.times))
    return statistics.median(trainer.times)


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
    """Trains one model by each of ``ATTENTIONS``: the same first weights and the same excerpts.

    The runs know nothing of each other, but take their steps in turn, so that whatever else the machine does slows
    both alike. ``on_step`` is told the losses by method after each.
    """
    trainers = {method: _Trainer(recipe, text, device, each, steps) for method, each in ATTENTIONS.items()}
    for i in range(steps):
        on_step({method: trainer.step(i) for method, trainer in trainers.items()})
    return [trainer.run(method, sample_length) for method, trainer in trainers.items()]


class _Trainer:
    """A model, its optimiser and its stream of excerpts."""

    def __init__(self, recipe: Recipe, text: Text, device: torch.device, attention: Attention, steps: int) -> None:
        self._recipe, self._text, self._device, self._steps = recipe, text, device, steps
        torch.manual_seed(SEED)
        sizes = (recipe.seqlen, recipe.num_layers, recipe.num_heads, recipe.d_model)
        self._model = char_gpt.CharGPT(char_gpt.GPTConfig(len(text.alphabet), *sizes), attention).to(device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._draw = torch.Generator().manual_seed(SEED)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, index: int) -> float:
        """One step, and its loss before the update."""
        start = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * self._schedule(index)
        loss = self._loss(self._text.train, self._draw)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.losses.append(loss.item())
        self.times.append(time.perf_counter() - start)
        return self.losses[-1]

    @torch.no_grad()
    def run(self, method: str, sample_length: int) -> Run:
        """What the steps gave: the held-out loss is a mean over eight batches, the sample begins with the prompt."""
        draw = torch.Generator().manual_seed(SEED)
        held_out_loss = sum(self._loss(self._text.held_out, draw).item() for _ in range(8)) / 8
        torch.manual_seed(SEED)
        with self._precision():
            written = self._model.write(self._text.encode(PROMPT)[None].to(self._device), sample_length)
        return Run(
            method=method,
            losses=self.losses,
            held_out_loss=held_out_loss,
            tokens_per_s=self._recipe.batch * self._recipe.seqlen / statistics.median(self.times),
            parameters=sum(p.numel() for p in self._model.parameters()),
            sample=self._text.decode(written[0]).strip(),
        )

    def _schedule(self, index: int) -> float:
        warm_up = min(1.0, (index + 1) / min(20, self._steps))
        return warm_up * (0.55 + 0.45 * math.cos(math.pi * index / self._steps))

    def _loss(self, tokens: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        excerpts, following = char_gpt.batch_of(tokens, self._recipe.seqlen, self._recipe.batch, draw)
        with self._precision():
            return char_gpt.loss_of(self._model, excerpts.to(self._device), following.to(self._device))

    def _precision(self) -> torch.autocast:
        """bfloat16 products on a GPU, where they are what people train with; float32 on a CPU."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda")
