"""The portable kernels in Triton's interpreter: the whole case table, and what no table of results shows."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import pytest
import torch

from flashtile import reference
from flashtile.backends import portable
from flashtile.backends.gpu.trial import trial
from flashtile.backends.portable.backward import config as backward
from flashtile.backends.portable.backward import launch as backward_launch
from flashtile.backends.portable.backward.launch import gqa_splits, launches
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.forward.launch import forward_launch
from flashtile.call.arguments import Grads
from flashtile.call.problem import Tensors
from flashtile.core.masks import Band
from flashtile.core.states import in_one
from flashtile.ops import plans as kept
from tests.backends.portable import plans
from tests.cases import CASES, Case, assert_forward_right, build, judge
from tests.maxima import judge_maxima
from tests.partials import CHAINS, judge_chain
from tests.poison import poisoned_memory
from tests.problems import banded_problem
from tests.rule import assert_close
from tests.slow import named, one_of_each, slow_but

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LOW_PRECISION = [
    c for c in CASES if c.name in {"causal", "window", "everything", "varlen_features", "odd_dims", "varlen_out"}
]


# It takes as long as all the others together.
@pytest.mark.parametrize("case", one_of_each(slow_but(CASES, lambda case: case.name != "many_in_a_group")), ids=str)
def test_the_case_table(case: Case) -> None:
    judge(build(case, torch.float32), "portable")


@pytest.mark.one_in(32)
@pytest.mark.parametrize("case", slow_but(CASES, lambda case: case.name != "many_in_a_group"), ids=str)
def test_largest_scores(case: Case) -> None:
    judge_maxima(build(case, torch.float32), "portable", gradients=case.name in ("causal", "bias", "varlen_features"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", LOW_PRECISION, ids=str)
def test_largest_scores_in_low_precision(case: Case) -> None:
    judge_maxima(build(case, torch.float16), "portable", gradients=False)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LOW_PRECISION, ids=str)
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "portable")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 512), (512, 300)])
def test_head_dims_past_256(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    case = Case(
        "big", batch=1, seqlen_q=20, seqlen_k=33, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, causal=True
    )
    judge(build(case, dtype), "portable")


TRAINED = [case for case in CASES if case.bias is not None and case.bias_grad]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case", slow_but(TRAINED, lambda case: case.name in ("bias", "bias_rows", "everything")), ids=str
)
def test_a_gradient_of_a_large_bias(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_launch, "MOST_SUMS", 0)
    with kept.own_plans():
        judge(build(case, torch.float32), "portable")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("fewest", "entries"), [(0, 1), (4800, 2), (10**6, 5)])
def test_sequences_add_to_copies_of_a_bias_gradient(fewest: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_launch, "_FEWEST_SUMS", fewest)
    call = build(Case("bias_copies", batch=5, seqlen_q=40, seqlen_k=30, bias="hqk", softcap=3.0), torch.float32)
    assert call.tensors.attn_bias is not None
    assert backward_launch.bias_entries(call.problem, call.tensors.attn_bias) == entries
    with kept.own_plans(), poisoned_memory():
        judge(call, "portable")


# Of four tiles.
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("programs", "batch", "parts"), [(1, 3, 1), (8, 5, 2), (16, 6, 4), (256, 4, 4)])
def test_a_large_bias_that_a_batch_shares_has_its_gradient_summed_in_parts(
    programs: int, batch: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_launch, "PROGRAMS", programs)
    monkeypatch.setattr(backward_launch, "MOST_SUMS", 0)
    call = build(Case("bias_shared", batch=batch, seqlen_q=20, seqlen_k=30, heads=1, kv_heads=1, bias="qk"),
                 torch.float32)  # fmt: skip
    assert call.tensors.attn_bias is not None
    assert backward_launch.bias_parts(call.problem, call.tensors.attn_bias) == parts
    with kept.own_plans(), poisoned_memory():
        judge(call, "portable")


def test_a_bias_without_sequences() -> None:
    judge(build(Case("no_batch", batch=0, bias="bhqk"), torch.float32), "portable")


def test_a_bias_without_rows() -> None:
    case = Case("varlen_no_rows", batch=2, lengths=((0, 3), (0, 9)), heads=1, kv_heads=1, bias="qk")
    judge(build(case, torch.float32), "portable")


# Row strides, numbers of keys, and what both are multiples of.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("pitch", "seqlen_k", "unit"), [(64, 48, 16), (48, 40, 8), (50, 48, 2), (64, 37, 1)])
def test_pairs_are_read_in_units_of_which_keys_and_strides_are_multiples(pitch: int, seqlen_k: int, unit: int) -> None:
    call = build(Case("pairs", seqlen_q=20, seqlen_k=seqlen_k, causal=True, mask="hqk", bias="qk"), torch.float32)
    behind = torch.full((2, 20, pitch - seqlen_k), float("nan"))
    for name, x in (("attn_bias", call.tensors.attn_bias), ("attn_mask", call.tensors.attn_mask)):
        assert x is not None
        wide = torch.cat([x.detach()[0], behind[: x.shape[1]].to(x.dtype)], 2)[..., :seqlen_k]
        setattr(call.tensors, name, wide)
    problem, tensors = call.problem, call.tensors
    terms = forward_launch(problem, tensors, PortableTiles(16, 16, 4, 1)).arguments["call"].mods
    assert terms.scores[-1].operands.VECTOR == terms.masks[0].operands.VECTOR == unit
    out, lse = plans.forward(problem, tensors)
    assert_forward_right(call, out, in_one(lse, out))
    grads = plans.backward(problem, tensors, out, lse, torch.randn_like(out))
    assert all(x is not None and x.isfinite().all() for x in (grads.dq, grads.dk, grads.dv, grads.dbias))


WIDE, TALL = PortableTiles(32, 16, 4, 1), PortableTiles(16, 32, 4, 1)
UNEVEN = {"forward": WIDE, "dkdv": TALL, "dq": WIDE}
DESCRIPTORS = {name: dataclasses.replace(config, tma=True) for name, config in UNEVEN.items()}
ONE_LOOP = {name: dataclasses.replace(config, one_loop=True) for name, config in DESCRIPTORS.items()}
APART = {"forward": WIDE, "dk": dataclasses.replace(TALL, tma=True, one_loop=True), "dv": WIDE, "dq": WIDE}


TILES = {"pointers": UNEVEN, "descriptors": DESCRIPTORS, "one loop": ONE_LOOP, "dk and dv apart": APART}
OTHERS = ("causal", "more_keys_window", "more_rows_window", "group_causal", "varlen_spare", "varlen_window", "dropout")
# Each case with every second kind of tiles in ``make test``, and with all in ``make test-all``.
TILED = slow_but(
    [(name, kind) for name in OTHERS for kind in TILES],
    lambda each: (OTHERS.index(each[0]) + list(TILES).index(each[1])) % 2 == 0,
)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "kind"), TILED)
def test_tiles_of_other_shapes_and_descriptors(name: str, kind: str) -> None:
    configs = TILES[kind]
    case = dataclasses.replace(next(c for c in CASES if c.name == name), head_dim=16, head_dim_v=24)
    with trial(**configs):
        judge(build(case, torch.float32), "portable")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dims", [(96, 72), (192, 128), (16, 150)], ids=str)
def test_tiles_in_parts(dims: tuple[int, int]) -> None:
    sizes = {"batch": 1, "seqlen_q": 19, "seqlen_k": 37, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = Case("parts", **sizes, kv_heads=1, causal=True, sinks=True, dropout=0.2, bias="qk", lse_grad=True)
    judge(build(case, torch.float32), "portable")


@pytest.mark.parametrize("dims", [(96, 72), (192, 128)], ids=str)
def test_parts_of_packed_sequences_by_descriptors(dims: tuple[int, int]) -> None:
    sizes = {"lengths": ((19, 37), (30, 7)), "spare": 3, "head_dim": dims[0], "head_dim_v": dims[1]}
    with trial(**DESCRIPTORS):
        judge(build(Case("varlen_parts", **sizes, heads=2, kv_heads=1, causal=True), torch.float32), "portable")


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("programs", "shares"), [(1, 1), (2, 2), (4, 3), (256, 6)])
@pytest.mark.parametrize("lengths", [(), ((9, 20), (30, 64))], ids=["dense", "packed"])
def test_programs_share_the_heads_of_a_group(
    programs: int, shares: int, lengths: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their last one may have fewer heads than the others; the next call is planned anew."""
    monkeypatch.setattr(backward, "PROGRAMS", programs)
    kept.kept.clear()
    call = build(
        Case("shared", heads=6, kv_heads=1, lengths=lengths, spare=3 * bool(lengths), causal=True), torch.float32
    )
    assert gqa_splits(call.problem) == shares
    judge(call, "portable")
    kept.kept.clear()


