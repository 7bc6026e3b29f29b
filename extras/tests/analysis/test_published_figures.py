"""The published figures, each from its formula. MB and GB are powers of ten unless a test says KiB, MiB or GiB."""

import pytest

from flashtile_lab.analysis import (
    H100,
    H200,
    AttentionShape,
    Blocks,
    LoopOrder,
    TransformerConfig,
    attention_memory,
    exponential_cost,
    peak_intermediates,
    standard_traffic,
    tile_memory,
    tiled_traffic,
    transformer_memory,
)


def test_standard_traffic_at_4096_and_768():
    traffic = standard_traffic(AttentionShape(4096, 4096, 768, dtype="float32"))
    assert round(traffic.inputs_read_bytes / 1e6, 1) == 37.7
    assert round(traffic.scores_probs_bytes / 1e6, 1) == 268.4
    assert round(traffic.out_write_bytes / 1e6, 1) == 12.6
    assert round(traffic.own_bytes / 1e6, 1) == 318.8
    assert round(traffic.total_bytes / 1e6, 1) == 331.4


@pytest.mark.parametrize(
    ("seqlen", "standard_mb", "tiled_mb", "ratio"),
    [(512, "0.5", "0.10", 5), (4096, "33.6", "0.57", 59), (16384, "536.9", "2.20", 245)],
)
def test_attention_memory_fp16(seqlen, standard_mb, tiled_mb, ratio):
    memory = attention_memory(AttentionShape(seqlen, seqlen, 64, dtype="float16"), Blocks(64, 64))
    assert f"{memory.standard_bytes / 1e6:.1f}" == standard_mb
    assert f"{memory.tiled_bytes / 1e6:.2f}" == tiled_mb
    assert round(memory.ratio) == ratio


@pytest.mark.parametrize(
    ("order", "rescales", "reads_mb"), [(LoopOrder.KV_OUTSIDE, 4096, 34.6), (LoopOrder.Q_OUTSIDE, 64, 67.6)]
)
def test_loop_orders_at_4096(order, rescales, reads_mb):
    traffic = tiled_traffic(AttentionShape(4096, 4096, 64, dtype="float16"), Blocks(64, 64), order)
    assert traffic.rescales == rescales
    assert round(traffic.inputs_read_bytes / 1e6, 1) == reads_mb


def test_tile_of_128_needs_112_kib():
    tile = tile_memory(Blocks(128, 128), head_dim=64, dtype="float16")
    assert tile.tiles_bytes == 112 * 1024
    assert tile.total_bytes == 113 * 1024


def test_scores_of_32768_take_4_gib_and_tiles_some_500_times_less():
    memory = attention_memory(AttentionShape(32768, 32768, 64, dtype="float32"), Blocks(128, 128))
    assert memory.standard_bytes == 4 * 2**30
    assert round(memory.tiled_bytes / 2**20) == 8
    assert round(memory.ratio, -2) == 500


def test_peak_intermediates_at_4096():
    peak = peak_intermediates(AttentionShape(4096, 4096, 64), Blocks(128, 128))
    assert (peak.standard_numbers, peak.tiled_numbers) == (16_777_216, 24_832)
    assert round(peak.ratio, 1) == 675.6


@pytest.mark.parametrize(("seqlen", "total_gb", "kv_cache_gb"), [(4096, 18.52, 2.15), (32768, 56.10, 17.18)])
def test_seven_billion_parameter_model(seqlen, total_gb, kv_cache_gb):
    config = TransformerConfig(d_model=4096, num_layers=32, vocab_size=32000, dtype="float16")
    memory = transformer_memory(config, seqlen)
    assert round(memory.total_bytes / 1e9, 2) == total_gb
    assert round(memory.kv_cache_bytes / 1e9, 2) == kv_cache_gb
    assert round(memory.weights_bytes / 1e9, 2) == 13.15


@pytest.mark.parametrize("device", [H100, H200])
def test_exponentials_take_half_the_cycles_of_the_products_on_hopper(device):
    cost = exponential_cost(AttentionShape(4096, 4096, 128, dtype="bfloat16"), device)
    assert cost.ratio == pytest.approx(0.5)
    assert round(device.exp_per_s / 1e12, 1) == 3.9
    assert round(device.peak_flops_per_s / 1e12) == 989
