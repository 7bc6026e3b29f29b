"""The script for prompts over 8-bit caches: its calls, their work, that each way is planned and gives equal bits."""

from unittest import mock

import pytest
import torch

import flashtile
from benchmarks import widening
from benchmarks.steps import StepCase
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.forward.paged import config
from flashtile_lab.kernels.decode import described_call
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


@pytest.mark.parametrize("name", widening.WAYS)
def test_each_way_is_planned_and_gives_the_bits_of_16_bits(name):
    case, ran = StepCase("chunks", 2, 1, 64, 16), []
    with on_cpu(num_sms=1):
        eight, wide = widening.inputs(case, SEQUENCES, "h", "cpu")
        want = flashtile.attention_with_kvcache(**wide, backend="hopper")
        with widening.way_of(name):
            choose = config.choose
            noted = mock.patch.object(config, "choose", lambda *args, **kw: ran.append(choose(*args, **kw)) or ran[-1])
            with noted:
                got = flashtile.attention_with_kvcache(**eight, backend="hopper")
    assert torch.equal(got, want) and len(ran) == 1 and ran[0].widens
    assert all(getattr(ran[0], key) == value for key, value in widening.WAYS[name].items())


def test_decode_is_the_kernel_that_took_such_calls_before():
    call = described_call((9, 0), seqlen_q=500, page_size=64, packed=True, kv=torch.float8_e4m3fn)
    assert BACKEND.kernel("decode", *call).name == "prompts"
    with widening.way_of("decode"):
        assert BACKEND.kernel("decode", *call).name == "decode"
