"""``batch_invariant``: 300 random batches on the CPU, where rows have bits of their own; refusals; ``explain``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidInputError
from flashtile.backends.cpu.invariant import KEYS, ROWS
from flashtile.call.backend import Capabilities
from flashtile.call.problem import described
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from tests.invariance import Layer, World, judge

SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16}
PAIRS = torch.rand(2)
LAYERS = [
    Layer(**SIZES, cached=False, name="packed"),
    Layer(**SIZES, cached=False, keywords={"window_size": (20, 0), "sinks": PAIRS}, name="packed_window"),
    Layer(**SIZES, cached=False, dtype=torch.bfloat16, keywords={"softcap": 3.0}, name="packed_softcap"),
    Layer(**SIZES, name="entries"),
    Layer(**SIZES, page_size=16, appends=True, keywords={"alibi_slopes": PAIRS}, name="pages_alibi"),
    Layer(**SIZES, page_size=3, dtype=torch.float16, keywords={"attention_chunk": 13}, name="pages_chunks"),
    Layer(**SIZES, page_size=1, float8=True, keywords={"sinks": PAIRS}, name="float8"),
    Layer(**SIZES, dtype=torch.float64, keywords={"window_size": (7, -1)}, name="float64_window"),
    Layer(heads=4, kv_heads=1, page_size=16, dtype=torch.bfloat16, latent=True, name="latent"),
    Layer(heads=3, kv_heads=3, head_dim=20, page_size=16, appends=True, name="alone"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_thirty_batches(layer: Layer) -> None:
    counts = [judge(layer, seed, "cpu", longest=40 if seed % 10 else 600, by_kind=False) for seed in range(30)]
    assert sum(compared for compared, _ in counts) > 2000
    assert [different for _, different in counts] == [0] * 30


@pytest.mark.parametrize("layer", LAYERS[::3], ids=str)
def test_unasked_they_differ(layer: Layer) -> None:
    counts = [judge(layer, seed, "cpu", longest=300, by_kind=False, invariant=False) for seed in range(4)]
    assert sum(different for _, different in counts) > 0


def test_functions_and_masks_of_packed_calls() -> None:
    """A captured table is read by distance, and a bias, a mask and intervals have rows for each row of a call."""
    torch.manual_seed(0)
    table, length = torch.randn(300), 300
    q, k, v = (torch.randn(length, 2, 16) for _ in range(3))
    bias, mask = torch.randn(length, length), torch.rand(length, length) > 0.3
    bounds = torch.tensor([0, length], dtype=torch.int32)
    whole: dict[str, Any] = {"attn_bias": bias, "attn_mask": mask}

    def score(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return x + table[i - j] * torch.tanh(x)

    first = flashtile.attention_varlen(q, k, v, bounds, bounds, batch_invariant=True, score_mod=score, **whole)
    beside = torch.tensor([0, length, length + 70], dtype=torch.int32)
    more = [torch.cat([x, x[:70]]) for x in (q, k, v)]
    both = flashtile.attention_varlen(*more, beside, beside, batch_invariant=True, score_mod=score, **whole)
    assert torch.equal(first, both[:length])
    rows = torch.tensor([0, 5], dtype=torch.int32)
    last = {name: x[-5:] for name, x in whole.items()}
    some = flashtile.attention_varlen(q[-5:], k, v, rows, bounds, 5, length, batch_invariant=True, **last)
    want = flashtile.attention_varlen(q, k, v, bounds, bounds, batch_invariant=True, **whole)
    assert torch.equal(some, want[-5:])
    assert torch.allclose(want, flashtile.attention_varlen(q, k, v, bounds, bounds, **whole), atol=1e-5)


def test_the_numbers_are_attentions() -> None:
    """Also of rows without keys, with sinks, and on the places where tiles begin and end."""
    torch.manual_seed(1)
    for rows, keys in ((1, 1), (ROWS, KEYS), (ROWS + 1, KEYS + 1), (40, 7), (3, 0), (0, 3), (70, 2 * KEYS + 5)):
        q, k, v = torch.randn(rows, 4, 16), torch.randn(keys, 2, 16), torch.randn(keys, 2, 24)
        bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (rows, keys)]
        for given in (
            {},
            {"sinks": torch.randn(4)},
            {"causal": True},
            {"window_size": (9, 3)},
            {"attention_chunk": 33},
        ):
            call: dict[str, Any] = {"return_lse": True, **given}
            got = flashtile.attention_varlen(q, k, v, *bounds, batch_invariant=True, **call)
            want = flashtile.attention_varlen(q, k, v, *bounds, **call)
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-5)


def test_gradients_follow_the_forward() -> None:
    torch.manual_seed(2)
    bounds = torch.tensor([0, 30, 47], dtype=torch.int32)
    q, k, v = (torch.randn(47, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grads = []
    for invariant in (True, False):
        out = flashtile.attention_varlen(q, k, v, bounds, bounds, causal=True, batch_invariant=invariant)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_compiled_calls_ask_too() -> None:
    world = World(Layer(**SIZES, page_size=16), 0, [30, 50])
    parts = [(0, 20, 30), (1, 0, 50)]
    eager = world.call(parts, True, "cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: Any, *caches: Any, **given: Any) -> Any:
        return flashtile.attention_with_kvcache(q, *caches, batch_invariant=True, return_lse=True, **given)

    q = torch.cat([world.q[b][first:stop] for b, first, stop in parts])
    table = torch.full((2, 4), -1, dtype=torch.int32)
    for b, places in enumerate(world.places):
        table[b, : len(places)] = torch.tensor(places)
    out, _ = compiled(
        q, *world.caches, cache_seqlens=torch.tensor([30, 50], dtype=torch.int32), page_table=table,
        cu_seqlens_q=torch.tensor([0, 10, 60], dtype=torch.int32), max_seqlen_q=50,
    )  # fmt: skip
    assert torch.equal(out, torch.cat([x for x, _ in eager]))


def test_refusals() -> None:
    q, bounds = torch.randn(9, 1, 16), torch.tensor([0, 9], dtype=torch.int32)

    def refused(name: str, says: str, **given: Any) -> None:
        with pytest.raises(InvalidInputError, match=f"^{name}: .*{says}"):
            flashtile.attention_varlen(q, q, q, bounds, bounds, **{"batch_invariant": True, **given})

    refused("batch_invariant", "must be True, False or 'strict'", batch_invariant="always")
    refused("batch_invariant", "must be True, False or 'strict'", batch_invariant=1.5)
    refused("dropout_p", "not with batch_invariant=True", dropout_p=0.5)
    lists = flashtile.create_block_mask(lambda b, h, i, j: i >= j, None, None, 9, 9, device="cpu")
    refused("block_mask", "not with batch_invariant=True", block_mask=lists)
    with pytest.raises(InvalidInputError, match="^batch_invariant: is True, but does not go with 8 bits"):
        flashtile.attention_varlen(*[q.bfloat16()] * 3, bounds, bounds, precision="fp8", batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant"):
        flashtile.attention(*[q[None]] * 3, batch_invariant=True)  # type: ignore[call-overload]
    pages = torch.empty(1, 16, 1, 16).expand(2, 16, 1, 16)
    table = torch.zeros(1, 2**18 + 1, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="^k_cache: has room for 4194320 keys of a sequence, at most 4194304"):
        flashtile.attention_with_kvcache(q[None], pages, pages, cache_seqlens=9, page_table=table, batch_invariant=True)


def test_backends_refuse_by_name() -> None:
    common: dict[str, Any] = {
        "device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "varlen": True, "head_dim": 128,
        "head_dim_v": 128, "batch_invariant": "strict",
    }  # fmt: skip
    packed = described(**common)
    slopes = packed.but(alibi=True)
    assert "no batch_invariant=True with ALiBi both ways" in dispatch.reasons("hopper", slopes, "forward")
    assert not any("ALiBi" in x for x in dispatch.reasons("hopper", slopes.but(band=Band(None, 0)), "forward"))
    cached = packed.but(cached=True, kv_dtype=torch.float8_e4m3fn, page_size=16, paged_scales=True)
    for name in ("hopper", "portable"):
        assert "no batch_invariant=True with scales by page" in dispatch.reasons(name, cached, "decode")
        # A backend that does not know the argument does not ignore it.
        able = dispatch.backend(name).capabilities("forward")
        assert isinstance(able, Capabilities) and "batch_invariant" in able.features
        biased = dispatch.reasons(name, packed.but(bias_dtype=torch.float32), "forward")
        assert "no batch_invariant=True with an attn_bias or a score_mod" in biased
    nothing = Capabilities(device_types=("cuda",), dtypes=(torch.bfloat16,), max_head_dim=None)
    assert "no batch_invariant=True" in nothing.reasons(packed)


def test_explain() -> None:
    q, bounds = torch.randn(9, 1, 16), torch.tensor([0, 9], dtype=torch.int32)
    packed: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    unasked = "  not batch-invariant, which batch_invariant=True asks for"
    assert unasked in flashtile.explain(q, q, q, **packed).splitlines()
    said = flashtile.explain(q, q, q, **packed, batch_invariant="strict").splitlines()
    assert "  batch-invariant, strictly" in said and f"tiles of {ROWS} x {KEYS}" in said[1]
    cache = torch.randn(1, 9, 1, 16)
    over = flashtile.explain(q[None], k_cache=cache, v_cache=cache, cache_seqlens=9)
    assert unasked in over.splitlines()
    assert "batch-invariant" not in flashtile.explain(q[None], q[None], q[None])


def test_kernels_have_it_in_packed_calls_unasked() -> None:
    able = dispatch.backend("portable").capabilities("forward")
    assert able is not None
    packed = described(device_type="cuda", compute_capability=(9, 0), varlen=True)
    assert able.invariance(packed) == "strict"
    assert able.invariance(packed.but(dropout_p=0.5)) == able.invariance(packed.but(varlen=False)) == ""
    assert able.invariance(packed.but(bias_dtype=torch.float32)) == ""
    assert able.invariance(packed.but(batch_invariant="by kind")) == "by kind"
    hopper = dispatch.backend("hopper").capabilities("forward")
    assert hopper is not None and hopper.invariance(packed.but(alibi=True)) == ""
    assert hopper.invariance(packed.but(alibi=True, band=Band(None, 0))) == "strict"
