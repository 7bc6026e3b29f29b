"""The closed forms against counting one by one, and the models against each other."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtile.analysis import (
    A100,
    DEVICES,
    H100,
    AttentionShape,
    Blocks,
    Device,
    LoopOrder,
    TransformerConfig,
    arithmetic_intensity,
    attention_flops,
    attention_memory,
    compulsory_traffic_bytes,
    dtype_bytes,
    exponential_cost,
    find_device,
    fitting_tiles,
    peak_intermediates,
    roofline_point,
    standard_traffic,
    tile_memory,
    tiled_traffic,
    transformer_memory,
)
from flashtile.errors import InvalidInputError

small = st.integers(1, 40)
shapes = st.builds(
    AttentionShape,
    seqlen_q=small,
    seqlen_k=small,
    head_dim=st.integers(1, 8),
    num_heads=st.integers(1, 3),
    batch_size=st.integers(1, 2),
    dtype=st.sampled_from(["float16", "fp32"]),
    causal=st.booleans(),
)
blocks = st.builds(Blocks, st.integers(1, 50), st.integers(1, 50))


def kept(shape, i, j):
    return not shape.causal or j <= i + shape.seqlen_k - shape.seqlen_q


def visited_tiles(shape, tile):
    """(rows of Q, rows of K) of each tile that holds a kept score."""
    found = []
    for i in range(0, shape.seqlen_q, tile.block_q):
        for j in range(0, shape.seqlen_k, tile.block_k):
            rows_q = range(i, min(i + tile.block_q, shape.seqlen_q))
            rows_k = range(j, min(j + tile.block_k, shape.seqlen_k))
            if kept(shape, rows_q[-1], rows_k[0]):
                found.append((len(rows_q), len(rows_k)))
    return found


@given(shapes)
def test_kept_scores_and_flops_count_each_score(shape):
    scores = sum(kept(shape, i, j) for i in range(shape.seqlen_q) for j in range(shape.seqlen_k)) * shape.num_problems
    flops = attention_flops(shape)
    assert shape.kept_scores == scores == flops.forward_exps == flops.backward_exps
    assert flops.forward_flops == 2 * 2 * shape.head_dim * scores
    assert flops.backward_flops == 5 * 2 * shape.head_dim * scores
    assert flops.total_flops == 14 * shape.head_dim * scores


@given(shapes, blocks)
def test_tiled_traffic_counts_each_tile(shape, tile):
    tiles = visited_tiles(shape, tile)
    assert shape.tile_visits(tile) == len(tiles)
    row_bytes, problems = shape.head_dim * shape.element_bytes, shape.num_problems
    q_rows, k_rows = sum(q for q, _ in tiles), sum(k for _, k in tiles)

    outside_kv = tiled_traffic(shape, tile, LoopOrder.KV_OUTSIDE)
    assert outside_kv.inputs_read_bytes == problems * row_bytes * (2 * shape.seqlen_k + q_rows)
    assert outside_kv.state_read_bytes == problems * q_rows * (row_bytes + 8)
    assert outside_kv.write_bytes == problems * (q_rows + shape.seqlen_q) * (row_bytes + 8)
    assert outside_kv.rescales == outside_kv.tile_visits == problems * len(tiles)

    outside_q = tiled_traffic(shape, tile, LoopOrder.Q_OUTSIDE)
    assert outside_q.inputs_read_bytes == problems * row_bytes * (shape.seqlen_q + 2 * k_rows)
    assert outside_q.state_read_bytes == 0
    assert outside_q.write_bytes == problems * shape.seqlen_q * (row_bytes + 4)
    assert outside_q.rescales == problems * ceil(shape.seqlen_q / tile.block_q)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_one_block_of_q_moves_each_byte_once(seqlen_q, seqlen_k, head_dim):
    shape = AttentionShape(seqlen_q, seqlen_k, head_dim)
    whole = tiled_traffic(shape, Blocks(64, 8), LoopOrder.Q_OUTSIDE)
    assert whole.total_bytes == compulsory_traffic_bytes(shape)


def test_causal_counts_stay_exact_where_a_loop_would_not_end():
    shape = AttentionShape(2**40, 2**40, 64, causal=True)
    blocks_a_side = 2**40 // 128
    assert shape.tile_visits(Blocks(128, 128)) == blocks_a_side * (blocks_a_side + 1) // 2


def test_memory_of_tiles_does_not_grow_with_heads_but_all_else_does():
    one = attention_memory(AttentionShape(256, 512, 32), Blocks(64, 128))
    many = attention_memory(AttentionShape(256, 512, 32, num_heads=3, batch_size=2), Blocks(64, 128))
    assert many.standard_bytes == 6 * one.standard_bytes == 6 * 256 * 512 * 2
    assert many.tiled_tiles_bytes == one.tiled_tiles_bytes == (64 * 32 + 2 * 128 * 32 + 64 * 128) * 2
    assert many.tiled_out_bytes + many.tiled_lse_bytes == 6 * (256 * 32 * 2 + 256 * 4)


def test_standard_traffic_with_other_lengths():
    traffic = standard_traffic(AttentionShape(3, 5, 7, num_heads=2, dtype="float32"))
    assert traffic.inputs_read_bytes == 2 * 4 * (3 * 7 + 2 * 5 * 7)
    assert traffic.scores_probs_bytes == 2 * 4 * 4 * 3 * 5
    assert traffic.own_bytes == traffic.inputs_read_bytes + traffic.scores_probs_bytes + 2 * 4 * 3 * 7


@pytest.mark.parametrize(("name", "bf16_tflops"), [("A100", 312), ("H100", 989.4), ("H200", 989.4)])
def test_device_peaks_match_their_data_sheets(name, bf16_tflops):
    assert DEVICES[name].peak_flops_per_s / 1e12 == pytest.approx(bf16_tflops, rel=1e-3)
    assert find_device(name.lower()) is DEVICES[name]


def test_roofline_on_both_sides_of_the_ridge():
    device = Device("toy", peak_flops_per_s=100.0, hbm_bytes_per_s=10.0)
    assert device.ridge_flops_per_byte == 10
    memory, compute = roofline_point(50, 10, device), roofline_point(2000, 100, device)
    assert (memory.bound, memory.intensity_flops_per_byte, memory.attainable_flops_per_s) == ("memory", 5, 50)
    assert memory.time_s == pytest.approx(1)
    assert (compute.bound, compute.attainable_flops_per_s, compute.time_s) == ("compute", 100, 20)
    ridge = roofline_point(100, 10, device)
    assert (ridge.bound, ridge.attainable_flops_per_s) == ("compute", 100)


@given(st.floats(1, 1e18), st.floats(1, 1e15))
def test_roofline_time_is_work_over_attainable_rate(flops, hbm_bytes):
    point = roofline_point(flops, hbm_bytes, A100)
    assert point.time_s == pytest.approx(flops / point.attainable_flops_per_s)
    assert arithmetic_intensity(flops, hbm_bytes) == point.intensity_flops_per_byte


def test_exponentials_weigh_more_in_narrow_heads():
    ratio = {d: exponential_cost(AttentionShape(64, 64, d), H100).ratio for d in (64, 256)}
    assert ratio[64] == pytest.approx(1.0)
    assert ratio[256] == pytest.approx(0.25)


def test_fitting_tiles_are_all_that_fit_tallest_first():
    sides, budget = (16, 32, 64, 128), 100_000
    fitting = fitting_tiles(budget, 64, "bf16", sides)
    pairs = [(tile.blocks.block_q, tile.blocks.block_k) for tile in fitting]
    expected = [
        (q, k)
        for q in reversed(sides)
        for k in reversed(sides)
        if 2 * (q * 64 + 2 * k * 64 + q * k) + 4 * (q * 64 + 2 * q) <= budget
    ]
    assert pairs == expected
    assert 0 < len(pairs) < len(sides) ** 2
    assert fitting_tiles(100, 64) == []
    exact = tile_memory(Blocks(64, 32), 64).total_bytes
    assert fitting_tiles(exact, 64, sides=(32, 64))[0].blocks == Blocks(64, 32)
    assert Blocks(64, 32) not in [tile.blocks for tile in fitting_tiles(exact - 1, 64, sides=(32, 64))]


def test_float64_tiles_accumulate_in_float64():
    assert tile_memory(Blocks(16, 16), 8, "float64").acc_bytes == 16 * 8 * 8


def test_peak_intermediates_of_unequal_blocks():
    peak = peak_intermediates(AttentionShape(100, 300, 16), Blocks(32, 64))
    assert (peak.standard_numbers, peak.tiled_numbers) == (30_000, 32 * 64 + 32 * 16 + 2 * 32)


def test_transformer_parts_and_grouped_heads():
    config = TransformerConfig(d_model=64, num_layers=3, vocab_size=100, num_heads=8, num_heads_kv=2, dtype="bf16")
    memory = transformer_memory(config, seqlen=10, batch_size=2)
    assert memory.embedding_bytes == 100 * 64 * 2
    assert memory.attention_weights_bytes == 3 * 2 * (64 * 64 * 2 + 2 * 64 * 16)
    assert memory.mlp_weights_bytes == 3 * 2 * 8 * 64 * 64
    assert memory.kv_cache_bytes == 3 * 20 * 2 * 16 * 2
    assert memory.activations_bytes == 3 * 20 * 3 * 64 * 2
    assert memory.lse_bytes == 3 * 20 * 8 * 4
    assert memory.scores_bytes_per_layer == 2 * 8 * 10 * 10 * 2
    parts = memory.embedding_bytes + memory.attention_weights_bytes + memory.mlp_weights_bytes
    assert memory.total_bytes == parts + memory.kv_cache_bytes + memory.activations_bytes


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("seqlen_q", lambda: AttentionShape(0, 1, 1)),
        ("seqlen_k", lambda: AttentionShape(1, -1, 1)),
        ("head_dim", lambda: AttentionShape(1, 1, 0)),
        ("dtype", lambda: AttentionShape(1, 1, 1, dtype="int3")),
        ("dtype", lambda: dtype_bytes("half")),
        ("block_k", lambda: Blocks(1, 0)),
        ("device", lambda: find_device("X9")),
        ("device", lambda: exponential_cost(AttentionShape(1, 1, 1), Device("toy", 1.0, 1.0))),
        ("dtype", lambda: exponential_cost(AttentionShape(1, 1, 1, dtype="float32"), H100)),
        ("peak_flops_per_s", lambda: Device("toy", 0.0, 1.0)),
        ("exp_per_s", lambda: Device("toy", 1.0, 1.0, exp_per_s=-1.0)),
        ("hbm_bytes_per_s", lambda: Device("toy", 1.0, float("nan"))),
        ("hbm_bytes", lambda: roofline_point(1, 0, H100)),
        ("hbm_bytes", lambda: arithmetic_intensity(1, 0)),
        ("on_chip_bytes", lambda: fitting_tiles(0, 64)),
        ("head_dim", lambda: tile_memory(Blocks(1, 1), 0)),
        ("num_heads", lambda: TransformerConfig(d_model=10, num_heads=3, num_heads_kv=3)),
        ("num_heads_kv", lambda: TransformerConfig(num_heads=32, num_heads_kv=5)),
        ("seqlen", lambda: transformer_memory(TransformerConfig(), 0)),
    ],
)
def test_bad_numbers_are_refused_by_name(argument, call):
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.argument == argument
