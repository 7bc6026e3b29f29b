"""The model of rings: its table is that of the saved rows, its limits are those of formulas."""

import dataclasses
import json
from pathlib import Path

import pytest

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis import (
    H200_CLUSTER,
    H200_KERNELS,
    Cluster,
    KernelTable,
    Link,
    RingShape,
    fit_link,
    ring_cost,
)
from flashtile_lab.analysis.sent import exchanged_bytes, gathered_bytes

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FREE = Link(0.0, 1e30)


def flat(tflops, state_bytes=0.0, overlaps=True, **rates):
    forward, backward = (((1, rate * 1e12, rate * 1e12),) for rate in (tflops, rates.get("backward", tflops)))
    return KernelTable("flat", forward, backward, 1e12, state_bytes, state_bytes, overlaps=overlaps)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_table_is_the_saved_rows(direction):
    saved = {}
    for line in (RESULTS / f"{direction}-nvidia-h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        case = row["case"]
        same = (case["dtype"], case["head_dim"], case["num_heads_q"], case["window"], row["provider"])
        if same == ("bfloat16", 128, 16, None, "flashtile") and row["tflops"]:
            saved[case["seqlen_k"], case["causal"]] = row["tflops"]  # the last of each
    table = {(keys, causal): rates[causal] for keys, *rates in getattr(H200_KERNELS, direction) for causal in (0, 1)}
    assert {key: round(tflops) for key, tflops in saved.items()} == {key: rate / 1e12 for key, rate in table.items()}


def test_rates_between_lengths():
    rate = H200_KERNELS.flops_per_s
    assert (rate(4096, True, False), rate(2048, False, True)) == (pytest.approx(687e12), pytest.approx(572e12))
    assert rate(100, False, False) == 594e12 and rate(2**22, True, True) == 642e12
    assert 1 / rate(1024 * 2**0.5, True, False) == pytest.approx((1 / 505e12 + 1 / 617e12) / 2)


def test_a_link_is_fitted():
    link = fit_link([(size, 12e-6 + size / 3e11) for size in (2**20, 2**24, 2**28)])
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(12e-6), pytest.approx(3e11))
    # 5% of a long transfer are more than the latency: errors count for what they are of their own transfer.
    errors = {2**10: 1, 2**20: 1, 2**29: 1.05, 2**30: 0.95}
    noisy = fit_link([(size, (12e-6 + size / 3e11) * by) for size, by in errors.items()])
    assert (noisy.latency_s, noisy.bytes_per_s) == (pytest.approx(12e-6, rel=0.1), pytest.approx(3e11, rel=0.1))
    assert fit_link([(1e6, 1e-6), (2e6, 3e-6)]).latency_s == 0
    assert link.time_s(0) == 0 and link.time_s(3e11) == pytest.approx(1 + 12e-6)
    for samples in ([], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 2.0), (16, 1.0)]):
        with pytest.raises(InvalidInputError, match="samples"):
            fit_link(samples)


@pytest.mark.parametrize("backward", [False, True])
def test_one_device_is_the_kernel(backward):
    cost = ring_cost(RingShape(8192, 1), H200_KERNELS, H200_CLUSTER, backward)
    pairs, rate = 8192 * 8193 / 2, H200_KERNELS.flops_per_s(8193, True, backward)
    assert cost.total_s == pytest.approx((10 if backward else 4) * 128 * 32 * pairs / rate)
    assert (cost.share, cost.hidden, cost.sent_bytes, cost.memory_s, cost.steps) == (pytest.approx(1), 1, 0, 0, 1)
    assert cost.flops_per_s == pytest.approx(rate)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("world", [2, 7, 64, 4096])
@pytest.mark.parametrize("backward", [False, True])
def test_free_links_and_memory_leave_the_kernels(world, backward):
    tokens = 2 * 32
    cost = ring_cost(RingShape(tokens, world), flat(100), Cluster(FREE, FREE), backward)
    assert cost.share == pytest.approx(1, rel=0.02) and cost.waiting_s == pytest.approx(0, abs=1e-12)
    # Ranks after a shard's owner need the first half of it.
    assert 0.5 <= cost.sent_bytes / gathered_bytes(tokens, world, RingShape(tokens, world).sizes, backward) <= 1
    assert cost.steps == world
    contiguous = ring_cost(RingShape(tokens, world, layout="contiguous"), flat(100), Cluster(FREE, FREE), backward)
    assert contiguous.share == pytest.approx(world / (2 * world - 1), rel=0.02)  # the last rank's steps are all full


