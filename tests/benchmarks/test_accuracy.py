import math

import pytest
import torch

from benchmarks import accuracy, results
from benchmarks.cases import Case, make_inputs
from benchmarks.checks import Reference
from benchmarks.providers import Eager
from benchmarks.session import Session
from tests.benchmarks.test_run import Fake

CPU = torch.device("cpu")
CASE = Case("forward", "float16", 1, 70, 70, 3, 3, 16, causal=True)


@pytest.fixture
def session(tmp_path):
    return Session(results.new_run("accuracy", CPU, commit="abc"), CPU, tmp_path / "rows.jsonl")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_exact_results_cover_every_head_and_agree_with_autograd_in_float64(direction):
    case = Case(direction, "float32", 1, 70, 70, 3, 3, 16, causal=True)
    inputs = make_inputs(case, CPU, outliers=0.05)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) * 16**-0.5
    probs = torch.softmax(scores.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf), dim=-1)
    out = torch.einsum("bhij,bjhd->bihd", probs, leaves[2])
    want = [out] if direction == "forward" else torch.autograd.grad(out, leaves, inputs.dout.double())
    for got, exact in zip(accuracy.exact(case, inputs), want, strict=True):
        torch.testing.assert_close(got, exact.detach(), rtol=1e-10, atol=1e-12)


def test_errors_are_root_mean_square_largest_and_relative():
    want = torch.tensor([3.0, 4.0]).double()
    (values,) = accuracy.errors((torch.tensor([3.0, 4.5]),), (want,), ("out",)).values()
    assert values == pytest.approx({"rmse": 0.5 / math.sqrt(2), "max_error": 0.5, "relative": 0.1})


def test_a_row_says_how_far_each_provider_is(session):
    rows = accuracy.measure(CASE, "outliers", [Eager(), Fake("off", scale=1.5), Fake("b", refuse="no")], session)
    eager, off, refused = rows
    assert 1e-6 < eager.values["out"]["rmse"] < 1e-3
    assert off.error == off.values["out"]["relative"] == pytest.approx(0.5, rel=0.01)
    assert refused.error == "refused: no" and refused.values is None
    # The error of the whole is that of the probes where the probes are all heads.
    inputs = make_inputs(CASE, CPU, outliers=0.001)
    outputs = Eager().native(Eager().prepare(CASE, inputs)(), CASE)
    assert eager.error == pytest.approx(Reference(CASE, inputs).error(outputs), rel=0.5)
    assert eager.case["inputs"] == "outliers"


def test_an_output_left_unwritten_or_a_failure_is_no_number(session):
    lazy, broken = accuracy.measure(CASE, "normal", [Fake("lazy", unwritten=True), Fake("x", fail="boom")], session)
    assert lazy.error == "wrong: not finite" and lazy.values is None
    assert broken.error == "failed: RuntimeError: boom"
