"""How much arithmetic attention does: products, exponentials, and their balance on a device."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis.roofline import Device
from flashtile_lab.analysis.shape import AttentionShape


@dataclass(frozen=True)
class AttentionFlops:
    """Arithmetic of one attention call; a multiply-add is two FLOPs."""

    forward_flops: int
    backward_flops: int
    forward_exps: int
    backward_exps: int

    @property
    def total_flops(self) -> int:
        """Forward and backward together."""
        return self.forward_flops + self.backward_flops


def attention_flops(shape: AttentionShape) -> AttentionFlops:
    """FLOPs of the matrix products, and exponentials, over the scores that the mask keeps.

    Forward: `Q K^T` and `P V`, `4 * d` FLOPs per score. Backward: five products (S again, dP, dV, dQ, dK), `10 * d` per
    score. One exponential per score in each direction, since P is recomputed. Softmax additions are not counted.

    Source: FlashAttention-2 (arXiv 2307.08691), section 4.1 (4 * seqlen^2 * head_dim * heads; backward 2.5 times it).
    The causal count there is half the square; here it is exact.
    """
    scores = shape.kept_scores
    return AttentionFlops(
        forward_flops=4 * scores * shape.head_dim,
        backward_flops=10 * scores * shape.head_dim,
        forward_exps=scores,
        backward_exps=scores,
    )


def arithmetic_intensity(flops: float, hbm_bytes: float) -> float:
    """FLOPs done for each byte moved, in FLOP per byte (operational intensity in Williams et al. 2009)."""
    if hbm_bytes <= 0:
        raise InvalidInputError("hbm_bytes", f"must be greater than 0, got {hbm_bytes}")
    return flops / hbm_bytes


@dataclass(frozen=True)
class ExponentialCost:
    """Busy time of the special-function units and of the tensor cores in one forward."""

    exp_seconds: float
    product_seconds: float

    @property
    def ratio(self) -> float:
        """Cycles of the exponentials over cycles of the products; both units run on one clock."""
        return self.exp_seconds / self.product_seconds


def exponential_cost(shape: AttentionShape, device: Device) -> ExponentialCost:
    """The time of a forward's exponentials and of its products, each alone at its peak rate.

    A score costs `4 * d` FLOPs and one exponential. A Hopper SM does 4096 dense 16-bit FLOPs and 16 exponentials per
    cycle, so at head_dim 128 a score takes 1/8 cycle of products and 1/16 cycle of exponentials: half as long.

    Source: FlashAttention-3 (arXiv 2407.08608), section 3.1 (3.9 TFLOPS against 989 TFLOPS).

    Raises:
        InvalidInputError: The device's rate of exponentials is not given, or its peak is not for the shape's dtype.
    """
    if device.exp_per_s is None:
        raise InvalidInputError("device", f"{device.name} has no rate of exponentials (exp_per_s)")
    device.check_dtype(shape.dtype)
    flops = attention_flops(shape)
    return ExponentialCost(
        exp_seconds=flops.forward_exps / device.exp_per_s,
        product_seconds=flops.forward_flops / device.peak_flops_per_s,
    )