@pytest.mark.parametrize("columns", [24, 25])
def test_strides_are_taken_for_multiples_of_16_bytes_only_where_they_are(columns: int) -> None:
    q, k, v = (torch.randn(1, 20, 2, columns)[..., :24] for _ in range(3))
    problem = banded_problem(Tensors(q, k, v), Band())
    call = forward_launch(problem, Tensors(q, k, v), PortableTiles(16, 16, 4, 1)).arguments["call"]
    assert call.q.VECTOR == call.k.VECTOR == call.v.VECTOR == (4 if columns == 24 else 1)
    out = plans.forward(problem, Tensors(q, k, v))[0]
    same = Tensors(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, plans.forward(problem, same)[0])

    def by_definition(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"out": reference.attention(problem, same, dtype)[0]}

    assert_close({"out": out}, lambda: by_definition(torch.float64), by_definition(q.dtype), q.dtype)


MANY_LENGTHS = (
    Case("causal", batch=1, head_dim=16, causal=True, kv_heads=1, sinks=True),
    Case("varlen", head_dim=16, window=(6, 3), dropout=0.3, alibi="h", spare=3),
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", MANY_LENGTHS, ids=str)
@pytest.mark.parametrize("kind", TILES)
def test_many_lengths_of_one_class(kind: str, case: Case) -> None:
    """All but lengths is laid out once for a class of shapes."""
    seen: OrderedDict[tuple[object, ...], object] = OrderedDict()
    with kept.own_plans(seen), trial(**TILES[kind]):
        for n, (seqlen_q, seqlen_k) in enumerate(((9, 73), (40, 80), (1, 70), (73, 0))):
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": n + 1}
            if case.name == "varlen":
                sizes = {"lengths": ((seqlen_q, seqlen_k), (7, 12), (0, n))[: n % 3 + 1], "batch": n % 3 + 1}
            judge(build(dataclasses.replace(case, **sizes), torch.float32), "portable")
    classes = [x for x in seen.values() if isinstance(x, kept.ShapeClass)]
    assert len(classes) == 1 and len(seen) == 1 + 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_is_bitwise_the_same_in_any_batch(causal: bool) -> None:
    case = Case("batch", batch=3, seqlen_q=37, seqlen_k=41, causal=causal)
    whole = build(case, torch.float16)
    out, lse = whole.run("portable")
    q, k, v = (whole.leaves[name] for name in ("q", "k", "v"))
    for b in range(3):
        tensors = Tensors(q[b : b + 1], k[b : b + 1], v[b : b + 1])
        alone, alone_lse = plans.forward(banded_problem(tensors, whole.problem.band), tensors)
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_lse[0], lse[b])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", slow_but(["causal", "more_rows_window", "masked_out", "prime"], named("causal", "prime"))
)
def test_one_loop_is_bitwise_the_same(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    runs = []
    for loops in ({}, {"one_loop": True}, {"one_loop": True, "mask_all": True}):
        config = PortableTiles(16, 16, 4, 1, **loops)
        with trial(forward=config, dkdv=config, dq=config), poisoned_memory():
            call = build(case, torch.float16)
            out, lse = call.run("portable")
            runs.append([out, lse, *torch.autograd.grad(out, list(call.leaves.values()), torch.ones_like(out))])
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_the_backward_repeats_bitwise() -> None:
    case = Case("repeat", kv_heads=1, causal=True, bias="h", sinks=True, dropout=0.2)
    runs = []
    for _ in range(2):
        call = build(case, torch.float16)
        out, _ = call.run("portable")
        runs.append(torch.autograd.grad(out, list(call.leaves.values()), torch.ones_like(out)))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.long
@pytest.mark.parametrize(("case", "cuts"), slow_but(CHAINS, CHAINS[1::2].__contains__), ids=str)
def test_a_chain_of_pieces_at_offsets_of_the_band(case: Case, cuts: tuple[int, ...]) -> None:
    with poisoned_memory(), torch.no_grad():
        judge_chain(portable.BACKEND, case, cuts, torch.float16)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packed", ["queries", "keys"])
def test_queries_and_keys_have_layouts_of_their_own(packed: str) -> None:
    """One side packed, the other dense, in every kernel: bitwise what both sides packed give."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(48, heads, 16) for heads in (4, 2, 2, 4))
    bounds = torch.tensor([0, 24, 48], dtype=torch.int32)
    both = Tensors(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    problem = banded_problem(both, Band(None, 0), needs_grad=True)
    out, lse = plans.forward(problem, both)
    want = plans.backward(problem, both, out, lse, dout)
    if packed == "queries":
        mixed = dataclasses.replace(both, k=k.view(2, 24, 2, -1), v=v.view(2, 24, 2, -1), cu_seqlens_k=None)
    else:
        mixed = dataclasses.replace(both, q=q.view(2, 24, 4, -1), cu_seqlens_q=None)
        problem = problem.but(seqlen_q=24, varlen=False)
        out, dout = out.view(2, 24, 4, -1), dout.view(2, 24, 4, -1)
        lse = lse.view(4, 2, 24).transpose(0, 1).contiguous()
    got, got_lse = plans.forward(problem, mixed)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    grads = plans.backward(problem, mixed, out, lse, dout)
    for made, whole in zip((grads.dq, grads.dk, grads.dv), (want.dq, want.dk, want.dv), strict=True):
        assert made is not None and whole is not None and torch.equal(made.view(whole.shape), whole)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_only_what_is_asked_for_is_computed(asked: tuple[bool, ...], apart: bool) -> None:
    call = build(Case("asked", causal=True), torch.float32)
    tensors = Tensors(*(call.leaves[name].detach() for name in ("q", "k", "v")))
    config = PortableTiles(16, 16, 4, 1)
    with trial(**dict.fromkeys(("dk", "dv") if apart else ("dkdv",), config)):
        out, lse = plans.forward(call.problem, tensors)
        whole = plans.backward(call.problem, tensors, out, lse, out)
        problem = call.problem.but(grads=Grads(*asked))
        some = plans.backward(problem, tensors, out, lse, out)
        made = launches(problem, tensors, out, None)
    assert len(made) == 2
    for name, wanted in zip(("dq", "dk", "dv"), asked, strict=True):
        assert torch.equal(getattr(some, name), getattr(whole, name)) if wanted else getattr(some, name) is None
