import json

import pytest
import torch

from benchmarks.cases import Case, make_inputs, select, suite
from flashtile.core.masks import Band


def test_the_forward_grid_is_what_the_goals_are_stated_for():
    cells = suite("forward")
    assert len(cells) == len(set(cells)) == len({c.name for c in cells}) == 36
    assert {c.batch * c.seqlen_q for c in cells} == {16384}
    assert {c.num_heads_q * c.head_dim for c in cells} == {2048}
    assert {(c.head_dim, c.causal) for c in cells} == {(d, x) for d in (64, 128, 256) for x in (False, True)}


def test_the_backward_grid_has_four_lengths():
    cells = suite("backward")
    assert len(cells) == 24
    assert {c.seqlen_q for c in cells} == {512, 2048, 8192, 16384}
    assert {c.direction for c in cells} == {"backward"}


def test_operations_follow_the_stated_formula():
    full, causal = (
        Case("forward", "bfloat16", 2, 512, 512, 3, 3, 64),
        Case("forward", "bfloat16", 2, 512, 512, 3, 3, 64, causal=True),
    )
    assert full.flops() == 4 * 2 * 3 * 512 * 512 * 64
    assert causal.flops() == full.flops() / 2
    backward = Case("backward", "bfloat16", 2, 512, 512, 3, 3, 64)
    assert backward.flops() == 2.5 * full.flops()


def test_packed_and_windowed_cells_count_the_pairs_they_keep():
    packed = Case("forward", "float32", 2, 7, 7, 1, 1, 8, lengths=(3, 7))
    assert packed.kept_pairs() == 9 + 49
    window = Case("forward", "float32", 1, 32, 32, 1, 1, 8, causal=True, window=(4, 0))
    assert window.kept_pairs() == int(Band(4, 0).dense(32, 32).sum())


@pytest.mark.parametrize("name", ["forward", "backward", "uses", "big-heads", "fp8", "cpu"])
def test_every_case_survives_json(name):
    for case in suite(name):
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_cells_are_chosen_by_glob_or_by_part():
    cells = suite("forward")
    assert [c.name for c in select(cells, "*d128*s512")] == ["forward-d128-full-s512", "forward-d128-causal-s512"]
    assert len(select(cells, "d256-causal")) == 6
    assert len(select(cells, "s512,*s1024")) == 12
    assert select(cells, None) == cells and select(cells, "nothing") == []


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="must be one of forward, backward, models"):
        suite("sideways")


def test_inputs_are_random_and_laid_out_as_the_case_says():
    case = Case("forward", "float32", 3, 9, 9, 4, 2, 8, lengths=(1, 9, 5))
    inputs = make_inputs(case, torch.device("cpu"), seed=3)
    assert inputs.q.shape == (15, 4, 8) and inputs.k.shape == inputs.v.shape == (15, 2, 8)
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 1, 10, 15]
    assert 0.8 < inputs.q.std() < 1.2 and not torch.equal(inputs.k, inputs.v)
    assert torch.equal(inputs.q, make_inputs(case, torch.device("cpu"), seed=3).q)


def test_cells_of_models_have_names_of_their_own() -> None:
    cases = suite("models")
    assert len({case.name for case in cases}) == len(cases)
    assert {case.direction for case in cases} == {"forward", "backward"}
    assert all(Case.from_dict(case.to_dict()) == case and case.flops() > 0 for case in cases)
    assert all(sum(c.lengths) > 0 and max(c.lengths) == c.seqlen_q for c in cases if c.lengths)


def test_big_heads_are_past_256_in_both_directions() -> None:
    cases = suite("big-heads")
    assert len(cases) == len({case.name for case in cases}) == 44
    assert {case.head_dim for case in cases} == {320, 384, 512}
    assert {case.seqlen_q for case in cases if not case.model} == {4096, 8192, 16384}
    assert sum(case.direction == "backward" for case in cases) == 22


def test_uses_have_every_kind_in_both_directions() -> None:
    cases = suite("uses")
    assert len({case.name for case in cases}) == len(cases)
    forward, backward = ([c for c in cases if c.direction == each] for each in ("forward", "backward"))
    assert [c.model for c in forward] == [c.model for c in backward]
    assert {name for c in cases for name in c.needs} == {"bias", "trained", "sinks", "dropout", "padding"}
    assert {c.dtype for c in cases} == {"bfloat16", "float32"}
    assert {16, 24, 32, 40} <= {c.head_dim for c in cases} and min(c.seqlen_q for c in cases) == 1


def test_padded_sequences_end_where_their_mask_says() -> None:
    case = Case("forward", "float32", 5, 40, 64, 2, 2, 16, padded=True)
    mask = make_inputs(case, torch.device("cpu")).mask
    assert mask is not None and mask.shape == (5, 1, 1, 64)
    assert mask.sum(-1).flatten().tolist() == case.key_lengths == [64, 44, 57, 37, 50]
    assert case.kept_pairs() == 40 * sum(case.key_lengths)
