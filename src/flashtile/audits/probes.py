"""The model's inputs and outputs: what is padding, what moves if tokens change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flashtile.core.errors import InvalidInputError


class Model:
    """A model and its inputs, run without gradients and with the same random numbers each time."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            self.kwargs = dict(inputs)
        elif isinstance(inputs, tuple | list):
            self.args = tuple(inputs)
        elif isinstance(inputs, Tensor):
            self.args = (inputs,)
        else:
            found = f"is a {type(inputs).__name__}"
            raise InvalidInputError("inputs", f"{found}, must be a tensor, a tuple of arguments or a dict of keywords")

    @property
    def tokens(self) -> Tensor | None:
        """The first tensor of the inputs: ids ``(batch, seqlen)``, or ``(batch, seqlen, features)``."""
        named = self.kwargs.get("input_ids", self.kwargs.get("inputs_embeds"))
        every = [named, *self.args, *self.kwargs.values()]
        return next((x for x in every if isinstance(x, Tensor) and x.dim() > 1), None)

    def run(self, tokens: Tensor | None = None) -> Any:
        """The model's result; with other tokens in place of its own if they are given."""
        own = self.tokens

        def fresh(x: Any) -> Any:
            # Caches among the inputs are changed by a run.
            return x if isinstance(x, Tensor) else copy.deepcopy(x)

        args, kwargs = (
            tree_map(lambda x: tokens if tokens is not None and x is own else fresh(x), given)
            for given in (self.args, self.kwargs)
        )
        devices = {x.device for x in self.model.parameters()} | {x.device for x in (own,) if x is not None}
        with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), torch.no_grad():
            torch.manual_seed(0)
            return self.model(*args, **kwargs)

    def padding(self, stated: Tensor | None) -> Tensor | None:
        """``(batch, seqlen)`` bool, True for tokens that are no padding; None if nothing says that some are."""
        tokens, mask = self.tokens, self.kwargs.get("attention_mask") if stated is None else stated
        if isinstance(mask, Tensor) and mask.dim() == 2:
            real = mask.bool()
        else:
            pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
            if mask is not None or not isinstance(pad, int) or tokens is None or tokens.is_floating_point():
                return None
            # Two and more at an end of a sequence; one alone may be its last token.
            is_pad = (tokens == pad).int()
            runs = is_pad.cumprod(1), is_pad.flip(1).cumprod(1).flip(1)
            real = ~((runs[0].bool() & (runs[0].sum(1, keepdim=True) > 1)) | (runs[1] * (runs[1].sum(1, True) > 1) > 0))
        return None if bool(real.all()) else real


def logits_of(result: Any) -> Tensor | None:
    """The logits in a model's result: a field of this name, or a tensor of floats."""
    found = getattr(result, "logits", None)
    if found is None and isinstance(result, Mapping):
        found = result.get("logits")
    if found is None:
        found = result[0] if isinstance(result, tuple) and result else result
    is_fit = isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 1
    return found if is_fit else None


def leak(model: Model, before: Tensor, changed: Tensor, watched: Tensor) -> float:
    """How much some tokens' outputs move when others change, beside what the others' own outputs move.

    Args:
        model: The model.
        before: Its logits ``(batch, seqlen, ...)``.
        changed: ``(batch, seqlen)`` bool, the tokens that are changed.
        watched: The same for the outputs that are looked at.
    """
    tokens = model.tokens
    assert tokens is not None
    if tokens.is_floating_point():
        other = torch.where(changed[..., None], -tokens.flip(-1) + 0.5, tokens)
    else:
        other = torch.where(changed, torch.where(tokens > 1, tokens - 1, tokens + 1), tokens)
    after = logits_of(model.run(other))
    assert after is not None
    moves = (after.double() - before.double()).abs().nan_to_num(0.0).flatten(2).amax(-1)
    own = float(torch.where(changed, moves, 0.0).max())
    noise = 64 * torch.finfo(before.dtype).eps * float(before.double().abs().nan_to_num(0.0).max())
    most = float(torch.where(watched, moves, 0.0).max())
    return most / own if own and most > noise else 0.0
