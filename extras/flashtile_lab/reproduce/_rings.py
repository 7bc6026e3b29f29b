"""Published speeds of rings of devices, as ``analysis.ring`` models them.

Theirs differ from ours in the table of kernels: the rate of a causal call is the one they publish for one device, that
without a mask the one other measurements of FlashAttention 2 show. Merging an output takes 38 bytes an element as their
source is written (the new one to float32, a difference, a product, a difference); it runs at 70% of the memory's rate,
the one number that is fitted, to ring-flash-attention's 85.2%. Adding gradients takes 10 bytes an element. Nothing
overlaps the sums that return last, or what is gathered.
"""

from __future__ import annotations

from flashtile_lab.analysis import Cluster, KernelTable, Link, RingShape, ring_cost

_ELEMENTWISE = 0.7
_TOKENS = 8192


def _kernels(name: str, full: float, causal: float, backward: float, hbm_bytes_per_s: float) -> KernelTable:
    forward, back = ((1, full * 1e12, causal * 1e12),), ((1, backward * 1e12, backward * 1e12),)
    merge, add = 38 / _ELEMENTWISE, 10 / _ELEMENTWISE
    return KernelTable(name, forward, back, hbm_bytes_per_s, state_bytes=merge, sums_bytes=add, overlaps=False)


# 591.5 and 373.4 causal forwards of 8k tokens, 32 heads of 128, in a second; 154.7 and 94.7 with their backwards.
_H800 = _kernels("H800, FlashAttention 2", 370, 325, 288, 3.35e12), 160e9
_A100 = _kernels("A100, FlashAttention 2", 225, 205, 174, 2.04e12), 240e9
# FlashAttention 3; its rates are fitted to the all-to-all of 8, whose kernels are those of one device.
_H100 = _kernels("H100, FlashAttention 3", 632, 632, 592, 3.35e12), 370e9


def ring_flash_attention(gpu: str, backward: bool) -> list[float]:
    """Percent of one device's speed on 8, 8k tokens each: ring, zigzag, stripe; with the backward or without."""
    kernels, bytes_per_s = _H800 if gpu == "H800" else _A100
    cluster = Cluster(Link(10e-6, bytes_per_s), Link(20e-6, 50e9))
    shares = []
    for layout in ("contiguous", "zigzag", "striped"):
        shape = RingShape(_TOKENS, 8, layout=layout)  # type: ignore[arg-type]
        costs = [ring_cost(shape, kernels, cluster, each) for each in (False, True)[: 1 + backward]]
        shares.append(100 * sum(cost.ideal_s for cost in costs) / sum(cost.total_s for cost in costs))
    return shares


def magi(scheme: str, backward: bool = False) -> list[float]:
    """TFLOPS of each device on 8 and on 64, 8k tokens each, 64 query and 8 key heads of 128, causal."""
    kernels, bytes_per_s = _H100
    cluster, speeds = Cluster(Link(10e-6, bytes_per_s), Link(20e-6, 50e9)), []
    for world in (8, 64):
        ulysses = {"ulysses": world, "usp": 8}.get(scheme, 1)
        way = "allgather" if scheme == "allgather" else "ring"
        shape = RingShape(_TOKENS, world, 64, 8, scheme=way, ulysses=ulysses)  # type: ignore[arg-type]
        speeds.append(ring_cost(shape, kernels, cluster, backward).flops_per_s / 1e12)
    return speeds
