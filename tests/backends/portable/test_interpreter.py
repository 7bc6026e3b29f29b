"""The portable kernels in Triton's interpreter: the whole case table, and what no table of results shows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile import reference
from flashtile.backends.portable import forward, tiles
from flashtile.backends.portable.tiles import Config
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors
from tests.cases import CASES, Case, build, judge
from tests.poison import poisoned_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LOW_PRECISION = [c for c in CASES if c.name in {"causal", "window", "everything", "varlen_features", "odd_dims"}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_case_table(case: Case) -> None:
    judge(build(case, torch.float32), "portable")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LOW_PRECISION, ids=str)
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "portable")


WIDE, TALL = Config(32, 16, 4, 1), Config(16, 32, 4, 1)
UNEVEN = {"forward": WIDE, "dkdv": TALL, "dq": WIDE}
DESCRIPTORS = {name: dataclasses.replace(config, tma=True) for name, config in UNEVEN.items()}
ONE_LOOP = {name: dataclasses.replace(config, one_loop=True) for name, config in DESCRIPTORS.items()}
APART = {"forward": WIDE, "dk": dataclasses.replace(TALL, tma=True, one_loop=True), "dv": WIDE, "dq": WIDE}


@pytest.mark.parametrize(
    "configs", [UNEVEN, DESCRIPTORS, ONE_LOOP, APART], ids=["pointers", "descriptors", "one loop", "dk and dv apart"]
)
@pytest.mark.parametrize(
    "name",
    ["causal", "more_keys_window", "more_rows_window", "group_causal", "varlen_spare", "varlen_window", "dropout"],
)
def test_tiles_of_other_shapes_and_descriptors(name: str, configs: dict[str, Config]) -> None:
    case = dataclasses.replace(next(c for c in CASES if c.name == name), head_dim=16, head_dim_v=24)
    with tiles.override(**configs):
        judge(build(case, torch.float32), "portable")


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("masked", [False, True], ids=["band alone", "with attn_mask"])
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(3, 2)], ids=str)
def test_a_nan_reaches_only_the_rows_that_keep_it(band: Band, masked: bool, tma: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 33, 2, 24), torch.randn(1, 40, 1, 24), torch.randn(1, 40, 1, 24)
    v[0, 11, 0, 5], v[0, 20, 0, 7], v[0, 22, 0, 7], v[0, 30, 0, 3] = torch.nan, torch.inf, -torch.inf, torch.inf
    v[0, 39], k[0, 36] = torch.nan, torch.nan
    tensors = Tensors(q, k, v, attn_mask=torch.rand(1, 1, 33, 40) > 0.5 if masked else None)
    problem = Problem.build(tensors, band)
    with tiles.override(forward=Config(16, 16, 4, 1, tma=tma)):
        out, lse = forward.run(problem, tensors)
    exact_out, exact_lse = reference.attention(problem, tensors)
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert band.unbounded or not out.isnan().all()


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_behind_a_length_reaches_nothing(causal: bool, tma: bool) -> None:
    """NaN behind the last sequence and in the neighbours: gradients of the sequence in between stay exact."""
    case = Case("varlen", batch=3, lengths=((7, 9), (21, 21), (5, 3)), spare=6, causal=causal, lse_grad=True)
    config = Config(16, 16, 4, 1, tma=tma)

    def run(poison: bool) -> list[torch.Tensor]:
        call = build(case, torch.float32)
        with torch.no_grad():
            for name, bounds in (("q", (7, 28)), ("k", (9, 30)), ("v", (9, 30))):
                leaf = call.leaves[name]
                if poison:
                    leaf[: bounds[0]] = torch.nan
                    leaf[bounds[1] :] = torch.nan
        with poisoned_memory(), tiles.override(forward=config, dkdv=config, dq=config):
            out, lse = call.run("portable")
            weight = torch.zeros_like(out)
            weight[7:28] = torch.linspace(-1, 1, out[7:28].numel()).reshape_as(out[7:28])
            if poison:
                weight[:7], weight[28:] = torch.nan, torch.nan
            grads = torch.autograd.grad(out, list(call.leaves.values()), weight)
        return [out[7:28], lse[:, 7:28], grads[0][7:28], grads[1][9:30], grads[2][9:30]]

    for clean, poisoned in zip(run(False), run(True), strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_is_bitwise_the_same_in_any_batch(causal: bool) -> None:
    case = Case("batch", batch=3, seqlen_q=37, seqlen_k=41, causal=causal)
    whole = build(case, torch.float16)
    out, lse = whole.run("portable")
    q, k, v = (whole.leaves[name] for name in ("q", "k", "v"))
    for b in range(3):
        tensors = Tensors(q[b : b + 1], k[b : b + 1], v[b : b + 1])
        alone, alone_lse = forward.run(Problem.build(tensors, whole.problem.band), tensors)
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("name", ["causal", "more_rows_window", "masked_out", "prime"])
def test_one_loop_is_bitwise_the_same(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    runs = []
    for loops in ({}, {"one_loop": True}, {"one_loop": True, "mask_all": True}):
        config = Config(16, 16, 4, 1, **loops)
        with tiles.override(forward=config, dkdv=config, dq=config), poisoned_memory():
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