@pytest.mark.parametrize(
    ("backward", "cluster", "world", "ulysses", "threshold"),
    [
        (False, Cluster(Link(0, 370e9), FREE), 8, 1, 2 * 600e12 / (8 * 370e9)),
        (True, Cluster(Link(0, 370e9), FREE), 8, 1, 2.4 * 600e12 / (8 * 370e9)),
        (False, Cluster(FREE, Link(0, 50e9)), 64, 1, 2 * 600e12 / (8 * 50e9)),
        # Devices of a node exchange heads first: as many bytes a step, and 4 times the work.
        (False, Cluster(FREE, Link(0, 50e9)), 64, 4, 2 * 600e12 / (8 * 50e9) / 4),
    ],
)
def test_transfers_are_hidden_from_the_length_of_the_formula_on(backward, cluster, world, ulysses, threshold):
    # Causal zigzag, groups of 8: n >= b F / (g B), 2 (b + 4) / 5 for b in the backward. Then more steps wait no more.
    def growth(tokens):
        shapes = [RingShape(tokens, ranks, 32, 4, ulysses=ulysses) for ranks in (world // 2, world)]
        few, many = (ring_cost(shape, flat(600), cluster, backward).waiting_s for shape in shapes)
        return many - few

    below, above = (round(threshold * by / 16) * 16 for by in (0.9, 1.1))
    assert growth(below) > 1e-7 and growth(above) == pytest.approx(0, abs=1e-9)


def test_slow_links_are_waited_for():
    shape, cluster = RingShape(64, 4), Cluster(Link(0, 1e6), FREE)
    keys, sums = 64 * shape.sizes.key_bytes / 1e6, 64 * shape.sizes.sums_bytes / 1e6
    forward, backward = (ring_cost(shape, flat(100), cluster, each) for each in (False, True))
    assert forward.transfer_s == pytest.approx(3 * keys) and forward.waiting_s == pytest.approx(3 * keys, rel=1e-3)
    assert backward.transfer_s == pytest.approx(3 * (keys + sums))
    assert backward.hidden == pytest.approx(0, abs=1e-3)
    theirs = ring_cost(shape, flat(100, overlaps=False), Cluster(Link(0, 1e12), FREE), True)
    assert theirs.waiting_s > ring_cost(shape, flat(100), Cluster(Link(0, 1e12), FREE), True).waiting_s


def test_keys_arrive_during_the_step_before():
    # Contiguous: a causal step and a full one. What takes 0.75 of the full one is waited for in the first alone.
    full = 4 * 128 * 32 * 512**2 / 100e12
    link = Link(0, 512 * 8 * 256 * 2 / (0.75 * full))
    cost = ring_cost(RingShape(512, 2, layout="contiguous"), flat(100), Cluster(link, FREE))
    assert cost.waiting_s == pytest.approx(0.25 * full, rel=0.01)
    # Gathered: half of the own step is beside the keys, half beside the sums.
    shape = RingShape(512, 2, causal=False, scheme="allgather")
    gathered = ring_cost(shape, flat(100), Cluster(link, FREE), True)
    assert gathered.waiting_s == pytest.approx(0.25 * full)


def test_the_slowest_rank_counts():
    # Of a window on both sides the first and the last rank have one neighbour, the others two.
    cost = ring_cost(RingShape(256, 4, causal=False, window=64, layout="contiguous"), flat(100), Cluster(FREE, FREE))
    pairs = 256 * 129 - 64 * 65 + 64 * 65
    assert cost.kernels_s == pytest.approx(4 * 128 * 32 * pairs / 100e12)


def test_launches_count_in_every_step():
    kernels = dataclasses.replace(flat(100), launch_s=1e-6)
    assert ring_cost(RingShape(64, 4), kernels, Cluster(FREE, FREE)).memory_s == pytest.approx(4e-6)


def test_the_link_between_nodes_counts_beyond_a_node():
    slow = Cluster(FREE, Link(0, 1e9))
    assert ring_cost(RingShape(64, 8), flat(100), slow).waiting_s == pytest.approx(0, abs=1e-12)
    assert ring_cost(RingShape(64, 9), flat(100), slow).waiting_s > 1e-4
    assert ring_cost(RingShape(64, 9), flat(100), dataclasses.replace(slow, node=9)).waiting_s < 1e-9
    assert ring_cost(RingShape(64, 16, ulysses=4), flat(100), slow).waiting_s > 1e-4  # a ring of 4, in two nodes


def test_merging_reads_and_writes_outputs_and_sums():
    forward, backward = (ring_cost(RingShape(64, 4), flat(100, 8), Cluster(FREE, FREE), each) for each in (False, True))
    # Of the rank whose steps have all rows over half the keys; its own step adds nothing.
    assert forward.memory_s == pytest.approx(3 * 64 * 32 * 128 * 8 / 1e12)
    assert backward.memory_s == pytest.approx(3 * (64 * 32 + 2 * 32 * 8) * 128 * 8 / 1e12)


@pytest.mark.parametrize("world", [8, 512])
def test_a_window_moves_what_it_needs(world):
    cost = ring_cost(RingShape(1024, world, window=512), H200_KERNELS, H200_CLUSTER)
    assert cost.sent_bytes == 2 * 512 * RingShape(1024, world).sizes.key_bytes and cost.steps == 3
    both = ring_cost(RingShape(1024, world, causal=False, window=512), H200_KERNELS, H200_CLUSTER)
    assert both.flops > 1.9 * cost.flops


def test_ways_of_sending_keys():
    shape = RingShape(4096, 8)
    costs = {
        "ring": ring_cost(shape, H200_KERNELS, H200_CLUSTER),
        "gathered": ring_cost(dataclasses.replace(shape, scheme="allgather"), H200_KERNELS, H200_CLUSTER),
        "exchanged": ring_cost(dataclasses.replace(shape, ulysses=8), H200_KERNELS, H200_CLUSTER),
        "both": ring_cost(dataclasses.replace(shape, ulysses=2), H200_KERNELS, H200_CLUSTER),
    }
    sent = {name: cost.sent_bytes for name, cost in costs.items()}
    assert sent["ring"] == sent["gathered"] == 7 * 4096 * shape.sizes.key_bytes
    assert sent["exchanged"] == exchanged_bytes(4096, 8, shape.sizes)
    assert sent["both"] == 3 * 4096 * shape.sizes.key_bytes + exchanged_bytes(4096, 2, shape.sizes)
    many = ring_cost(dataclasses.replace(shape, world=32, ulysses=16), H200_KERNELS, H200_CLUSTER)  # a key head for two
    assert many.sent_bytes == exchanged_bytes(4096, 16, shape.sizes) + 16 * 4096 * 256 * 2
    assert {cost.flops for cost in costs.values()} == {costs["ring"].flops}
    assert costs["exchanged"].steps == 1 and costs["exchanged"].hidden == 0 and costs["exchanged"].memory_s == 0
    assert costs["gathered"].waiting_s < costs["gathered"].transfer_s
    for name in ("ring", "gathered", "exchanged", "both"):
        assert 0.7 < costs[name].share <= 1, name
    # Across nodes each node gets the shards of the others once for each of its devices' links.
    far = ring_cost(RingShape(64, 64, scheme="allgather"), flat(100, overlaps=False), Cluster(FREE, Link(0, 50e9)))
    assert far.transfer_s == far.waiting_s == pytest.approx(7 * 64 * shape.sizes.key_bytes / 50e9)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("tokens", lambda: RingShape(0, 8)),
        ("world", lambda: RingShape(8, 0)),
        ("num_heads_kv", lambda: RingShape(8, 8, 32, 5)),
        ("ulysses", lambda: RingShape(8, 8, ulysses=3)),
        ("ulysses", lambda: RingShape(8, 64, ulysses=64)),
        ("scheme", lambda: RingShape(8, 8, scheme="star")),
        ("dtype", lambda: RingShape(8, 8, dtype="int3")),
        ("layout", lambda: ring_cost(RingShape(8, 8, layout="spiral"), H200_KERNELS, H200_CLUSTER)),
        ("bytes_per_s", lambda: Link(0, 0)),
        ("latency_s", lambda: Link(-1, 1)),
        ("node", lambda: Cluster(FREE, FREE, 0)),
    ],
)
def test_refusals(argument, make):
    with pytest.raises(InvalidInputError) as found:
        make()
    assert found.value.argument == argument


def test_documents_are_dealt() -> None:
    cost = ring_cost(RingShape(32768, 4, layout="deal", document=5000), H200_KERNELS, H200_CLUSTER)
    assert 0 < cost.of_least <= 1.1 and 1 <= cost.imbalance <= 1.05 and cost.sent_bytes > 0
    alone = ring_cost(RingShape(32768, 4, layout="deal", document=2048), H200_KERNELS, H200_CLUSTER)
    assert (alone.sent_bytes, alone.of_least, alone.imbalance, alone.steps) == (0, 1.0, 1.0, 1)
    assert alone.share == pytest.approx(1)
    causal = ring_cost(RingShape(8192, 4, layout="contiguous"), H200_KERNELS, H200_CLUSTER)
    assert causal.imbalance == pytest.approx(1.75, rel=0.01)
