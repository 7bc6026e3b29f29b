import math

import pytest
import torch

from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.checks import Reference, poison, probes
from flashtile import reference
from flashtile.call.problem import Tensors
from tests.problems import banded_problem

CPU = torch.device("cpu")
CASES = [
    Case("forward", "float32", 2, 33, 33, 3, 3, 8),
    Case("forward", "float32", 2, 40, 40, 2, 2, 8, causal=True, window=(5, 0)),
    Case("forward", "float32", 1, 3, 17, 4, 2, 8, causal=True),
    Case("forward", "float32", 3, 20, 20, 4, 2, 8, causal=True, lengths=(1, 20, 7)),
    Case("backward", "float32", 2, 33, 33, 4, 2, 8, causal=True),
    Case("backward", "float32", 3, 20, 20, 2, 2, 8, lengths=(1, 20, 7)),
    Case("forward", "float32", 2, 33, 33, 4, 2, 8, causal=True, sinks=True, softcap=2.0),
    Case("backward", "float32", 2, 33, 33, 4, 2, 8, bias="trained", sinks=True, softcap=2.0),
]


def oracle(case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The same results from the library's oracle and PyTorch's autograd."""
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    bias, sinks = (None if x is None else x.detach().double() for x in (inputs.bias, inputs.sinks))
    bounds = {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
    tensors = Tensors(*leaves, **bounds, attn_bias=bias, sinks=sinks)
    packed = case.lengths is not None
    lengths = {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k} if packed else {}
    out, _ = reference.attention(banded_problem(tensors, case.band, softcap=case.softcap, **lengths), tensors)
    if case.direction == "forward":
        return (out.detach(),)
    return torch.autograd.grad(out, leaves, inputs.dout.double())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_reference_agrees_with_the_oracle(case, monkeypatch):
    monkeypatch.setattr("benchmarks.checks._ROWS_PER_CHUNK", 8)
    inputs = make_inputs(case, CPU)
    assert Reference(case, inputs).error(oracle(case, inputs)) < 1e-12


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_wrong_row_of_a_probed_head_passes_the_limit(case):
    inputs = make_inputs(case, CPU)
    found = Reference(case, inputs)
    for index in range(len(oracle(case, inputs))):
        outputs = oracle(case, inputs)
        outputs[index].select(-2, -1).select(-2, -1).mul_(1.01)  # last head of the last row
        assert found.error(outputs) > found.limit


def test_nan_anywhere_is_an_error_that_no_limit_admits():
    case = Case("forward", "float32", 2, 16, 16, 8, 8, 8)
    inputs = make_inputs(case, CPU)
    found = Reference(case, inputs)
    unprobed = next(h for h in range(8) if all(p.head_kv != h or p.sequence != 0 for p in found.probes))
    outputs = oracle(case, inputs)
    outputs[0][0, 5, unprobed, 2] = torch.nan
    error = found.error(outputs)
    assert math.isnan(error) and not error <= found.limit


def test_low_precision_gets_the_room_its_rounding_needs_and_not_much_more():
    case = Case("forward", "bfloat16", 1, 128, 128, 2, 2, 64)
    found = Reference(case, make_inputs(case, CPU))
    assert 2e-3 < found.limit < 5e-2


def test_probes_take_the_first_and_the_last_head():
    chosen = probes(Case("forward", "bfloat16", 4, 16, 16, 6, 3, 8))
    assert (chosen[0].sequence, chosen[0].head_kv) == (0, 0)
    assert (chosen[-1].sequence, chosen[-1].head_kv) == (3, 2) and chosen[-1].heads_q == slice(4, 6)


def test_poison_leaves_nan():
    x = torch.ones(4)
    poison((x,))
    assert bool(x.isnan().all())
