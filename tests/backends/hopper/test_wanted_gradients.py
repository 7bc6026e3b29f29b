"""The Hopper backward computes the gradients that are asked for, and no others."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends import hopper
from flashtile.backends.gpu import host
from flashtile.backends.gpu.described import described_tensors
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.hopper.backward import config
from flashtile.backends.hopper.backward.workspace import Workspace
from flashtile.call.arguments import GRADIENTS, Grads
from flashtile.core.masks import Band
from flashtile_lab.kernels.hopper import _problem
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case, build, judge
from tests.slow import slow_but

SUBSETS = [names for n in (1, 2) for names in itertools.combinations("qkv", n)]
# Rows that the first row block of a tile does not see, several key blocks, heads that share keys.
CASES = (
    Case("causal", batch=1, seqlen_q=260, seqlen_k=300, head_dim=64, kv_heads=1, causal=True, sinks=True),
    Case("causal_128", batch=1, seqlen_q=200, seqlen_k=270, head_dim=128, causal=True, lse_grad=True),
    Case("varlen_128", batch=2, lengths=((130, 200), (70, 64)), heads=1, kv_heads=1, head_dim=128, window=(90, 30),
         spare=9, softcap=5.0),
    Case("causal_256", batch=1, seqlen_q=130, seqlen_k=150, head_dim=256, kv_heads=1, causal=True),
    Case("latent", batch=1, seqlen_q=130, seqlen_k=150, head_dim=192, head_dim_v=128, kv_heads=1, causal=True),
    Case("causal_96", batch=1, seqlen_q=130, seqlen_k=150, head_dim=88, kv_heads=1, causal=True),
    Case("varlen_256", batch=2, lengths=((130, 70), (0, 30)), heads=1, kv_heads=1, head_dim=200, alibi="h"),
)  # fmt: skip
RUNS = slow_but(
    [(case, names, ordered) for case in CASES for names in SUBSETS for ordered in (False, True)],
    lambda each: each[2] == (each[1] in (("q",), ("q", "v")) and each[0].head_dim == 128),
)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("case", "names", "ordered"), RUNS, ids=str)
def test_every_subset_in_the_emulator(case: Case, names: tuple[str, ...], ordered: bool) -> None:
    call = build(case, torch.bfloat16).wanting((*names, "sinks"))
    call.keywords["deterministic"] = ordered
    with on_cpu(len(names) + case.head_dim, 2, ordered_sums=ordered):
        judge(call, "hopper")


def test_sinks_alone_need_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("varlen", batch=2, lengths=((30, 40), (9, 0)), head_dim=64, sinks=True, spare=3, lse_grad=True)
    started = []
    with on_cpu():
        run = host.interpret

        def note(launch: Launch) -> None:
            started.append(launch.kernel.__name__)
            run(launch)

        monkeypatch.setattr(host, "interpret", note)
        judge(build(case, torch.bfloat16).wanting(["sinks"]), "hopper")
    assert started == ["attention_forward", "prepare_rows"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", [*SUBSETS, ()], ids=str)
@pytest.mark.parametrize("seqlen_k", [150, 0])
def test_what_nobody_wants_is_not_there(names: tuple[str, ...], seqlen_k: int) -> None:
    call = build(Case("causal", batch=1, seqlen_q=70, seqlen_k=seqlen_k, head_dim=64, sinks=True), torch.bfloat16)
    tensors = dataclasses.replace(call.tensors, **{name: x.detach() for name, x in call.leaves.items()})
    problem = call.problem.but(grads=Grads(*(name in names for name in "qkv")), deterministic=True)
    with on_cpu(), torch.no_grad():
        out, lse = call.run("hopper")
        plan = hopper.BACKEND.plan("backward", problem, tensors, (out, None))
        found = plan(tensors, out, lse, out, None)
    assert {name for name in GRADIENTS if getattr(found, GRADIENTS[name]) is not None} == set(names)


@pytest.mark.parametrize("names", SUBSETS, ids=str)
def test_memory_for_dq_is_for_dq(names: tuple[str, ...]) -> None:
    problem = _problem(128, Band(None, 0), grads=Grads(*(name in names for name in "qkv")), deterministic=True)
    tensors = described_tensors(problem)
    work = Workspace.of(problem, config.choose(problem), tensors)
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    # Two float32 a row, and the counter of tiles; with dq its sums, and a semaphore for each row block.
    extra = rows * 128 + work.blocks if "q" in names else 0
    assert work.floats == 2 * rows + 4 + extra
