"""Masks that change between calls, that compiled code gets or makes, and that are split by sample."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention import flex_attention as pytorch

import flashtile
from flashtile import InvalidInputError, masks
from flashtile.compat import flex_attention as compat
from flashtile.distributed.values import intervals
from flashtile.mods.converted import keep, lists_of
from tests.changes import CHANGES, KEYS, MAKERS, ROWS, SIZE, check, inputs, made
from tests.fuzz.drawn import Draw

OURS = flashtile.create_block_mask


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_changed_mask_is_followed(maker: str, change: str) -> None:
    qkv = inputs()
    for is_used in (True, False):
        mask, reach = made(maker)
        if is_used:
            check(mask, qkv)
            assert lists_of(mask) is lists_of(mask)
        CHANGES[change](mask, reach)
        check(mask, qkv)


@pytest.mark.one_in(40)
@pytest.mark.parametrize("seed", range(200))
def test_random_changes(seed: int) -> None:
    """Some at once, in any order, of masks of one or more heads and samples, in inference mode too, compiled or not."""
    d = Draw(("changes", seed), None)  # type: ignore[arg-type]
    mask, reach = None, None
    with torch.inference_mode(d.chance(0.2)):
        mask, reach = made(d.pick(*MAKERS), d.upto(40), (d.pick(1, 2), d.pick(1, 2)))
    call: Callable[..., Tensor] = flashtile.attention
    if d.chance(0.1):
        torch._dynamo.reset()
        call = torch.compile(flashtile.attention, backend="eager")
    for _ in range(3):
        with torch.inference_mode(mask.kv_num_blocks.is_inference()):
            for _ in range(d.upto(2)):
                CHANGES[d.pick(*CHANGES)](mask, reach)
        check(mask, inputs(), call)


def test_another_function_converts_nothing_and_no_cache_keeps_a_mask() -> None:
    mask, _ = made("pytorch")
    before = lists_of(mask)
    mask.mask_mod = CHANGES
    after = lists_of(mask)
    assert after.mask_mod is CHANGES and after.row_items is before.row_items
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_what_is_read_in_inference_mode_or_traced_is_no_later_calls() -> None:
    mask, _ = made("pytorch")
    with torch.inference_mode():
        assert not lists_of(mask).row_items.is_inference()
    check(mask, inputs())
    from torch._subclasses import FakeTensorMode

    other, _ = made("pytorch")
    with FakeTensorMode(allow_non_fake_inputs=True):
        lists_of(other)
    check(other, inputs())


def test_bits_hold_for_the_function_and_the_values_that_they_were_made_of() -> None:
    """As on Hopper, where masks that the compat module makes have them."""
    for change in ("captured tensor", "function", "counts in place"):
        mask, reach = made("compat")
        keep(mask, replace(lists_of(mask), has_bits=True))
        assert lists_of(mask).has_bits and lists_of(mask).has_bits
        CHANGES[change](mask, reach)
        assert not lists_of(mask).has_bits


def test_ranks_read_intervals_again_once_they_are_written() -> None:
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            mask = masks.rows(0, torch.full((1, 1, 6), 4, dtype=torch.int32))
            before = intervals(mask.row_keys, None, (6,), (6,))
            assert mask.row_keys is not None
            mask.row_keys[..., 1] = 2
            after = intervals(mask.row_keys, None, (6,), (6,))
        assert before is not None and after is not None and before.rows != after.rows


def test_lists_that_do_not_fit_are_refused() -> None:
    mask, _ = made("pytorch", groups=(1, 1))
    with pytest.raises(InvalidInputError, match="block_mask: has lists of shapes"):
        lists_of(mask[..., 0])


# What compiled code gets, and what it makes itself.


def by_sample(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx + 5 * b >= kv_idx


def compiled(f: Callable[..., Any]) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    return torch.compile(f, fullgraph=True, backend=counter), counter


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    turned = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = compat.flex_attention(*turned, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def native(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return flashtile.attention(q, k, v, block_mask=mask)


def want_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtile.attention(q, k, v, mask_mod=by_sample)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("maker", "call"), [(pytorch.create_block_mask, native), (compat.create_block_mask, flex), (OURS, native)]
)
def test_compiled_code_takes_masks_and_makes_them(maker: Callable[..., Any], call: Callable[..., Tensor]) -> None:
    qkv = inputs()

    def make() -> Any:
        return maker(by_sample, 2, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=SIZE)

    run, counter = compiled(call)
    mask, want = make(), want_of(*qkv)
    torch.testing.assert_close(run(*qkv, mask), want)
    call(*qkv, mask)  # what it keeps then is no other mask to compiled code
    torch.testing.assert_close(run(*qkv, mask), want)
    assert counter.frame_count == 1
    run, counter = compiled(lambda q, k, v: call(q, k, v, make()))
    torch.testing.assert_close(run(*qkv), want)
    assert counter.frame_count == 1


def test_compiled_code_follows_a_changed_mask() -> None:
    torch._dynamo.reset()
    run = torch.compile(flashtile.attention, fullgraph=True, backend="aot_eager")
    mask, reach = made("pytorch")
    for change in ("captured tensor", "counts in place", "counts", "function"):
        check(mask, inputs(), run)
        CHANGES[change](mask, reach)
    check(mask, inputs(), run)


@pytest.mark.long
def test_slices_of_pytorchs_masks_in_compiled_code_and_out() -> None:
    """As decoding takes a block of rows out of a mask of all."""
    mask = pytorch.create_block_mask(
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, 2, 8, generator=make, dtype=torch.float64) for n in (16, 64, 64))

    def sliced(q: Tensor, index: Tensor, first: int) -> Any:
        part = mask[:, :, index]
        part.mask_mod = lambda b, h, q_idx, kv_idx: q_idx + first >= kv_idx
        part.seq_lengths = (16, 64)
        return part

    inside, _ = compiled(lambda q, index, first: flex(q, k, v, sliced(q, index, first)))
    for n in (2, 1):
        want = flashtile.attention(q, k[:, : 16 * n + 16], v[:, : 16 * n + 16], causal=True)
        given = q, torch.tensor([n]), 16 * n
        torch.testing.assert_close(inside(*given), want)
        torch.testing.assert_close(flex(q, k, v, sliced(*given)), want)
    outside, _ = compiled(flex)
    torch.testing.assert_close(outside(q, k, v, sliced(*given)), want)


# Masks by sample.


def of_samples() -> dict[str, Any]:
    ids = torch.randint(0, 3, (5, ROWS), generator=torch.Generator().manual_seed(2)).sort(-1).values
    documents = masks.documents(ids)
    return {
        "lists": OURS(by_sample, 5, None, ROWS, ROWS, BLOCK_SIZE=16),
        "lists by head": OURS(lambda b, h, i, j: (i - j).abs() <= 3 * b + 9 * h, 5, 2, ROWS, ROWS, BLOCK_SIZE=16),
        "converted": lists_of(pytorch.create_block_mask(by_sample, 5, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=16)),
        "documents": documents,
        "and chunks": documents & masks.chunks(7, ROWS),
        "columns": masks.columns(0, ids.int()[:, None] * 9),
        "shared": masks.chunks(7, ROWS),
        "shared lists": OURS(lambda b, h, i, j: i >= j, None, None, ROWS, ROWS, BLOCK_SIZE=16),
    }


@pytest.mark.parametrize("name", of_samples())
def test_masks_are_split_by_sample(name: str) -> None:
    mask = of_samples()[name]
    qkv = tuple(torch.randn(5, ROWS, 2, 8, dtype=torch.float64) for _ in range(3))
    want = native(*qkv, mask)
    shared = mask.batch == 1
    for at in (slice(2), slice(1, 4), slice(3, None), slice(-2, None), 0, 3, -1):
        samples = at if isinstance(at, slice) else slice(at % 5, at % 5 + 1)
        got = mask[at]
        assert (got is mask) == shared
        torch.testing.assert_close(native(*(x[samples] for x in qkv), got), want[samples])
    torch.testing.assert_close(native(*(x[2:4] for x in qkv), mask[1:][1:3]), want[2:4])
    for chunks in (2, 5):
        _, named = split_args_kwargs_into_chunks((), {**dict(zip("qkv", qkv, strict=True)), "mask": mask}, chunks)
        assert len(named) == chunks
        torch.testing.assert_close(torch.cat([native(**each) for each in named]), want)
        assert not shared or all(each["mask"] is mask for each in named)
    same = torch.utils._pytree.tree_map(lambda x: x, {"mask": mask})
    assert same["mask"] is mask


def test_what_is_no_sample_is_refused() -> None:
    mask = of_samples()["lists"]
    with pytest.raises(IndexError, match="sample 5 of a mask of 5"):
        mask[5]
    with pytest.raises(InvalidInputError, match="samples: has steps of 2"):
        mask[::2]
    with pytest.raises(TypeError):
        mask[0, 1]
    with pytest.raises(TypeError):
        iter(mask)
