"""Problem: one frozen record of a call, and with ``arguments`` the only place that refuses any.

``Problem.build`` checks shapes, dtypes and devices by named axes; ``check_values`` looks into index tensors where that
costs no synchronisation. Everything below this layer may assume that the arguments are right.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.errors import InvalidInputError
from flashtile.masks import Band

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SLOPE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of one call. Shapes as in the README; absent features are None.

    Attributes:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, or ``(total_q, num_heads_q, head_dim)``.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``, or ``(total_k, num_heads_kv, head_dim)``.
        v: ``(batch, seqlen_k, num_heads_kv, head_dim_v)``, or ``(total_k, num_heads_kv, head_dim_v)``.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)`` float32.
        attn_mask: bool, broadcastable to ``(batch, num_heads_q, seqlen_q, seqlen_k)``, True keeps.
        attn_bias: Any float dtype, broadcastable likewise.
        sinks: ``(num_heads_q,)``, any float dtype.
        cu_seqlens_q: ``(batch + 1,)`` int32.
        cu_seqlens_k: ``(batch + 1,)`` int32.
        rng_state: ``(2,)`` int64: Philox seed and offset of dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None = None
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rng_state: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """What a call asks for, without tensor data: hashable, so it can be a key for tiles and caches.

    Attributes:
        device_type: ``cpu``, ``cuda`` (NVIDIA and AMD) or whatever else PyTorch calls it.
        compute_capability: ``(major, minor)`` of an NVIDIA device, else None.
        dtype: That of q, k and v.
        batch: Sequences.
        seqlen_q: Queries a sequence; for packed sequences an upper bound, the longest if the caller said it.
        seqlen_k: Keys a sequence; for packed sequences an upper bound likewise.
        num_heads_q: Query heads, a multiple of ``num_heads_kv``.
        num_heads_kv: Key and value heads.
        head_dim: Width of q and k.
        head_dim_v: Width of v and of the output.
        band: Causal and window masks.
        softmax_scale: Factor of the scores.
        softcap: 0, or the cap c of ``c * tanh(scores / c)``.
        alibi: Whether slopes are given.
        mask: Whether a boolean mask is given.
        bias_dtype: Dtype of the additive bias, None without one.
        bias_grad: Whether the bias needs a gradient.
        sinks: Whether sinks are given.
        dropout_p: Probability of dropping, 0 for none.
        varlen: Whether sequences are packed and delimited by cu_seqlens.
        deterministic: Whether the backward must be bitwise repeatable.
        needs_grad: Whether a backward will follow.
        aligned: Whether q, k and v start and stride on 16 bytes, as bulk copies need.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    band: Band
    softmax_scale: float
    softcap: float = 0.0
    alibi: bool = False
    mask: bool = False
    bias_dtype: torch.dtype | None = None
    bias_grad: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    varlen: bool = False
    deterministic: bool = False
    needs_grad: bool = False
    aligned: bool = True

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, the dtype of the softmax state; float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def lse_shape(self, q: Tensor) -> tuple[int, ...]:
        """Of lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``; total_q is known to q alone."""
        return (q.shape[1], q.shape[0]) if self.varlen else (q.shape[0], q.shape[2], q.shape[1])

    @classmethod
    def build(
        cls,
        tensors: Tensors,
        band: Band,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        needs_grad: bool = False,
        bias_grad: bool = False,
    ) -> Problem:
        """Checks the tensors against one another and records the call.

        Args:
            tensors: The call's tensors.
            band: From ``band_of``.
            softmax_scale: ``head_dim ** -0.5`` if None.
            softcap: Cap of the scores, 0 for none.
            dropout_p: Probability of dropping.
            deterministic: Ask for a bitwise repeatable backward.
            max_seqlen_q: Longest query sequence of a packed call, if known.
            max_seqlen_k: Longest key sequence of a packed call, if known.
            needs_grad: Whether a backward will follow.
            bias_grad: Whether attn_bias needs a gradient.

        Returns:
            The record.

        Raises:
            InvalidInputError: Naming the argument that does not fit.
        """
        sizes = _check_tensors(tensors, max_seqlen_q, max_seqlen_k)
        q, bias = tensors.q, tensors.attn_bias
        return cls(
            device_type=q.device.type,
            compute_capability=_compute_capability(q.device),
            dtype=q.dtype,
            batch=sizes["batch"],
            seqlen_q=sizes["seqlen_q"],
            seqlen_k=sizes["seqlen_k"],
            num_heads_q=sizes["num_heads_q"],
            num_heads_kv=sizes["num_heads_kv"],
            head_dim=sizes["head_dim"],
            head_dim_v=sizes["head_dim_v"],
            band=band,
            softmax_scale=sizes["head_dim"] ** -0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap,
            alibi=tensors.alibi_slopes is not None,
            mask=tensors.attn_mask is not None,
            bias_dtype=None if bias is None else bias.dtype,
            bias_grad=bias_grad,
            sinks=tensors.sinks is not None,
            dropout_p=dropout_p,
            varlen=tensors.cu_seqlens_q is not None,
            deterministic=deterministic,
            needs_grad=needs_grad,
            aligned=q.device.type == "cpu" or all(_aligned(t) for t in (q, tensors.k, tensors.v)),
        )


