"""Random steps of a server on the CPU backend, and that they are mixed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz import mixed
from tests.fuzz.drawn import Sizes
from tests.kvcache.cases import CacheCase, build
from tests.slow import slow_but


@pytest.mark.parametrize("shard", slow_but(range(50), lambda shard: shard < 1))
def test_random_batches(shard: int) -> None:
    assert not mixed.fuzz("cpu", 10 * shard, 10, print)


def test_every_feature_is_mixed() -> None:
    names = (
        "tree", "slots", "ragged", "causal_each", "rotary", "float8", "e5m2", "window", "leftpad", "alibi", "sinks",
        "entries", "out",
    )  # fmt: skip
    seen = Counter[str]()
    for number in range(300):
        case = mixed.draw_batch(number, Sizes(40, 2**13)).case
        assert isinstance(case, CacheCase) and case.packed
        seen.update(name for name in names if getattr(case, name))
        queries = {-1 if old < 0 else rows for old, rows, _ in case.sequences}
        seen.update(f"{rows} rows" for rows in queries & {-1, 0, 1})
        seen["more rows"] += max(queries) > 1 and len(queries) > 2
        seen["group"] += case.heads > case.kv_heads
    assert len(seen) == len(names) + 5 and min(seen.values()) >= 15, seen


def test_a_batch_that_changes_a_sequence_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other work in the batch, the last bit of every output differs."""
    from flashtile.backends.cpu import decode

    attend = decode.decode

    def off(problem, one, t):  # type: ignore[no-untyped-def]
        lse = attend(problem, one, t)
        return lse if problem.batch == 1 else lse.nextafter(lse * 2)

    monkeypatch.setattr(decode, "decode", off)
    said: list[str] = []
    wrong = mixed.fuzz("cpu", 10**6, 4, said.append)
    assert wrong and any("sequence " in each for each in wrong) and len(said) == len(wrong) + 1


def test_few_kinds_are_few_builds() -> None:
    """As many as there may be time for on a GPU, of batches that differ in lengths alone."""
    batches = [mixed.draw_batch(n, mixed.ON_GPU, 4) for n in range(40)]
    kinds = {(b.dtype, c.heads, c.head_dim, c.head_dim_v, c.page_size, c.window, c.rotary, c.float8, c.alibi, c.softcap)
             for b in batches if isinstance(c := b.case, CacheCase)}  # fmt: skip
    assert len(kinds) == 4 and len({str(b.case) for b in batches}) == 40
    assert not mixed.fuzz("cpu", 0, 2, print, kinds=2)


def test_a_seed_is_a_batch() -> None:
    assert [mixed.draw_batch(n) for n in range(20)] == [mixed.draw_batch(n) for n in range(20)]
    call = mixed.draw_batch(7)
    assert isinstance(call.case, CacheCase)
    assert build(call.case, call.dtype, "meta").problem.varlen
