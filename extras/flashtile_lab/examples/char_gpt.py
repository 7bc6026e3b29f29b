"""A small character GPT that takes its attention as a function.

The whole model is plain PyTorch. Swapping ``standard_attention`` for ``flash_attention`` is the one line that a user of
flashtile would change, so two models that differ in nothing else can be trained side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile.nn import RotaryEmbedding

# Causal self-attention: q, k, v and the result are (batch, seqlen, num_heads, head_dim).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the textbooks write it, with the whole score matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    # In place, so that two matrices of this size are alive at once and not three.
    probs = scores.masked_fill_(future, -torch.inf).softmax(dim=-1)
    return (probs @ v).transpose(1, 2)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same by PyTorch's own function; a mask of all pairs takes the place of the causal one."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by flashtile, without the score matrix."""
    out = flashtile.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a ``CharGPT``, which sees ``seqlen`` characters at once; ``num_heads`` divides ``d_model``."""

    vocab_size: int
    seqlen: int = 128
    num_layers: int = 4
    num_heads: int = 4
    d_model: int = 128


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised copy of the stream and added back to it."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention = attention
        self.rotate = RotaryEmbedding(config.d_model // config.num_heads)
        self.norm_attention = nn.LayerNorm(config.d_model)
        self.norm_mlp = nn.LayerNorm(config.d_model)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor, cached: Attention | None = None) -> Tensor:
        """Maps the stream ``(..., d_model)`` to itself; ``cached`` is as in ``CharGPT.forward``, for this block."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        attended = cached(q, k, v) if cached else self.attention(self.rotate(q), self.rotate(k), v)
        x = x + self.out(attended.flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class CharGPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, config: GPTConfig, attention: Attention = flash_attention) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()

    def forward(self, tokens: Tensor, cached: Sequence[Attention] | None = None) -> Tensor:
        """Logits ``(batch, seqlen, vocab_size)`` of each next character, from tokens ``(batch, seqlen)`` int64.

        To go on from tokens whose keys and values are kept, ``cached`` has a function for each block that rotates q and
        k, adds k and v to what is kept and attends to it all. Tokens may be packed then: ``(total,)``.
        """
        x = self.characters(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cached[i] if cached else None)
        return self.head(self.norm(x))

    def _initialise(self) -> None:
        """Linear maps keep the size of their input, but those that end a block start at 0: it begins as identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)
        nn.init.normal_(self.characters.weight, std=0.5)

    @torch.no_grad()
    def write(self, tokens: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """Appends ``count`` characters to the prompt ``(1, length)`` int64, sampled with PyTorch's generator."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.seqlen :])[:, -1].float()
            chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens


class Text:
    """A text as characters, split into a training part and a held-out tail of one tenth."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self._index = {character: i for i, character in enumerate(self.alphabet)}
        tokens = self.encode(text)
        split = len(tokens) * 9 // 10
        self.train, self.held_out = tokens[:split], tokens[split:]

    def encode(self, text: str) -> Tensor:
        """Tokens ``(len(text),)`` int64."""
        return torch.tensor([self._index[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        """The characters of tokens ``(length,)``."""
        return "".join(self.alphabet[token] for token in tokens.tolist())


def shakespeare() -> Text:
    """The text that comes with the package: 130,000 characters of Romeo and Juliet, 61 of them different."""
    return Text(resources.files("flashtile_lab.examples").joinpath("shakespeare.txt").read_text(encoding="utf-8"))


def batch_of(tokens: Tensor, seqlen: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random excerpts and the characters that follow each of theirs: two tensors ``(batch, seqlen)`` int64."""
    starts = torch.randint(len(tokens) - seqlen, (batch, 1), generator=generator, device=generator.device)
    excerpts = tokens[starts + torch.arange(seqlen + 1, device=starts.device)]
    return excerpts[:, :-1], excerpts[:, 1:]


def loss_of(model: nn.Module, excerpts: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy, nats a character: ``ln(vocab_size)`` for a model that knows nothing."""
    return F.cross_entropy(model(excerpts).flatten(0, 1).float(), following.flatten())
