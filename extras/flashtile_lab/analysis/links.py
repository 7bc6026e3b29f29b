"""Links between devices, and clusters of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis.shape import require_positive


@dataclass(frozen=True)
class Link:
    """A way between devices: a transfer takes `latency_s + bytes / bytes_per_s`, in each direction at once."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_positive(bytes_per_s=self.bytes_per_s)
        if self.latency_s < 0:
            raise InvalidInputError("latency_s", f"must not be negative, got {self.latency_s}")

    def time_s(self, num_bytes: float) -> float:
        """Seconds of one transfer; nothing takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


def fit_link(samples: Sequence[tuple[float, float]]) -> Link:
    """The link that measured transfers, of bytes and seconds, fit best: least squares of the relative errors.

    Raises:
        InvalidInputError: Fewer than two sizes, or times that do not grow with them.
    """
    weights = [(1 / t**2, x, t) for x, t in samples]
    total = sum(w for w, _, _ in weights)
    mean_x, mean_t = (sum(w[0] * w[i] for w in weights) / total if total else 0.0 for i in (1, 2))
    spread = sum(w * (x - mean_x) ** 2 for w, x, _ in weights)
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, x, t in weights) / spread if spread else 0.0
    if slope <= 0:
        raise InvalidInputError("samples", "must be transfers of several sizes, of which larger ones take longer")
    return Link(max(0.0, mean_t - slope * mean_x), 1 / slope)


@dataclass(frozen=True)
class Cluster:
    """Nodes of `node` devices each: one link within a node, another from device to device across nodes."""

    inner: Link
    outer: Link
    node: int = 8

    def __post_init__(self) -> None:
        require_positive(node=self.node)
