"""The closed forms against counting one by one, and the models against each other."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis import (
    A100,
    DEVICES,
    H100,
    H200,
    AttentionShape,
    Blocks,
    DecodeShape,
    Device,
    LoopOrder,
    TransformerConfig,
    arithmetic_intensity,
    attention_flops,
    attention_memory,
    compulsory_traffic_bytes,
    decode_cost,
    decode_splits,
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


def test_a_decode_step_reads_each_byte_once():
    shape = DecodeShape(50, 6, 2, 8, batch_size=3, seqlen_q=4, page_size=16)
    cost = decode_cost(shape, H200)
    keys = [(b, h, j) for b in range(3) for h in range(2) for j in range(50)]
    assert cost.kv_bytes == sum(8 * 2 + 8 * 2 for _ in keys)
    assert cost.rows_bytes == 3 * 6 * 4 * (8 * 2 + 8 * 2 + 4)
    assert cost.page_table_bytes == 3 * 4 * 4 and cost.page_table_share == 48 / cost.kv_bytes
    assert cost.total_bytes == cost.kv_bytes + cost.rows_bytes + cost.page_table_bytes
    assert cost.roofline.time_s == pytest.approx(cost.total_bytes / 4.8e12)
    seen = sum(j <= i + 50 - 4 for i in range(4) for j in range(50))
    assert cost.flops == 4 * 8 * 3 * 6 * seen
    # The ends of last pages, averaged over every length.
    pages = [DecodeShape(n, 6, 2, 8, 3, page_size=16).pages for n in range(1, 161)]
    spare = sum(pages[n - 1] * 16 - n for n in range(1, 161)) / 160
    assert cost.spare_bytes == pytest.approx(spare * 3 * 2 * 32)


@pytest.mark.parametrize(("group", "seqlen_q", "cache"), [(1, 1, None), (8, 1, None), (8, 4, None), (4, 1, "float8")])
def test_the_intensity_of_decoding_is_that_of_its_rows(group, seqlen_q, cache):
    cost = decode_cost(DecodeShape(2**22, 2 * group, 2, 128, seqlen_q=seqlen_q, cache_dtype=cache), H200)
    assert cost.roofline.intensity_flops_per_byte == pytest.approx(2 * group * seqlen_q / (1 if cache else 2), rel=1e-3)


def test_a_cache_of_8_bits_takes_half_the_bytes_and_no_less_arithmetic():
    wide, narrow = (decode_cost(DecodeShape(4096, 8, 8, 64, cache_dtype=c), H200) for c in ("bf16", "fp8"))
    assert wide.kv_bytes == 2 * narrow.kv_bytes and wide.flops == narrow.flops and wide.rows_bytes == narrow.rows_bytes


def test_splitting_pays_where_programs_are_fewer_than_multiprocessors():
    toy = Device("toy", 1e15, 1e12, num_sms=10)
    tile = Blocks(16, 32)
    key = 2 * 4 * 2
    # Four programs of 3,200 keys on ten multiprocessors, each with a tenth of the memory rate.
    found = decode_splits(DecodeShape(3200, 4, 4, 4), toy, tile)
    assert found.programs == 4 and found.unsplit_s == pytest.approx(3200 * key * 10 / 1e12)
    partial = 2 * found.splits * 4 * (4 + 1) * 4
    assert found.partial_bytes == partial
    # Five splits are 20 programs of 640 keys: two on each.
    assert found.splits == 5 and found.split_s == pytest.approx((2 * 640 * key * 10 + partial) / 1e12)
    assert found.gain == pytest.approx(found.unsplit_s / found.split_s)
    full = decode_splits(DecodeShape(3200, 4, 4, 4, batch_size=5), toy, tile)
    assert (full.programs, full.splits, full.partial_bytes, full.gain) == (20, 1, 0, 1.0)
    short = decode_splits(DecodeShape(32, 4, 4, 4), toy, tile)
    assert (short.splits, short.gain) == (1, 1.0), "one block of keys cannot be split"
    rows = decode_splits(DecodeShape(3200, 40, 4, 4, seqlen_q=2), toy, tile)
    assert rows.programs == 4 * 2, "twenty rows of a group are two blocks"


@given(st.integers(1, 5000), st.integers(1, 6), st.integers(1, 40), st.integers(1, 64))
def test_the_splits_are_the_fewest_that_are_near_the_best(seqlen_k, batch, num_sms, block_k):
    device, shape = Device("toy", 1e15, 1e12, num_sms=num_sms), DecodeShape(seqlen_k, 2, 1, 8, batch)

    def seconds(splits):
        blocks = ceil(seqlen_k / block_k)
        keys = min(seqlen_k, ceil(blocks / splits) * block_k)
        written = 2 * splits * batch * 2 * (8 + 1) * 4 if splits > 1 else 0
        return (ceil(batch * splits / num_sms) * keys * 32 * num_sms + written) / 1e12

    found = decode_splits(shape, device, Blocks(64, block_k))
    times = {splits: seconds(splits) for splits in range(1, min(num_sms, ceil(seqlen_k / block_k)) + 1)}
    near = [splits for splits, time in times.items() if time <= 1.05 * min(times.values())]
    assert found.splits == near[0] and found.split_s == pytest.approx(times[near[0]])
    assert found.unsplit_s == pytest.approx(times[1])


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
        ("seqlen_k", lambda: DecodeShape(0, 1, 1, 8)),
        ("num_heads_kv", lambda: DecodeShape(8, 6, 4, 8)),
        ("page_size", lambda: DecodeShape(8, 4, 4, 8, page_size=-1)),
        ("dtype", lambda: DecodeShape(8, 4, 4, 8, cache_dtype="int3")),
        ("dtype", lambda: decode_cost(DecodeShape(8, 4, 4, 8, dtype="float32"), H200)),
        ("device", lambda: decode_splits(DecodeShape(8, 4, 4, 8), Device("toy", 1.0, 1.0), Blocks(1, 1))),
        ("num_sms", lambda: Device("toy", 1.0, 1.0, num_sms=0)),
        ("seqlen", lambda: transformer_memory(TransformerConfig(), 0)),
    ],
)
def test_bad_numbers_are_refused_by_name(argument, call):
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.argument == argument
