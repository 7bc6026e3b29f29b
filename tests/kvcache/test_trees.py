"""Draft trees: the definition written out another way, chains, what is not looked at, refusals of their contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile.nn import apply_rotary
from flashtile.serving import tree_depths, tree_from_parents, tree_words
from tests import trees
from tests.kvcache.cases import CacheCase, build

LENGTHS = torch.tensor([9, 0, 30], dtype=torch.int32)


def step(rows: int, kind: str, **keywords: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A step that appends drafts to three sequences: its tensors, its mask, and out."""
    torch.manual_seed(0)
    of = {"q": (3, rows, 4, 16), "k": (3, rows, 2, 16), "v": (3, rows, 2, 16)}
    t = {name: torch.randn(shape, dtype=torch.float64) for name, shape in of.items()}
    t |= {name: torch.randn(3, 100, 2, 16, dtype=torch.float64) for name in ("k_cache", "v_cache")}
    mask = trees.masks(kind, [rows] * 3, rows)
    out = flashtile.attention_with_kvcache(**t, cache_seqlens=LENGTHS, tree_mask=mask, **keywords)
    assert isinstance(out, Tensor)
    return t, mask, out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [1, 2, 13, 64])
@pytest.mark.parametrize("kind", trees.KINDS)
def test_a_row_sees_what_its_path_alone_would(kind: str, rows: int, window: int | None) -> None:
    """Each row against a causal call of its ancestors and itself, in their order, as the last keys of the sequence."""
    slopes, angle = torch.tensor([0.1, 0.2, 0.5, 1.0]).double(), torch.arange(100.0)[:, None].double() * torch.rand(8)
    more: dict[str, Any] = {"alibi_slopes": slopes, "window_size": window and (window, 0)}
    t, mask, out = step(rows, kind, rotary_cos=angle.cos(), rotary_sin=angle.sin(), **more)
    for b, length in enumerate(LENGTHS.tolist()):
        depth = mask[b].sum(-1) - 1
        for row in {0, rows // 2, rows - 1}:
            path = mask[b, row].nonzero()[:, 0]
            path = path[depth[path].argsort()]
            turn = angle[length : length + len(path)]
            q, k = (apply_rotary(x[b, path], turn.cos(), turn.sin())[None] for x in (t["q"], t["k"]))
            k, v = (torch.cat([t[f"{n}_cache"][b, :length], x])[None] for n, x in (("k", k[0]), ("v", t["v"][b, path])))
            want = flashtile.attention(q, k, v, causal=True, **more)
            torch.testing.assert_close(out[b, row], want[0, -1])


CHAINS = ("plain", "window", "packed", "rotary", "float8")


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_the_bits_of_a_causal_call(name: str) -> None:
    assert_chains_are_causal(name, torch.float32, "cpu")


def assert_chains_are_causal(name: str, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Caches of a chain and of the call without a tree have the same bits, and so have out and lse.

    On a GPU these are another build's, whose multiplications and additions the compiler may join in other ways: there
    they differ by roundings.
    """
    lengths, sizes = (37, 5, 0, 90), {"heads": 4, "kv_heads": 2, "head_dim": 32}
    each = tuple((n, 20, 20) for n in lengths)
    case = {
        "plain": CacheCase("", each, **sizes, appends=True, alibi="h"),
        "window": CacheCase("", each, **sizes, appends=True, window=(11, 0), page_size=4, leftpad=(3, 2, 1, 0)),
        "packed": CacheCase("", ((37, 20, 20), (5, 1, 1), (90, 7, 7)), **sizes, packed=True, appends=True, rotary=16),
        "rotary": CacheCase("", each, **sizes, appends=True, rotary=32, interleaved=True),
        "float8": CacheCase("", each, **sizes, appends=True, float8="h", page_size=16),
    }[name]
    found = []
    for tree in ("", "chain"):
        call = build(replace(case, tree=tree), dtype, device)
        found.append([*call.run(backend), call.tensors.k_cache, call.tensors.v_cache])
    for place, (x, y) in enumerate(zip(*found, strict=True)):
        if device == "cpu" or place >= 2:
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        else:
            # float32 sums in 16 roundings; rounded to 16 bits, neighbours.
            few = 16 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(x, y, rtol=max(few, torch.finfo(x.dtype).eps), atol=few)


def test_words_are_the_mask() -> None:
    mask = trees.masks("forest", [64] * 3, 64)
    words = tree_words(mask)
    assert words.dtype == torch.int64 and words[0, 63] < 0, "row 63 sees itself"
    assert torch.equal(tree_depths(words), mask.sum(-1, dtype=torch.int32) - 1)
    t, _, out = step(64, "forest")
    assert torch.equal(flashtile.attention_with_kvcache(**t, cache_seqlens=LENGTHS, tree_mask=words), out)
    assert torch.equal(tree_words(words), words)


@pytest.mark.parametrize("kind", trees.KINDS)
def test_trees_by_their_parents(kind: str) -> None:
    for rows in (1, 2, 9, 64):
        of = [trees.parents(kind, rows, seed) for seed in range(3)]
        want = tree_words(torch.stack([trees.ancestors(each) for each in of]))
        assert torch.equal(tree_from_parents(torch.tensor(of)), want)


def test_bits_past_a_packed_tree_are_not_looked_at() -> None:
    case = CacheCase("", ((9, 3, 3), (20, 12, 12)), packed=True, appends=True, tree="random", tree_rows=13, rotary=16)
    call = build(case, torch.float32)
    out, lse = (x.clone() for x in call.run("cpu"))
    mask = call.keywords["tree_mask"].clone()
    mask[0, 3:], mask[0, :, 3:], mask[1, 12:], mask[1, :, 12:] = False, False, False, False
    for x, y in zip(call.run("cpu", tree_mask=mask), (out, lse), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[1, 0], [1, 0]], "sequence 1: row 1 does not see itself"),
        ([[1, 1], [1, 1]], "sequence 1: rows 0 and 1 see each other, which is a cycle"),
        ([[1, 0, 0], [1, 1, 0], [0, 1, 1]], "sequence 1: row 2 does not see row 0, an ancestor of one that it sees"),
        ([[1, 1, 0], [0, 1, 1], [1, 0, 1]], "sequence 1: row 0 does not see row 2"),
    ],
)
def test_what_is_no_tree_is_refused(rows: list[list[int]], text: str) -> None:
    wrong = torch.tensor(rows) != 0
    mask = torch.stack([torch.eye(len(rows)) != 0, wrong])
    q, cache = torch.randn(2, len(rows), 4, 8), torch.randn(2, 16, 2, 8)
    with pytest.raises(InvalidInputError, match=f"^tree_mask: {text}"):
        flashtile.attention_with_kvcache(q, cache, cache, cache_seqlens=9, tree_mask=mask)


def test_contents_are_looked_at_on_a_gpu_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.ops.cached import CACHED

    call = build(CacheCase("", ((9, 3, 0),), tree="random"), torch.float32)
    plan = CACHED.guarded(call.problem.but(device_type="cuda"), lambda t: t.out)
    bad = replace(call.tensors, tree_mask=torch.zeros(1, 3, dtype=torch.int64))
    plan(bad)
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    with pytest.raises(InvalidInputError, match="^tree_mask: sequence 0: row 0 does not see itself"):
        plan(bad)


def test_rotated_keys_that_are_no_drafts_are_refused() -> None:
    case = CacheCase("", ((9, 3, 2), (5, 4, 4)), packed=True, packed_new=True, appends=True, tree="random", rotary=8)
    call = build(case, torch.float32)
    with pytest.raises(InvalidInputError, match="^cu_seqlens_k_new: gives sequence 0 2 keys, must have as many as"):
        call.run("cpu")


def test_a_tree_takes_as_many_positions_as_it_is_deep() -> None:
    case = CacheCase("", ((9, 8, 8), (5, 8, 8)), appends=True, tree="star", rotary=8, rotary_start=False)
    call = build(case, torch.float32)
    cos = call.keywords["rotary_cos"]
    want, _ = call.run("cpu")
    got, _ = call.run("cpu", rotary_cos=cos[:11], rotary_sin=call.keywords["rotary_sin"][:11])
    assert torch.equal(got, want)
    with pytest.raises(InvalidInputError, match="^rotary_cos: has 10 positions, but sequence 0 rotates at 10"):
        call.run("cpu", rotary_cos=cos[:10], rotary_sin=cos[:10])


def test_hoppers_own_kernels_take_none() -> None:
    pytest.importorskip("triton")
    from flashtile.backends.hopper import BACKEND

    for rows in (8, 40):
        case = CacheCase("", ((100, rows, 0),), heads=32, kv_heads=4, head_dim=128, page_size=64)
        plain, of_tree = (
            build(each, torch.bfloat16).problem.but(device_type="cuda", compute_capability=(9, 0))
            for each in (case, replace(case, tree="chain"))
        )
        assert BACKEND.kernel("decode", plain).name in ("wide groups", "prompts")
        assert BACKEND.describe(of_tree, "decode").startswith("Triton")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend: str) -> None:
    torch._dynamo.reset()
    q, cache = torch.randn(3, 7, 4, 16), torch.randn(3, 100, 2, 16)

    def layer(q: Tensor, mask: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(q * 2, cache, cache, cache_seqlens=LENGTHS, tree_mask=mask) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for kind in ("random", "star"):
        mask = trees.masks(kind, [7] * 3, 7)
        torch.testing.assert_close(compiled(q, mask), layer(q, mask))
        torch.testing.assert_close(compiled(q, tree_words(mask)), layer(q, mask))
