"""What ``flashtile build`` lists is all that servers and trainings ask for: kernels by their keys, none compiled."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import flashtile
from benchmarks import first_call
from flashtile.backends.gpu.launch import Launch
from flashtile.cli.models import LayerShape, Uses, models
from tests.archive.asked import asked, missing

pytest.importorskip("triton")

BRAIN = torch.bfloat16


@pytest.fixture(autouse=True)
def without_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of the benchmark on CPU tensors that nothing writes."""
    monkeypatch.setenv("FLASHTILE_KERNELS", "off")
    monkeypatch.setattr(first_call, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: torch.empty(*shape, **options))
    monkeypatch.setattr(torch, "randn_like", torch.empty_like)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(first_call, "_plain", lambda *given: None)
    yield


def _asked(case: str) -> dict[bytes, Launch]:
    with asked("sm_90") as found:
        call, inputs, _ = first_call.CASES[case]()
        out = call()
        if inputs:
            out.sum().backward()
    return found


def test_a_server_asks_for_nothing_that_is_not_listed() -> None:
    """With ``--model llama3-8b --packed --pages 16 --forward``, on tensors as vLLM has them."""
    (layer,) = models()["llama3-8b"]
    found = _asked("a server's start")
    names = {each.kernel.__name__ for each in found.values()}
    assert {"cache_append", "cache_attention", "paged_forward"} <= names
    assert missing(found, layer, Uses(BRAIN, True, True, False, (16,)), "sm_90") == []


@pytest.mark.parametrize(
    "layer", [LayerShape(32, 8, 128, True), LayerShape(28, 4, 64, False), LayerShape(32, 8, 256, True)], ids=str
)
def test_trainings_of_any_length_ask_for_nothing_that_is_not_listed(layer: LayerShape) -> None:
    with asked("sm_90") as found:
        for length in random.Random(0).sample(range(1, 8193), 231):
            heads = layer.heads_q, layer.heads_kv, layer.heads_kv
            q, k, v = (torch.empty(2, length, n, layer.head_dim, dtype=BRAIN, requires_grad=True) for n in heads)
            flashtile.attention(q, k, v, causal=layer.causal).backward(torch.empty_like(q))
    assert 8 < len(found) < 20
    assert missing(found, layer, Uses(BRAIN, True, False, True), "sm_90") == []


# Heads, head_dim and uses of a layer that a case is a call of.
_WIDE = 16, 16, 128
LISTED: dict[str, tuple[LayerShape, Uses]] = {
    "d128 causal": (LayerShape(*_WIDE, True), Uses(BRAIN, packed=False)),
    "d128 full": (LayerShape(*_WIDE, False), Uses(BRAIN, packed=False)),
    "packed": (LayerShape(*_WIDE, True), Uses(BRAIN, dense=False)),
    "d64, 16 over 4 heads": (LayerShape(16, 4, 64, True), Uses(BRAIN, packed=False)),
    "window and softcap": (LayerShape(*_WIDE, True, 256, 30.0), Uses(BRAIN, packed=False)),
    "decode, pages of 64": (LayerShape(32, 8, 128, True), Uses(BRAIN, False, False, False, (64,))),
    "decode with append": (LayerShape(32, 8, 128, True), Uses(BRAIN, False, False, False, (64,))),
    "decode, 64 over 2 heads of 64": (LayerShape(64, 2, 64, True), Uses(BRAIN, False, False, False, (64,))),
    "8 bits": (LayerShape(*_WIDE, False), Uses(BRAIN, packed=False, precision="fp8")),
    "20 new lengths": (LayerShape(*_WIDE, True), Uses(BRAIN, packed=False)),
}


@pytest.mark.parametrize("case", LISTED)
def test_first_calls_ask_for_nothing_that_is_not_listed(case: str) -> None:
    layer, uses = LISTED[case]
    found = _asked(case)
    assert found and missing(found, layer, uses, "sm_90") == []
