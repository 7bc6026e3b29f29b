"""``flashtile.masks``: what the masks mean, and that what they leave out costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError, masks
from flashtile.call.problem import Problem, Tensors
from flashtile.core.masks import Band
from flashtile.masks import Intervals
from tests.intervals import KINDS, dense, drawn_mask
from tests.problems import banded_problem


def qkv(batch: int, seqlen_q: int, seqlen_k: int, heads: int = 2, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(3)
    shapes = (batch, seqlen_q, heads, 8), (batch, seqlen_k, 1, 8), (batch, seqlen_k, 1, 8)
    q, k, v = (torch.randn(shape, generator=make, dtype=torch.float64, **how) for shape in shapes)
    return q, k, v


def test_documents_are_runs_of_ids_or_lie_between_bounds() -> None:
    want = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2), torch.zeros(1, 1)).bool()
    by_bounds = masks.documents(cu_seqlens=torch.tensor([0, 3, 3, 5], dtype=torch.int32), seqlen=6)
    assert torch.equal(dense(by_bounds, 6, 6)[0, 0], want)
    by_ids = masks.documents(torch.tensor([[7, 7, 7, 0, 0], [1, 1, 7, 7, 1]], dtype=torch.int32))
    assert torch.equal(dense(by_ids, 5, 5)[0, 0], want[:5, :5])
    assert torch.equal(dense(by_ids, 5, 5)[1, 0], torch.block_diag(*[torch.ones(n, n) for n in (2, 2, 1)]).bool())
    assert torch.equal(dense(masks.documents(by_bounds.row_keys[0, 0, :5, 0]), 5, 5)[0, 0], want[:5, :5])
    assert dense(masks.documents(cu_seqlens=torch.tensor([0]), seqlen=2), 2, 2).sum() == 0
    whole = masks.documents(cu_seqlens=torch.tensor([0, 3, 5]))
    assert torch.equal(dense(whole, 5, 5)[0, 0], want[:5, :5])


@pytest.mark.parametrize("kind", ["documents", "prefix", "chunks"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(23, 23), (12, 30), (30, 12)])
def test_mirrored_masks_say_the_same_by_rows_and_by_columns(kind: str, seqlen_q: int, seqlen_k: int) -> None:
    for seed in range(5):
        made = drawn_mask(kind, (2, 1), seqlen_q, seqlen_k, torch.Generator().manual_seed(seed))
        assert made.mirrored
        by_rows, by_columns = Intervals(made.row_keys, None), Intervals(None, made.key_rows)
        assert torch.equal(dense(by_rows, seqlen_q, seqlen_k), dense(by_columns, seqlen_q, seqlen_k))


def test_a_prefix_is_seen_by_all_rows_and_the_rest_is_causal() -> None:
    made = dense(masks.prefix(torch.tensor([2, 0]), 4), 4, 4)[:, 0].int().tolist()
    assert made[0] == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert made[1] == torch.ones(4, 4).tril().int().tolist()
    later = dense(masks.prefix(torch.tensor([1]), 2, seqlen_k=4), 2, 4)[0, 0]
    assert torch.equal(later, torch.ones(2, 4, dtype=torch.bool).tril(2))


def test_chunks_are_those_of_attention_chunk() -> None:
    for lengths in ((20, 20), (9, 25), (25, 9)):
        made = dense(masks.chunks(6, lengths[0], seqlen_k=lengths[1]), *lengths)[0, 0]
        assert torch.equal(made, Band(chunk=6).dense(*lengths))


def test_both_masks_keep_what_each_keeps() -> None:
    make = torch.Generator().manual_seed(1)
    for _ in range(20):
        kinds = [KINDS[int(n)] for n in torch.randint(0, len(KINDS), (2,), generator=make)]
        a, b = (drawn_mask(kind, (2, 2), 17, 17, make) for kind in kinds)
        assert torch.equal(
            dense(a & b, 17, 17).expand(2, 2, 17, 17), dense(a, 17, 17) & dense(b, 17, 17).expand(2, 2, 17, 17)
        )
    made = [a, flashtile.create_block_mask(lambda b, h, i, j: i >= j, None, None, 17, 17)]
    for left, right in [(a, 3), (3, a), (a, made[1]), (made[1], a), (made[1], made[1])]:
        with pytest.raises(TypeError, match=r"& is of two masks of intervals.*and_masks"):
            left & right
    for left, right in [(a, b), (a, made[1]), (made[1], a)]:
        with pytest.raises(TypeError, match=r"masks have no \|.*or_masks"):
            left | right


def test_a_prefix_by_document_is_of_its_own_document() -> None:
    make = torch.Generator().manual_seed(6)
    ids = torch.tensor([[7, 7, 7, 7, 0, 0, 0, 2], [1, 1, 1, 7, 7, 7, 7, 7]])
    bounds = [[0, 4, 7, 8], [0, 3, 8, 8]]
    for lengths in (torch.randint(0, 5, (2, 3), generator=make), torch.tensor([2, 3]), torch.tensor([[3], [9]])):
        made = masks.prefix(lengths, ids=ids)
        assert made.mirrored
        for b, of_sample in enumerate(bounds):
            want = torch.zeros(8, 8, dtype=torch.bool)
            given = [*(lengths if lengths.dim() == 1 else lengths[b]).tolist(), 0, 0, 0]
            for first, stop, length in zip(of_sample, of_sample[1:], given, strict=False):
                size = stop - first
                want[first:stop, first:stop] = torch.ones(size, size).tril().bool() | (torch.arange(size) < length)
            by_bounds = masks.prefix(torch.tensor(given), 8, cu_seqlens=torch.tensor(of_sample))
            for mask in (made[b], by_bounds):
                for side in (Intervals(mask.row_keys, None), Intervals(None, mask.key_rows)):
                    assert torch.equal(dense(side, 8, 8)[0, 0], want)
    beyond = masks.prefix(torch.tensor([2, 9]), 6, cu_seqlens=torch.tensor([0, 3, 4]))
    assert dense(beyond, 6, 6)[0, 0].sum(-1).tolist() == [2, 2, 3, 1, 0, 0]
    for wrong, named in (
        (dict(lengths=torch.tensor([1])), "seqlen"),
        (dict(lengths=torch.tensor([1]), seqlen=8, ids=ids), "seqlen"),
        (dict(lengths=torch.tensor([1]), ids=ids, seqlen_k=9), "seqlen_k"),
        (dict(lengths=torch.tensor(1), ids=ids), "lengths"),
        (dict(lengths=torch.ones(3, 1).int(), ids=ids), "lengths"),
        (dict(lengths=torch.ones(2, 1).int(), seqlen=8, cu_seqlens=torch.tensor([0, 8])), "lengths"),
    ):
        with pytest.raises(InvalidInputError, match=f"^{named}: "):
            masks.prefix(**wrong)  # type: ignore[arg-type]


def test_ends_by_sample_are_refused_with_what_they_should_be() -> None:
    q, k, v = qkv(3, 8, 8)
    ends = torch.full((3, 8), 4, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=r"^block_mask: .*by batch, give masks of start\[:, None\]"):
        flashtile.attention(q, k, v, block_mask=masks.rows(0, ends))
    assert flashtile.attention(q, k, v, block_mask=masks.rows(0, ends[:, None])).shape == q.shape


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_what_a_boolean_mask_is(kind: str) -> None:
    for lengths in ((40, 40), (300, 37), (37, 300)):
        made = drawn_mask(kind, (2, 2), *lengths, torch.Generator().manual_seed(5))
        q, k, v = qkv(2, *lengths, requires_grad=True)
        found = [
            flashtile.attention(q, k, v, window_size=(90, 60), return_lse=True, **mask)
            for mask in ({"block_mask": made}, {"attn_mask": dense(made, *lengths)})
        ]
        grads = [torch.autograd.grad(out.square().sum() + lse.clamp(min=-9).sum(), (q, k, v)) for out, lse in found]
        for got, want in zip((*found[0], *grads[0]), (*found[1], *grads[1]), strict=True):
            torch.testing.assert_close(got, want)


def test_packed_sequences_use_the_first_rows_of_a_mask() -> None:
    lengths = (9, 30, 0, 17)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    made = drawn_mask("both", (4, 2), 30, 30, torch.Generator().manual_seed(2))
    q, k, v = (x[0] for x in qkv(1, sum(lengths), sum(lengths)))
    got = flashtile.attention_varlen(q, k, v, bounds, bounds, block_mask=made, causal=True)
    keep = dense(made, 30, 30)
    for b, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        rows, mask = slice(start, stop), keep[b : b + 1, :, : stop - start, : stop - start]
        want = flashtile.attention(q[None, rows], k[None, rows], v[None, rows], attn_mask=mask, causal=True)
        torch.testing.assert_close(got[rows], want[0])


def test_transforms_and_compiled_code_take_them() -> None:
    made = drawn_mask("both", (3, 2), 21, 26, torch.Generator().manual_seed(4))
    q, k, v = qkv(3, 21, 26)
    keep = dense(made, 21, 26)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, block_mask=made)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, attn_mask=keep)

    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    for got, want in zip(*(torch.func.jvp(f, (q, k, v), tangents) for f in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want)
    many = torch.stack((q, 2 * q)), torch.stack((k, -k)), torch.stack((v, v + 1))
    torch.testing.assert_close(torch.vmap(ours)(*many), torch.vmap(theirs)(*many))

    def by_ids(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, block_mask=masks.documents(ids), causal=True)

    ids = torch.tensor([[0] * 9 + [1] * 17, [2] * 26, [3] * 20 + [4] * 6])
    q = qkv(3, 26, 26)[0]
    compiled = torch.compile(by_ids, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, ids), by_ids(q, k, v, ids))


BAD = {
    "ids and bounds": ("ids", lambda: masks.documents(torch.zeros(3).int(), cu_seqlens=torch.zeros(2).int())),
    "neither": ("ids", lambda: masks.documents()),
    "ids of floats": ("ids", lambda: masks.documents(torch.zeros(3))),
    "ids of rank 3": ("ids", lambda: masks.documents(torch.zeros(1, 2, 3).int())),
    "seqlen with ids": ("seqlen", lambda: masks.documents(torch.zeros(3).int(), seqlen=3)),
    "bounds of rank 2": ("cu_seqlens", lambda: masks.documents(cu_seqlens=torch.zeros(1, 2).int())),
    "lengths of rank 2": ("lengths", lambda: masks.prefix(torch.zeros(1, 2).int(), 3)),
    "size 0": ("size", lambda: masks.chunks(0, 5)),
    "end a list": ("end", lambda: masks.rows(0, [1])),
    "start of floats": ("start", lambda: masks.rows(torch.zeros(3), torch.ones(3).int())),
    "start of rank 4": ("start", lambda: masks.columns(torch.zeros(1, 1, 1, 3).int(), torch.ones(3).int())),
    "start and end": ("start", lambda: masks.columns(torch.zeros(2).int(), torch.ones(3).int())),
    "start elsewhere": ("start", lambda: masks.rows(torch.zeros(3, device="meta").int(), torch.ones(3).int())),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    argument, make = BAD[name]
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        make()


def test_where_there_are_no_intervals_a_call_is_refused() -> None:
    q, k, v = (x.half() for x in qkv(1, 16, 16))
    made = masks.chunks(4, 16)
    with pytest.raises(InvalidInputError, match="^block_mask: "):
        flashtile.attention(q.repeat_interleave(2, -1), k.repeat_interleave(2, -1), v.repeat_interleave(2, -1),
                            block_mask=made, precision="fp8")  # fmt: skip
    with pytest.raises(UnsupportedError, match="backend 'hopper'"):
        flashtile.attention(q, k, v, block_mask=made, backend="hopper")


def problem_of(made: Intervals, seqlen: int, **more: Any) -> tuple[Problem, Tensors]:
    q, k, v = qkv(1, seqlen, seqlen)
    t = Tensors(q, k, v, row_keys=made.row_keys, key_rows=made.key_rows)
    return banded_problem(t, Band(), mirrored=made.mirrored, **more), t


def visited(made: Intervals, seqlen: int, block: int, over_keys: bool) -> tuple[int, int]:
    """The blocks that tiles of so many rows, or keys, would visit, and how many of them unmasked; by GPU kernels."""
    triton = pytest.importorskip("triton")
    del triton
    from flashtile.backends.gpu.device.masks import FAR
    from flashtile.backends.gpu.masks import Side, bounds_launch, most_bounds
    from tests.backends.hopper.emulated import on_cpu

    problem, t = problem_of(made, seqlen)
    side = Side(block, over_keys)
    from flashtile.backends.gpu.host import Launcher, run

    table = torch.empty(most_bounds(problem, t, over_keys=over_keys), dtype=torch.int32)
    with on_cpu(0):
        run([Launcher(bounds_launch(problem, t, side), t.q.device, t, {"bounds": table})], t, {"bounds": table})
    blocks = full = 0
    for any_start, any_stop, all_start, all_stop in table[: 4 * -(-seqlen // block)].view(-1, 4).tolist():
        assert any_stop < FAR.value
        if any_start < any_stop:
            blocks += -(-any_stop // block) - any_start // block
            full += max(0, min(all_stop, seqlen) // block - -(-all_start // block))
    return blocks, full


@pytest.mark.parametrize("over_keys", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_documents_visit_about_the_blocks_of_a_packed_call(over_keys: bool, alone: bool) -> None:
    lengths, block = (700, 64, 1300, 3, 260, 900), 64
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    made = masks.documents(cu_seqlens=cu_seqlens)
    if alone:  # by rows alone, of which the tiles of keys must find theirs, or the other way
        made = Intervals(None, made.key_rows) if not over_keys else Intervals(made.row_keys, None)
    found, full = visited(made, sum(lengths), block, over_keys)
    packed = sum((-(-n // block)) ** 2 for n in lengths)
    # Documents begin within tiles, so that each has a tile and a block more than where it is a sequence of its own.
    most = sum((-(-n // block) + 1) ** 2 for n in lengths)
    assert packed * 0.8 < found <= most
    assert full >= sum(max(0, n // block - 1) ** 2 for n in lengths)
    assert 2 * found < (sum(lengths) / block) ** 2


def test_nothing_of_the_size_of_the_scores_is_made() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            for x in found if isinstance(found, (tuple, list)) else (found,):
                largest = max(largest, x.numel()) if isinstance(x, Tensor) else largest
            return found

    seqlen = 4096
    q, k, v = (x.float().requires_grad_() for x in qkv(1, seqlen, seqlen))
    with Watch():
        made = masks.documents(torch.arange(seqlen)[None] // 500)
        flashtile.attention(q, k, v, block_mask=made).sum().backward()
    assert largest < seqlen * seqlen / 8