class _Axes:
    """Sizes by axis name: the first tensor that shows an axis fixes it, every later one must agree."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.owners: dict[str, str] = {}

    def fix(self, argument: str, axis: str, size: int) -> None:
        if self.sizes.setdefault(axis, size) != size:
            owner = self.owners[axis]
            raise InvalidInputError(argument, f"{axis} is {size}, but {owner} has {self.sizes[axis]}")
        self.owners.setdefault(axis, argument)

    def bind(self, argument: str, tensor: Tensor, axes: tuple[str, ...]) -> None:
        if tensor.dim() != len(axes):
            shape = ", ".join(axes)
            raise InvalidInputError(argument, f"has {tensor.dim()} dimensions, must have {len(axes)}: ({shape})")
        for axis, size in zip(axes, tensor.shape, strict=True):
            self.fix(argument, axis, size)

    def broadcasts(self, argument: str, tensor: Tensor, axes: tuple[str, ...]) -> None:
        if tensor.dim() > len(axes):
            raise InvalidInputError(argument, f"has {tensor.dim()} dimensions, must have at most {len(axes)}")
        for axis, size in zip(axes[len(axes) - tensor.dim() :], tensor.shape, strict=True):
            if size != 1 and size != self.sizes[axis]:
                shape = ", ".join(f"{name} {self.sizes[name]}" for name in axes)
                raise InvalidInputError(
                    argument, f"{axis} is {size}, must be 1 or {self.sizes[axis]} to broadcast to ({shape})"
                )


def _check_tensors(t: Tensors, max_seqlen_q: int | None, max_seqlen_k: int | None) -> dict[str, int]:
    """Checks dtypes, devices and shapes; returns sizes by axis name."""
    _check_dtypes_and_devices(t)
    axes = _Axes()
    if t.cu_seqlens_q is None:
        axes.bind("q", t.q, ("batch", "seqlen_q", "num_heads_q", "head_dim"))
        axes.bind("k", t.k, ("batch", "seqlen_k", "num_heads_kv", "head_dim"))
        axes.bind("v", t.v, ("batch", "seqlen_k", "num_heads_kv", "head_dim_v"))
    else:
        axes.bind("q", t.q, ("total_q", "num_heads_q", "head_dim"))
        axes.bind("k", t.k, ("total_k", "num_heads_kv", "head_dim"))
        axes.bind("v", t.v, ("total_k", "num_heads_kv", "head_dim_v"))
        _bind_packed(axes, t, max_seqlen_q, max_seqlen_k)
    sizes = axes.sizes
    for axis, owner in (("num_heads_q", "q"), ("num_heads_kv", "k"), ("head_dim", "q"), ("head_dim_v", "v")):
        if sizes[axis] == 0:
            raise InvalidInputError(owner, f"{axis} is 0, must be at least 1")
    if sizes["num_heads_q"] % sizes["num_heads_kv"]:
        raise InvalidInputError(
            "q",
            f"num_heads_q is {sizes['num_heads_q']}, must be a multiple of k's num_heads_kv {sizes['num_heads_kv']}",
        )
    scores = ("batch", "num_heads_q", "seqlen_q", "seqlen_k")
    if t.attn_mask is not None:
        axes.broadcasts("attn_mask", t.attn_mask, scores)
    if t.attn_bias is not None:
        axes.broadcasts("attn_bias", t.attn_bias, scores)
    if t.alibi_slopes is not None:
        per_batch = t.alibi_slopes.dim() == 2
        axes.bind("alibi_slopes", t.alibi_slopes, ("batch", "num_heads_q") if per_batch else ("num_heads_q",))
    if t.sinks is not None:
        axes.bind("sinks", t.sinks, ("num_heads_q",))
    return sizes


def _bind_packed(axes: _Axes, t: Tensors, max_seqlen_q: int | None, max_seqlen_k: int | None) -> None:
    """Adds batch and the upper bounds of the lengths, from cu_seqlens and whatever names a longest length."""
    for name, cu_seqlens in (("cu_seqlens_q", t.cu_seqlens_q), ("cu_seqlens_k", t.cu_seqlens_k)):
        if cu_seqlens is None:
            raise InvalidInputError(name, "is None, must be an int32 tensor of shape (batch + 1,)")
        axes.bind(name, cu_seqlens, ("batch + 1",))
    if axes.sizes["batch + 1"] == 0:
        raise InvalidInputError("cu_seqlens_q", "is empty, must have shape (batch + 1,)")
    axes.fix("cu_seqlens_q", "batch", axes.sizes["batch + 1"] - 1)
    for axis, total, longest, from_end in (
        ("seqlen_q", "total_q", max_seqlen_q, 2),
        ("seqlen_k", "total_k", max_seqlen_k, 1),
    ):
        if longest is None:
            shown = [m.shape[-from_end] for m in (t.attn_mask, t.attn_bias) if m is not None and m.dim() >= from_end]
            longest = next((size for size in shown if size != 1), axes.sizes[total])
        axes.fix(f"max_{axis}", axis, longest)


def _check_dtypes_and_devices(t: Tensors) -> None:
    if t.q.dtype not in DTYPES:
        raise InvalidInputError("q", f"dtype is {t.q.dtype}, must be float16, bfloat16, float32 or float64")
    for name, tensor in (("k", t.k), ("v", t.v)):
        if tensor.dtype != t.q.dtype:
            raise InvalidInputError(name, f"dtype is {tensor.dtype}, but q has {t.q.dtype}")
    if t.attn_mask is not None and t.attn_mask.dtype != torch.bool:
        raise InvalidInputError("attn_mask", f"dtype is {t.attn_mask.dtype}, must be bool; attn_bias takes floats")
    for name, tensor_or_none in (("attn_bias", t.attn_bias), ("sinks", t.sinks)):
        if tensor_or_none is not None and not tensor_or_none.dtype.is_floating_point:
            raise InvalidInputError(name, f"dtype is {tensor_or_none.dtype}, must be a float dtype")
    if t.alibi_slopes is not None and t.alibi_slopes.dtype not in SLOPE_DTYPES:
        raise InvalidInputError("alibi_slopes", f"dtype is {t.alibi_slopes.dtype}, must be float32")
    for name, tensor_or_none in (("cu_seqlens_q", t.cu_seqlens_q), ("cu_seqlens_k", t.cu_seqlens_k)):
        if tensor_or_none is not None and tensor_or_none.dtype != torch.int32:
            raise InvalidInputError(name, f"dtype is {tensor_or_none.dtype}, must be int32")
    for name in _FOLLOWERS:
        tensor_or_none = getattr(t, name)
        if tensor_or_none is not None and tensor_or_none.device != t.q.device:
            raise InvalidInputError(name, f"is on {tensor_or_none.device}, but q is on {t.q.device}")


_FOLLOWERS = ("k", "v", "alibi_slopes", "attn_mask", "attn_bias", "sinks", "cu_seqlens_q", "cu_seqlens_k")


def check_values(problem: Problem, tensors: Tensors) -> None:
    """Looks into cu_seqlens: they start at 0, never fall, stay within the rows and under the longest length.

    On a GPU this waits for the device, so callers ask only when ``FLASHTILE_CHECK`` is set.

    Raises:
        InvalidInputError: Naming the tensor or the length that is wrong.
    """
    for side, cu_seqlens, rows, longest in (
        ("q", tensors.cu_seqlens_q, tensors.q.shape[0], problem.seqlen_q),
        ("k", tensors.cu_seqlens_k, tensors.k.shape[0], problem.seqlen_k),
    ):
        if cu_seqlens is None:
            continue
        bounds = cu_seqlens.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        name = f"cu_seqlens_{side}"
        if bounds[0] != 0:
            raise InvalidInputError(name, f"starts with {bounds[0]}, must start with 0")
        if any(length < 0 for length in lengths):
            raise InvalidInputError(name, "falls somewhere, must never fall")
        if bounds[-1] > rows:
            raise InvalidInputError(name, f"ends with {bounds[-1]}, but {side} has {rows} rows")
        if lengths and max(lengths) > longest:
            raise InvalidInputError(
                f"max_seqlen_{side}", f"is {longest}, but {name} holds a sequence of {max(lengths)}"
            )


@functools.lru_cache(maxsize=64)
def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _aligned(tensor: Tensor) -> bool:
    if not hasattr(tensor, "fake_mode") and tensor.data_ptr() % 16:
        return False
    size = tensor.element_size()
    return all(s * size % 16 == 0 for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1)
