"""A model of attention over many devices: the steps of a plan, timed by a table of kernel rates and by links.

It is a model and no measurement. It assumes that

- all devices are alike and start together, and a step takes as long as that of the slowest (of all ranks up to 16; of
  the first, the middle and the last of more);
- a kernel runs at the rate of the table for a call of as many keys a row, and the device is full whatever the heads;
- running outputs and sums of gradients are read and written once a step, at the memory's rate, beside nothing else;
- keys of the next step, and sums of the one before, travel while kernels run and do not slow them down; what takes
  longer is waited for;
- a transfer takes a latency and its bytes at the link's rate: no congestion, no other traffic. A ring that leaves a
  node is as slow as the link between nodes. What is gathered comes to each node once, and is spread within it;
- an all-to-all overlaps nothing.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, NamedTuple, get_args

from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.distributed.calls import RingCall
from flashtile.distributed.dealing import Mask, deal_rows
from flashtile.distributed.layouts import Layout
from flashtile.distributed.plan import RingPlan, make_plan
from flashtile.distributed.ring import RankRing
from flashtile_lab.analysis.links import Cluster, Link
from flashtile_lab.analysis.roofline import H200
from flashtile_lab.analysis.sent import Sizes, bytes_sent, exchanged_bytes, gathered_bytes, least_keys
from flashtile_lab.analysis.shape import dtype_bytes, require_positive

Scheme = Literal["ring", "allgather"]
# Keys of a sequence, and FLOP/s over them without a mask and causal.
Rates = tuple[tuple[int, float, float], ...]
_ALL_RANKS = 16


@dataclass(frozen=True)
class KernelTable:
    """How fast the kernels of a device are.

    Attributes:
        name: For tables.
        forward: Rates by length, in rising order; between lengths the time a FLOP changes with the logarithm.
        backward: Likewise.
        hbm_bytes_per_s: Bandwidth of the device memory.
        state_bytes: Bytes that merging moves for each element of the output of a step after the first.
        sums_bytes: Bytes that adding moves for each element of dq, dk and dv of a step.
        launch_s: Time that a call of a step adds and nothing hides.
        overlaps: Whether the own step overlaps what is gathered before the others, and part of it, in a backward, the
            sums that return at the end. Where it does not, gathered keys are used by one kernel.
    """

    name: str
    forward: Rates
    backward: Rates
    hbm_bytes_per_s: float
    state_bytes: float = 8
    sums_bytes: float = 8
    launch_s: float = 0.0
    overlaps: bool = True

    def flops_per_s(self, keys: float, causal: bool, backward: bool) -> float:
        """The rate of a call over so many keys; beyond the table that of its ends."""
        table = self.backward if backward else self.forward
        column = 2 if causal else 1
        after = bisect_right(table, keys, key=lambda row: row[0])
        if after in (0, len(table)):
            return table[min(after, len(table) - 1)][column]
        low, high = table[after - 1], table[after]
        along = log2(keys / low[0]) / log2(high[0] / low[0])
        return 1 / ((1 - along) / low[column] + along / high[column])


def _tflops(*rows: tuple[int, float, float]) -> Rates:
    return tuple((keys, full * 1e12, causal * 1e12) for keys, full, causal in rows)


# Saved rows of benchmarks/results: bfloat16, head_dim 128, 16 heads, 16k tokens. A test compares them.
H200_KERNELS = KernelTable(
    "H200, flashtile-hopper",
    _tflops((512, 594, 348), (1024, 678, 505), (2048, 720, 617), (4096, 737, 687), (8192, 747, 728), (16384, 733, 735)),
    _tflops((512, 398, 246), (2048, 572, 504), (8192, 596, 659), (16384, 614, 642)),
    H200.hbm_bytes_per_s,
)
# Point to point as measured between two H200s, both ways at once; 50 GB/s a device is one NDR adapter each. The
# latencies are assumed.
H200_CLUSTER = Cluster(Link(10e-6, 249e9), Link(20e-6, 50e9))


@dataclass(frozen=True)
class RingShape:
    """One attention call, of one sequence of `tokens * world` rows, on `world` devices.

    Attributes:
        tokens: Rows of each device.
        world: Devices.
        num_heads_q: Query heads.
        num_heads_kv: Key heads.
        head_dim: Width of a head.
        causal: Whether it is causal.
        window: Keys kept before the diagonal, None for all.
        layout: Of the rows; "deal" for the one that ``flashtile.distributed.deal`` makes.
        document: Rows of each of the packed documents that the sequence is made of, None for one.
        scheme: How keys travel: in a ring, or all at once.
        ulysses: Devices that exchange rows for heads first, neighbours; the rest is the ring. `world` for no ring.
        dtype: Of the inputs.
    """

    tokens: int
    world: int
    num_heads_q: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    causal: bool = True
    window: int | None = None
    layout: Layout | Literal["deal"] = "zigzag"
    scheme: Scheme = "ring"
    ulysses: int = 1
    dtype: str = "bfloat16"
    document: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise InvalidInputError(
                "scheme", f"{self.scheme!r} is not known, must be one of {', '.join(get_args(Scheme))}"
            )
        names = ("tokens", "world", "num_heads_q", "num_heads_kv", "head_dim", "ulysses")
        require_positive(**{name: getattr(self, name) for name in names})
        require_positive(document=self.document or 1)
        dtype_bytes(self.dtype)
        for name, value, by in (
            ("num_heads_kv", self.num_heads_q, self.num_heads_kv),
            ("ulysses", self.world, self.ulysses),
            ("ulysses", self.num_heads_q, self.ulysses),
        ):
            if value % by:
                raise InvalidInputError(name, f"{by} does not divide {value}")

    @property
    def band(self) -> Band:
        """The mask."""
        return Band(self.window, 0 if self.causal else self.window)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the whole call."""
        return Sizes(self.num_heads_q, self.num_heads_kv, self.head_dim, self.head_dim, dtype_bytes(self.dtype))

    @property
    def local(self) -> Sizes:
        """Sizes of what one device computes."""
        heads = self.num_heads_q // self.ulysses, ceil(self.num_heads_kv / self.ulysses)
        return self.sizes._replace(num_heads_q=heads[0], num_heads_kv=heads[1])

    @property
    def ring(self) -> int:
        """Ranks of the ring."""
        return self.world // self.ulysses

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each document; the last has what is left."""
        total, each = self.tokens * self.world, self.document or self.tokens * self.world
        return (each,) * (total // each) + ((total % each,) if total % each else ())

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that are kept, of one head."""
        return sum(self.band.count(length, length) for length in self.lengths)

    def plans(self) -> list[RingPlan]:
        """The plans that stand for all ranks of the ring."""
        world, lengths, layout = self.ring, self.lengths, self.dealt
        ranks = range(world) if world <= _ALL_RANKS else (0, world // 2, world - 1)
        return [make_plan(lengths, lengths, world, rank, layout, self.band) for rank in ranks]

    @property
    def dealt(self) -> Layout:
        """The layout that is run."""
        return deal_rows(self.lengths, self.ring, Mask(self.band)) if self.layout == "deal" else self.layout

    def least(self, plans: Sequence[RingPlan]) -> float:
        """Keys that ranks get over the least that any exchange of blocks of 128 rows gives them; 1 for none."""
        ring = RankRing(self.lengths, self.lengths, self.ring, self.dealt, self.band)
        least = sum(least_keys(ring, plan.rank) for plan in plans)
        return sum(step.keys for plan in plans for step in plan.steps if step.number) / least if least else 1.0


@dataclass(frozen=True)
class RingCost:
    """The times of one direction of a call, on the slowest device.

    Attributes:
        steps: Steps in which something is computed.
        kernels_s: Time of the kernels.
        memory_s: Time of running outputs and sums.
        transfer_s: Time in which something travels to or from the device.
        waiting_s: The part of it in which no kernel runs.
        sent_bytes: Bytes that it sends.
        of_least: Keys that devices get around the ring, over the least that blocks of 128 rows need.
        imbalance: Pairs that the fullest device keeps, over the mean.
        flops: FLOPs of all devices.
        ideal_s: One device's time for the whole sequence, divided by the devices.
    """

    world: int
    steps: int
    kernels_s: float
    memory_s: float
    transfer_s: float
    waiting_s: float
    sent_bytes: int
    of_least: float
    imbalance: float
    flops: float
    ideal_s: float

    @property
    def total_s(self) -> float:
        """Time of the call."""
        return self.kernels_s + self.memory_s + self.waiting_s

    @property
    def share(self) -> float:
        """The ideal over the time of the call."""
        return self.ideal_s / self.total_s

    @property
    def hidden(self) -> float:
        """The part of the transfers that kernels hide; 1 if there are none."""
        return 1 - self.waiting_s / self.transfer_s if self.transfer_s else 1.0

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of each device."""
        return self.flops / self.world / self.total_s


def ring_cost(shape: RingShape, kernels: KernelTable, cluster: Cluster, backward: bool = False) -> RingCost:
    """The time of a forward, or of a backward alone, and what it is made of; the module lists what is assumed.

    Source: blocks of keys in a ring, arXiv 2310.01889; zigzag, zhuzilin/ring-flash-attention; heads for rows, arXiv
    2309.14509; both, arXiv 2405.07719.
    """
    plans = shape.plans()
    steps = _Steps(shape, kernels, backward, plans)
    parts = steps.gathered(cluster) if shape.scheme == "allgather" and shape.ring > 1 else steps.ringed(cluster)
    exchange, exchanged = _exchange(shape, cluster)
    length, sizes = shape.tokens * shape.world, shape.sizes
    pairs = shape.pairs
    return RingCost(
        world=shape.world,
        steps=len(steps.busy),
        kernels_s=parts.kernels_s,
        memory_s=parts.memory_s,
        transfer_s=parts.transfer_s + exchange,
        waiting_s=parts.waiting_s + exchange,
        sent_bytes=exchanged + parts.sent_bytes,
        of_least=shape.least(plans) if shape.scheme == "ring" else 1.0,
        imbalance=max(plan.pairs for plan in plans) * shape.ring / max(pairs, 1),
        flops=_flops(sizes, pairs, backward),
        ideal_s=_kernel_s(kernels, sizes, length, pairs, shape.band, backward) / shape.world,
    )


def _flops(sizes: Sizes, pairs: int, backward: bool) -> float:
    """FLOPs over pairs of a row and a key: two products, five in a backward; a multiply-add is two."""
    return (10 if backward else 4) * sizes.head_dim * sizes.num_heads_q * pairs


def _kernel_s(kernels: KernelTable, sizes: Sizes, rows: int, pairs: int, band: Band, backward: bool) -> float:
    """Seconds of a kernel over rows that keep so many pairs; causal and windowed rows as those of a causal call."""
    masked = not band.unbounded
    keys = pairs / max(rows, 1) * (2 if masked else 1)
    return _flops(sizes, pairs, backward) / kernels.flops_per_s(keys, masked, backward)


class _Parts(NamedTuple):
    kernels_s: float
    memory_s: float
    transfer_s: float
    waiting_s: float
    sent_bytes: int


class _Steps:
    """What the slowest rank does in each step.

    Attributes:
        busy: Number of a step -> seconds of its kernels, and of what they add to what other calls left.
        coming: Number -> rows of the shard that arrives for it.
        leaving: Number -> rows of the shard whose sums leave after it.
    """

    def __init__(self, shape: RingShape, kernels: KernelTable, backward: bool, plans: Sequence[RingPlan]) -> None:
        self.shape, self.kernels, self.backward, self.plans = shape, kernels, backward, plans
        busy: dict[int, tuple[float, float]] = {}
        self.coming, self.leaving = defaultdict[int, int](int), defaultdict[int, int](int)
        for plan in plans:
            for step in plan.steps:
                number, times = step.number, [self._times(call, step.number == 0) for call in step.calls]
                here = sum(kernel for kernel, _ in times), sum(memory for _, memory in times)
                busy[number] = max(busy.get(number, (0.0, 0.0)), here, key=sum)
                if step.receive_from is not None:
                    self.coming[number] = max(self.coming[number], step.keys)
                if backward and step.sums_to is not None:
                    self.leaving[number] = max(self.leaving[number], step.keys)
        self.busy = [busy[number] for number in sorted(busy)]
        self.numbers = sorted(busy)

    def _times(self, call: RingCall, first: bool) -> tuple[float, float]:
        bounds = zip(*map(itertools.pairwise, (call.cu_seqlens_q, call.cu_seqlens_k)), strict=True)
        lengths = [(stop - start, last - begin) for (start, stop), (begin, last) in bounds]
        rows, keys = (sum(each[side] for each in lengths if all(each)) for side in (0, 1))
        sizes, kernels = self.shape.local, self.kernels
        moved = rows * sizes.num_heads_q * kernels.state_bytes
        if self.backward:
            moved = (rows * sizes.num_heads_q + 2 * keys * sizes.num_heads_kv) * kernels.sums_bytes
        added = 0.0 if first else moved * sizes.head_dim / kernels.hbm_bytes_per_s
        kernel = _kernel_s(kernels, sizes, rows, call.pairs, call.band, self.backward)
        return kernel, added + kernels.launch_s

    def _total(self) -> tuple[float, float]:
        return sum(kernel for kernel, _ in self.busy), sum(memory for _, memory in self.busy)

    def ringed(self, cluster: Cluster) -> _Parts:
        """Steps one after another; keys of the next and sums of the one before travel meanwhile."""
        sizes, link = self.shape.local, cluster.inner if self.shape.world <= cluster.node else cluster.outer
        coming = [link.time_s(self.coming[number] * sizes.key_bytes) for number in self.numbers]
        leaving = [link.time_s(self.leaving[number] * sizes.sums_bytes) for number in self.numbers]
        busy = [kernel + memory for kernel, memory in self.busy]
        if self.backward and self.kernels.overlaps and len(busy) > 1:
            early = sizes.key_bytes / (sizes.key_bytes + sizes.sums_bytes)
            busy = [busy[0] * early, *busy[1:], busy[0] * (1 - early)]
        # What travels during a step, and after all of them.
        beside = [a + b for a, b in itertools.zip_longest(coming[1:], [0.0, *leaving], fillvalue=0.0)]
        waiting = sum(max(0.0, a - b) for a, b in itertools.zip_longest(beside, busy, fillvalue=0.0))
        sent = max(bytes_sent(plan, sizes, self.backward) for plan in self.plans)
        return _Parts(*self._total(), sum(coming) + sum(leaving), waiting, sent)

    def gathered(self, cluster: Cluster) -> _Parts:
        """All keys at once, and in a backward the sums of their gradients."""
        shape, sizes, overlaps = self.shape, self.shape.local, self.kernels.overlaps
        keys, neighbours = shape.tokens * shape.ulysses, max(1, cluster.node // shape.ulysses)
        nodes = ceil(shape.ring / neighbours)

        def spread(row_bytes: int) -> float:
            within = cluster.inner.time_s((shape.ring - nodes) * keys * row_bytes)
            return max(within, cluster.outer.time_s((nodes - 1) * keys * row_bytes))

        transfers = [spread(sizes.key_bytes), *([spread(sizes.sums_bytes)] if self.backward else [])]
        beside, (kernels, memory) = sum(self.busy[0]) / len(transfers), self._total()
        if not overlaps:
            beside, memory = 0.0, self.kernels.launch_s
            whole = [_kernel_s(self.kernels, sizes, x.rows, x.pairs, shape.band, self.backward) for x in self.plans]
            kernels = max(whole)
        waiting = sum(max(0.0, time - beside) for time in transfers)
        sent = gathered_bytes(keys, shape.ring, sizes, self.backward)
        return _Parts(kernels, memory, sum(transfers), waiting, sent)


def _exchange(shape: RingShape, cluster: Cluster) -> tuple[float, int]:
    """Seconds and bytes of the all-to-all between rows and heads, there and back."""
    if shape.ulysses == 1:
        return 0.0, 0
    sent, within = exchanged_bytes(shape.tokens, shape.ulysses, shape.sizes), min(cluster.node, shape.ulysses)
    far = sent * (shape.ulysses - within) / (shape.ulysses - 1)
    return 2 * max(cluster.inner.time_s((sent - far) / 2), cluster.outer.time_s(far / 2)), sent
