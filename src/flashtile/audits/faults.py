"""What a layer's attention is meant to be, and what is wrong with a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashtile.audits.calls import SeenCall
from flashtile.audits.measure import Errors, SeenPairs, errors_of

# Models of transformers that do not scale scores: their weights do.
_UNSCALED = {"gpt_neo", "mt5", "longt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong in a model's attention.

    Attributes:
        layer: The module's name; empty for the model as a whole.
        kind: ``"mask"``, ``"window"``, ``"scale"``, ``"heads"``, ``"dropout"``, ``"padding"``, ``"error"``,
            ``"empty rows"``, ``"overflow"`` or ``"not finite"``.
        text: What is wrong, in a sentence.
        value: The number in it.
    """

    layer: str
    kind: str
    text: str
    value: float

    def __str__(self) -> str:
        return f"{self.layer or 'the model'}: {self.kind}: {self.text}"


@dataclass(frozen=True)
class Intent:
    """What a layer's attention is meant to be.

    Attributes:
        causal: Whether rows see no later key; None if nothing says so.
        left: Most keys before a row's own; None is unbounded.
        right: Most keys after it; None is unbounded.
        bounded: Whether left and right are known.
        scale: The factor of the scores.
        training: Whether the layer and the whole model are training.
        source: Where this is from, for sentences.
    """

    causal: bool | None
    left: int | None
    right: int | None
    bounded: bool
    scale: float
    training: bool
    source: str


@dataclass(frozen=True)
class Stated:
    """What the caller says that all layers are meant to be; None leaves it to the model."""

    causal: bool | None = None
    window_size: Sequence[int | None] | None = None
    softmax_scale: float | None = None


def intent_of(module: nn.Module, head_dim: int, stated: Stated, is_training: bool) -> Intent:
    """What a layer is meant to be: as stated, or as its module and the module's ``config`` say."""
    config: Any = getattr(module, "config", None)
    causal = stated.causal
    for name in ("is_causal", "causal"):
        found = getattr(module, name, None)
        if causal is None and isinstance(found, bool) and not getattr(module, "is_cross_attention", False):
            causal = found
    left, right, is_bounded = _window(module, config, causal)
    if stated.window_size is not None:
        left, right = (None if x is None or x < 0 else x for x in stated.window_size)
        is_bounded = True
    source = "what is stated" if stated.window_size is not None else "the model's config" if config else "the module"
    scale = stated.softmax_scale
    if scale is None:
        given = getattr(module, "softmax_scale", None), getattr(config, "attention_multiplier", None)
        scale = next((x for x in given if isinstance(x, float)), None)
    if scale is None:
        dim = 1 if getattr(config, "model_type", "") in _UNSCALED else head_dim
        scale = float(getattr(config, "query_pre_attn_scalar", None) or dim) ** -0.5
    return Intent(causal, left, 0 if causal else right, is_bounded, scale, is_training, source)


def _window(module: nn.Module, config: Any, causal: bool | None) -> tuple[int | None, int | None, bool]:
    """The bounds left and right, and whether they are known."""
    window = getattr(module, "window_size", None)
    if isinstance(window, tuple | list) and len(window) == 2:
        left, right = (None if x is None or x < 0 else int(x) for x in window)
        return left, right, True
    if not causal:
        return None, None, False
    if config is None:
        window = getattr(module, "sliding_window", window)
        return (window - 1, 0, True) if isinstance(window, int) and window > 0 else (None, 0, False)
    kinds, at = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[at] if kinds and isinstance(at, int) and at < len(kinds) else None
    window = getattr(config, "sliding_window", None)
    if kind not in (None, "sliding_attention", "full_attention"):
        return None, 0, False
    if kind == "full_attention" or window is None or getattr(config, "use_sliding_window", True) is False:
        return None, 0, not hasattr(config, "window_size")  # which means something else to each model
    return window - 1, 0, kind is not None or not hasattr(config, "max_window_layers")


