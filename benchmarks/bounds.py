"""What bounds a cell: the share of a card's rate of products, of its memory or of its L2 cache that a time is.

Operations are those of the two products (and of the backward's five), bytes those of the arguments and results, read or
written once. Whatever takes longer at the card's rates bounds the cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.cases import Case
from benchmarks.results import Row
from flashtile.core.masks import Band


@dataclass(frozen=True)
class Card:
    """Rates that a call can reach: operations of products in 16 bits, bytes of memory and of L2; and L2's size."""

    flops_per_s: float
    bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: float


# Products: plain ones of bf16 of random numbers, measured, where power limits both cards alike; attention can pass that
# by some percent. Memory: the data sheets' 3.35 and 4.8 TB/s. L2: a backward that moved 43.5 GB in 5.8 ms at 96 to 97%
# of its peak by Nsight Compute (docs/tuning-notes.md).
_PRODUCTS, _L2 = 790e12, 7.7e12
CARDS = {
    "NVIDIA H100 80GB HBM3": Card(_PRODUCTS, 3.35e12, _L2, 50e6),
    "NVIDIA H200": Card(_PRODUCTS, 4.8e12, _L2, 60e6),
}
# Products of 8 bits are twice as fast by the data sheets.
_OF_8_BITS = 2.0
# Ways of timing in which the host takes part.
_HOST = ("loop", "host")


def work(case: Any, *, eight_bits: bool = False) -> tuple[float, float]:
    """Operations and bytes of a ``Case``, ``DecodeCase``, ``StepCase`` or ``LatentCase``, from its sizes.

    With ``eight_bits`` q, k, v and the output have 8 bits.
    """
    dims = case.head_dim + (getattr(case, "head_dim_v", None) or case.head_dim)
    rows, keys = (sum(of) for of in zip(*case.sequences, strict=True))
    if not isinstance(case, Case):
        pairs = sum(Band(None, 0).count(*sizes) for sizes in case.sequences)
        return 2.0 * case.num_heads_q * dims * pairs, keys * case.key_bytes + 2.0 * rows * case.num_heads_q * dims
    size = 1 if eight_bits else case.torch_dtype.itemsize
    elements = (rows * case.num_heads_q + keys * case.num_heads_kv) * dims
    bias = case.num_heads_q * case.seqlen_q * case.seqlen_k if case.bias else 0
    # The backward reads what the forward reads and writes, and a gradient of each is read or written.
    moved = {"forward": elements + bias, "backward": 2 * elements + bias * (1 + (case.bias == "trained"))}
    return case.flops(), size * float(moved.get(case.direction, 0))


def bound(row: Row, case: Any) -> tuple[float, str] | None:
    """The share that a row's time is of the rate that bounds it, and that rate's name; None where no rate is known.

    Calls repeat on the same tensors: what fits into L2 is read from there, except from caches that are taken in turn.
    """
    card = CARDS.get(row.device)
    if card is None or row.median_ms is None or case.dtype == "float32" or getattr(case, "measure", "graph") in _HOST:
        return None
    eight_bits = "fp8" in row.provider
    if hasattr(case, "sequences"):
        flops, moved = work(case, eight_bits=eight_bits)
    else:  # of pairs that a function or a list keeps, which were counted when it was timed
        flops, moved = (row.tflops or 0.0) * 1e9 * row.median_ms, float(getattr(case, "selected_bytes", 0))
    in_l2 = moved <= card.l2_bytes and getattr(case, "copies", 1) == 1
    rate = card.flops_per_s * (_OF_8_BITS if eight_bits else 1.0)
    memory = moved / (card.l2_bytes_per_s if in_l2 else card.bytes_per_s)
    least_s, name = max((flops / rate, "products"), (memory, "L2" if in_l2 else "memory"))
    return (1e3 * least_s / row.median_ms, name) if least_s else None


def shown(row: Row | None, case: Any) -> str:
    """A share in a few letters, such as ``88% memory``; empty if there is none."""
    found = None if row is None else bound(row, case)
    return "" if found is None else f"{100 * found[0]:.0f}% {found[1]}"
