"""What a decode step over a cache costs: bytes read, the shortest time, and when splitting the keys pays."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis.roofline import Device, Roofline, roofline_point
from flashtile_lab.analysis.shape import STATE_BYTES, AttentionShape, Blocks, dtype_bytes, require_positive

# Bytes of an entry of page_table.
_PAGE_ID_BYTES = 4
# A split more is worth a program and a partial result more only if it saves this much.
_SLACK = 1.05


@dataclass(frozen=True)
class DecodeShape:
    """One call of `seqlen_q` queries a sequence over a cache of `seqlen_k` keys, the queries' own included.

    Causal: the last query stands at the last key. Keys and values are in `cache_dtype`, by default in `dtype` like the
    queries and the output. `page_size` 0 is a cache without pages.
    """

    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch_size: int = 1
    seqlen_q: int = 1
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    page_size: int = 0

    def __post_init__(self) -> None:
        sizes = ("seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "batch_size", "seqlen_q")
        require_positive(**{name: getattr(self, name) for name in sizes})
        if self.num_heads_q % self.num_heads_kv:
            raise InvalidInputError(
                "num_heads_kv", f"{self.num_heads_kv} does not divide num_heads_q {self.num_heads_q}"
            )
        if self.page_size < 0:
            raise InvalidInputError("page_size", f"must be at least 0, got {self.page_size}")
        dtype_bytes(self.dtype)
        dtype_bytes(self.cache_dtype or self.dtype)

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value in one head."""
        return 2 * self.head_dim * dtype_bytes(self.cache_dtype or self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self.batch_size * self.num_heads_kv * self.seqlen_k * self.key_bytes

    @property
    def rows_bytes(self) -> int:
        """Bytes of the queries, the output and the float32 log-sum-exp."""
        rows = self.batch_size * self.num_heads_q * self.seqlen_q
        return rows * (2 * self.head_dim * dtype_bytes(self.dtype) + STATE_BYTES)

    @property
    def pages(self) -> int:
        """Pages that hold the keys of one sequence; 0 without pages."""
        return ceil(self.seqlen_k / self.page_size) if self.page_size else 0

    @property
    def flops(self) -> int:
        """FLOPs of the two products over the scores that the causal mask keeps; a multiply-add is two."""
        scores = AttentionShape(
            self.seqlen_q, self.seqlen_k, self.head_dim, self.num_heads_q, self.batch_size, causal=True
        ).kept_scores
        return 4 * self.head_dim * scores


@dataclass(frozen=True)
class DecodeCost:
    """Bytes of a call, and its place under a device's roofline."""

    kv_bytes: int
    rows_bytes: int
    page_table_bytes: int
    spare_bytes: float
    flops: int
    roofline: Roofline

    @property
    def total_bytes(self) -> int:
        """All bytes that the call moves; spare ones are not moved."""
        return self.kv_bytes + self.rows_bytes + self.page_table_bytes

    @property
    def page_table_share(self) -> float:
        """Bytes of page ids over those of keys and values."""
        return self.page_table_bytes / self.kv_bytes


def decode_cost(shape: DecodeShape, device: Device) -> DecodeCost:
    """The fewest bytes a decode step can move, and the time that takes at the device's peak and memory rate.

    Convention: keys and values `2 * m * d * e` for every sequence and key head, read once: the query heads of a group
    share that read, and splits read each key once too. Queries are read once, output and float32 log-sum-exp written
    once, and a sequence's page ids, 4 bytes each, read once. For m keys much longer than the queries the intensity is
    `2 * group_size * seqlen_q / e` FLOP per byte, whatever the length.

    `spare_bytes` is what pages take beyond the keys, on average over lengths: `(page_size - 1) / 2` keys a sequence.

    Source: Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023); grouped heads, arXiv 2305.13245.

    Raises:
        InvalidInputError: The device's peak is not for the queries' dtype, in which the products are taken.
    """
    device.check_dtype(shape.dtype)
    table = shape.batch_size * shape.pages * _PAGE_ID_BYTES
    spare = max(0, shape.page_size - 1) / 2 * shape.batch_size * shape.num_heads_kv * shape.key_bytes
    return DecodeCost(
        kv_bytes=shape.kv_bytes,
        rows_bytes=shape.rows_bytes,
        page_table_bytes=table,
        spare_bytes=spare,
        flops=shape.flops,
        roofline=roofline_point(shape.flops, shape.kv_bytes + shape.rows_bytes + table, device),
    )


@dataclass(frozen=True)
class DecodeSplits:
    """How many programs share the keys of a call, and what that gains."""

    programs: int
    splits: int
    partial_bytes: int
    unsplit_s: float
    split_s: float

    @property
    def gain(self) -> float:
        """Time without splits over the time with them; 1 where splitting does not pay."""
        return self.unsplit_s / self.split_s


def decode_splits(shape: DecodeShape, device: Device, blocks: Blocks) -> DecodeSplits:
    """The fewest splits of the keys within 5% of the shortest time, and the times with them and without any.

    Convention: a program takes one sequence, one key head and `block_q` of its rows, queries times group; a split takes
    whole blocks of `block_k` keys. A multiprocessor reads at its share of the memory rate, one program after another,
    so a call takes as long as the one with the most keys. A device with fewer programs than multiprocessors then runs
    at that fraction of its memory rate. More than one split writes float32 outputs and log-sum-exps and reads them
    again, `8 * (d + 1)` bytes a row and split. A multiprocessor can in fact read faster than its share while others
    idle, so the gain is the most that splitting can bring; launches are not counted.

    Source: Flash-Decoding, as in `decode_cost`.

    Raises:
        InvalidInputError: The device's number of multiprocessors is not given.
    """
    if device.num_sms is None:
        raise InvalidInputError("device", f"{device.name} has no number of multiprocessors (num_sms)")
    num_sms, row_blocks = device.num_sms, ceil(shape.group_size * shape.seqlen_q / blocks.block_q)
    programs = shape.batch_size * shape.num_heads_kv * row_blocks
    key_blocks = ceil(shape.seqlen_k / blocks.block_k)
    rows = shape.batch_size * shape.num_heads_q * shape.seqlen_q

    def partial_bytes(splits: int) -> int:
        return 2 * splits * rows * (shape.head_dim + 1) * STATE_BYTES if splits > 1 else 0

    def seconds(splits: int) -> float:
        keys = min(shape.seqlen_k, ceil(key_blocks / splits) * blocks.block_k)
        longest = ceil(programs * splits / num_sms) * keys * shape.key_bytes
        return (longest * num_sms + partial_bytes(splits)) / device.hbm_bytes_per_s

    # With as many splits as multiprocessors even a single program's keys are on all of them.
    counts = range(1, min(key_blocks, num_sms) + 1)
    enough = _SLACK * min(map(seconds, counts))
    best = next(count for count in counts if seconds(count) <= enough)
    return DecodeSplits(programs, best, partial_bytes(best), seconds(1), seconds(best))
