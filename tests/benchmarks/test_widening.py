"""The script for prompts over 8-bit caches: its calls, their work, that each way is planned and gives equal bits."""

import pytest
import torch

import flashtile
from benchmarks import widening
from benchmarks.steps import StepCase
from flashtile.backends.hopper.forward import config
from tests.backends.hopper.emulated import on_cpu

SEQUENCES = ((70, 150), (1, 30))


@pytest.mark.parametrize("scales", ["", "h", "eh"])
def test_both_caches_hold_the_same_numbers(scales):
    case = StepCase("chunks", 2, 1, 64, 16)
    eight, wide = widening.inputs(case, SEQUENCES, scales, "cpu")
    assert eight["k_cache"].dtype == torch.float8_e4m3fn and ("k_scale" in eight) == bool(scales)
    got, want = (flashtile.attention_with_kvcache(**each) for each in (eight, wide))
    assert (got - want).norm() <= 1e-2 * want.norm() and want.norm() > 0


def test_work_is_that_of_kept_pairs():
    assert widening.flops(((3, 5), (1, 4)), heads=2, head_dim=8) == 4 * 2 * 8 * (3 + 4 + 5 + 4)


@pytest.mark.parametrize("name", [*widening.WAYS, "decode"])
def test_each_way_is_planned_and_gives_the_bits_of_16_bits(name, monkeypatch):
    case, ran = StepCase("chunks", 2, 1, 64, 16), []
    choose = config.choose
    monkeypatch.setattr(config, "choose", lambda *args, **kw: ran.append(choose(*args, **kw)) or ran[-1])
    with on_cpu(num_sms=1):
        eight, wide = widening.inputs(case, SEQUENCES, "h", "cpu")
        want = flashtile.attention_with_kvcache(**wide, backend="hopper")
        assert len(ran) == 1 and ran[0].widen_warps == 0
        if name == "decode":
            with widening.way_of(name):
                assert not config.WIDENS
            return
        with widening.way_of(name):
            got = flashtile.attention_with_kvcache(**eight, backend="hopper")
    assert torch.equal(got, want) and len(ran) == 2
    changes = config.WIDENING[ran[1].num_warpgroups] | widening.WAYS[name]
    assert all(getattr(ran[1], key) == value for key, value in changes.items())
