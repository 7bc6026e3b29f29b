"""What a backend is, and how it says what it can do.

Support is data. ``Capabilities`` defaults every feature to no; ``FEATURES`` names each feature once, with the question
whether a problem uses it, and both the refusals and the printed support table come from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flashtile.problem import Problem, Tensors

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Feature:
    """One feature of a call.

    Attributes:
        name: The field of ``Capabilities`` that says whether it is supported.
        label: How refusals and the support table call it.
        used: Whether a problem needs it.
    """

    name: str
    label: str
    used: Callable[[Problem], bool]


FEATURES: tuple[Feature, ...] = (
    Feature("causal", "causal", lambda p: p.band.right is not None),
    Feature("window", "sliding window", lambda p: p.band.left is not None or p.band.right not in (None, 0)),
    Feature("grouped_heads", "grouped heads (GQA, MQA)", lambda p: p.group_size > 1),
    Feature("varlen", "packed sequences (varlen)", lambda p: p.varlen),
    Feature("head_dim_v", "head_dim_v other than head_dim", lambda p: p.head_dim_v != p.head_dim),
    Feature("softcap", "softcap", lambda p: p.softcap > 0),
    Feature("alibi", "ALiBi", lambda p: p.alibi),
    Feature("mask", "boolean attn_mask", lambda p: p.mask),
    Feature("bias", "additive attn_bias", lambda p: p.bias_dtype is not None),
    Feature("bias_grad", "gradient of attn_bias", lambda p: p.bias_grad),
    Feature("sinks", "sinks", lambda p: p.sinks),
    Feature("dropout", "dropout", lambda p: p.dropout_p > 0),
    Feature("deterministic", "deterministic=True", lambda p: p.deterministic),
    Feature("unaligned", "inputs not aligned to 16 bytes", lambda p: not p.aligned),
)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one direction of a backend can do. A field is True only when a test of its numbers says so.

    Attributes:
        device_types: PyTorch device types it runs on.
        dtypes: Input dtypes.
        max_head_dim: Largest head_dim and head_dim_v, None for any.
        head_dim_multiple: head_dim and head_dim_v must be multiples of it.
        min_compute_capability: Lowest NVIDIA compute capability, None where that does not apply.
        max_compute_capability: Highest, None for any.
    """

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    head_dim_multiple: int = 1
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    causal: bool = False
    window: bool = False
    grouped_heads: bool = False
    varlen: bool = False
    head_dim_v: bool = False
    softcap: bool = False
    alibi: bool = False
    mask: bool = False
    bias: bool = False
    bias_grad: bool = False
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    unaligned: bool = False

    def reasons(self, problem: Problem) -> list[str]:
        """Every reason why the problem cannot run here, empty if it can."""
        why = [*self._device_reasons(problem), *self._shape_reasons(problem)]
        return why + [f"no {f.label}" for f in FEATURES if f.used(problem) and not getattr(self, f.name)]

    def _device_reasons(self, problem: Problem) -> list[str]:
        if problem.device_type not in self.device_types:
            return [f"needs {' or '.join(self.device_types)} tensors, these are on {problem.device_type}"]
        have = problem.compute_capability
        if have is None:
            return []
        low, high = self.min_compute_capability, self.max_compute_capability
        if (low and have < low) or (high and have > high):
            needed = ".".join(map(str, low)) if low else ""
            more = "" if high == low else " or later"
            return [f"needs compute capability {needed}{more}, this device is {have[0]}.{have[1]}"]
        return []

    def _shape_reasons(self, problem: Problem) -> list[str]:
        why = []
        if problem.dtype not in self.dtypes:
            why.append(f"no {str(problem.dtype).removeprefix('torch.')}")
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if self.max_head_dim is not None and size > self.max_head_dim:
                why.append(f"{name} is {size}, at most {self.max_head_dim} is supported")
            if size % self.head_dim_multiple:
                why.append(f"{name} is {size}, must be a multiple of {self.head_dim_multiple}")
        return why


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward returns: gradients in the shapes and dtypes of their inputs.

    Attributes:
        dq: Like q.
        dk: Like k.
        dv: Like v.
        dbias: Like attn_bias, None unless ``problem.bias_grad``.
        dsinks: Like sinks, None without sinks.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


class Backend(Protocol):
    """One way to compute attention. An instance named ``BACKEND`` stands in each backend's ``__init__``.

    Importing that module must not import Triton: only running a kernel may.
    """

    name: str
    summary: str

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """What a direction can do; None if the backend does not have it."""

    def missing(self) -> str | None:
        """What this machine lacks to run the backend at all, in one phrase; None if nothing."""

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The tiles and the algorithm a problem would run with, in one line."""

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp.

        Returns:
            out: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or ``(total_q, num_heads_q, head_dim_v)``, in q's
                dtype, contiguous.
            lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``, ``problem.lse_dtype``, contiguous;
                natural log, -inf for a row without keys.
        """

    def backward(
        self,
        problem: Problem,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> Gradients:
        """Gradients from the forward's results, whichever backend made them.

        Args:
            problem: The forward's.
            tensors: The forward's, the same rng_state included.
            out: The forward's output.
            lse: The forward's lse.
            dout: Gradient of out, any strides.
            dlse: Gradient of lse, or None for zero.
        """
