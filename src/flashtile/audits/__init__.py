"""``flashtile.audit``: which attention runs in each layer of a model, and whether it is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtile.audits import faults, measure
from flashtile.audits.calls import SeenCall
from flashtile.audits.faults import Finding, Stated
from flashtile.audits.probes import Model, leak, logits_of
from flashtile.audits.report import Audit, AuditedCall
from flashtile.audits.watch import Watch
from flashtile.core.errors import InvalidInputError

__all__ = ["Audit", "AuditedCall", "Finding", "audit"]


def audit(
    model: nn.Module,
    inputs: Any,
    *,
    causal: bool | None = None,
    window_size: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    attention_mask: Tensor | None = None,
) -> Audit:
    """Runs a model and compares the attention of each layer with attention in float64 on the same tensors.

    Seen are PyTorch's ``scaled_dot_product_attention``, ``flex_attention``, ``varlen_attn`` and
    ``MultiheadAttention``, flash-attn's functions wherever they come from, flashtile's, the functions that are
    registered with transformers, and attention that is written out as a product, a softmax and a product. The model
    runs as it is, without gradients; parts that are compiled run as the code that they were compiled from. It runs once
    more with exact attention, and once more for each of two probes: whether tokens move outputs before them, and
    whether padding moves any.

    What a layer is meant to be is taken from its attributes (``is_causal``, ``sliding_window``) and from its config; a
    keyword states it for all layers. What neither says is not judged. docs/audit.md has the list.

    Args:
        model: The model, on any device and in any dtype.
        inputs: A tensor, a tuple of arguments, or a dict of keywords, as for the model.
        causal: Whether tokens must see no later ones.
        window_size: ``(left, right)``: most keys before and after a row's own that it sees; -1 or None is unbounded.
        softmax_scale: Factor of the scores; ``head_dim ** -0.5`` if neither this nor a config says another.
        attention_mask: ``(batch, seqlen)``, 0 where a token is padding; by default the one among the inputs.

    Returns:
        The report.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError("model", f"is a {type(model).__name__}, must be a torch.nn.Module")
    if window_size is not None and len(window_size) != 2:
        raise InvalidInputError("window_size", f"is {window_size!r}, must be a pair (left, right)")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise InvalidInputError("attention_mask", f"has shape {shape}, must be (batch, seqlen)")
    return _Auditor(Model(model, inputs), Stated(causal, window_size, softmax_scale), attention_mask).report()


class _Auditor:
    """Runs the model and collects what its calls show."""

    def __init__(self, model: Model, stated: Stated, attention_mask: Tensor | None) -> None:
        self.model, self.stated, self.real = model, stated, model.padding(attention_mask)
        self.calls: list[AuditedCall] = []
        self.findings: list[Finding] = []
        self.idle: list[str] = []
        self.unseen: list[str] = []
        self.causal: set[bool | None] = set()

    def report(self) -> Audit:
        tokens = self.model.tokens
        batch = 1 if tokens is None else len(tokens)
        watch = Watch(self.model.model, self._look, batch)
        moved = None
        with watch.running():
            logits = logits_of(self.model.run())
            if logits is not None and self.calls:
                watch.handler = _exact
                exact = logits_of(self.model.run())
                assert exact is not None
                changed = exact.argmax(-1) != logits.argmax(-1)
                fits = self.real is not None and changed.shape == self.real.shape
                moved = float((changed[self.real] if fits else changed).double().mean())
            if logits is not None:
                watch.handler = _as_it_is
                self.findings += self._probes(logits)
        return Audit(
            type(self.model.model).__name__, tuple(self.calls), tuple(self.findings), tuple(self._notes(watch)), moved
        )

    @torch.no_grad()
    def _look(self, layer: str, module: nn.Module, call: SeenCall) -> None:
        is_training = self.model.model.training and module.training
        intent = faults.intent_of(module, call.q.shape[-1], self.stated, is_training)
        self.causal.add(intent.causal)
        kept = errors = None
        product, words = 0.0, "-"
        if not call.unknown:
            call, product = measure.fitted(call)
            fits = self.real is not None and len(self.real) == len(call.q) and call.ids is None
            kept = measure.kept(call, self.real.to(call.q.device) if self.real is not None and fits else None)
            words = faults.described(call, kept)
            errors = None if call.dropout_p else measure.errors_of(call)[0]
            found = [*faults.of_masks(call, kept, intent, fits), *faults.of_settings(call, intent)]
            found += faults.of_numbers(call, errors, product)
            self.findings += (Finding(layer, *each) for each in found)
            if kept.idle:
                self.idle.append(layer)
            if intent.left is not None and intent.left >= kept.reach:
                self.unseen.append(layer)
        (batch, rows, heads, dim), (keys, kv) = call.q.shape, call.k.shape[1:3]
        scale = call.softmax_scale
        self.calls.append(AuditedCall(
            layer, call.function, (batch, rows, keys, heads, kv, dim), str(call.q.dtype).removeprefix("torch."), words,
            None if scale is None else float(f"{scale * call.factor:.3g}"), product * abs(scale or 1.0), kept, errors,
            call.unknown or ("dropout" if call.dropout_p else ""),
        ))  # fmt: skip

    def _probes(self, logits: Tensor) -> Iterator[Finding]:
        """Changes tokens, and looks at the outputs of others."""
        tokens = self.model.tokens
        if tokens is None or tokens.dim() != (3 if tokens.is_floating_point() else 2) or tokens.shape[1] < 2:
            return
        if logits.dim() < 3 or logits.shape[:2] != tokens.shape[:2]:
            return
        place = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        real = torch.ones_like(place, dtype=torch.bool) if self.real is None else self.real.to(tokens.device)
        last = torch.where(real, place, -1).amax(1, keepdim=True)
        if self.stated.causal or (self.stated.causal is None and self.causal == {True}):
            share = leak(self.model, logits, place == last, real & (place < last))
            if share > 1e-3:
                text = f"a change of the last token moves outputs before it, {share:.2g} times as much as its own"
                yield Finding("", "mask", text, share)
        if self.real is not None and self.real.shape == tokens.shape[:2]:
            share = leak(self.model, logits, ~real, real)
            if share > 1e-3:
                text = f"a change of padding moves outputs of real tokens, {share:.2g} times as much as its own"
                yield Finding("", "padding", text, share)

    def _notes(self, watch: Watch) -> Iterator[str]:
        if not self.calls:
            yield "no attention call was seen: the model has none, or runs a kernel of its own"
        for reason, count in Counter(call.unknown for call in self.calls if call.unknown).items():
            yield f"{count} call{'s were' if count != 1 else ' was'} not compared: {reason}"
        for layers, text in (
            (self.idle, "a mask was passed that cuts nothing; kernels without masks are faster"),
            (self.unseen, "the window is not shorter than the sequence, so it was not tried"),
            (list(dict.fromkeys(watch.unknown)), "a softmax of four dimensions that was not recognised as attention"),
        ):
            if layers:
                yield f"{layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}: {text}"


def _as_it_is(layer: str, module: nn.Module, call: SeenCall) -> None:
    """Changes nothing."""


def _exact(layer: str, module: nn.Module, call: SeenCall) -> Tensor | None:
    """What a call shall return: attention in float64, without dropout."""
    return None if call.unknown else measure.errors_of(measure.fitted(call)[0])[1]