def described(call: SeenCall, kept: SeenPairs) -> str:
    """A mask in a few words."""
    share = f"keeps {100 * kept.share:.0f} % of pairs"
    if kept.empty[0] == kept.empty[1]:
        return "keeps nothing"
    if not call.aligned or kept.holes or (call.ids is not None and call.right is None):
        return "all" if kept.share == 1 else share
    span = kept.span
    is_windowed = kept.slides and span < kept.reach
    words = []
    if kept.ahead[1] == 0:
        words.append("causal")
    elif kept.all_ahead and kept.ahead[1] < call.k.shape[1] - 1:
        words.append(f"{_keys(abs(kept.ahead[1]))} {'after' if kept.ahead[1] > 0 else 'before'} its own")
    if is_windowed:
        words.append(f"window of {span + 1} keys" if kept.ahead[1] <= 0 else f"{_keys(span)} before")
    return ", ".join(words) or ("all" if kept.share == 1 else share)


def of_masks(call: SeenCall, kept: SeenPairs, intent: Intent, padding: bool) -> Iterator[tuple[str, str, float]]:
    """Faults of a call's mask: kind, sentence, number.

    Args:
        call: The call.
        kept: What its mask keeps.
        intent: What the layer is meant to be.
        padding: Whether padding is known.
    """
    empty, rows = kept.empty
    behind = call.aligned and empty < rows and kept.ahead[1] < 0
    if behind and (intent.causal or kept.all_ahead or kept.ahead[0] == kept.ahead[1]):
        yield "mask", f"no row sees its own token: the mask is {_rows(-kept.ahead[1])} off, too early", -kept.ahead[1]
    elif empty:
        yield "empty rows", f"{empty:,} of {rows:,} rows see no key", empty
    if call.right == 0 and not call.aligned and call.function.startswith("scaled_dot") and call.k.shape[1] > 1:
        rows, keys = call.q.shape[1], call.k.shape[1]
        text = (
            f"is_causal counts {rows} rows from the first of {keys} keys: the last row sees {min(rows, keys)} of them"
        )
        yield "mask", f"{text}; rows at the end of the keys need a mask", keys - rows
    if call.aligned and empty < rows:
        yield from _of_bounds(call, kept, intent)
    if padding and kept.padded[0]:
        text = f"{kept.padded[0]:,} of {kept.padded[1]:,} rows of real tokens see keys of padding"
        yield "padding", text, kept.padded[0]


def _of_bounds(call: SeenCall, kept: SeenPairs, intent: Intent) -> Iterator[tuple[str, str, float]]:
    (_, ahead), span, keys = kept.ahead, kept.span, call.k.shape[1]
    is_local = span == ahead
    # Without a statement a bound of one or two keys after a row's own is taken for a causal mask that is off.
    suspect = (
        intent.causal is None and not intent.bounded and kept.all_ahead and 0 < ahead <= 2 and keys > 4 and not is_local
    )
    if (intent.causal and ahead > 0) or suspect:
        if ahead < min(8, keys - 1) and kept.all_ahead:
            text = f"rows see {_keys(ahead)} after their own: the causal mask is {_rows(ahead)} off"
        else:
            text = f"not causal: rows see up to {_keys(ahead)} after their own"
        yield "mask", text, ahead
    elif not intent.causal and intent.bounded and intent.right is not None and ahead > intent.right:
        text = f"rows see {_keys(ahead)} after their own, {intent.source} says {intent.right}"
        yield "window", text + _off(ahead - intent.right), ahead
    if not intent.bounded:
        return
    meant = kept.reach if intent.left is None else min(intent.left, kept.reach)
    if span > meant and intent.left is not None:
        text = f"rows see {span + 1} keys up to their own, {intent.source} says {meant + 1}"
        yield "window", text + _off(span - meant), span + 1
    elif span < meant and kept.slides:
        says = "all" if intent.left is None else f"{intent.left + 1}"
        text = f"rows see at most {span + 1} keys up to their own, {intent.source} says {says}"
        yield "window", text + ("" if intent.left is None else _off(meant - span)), span + 1


def of_settings(call: SeenCall, intent: Intent) -> Iterator[tuple[str, str, float]]:
    """Faults of a call's scale, heads and dropout."""
    if call.softmax_scale is not None:
        scale, near = call.softmax_scale * call.factor, 0.01 if call.scores is not None else 1e-3
        if abs(scale - intent.scale) > near * intent.scale:
            text = f"scores are scaled by {scale:.5g} where {intent.scale:.5g} was expected"
            named = {call.q.shape[-1] ** -1.0: "1 / head_dim", 1.0: "not at all", call.q.shape[-1] ** 0.5: "inverted"}
            known = next((f" ({name})" for value, name in named.items() if abs(scale - value) < near * value), "")
            yield "scale", f"{text}{known}; state softmax_scale if it is meant", scale
    if (kv := interleaved(call.k)) is not None:
        group = call.k.shape[2] // kv
        text = f"query head h reads key head h % {kv}, where grouped heads read h // {group}"
        yield "heads", f"{text}: keys were repeated whole, not each head by itself", kv
    if call.dropout_p > 0 and not intent.training:
        yield "dropout", f"dropout of {call.dropout_p:g} in a model or layer that is in eval mode", call.dropout_p


