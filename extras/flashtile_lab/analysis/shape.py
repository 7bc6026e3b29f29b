"""The inputs of the models: the size of one attention call, its blocks, and the element sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flashtile.core.errors import InvalidInputError

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}

# Softmax statistics and accumulators are float32 whatever the inputs are.
STATE_BYTES = 4


def dtype_bytes(dtype: str) -> int:
    """Size of one element of `dtype` in bytes.

    Args:
        dtype: A name of `DTYPE_BYTES`, or its short form (fp64, fp32, fp16, bf16, fp8).

    Raises:
        InvalidInputError: The name is not known.
    """
    name = _DTYPE_ALIASES.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise InvalidInputError("dtype", f"{dtype!r} is not known, must be one of {known}")
    return DTYPE_BYTES[name]


def require_positive(**values: float) -> None:
    """Raise for any value that is not a finite number greater than 0.

    Raises:
        InvalidInputError: Names the first such value.
    """
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise InvalidInputError(name, f"must be a finite number greater than 0, got {value}")


@dataclass(frozen=True)
class Blocks:
    """Rows of Q and rows of K that one tile of scores covers."""

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        require_positive(block_q=self.block_q, block_k=self.block_k)


@dataclass(frozen=True)
class AttentionShape:
    """One attention call in which every query head has its own keys and values.

    `causal` keeps key j for query i when `j <= i + seqlen_k - seqlen_q` (aligned bottom-right).
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    num_heads: int = 1
    batch_size: int = 1
    dtype: str = "float16"
    causal: bool = False

    def __post_init__(self) -> None:
        require_positive(
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            batch_size=self.batch_size,
        )
        dtype_bytes(self.dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K, V and the output."""
        return dtype_bytes(self.dtype)

    @property
    def num_problems(self) -> int:
        """Independent (batch, head) pairs; every model is per pair, times this."""
        return self.batch_size * self.num_heads

    @property
    def q_bytes(self) -> int:
        """Bytes of Q, and of the output, over all batches and heads."""
        return self.num_problems * self.seqlen_q * self.head_dim * self.element_bytes

    @property
    def k_bytes(self) -> int:
        """Bytes of K, and of V, over all batches and heads."""
        return self.num_problems * self.seqlen_k * self.head_dim * self.element_bytes

    @property
    def scores_bytes(self) -> int:
        """Bytes of the full score matrix S in the input dtype, over all batches and heads."""
        return self.num_problems * self.seqlen_q * self.seqlen_k * self.element_bytes

    @property
    def kept_scores(self) -> int:
        """Scores that the mask keeps, over all batches and heads; exact attention must compute them all."""
        if not self.causal:
            return self.num_problems * self.seqlen_q * self.seqlen_k
        # Row i keeps i + 1 + offset keys; rows from the first with a key left form an arithmetic series up to seqlen_k.
        rows = min(self.seqlen_q, self.seqlen_k)
        return self.num_problems * (rows * (2 * self.seqlen_k - rows + 1) // 2)

    def num_blocks(self, blocks: Blocks) -> tuple[int, int]:
        """Number of blocks along Q and along K."""
        return ceil(self.seqlen_q / blocks.block_q), ceil(self.seqlen_k / blocks.block_k)

    def tile_visits(self, blocks: Blocks) -> int:
        """Tiles of scores that hold at least one kept score, for one (batch, head) pair."""
        num_q, num_k = self.num_blocks(blocks)
        if not self.causal:
            return num_q * num_k
        # Block i of Q, except the last, sees (i + 1) * block_q + offset keys; those sums of ceilings have a closed
        # form.
        offset = self.seqlen_k - self.seqlen_q
        first = max(0, -offset // blocks.block_q)
        count = num_q - 1 - first
        if count <= 0:
            return num_k
        start = (first + 1) * blocks.block_q + offset + blocks.block_k - 1
        return num_k + _floor_sum(count, blocks.block_k, blocks.block_q, start)


def _floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """sum((step * i + start) // modulus for i in range(count)), by the Euclidean recursion, for start >= 0."""
    total = 0
    while True:
        total += (count - 1) * count // 2 * (step // modulus) + count * (start // modulus)
        step %= modulus
        start %= modulus
        top = step * count + start
        if top < modulus:
            return total
        count, start, modulus, step = top // modulus, top % modulus, step, modulus