def interleaved(k: Tensor) -> int | None:
    """How many key heads there are, if they were expanded as 0 1 2 0 1 2 instead of 0 0 1 1 2 2; else None."""
    heads, sample = k.shape[2], k[:1, :64]
    distinct: list[int] = []
    order = []
    for h in range(heads):
        same = next((n for n, d in enumerate(distinct) if torch.equal(sample[:, :, h], sample[:, :, d])), None)
        order.append(len(distinct) if same is None else same)
        if same is None:
            distinct.append(h)
    count = len(distinct)
    is_turned = 1 < count < heads and heads % count == 0 and order == [h % count for h in range(heads)]
    return count if is_turned else None


def of_numbers(call: SeenCall, errors: Errors | None, product: float) -> Iterator[tuple[str, str, float]]:
    """Faults of a call's numbers; ``product`` is the largest of a query and a key."""
    most = torch.finfo(call.score_dtype).max
    name = str(call.score_dtype).removeprefix("torch.")
    # Products that are formed in a dtype overflow before they are scaled.
    peak = product if call.scores is not None else product * (call.softmax_scale or 1.0)
    is_finite = bool(torch.isfinite(call.out).all())
    if peak > most:
        yield "overflow", f"scores reach {peak:.3g}, {name} ends at {most:.3g}", peak
    if not is_finite:
        yield "not finite", "the result holds infinities or NaN", 1.0
    if errors is None or not errors.is_fault() or not is_finite:
        return
    count, first, last = errors.wrong
    where = f"{count:,} rows of {call.q.shape[1]:,} ({first} to {last}), {len(errors.heads)} of {call.q.shape[2]} heads"
    beside = f"off by {errors.error:.2g}, where plain PyTorch errs by {errors.plain:.2g}: {where}"
    for kind, name, other in _suspects(call):
        if not errors_of(other)[0].is_fault():
            yield kind, f"{call.function} computes attention {name} (as asked for: {beside})", errors.error
            return
    yield "error", f"{call.function} is {beside}", errors.error


def _suspects(call: SeenCall) -> Iterator[tuple[str, str, SeenCall]]:
    """Calls that a faulty kernel may have computed instead: kind of the fault, words, the call."""
    heads, kv = call.q.shape[2], call.k.shape[2]
    if 1 < kv < heads:
        turned = call.but(k=call.k.repeat(1, 1, heads // kv, 1), v=call.v.repeat(1, 1, heads // kv, 1))
        yield "heads", f"in which query head h reads key head h % {kv}", turned
    for step in (1, -1):
        words = "more" if step > 0 else "fewer"
        if call.right is not None:
            yield "mask", f"in which rows see one key {words} after their own", call.but(right=call.right + step)
        if call.left is not None:
            yield "window", f"in which rows see one key {words} before their own", call.but(left=call.left + step)
    if call.right is not None:
        yield "mask", "that is not causal", call.but(right=None)
    else:
        yield "mask", "that is causal", call.but(right=0)
    if call.left is not None:
        yield "window", "without its window", call.but(left=None)
    for scale in (call.q.shape[-1] ** -0.5, 1.0, call.q.shape[-1] ** -1.0):
        if call.softmax_scale is not None and scale != call.softmax_scale:
            yield "scale", f"with scores times {scale:.5g}", call.but(softmax_scale=scale)
    for name, kind in (("mask", "mask"), ("bias", "mask"), ("slopes", "error"), ("sinks", "error"), ("ids", "mask")):
        if getattr(call, name) is not None:
            yield kind, f"without its {name}", call.but(**{name: None})


def _keys(count: int) -> str:
    return f"{count} key{'s' if count != 1 else ''}"


def _rows(count: int) -> str:
    return "one row" if count == 1 else f"{count} rows"


def _off(count: int) -> str:
    return ": off by one" if count == 1 else ""
