"""Host code of the kernels that quantise: the launches of a call, and the plan that repeats them."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Sequences
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Memory, Plan, empty
from flashtile.backends.portable.device.records import MEAN_SPLITS, Angles, Mean, PerHead, Rounding, Source, Written
from flashtile.call.blocks import BLOCK, num_blocks
from flashtile.call.problem import compute_capability
from flashtile.call.quantized import E4M3, Choices, Inputs, Quantized, record, turned

_kernels = device_code("flashtile.backends.portable.rounding.kernels")
mean_of_keys = _kernels.mean_of_keys
quantize_columns = _kernels.quantize_columns
quantize_rows = _kernels.quantize_rows
sum_keys = _kernels.sum_keys


# Heads of a program that quantises rows, and the most bytes of a head's rows if the next are loaded meanwhile: half
# as many beside angles, which take registers, twice as many on sm_90 and sm_100, where shared memory has room.
_HEADS, _MOST_AHEAD = 4, 32 * 1024
_ROOMY = ((9, 0), (10, 0))


@dataclass(frozen=True, eq=False)
class RoundedSide:
    """The call of q, k or v.

    Attributes:
        name: ``"q"``, ``"k"`` or ``"v"``.
        given: The call's tensors.
        choices: What is asked for.
        capability: Compute capability of an NVIDIA device, else None.
        x: The tensor.
        bounds: Bounds of its packed sequences.
        batch: Sequences.
        blocks: Blocks of a sequence, or of all packed ones.
    """

    name: str
    given: Inputs
    choices: Choices
    capability: tuple[int, int] | None
    x: Tensor
    bounds: Tensor | None
    batch: int
    blocks: int

    @classmethod
    def of(cls, name: str, given: Inputs, choices: Choices, capability: tuple[int, int] | None) -> RoundedSide:
        """The side of one of the tensors."""
        x, bounds = getattr(given, name), given.cu_seqlens_q if name == "q" else given.cu_seqlens_k
        batch = x.shape[0] if bounds is None else bounds.shape[0] - 1
        return cls(name, given, choices, capability, x, bounds, batch, num_blocks(x.shape[-3], bounds))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales, as ``Quantized`` has it."""
        heads, scales = self.x.shape[-2], self.choices.scales
        if scales == "tensor":
            return (1,) * (self.x.dim() - 1)
        if self.bounds is not None:
            return heads, self.blocks
        return self.batch, heads, 1 if scales == "head" else self.blocks

    def programs(self, heads: int = 1) -> int:
        """Blocks of all sequences and of so many heads."""
        return self.blocks * -(-self.x.shape[-2] // heads) * (self.batch if self.bounds is None else 1)

    @property
    def largest_at(self) -> int:
        """Where the numbers that its scales depend on begin, in bytes: q's, k's and v's have as much room each."""
        return "qkv".index(self.name) * 16 * -(-self.batch * self.given.q.shape[-2] // 4)

    @property
    def width(self) -> int:
        """Columns of a part: columns of q or k that are turned together are whole parts."""
        cos = self.given.rotary_cos
        turned = 64 if cos is None or self.name == "v" or self.choices.rotary_interleaved else cos.shape[1]
        return math.gcd(self.x.shape[-1], turned, 64)

    @property
    def sequences(self) -> Sequences:
        """The sequences of the tensor."""
        name = "cu_seqlens_q" if self.name == "q" else "cu_seqlens_k"
        return Sequences(pointer(self.bounds, name), self.batch, self.x.shape[-3])


def search_of(batch: int) -> int:
    """The bounds that a kernel reads at once, to find a block's sequence: two widths, as each has builds of its own.

    Four sequences take 1.09 times as long with the larger one; with 256, ptxas spills 50 numbers.
    """
    return 32 if batch <= 32 else 128


def launches(given: Inputs, choices: Choices, capability: tuple[int, int] | None) -> dict[str, Launch]:
    """The kernels of a call by name, in the order in which they run."""
    sides = [RoundedSide.of(name, given, choices, capability) for name in ("k", "q", "v")]
    made = mean_launches(sides[0]) if choices.smooth_k else {}
    for side in sides:
        if choices.scales != "block":
            made[f"largest_{side.name}"] = block_launch(side, finds=True)
        made[f"quantize_{side.name}"] = block_launch(side, finds=False)
    return made


def mean_launches(side: RoundedSide) -> dict[str, Launch]:
    """The launches that find the mean of k."""
    heads, width = side.x.shape[-2:]
    sums = Pointer(torch.float32, "sums")
    of_sums = {"source": _source(side), "sequences": side.sequences, "angles": _angles(side), "sums_ptr": sums}
    of_mean = {
        "sums_ptr": sums, "mean_ptr": Pointer(torch.float32, "mean"), "sequences": side.sequences, "num_heads": heads,
        "rounding": _rounding(side), "DIM": width, "WIDTH": side.width,
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": 1, **_registers(side)}
    return {
        "sum_keys": Launch(sum_keys, side.batch * heads * MEAN_SPLITS, of_sums, options),
        "mean_of_keys": Launch(mean_of_keys, side.batch * heads, of_mean, {"num_warps": 8, "num_stages": 1}),
    }


def _padded(dim: int) -> int:
    return 1 << (dim - 1).bit_length()


def _registers(side: RoundedSide) -> dict[str, int]:
    """The limit for a thread, up to head_dim 128: a multiprocessor then holds two programs of 8 warps, or four of 4."""
    return {"maxnreg": 128} if side.capability is not None and side.x.shape[-1] <= 128 else {}


def block_launch(side: RoundedSide, *, finds: bool) -> Launch:
    """The launch that quantises a tensor, or ``finds`` what its scales depend on."""
    heads, width, scales = *side.x.shape[-2:], side.choices.scales
    by_block = scales == "block" or (scales == "head" and side.bounds is not None)
    stride = 0 if scales == "tensor" else side.blocks if by_block else 1
    smooth, is_q, is_v = side.choices.smooth_k, side.name == "q", side.name == "v"
    has_shift = smooth and is_q and not finds
    written = Written(
        None if finds else Pointer(torch.uint8, f"{side.name}_out"),
        PerHead(
            None if finds else Pointer(torch.float32, f"{side.name}_scale"),
            heads * stride if side.bounds is None else 0, stride, int(by_block),
        ),
        PerHead(
            None if scales == "block" else Pointer(torch.int32, "largest", side.largest_at),
            heads if scales == "head" else 0, int(scales == "head"), 0,
        ),
        Pointer(torch.float32, "shift") if has_shift else None,
    )  # fmt: skip
    arguments: dict[str, Any] = {"source": _source(side), "sequences": side.sequences}
    if is_v:
        arguments |= {"written": written, "stride_dim": side.blocks * BLOCK, "rounding": _rounding(side)}
    else:
        k, has_mean = side.given.k, has_shift or (smooth and not is_q)
        bounds_k = pointer(side.given.cu_seqlens_k, "cu_seqlens_k")
        mean = Pointer(torch.float32, "mean") if has_mean else None
        arguments |= {
            "keys": Sequences(bounds_k, side.batch, k.shape[-3]), "angles": _angles(side),
            "mean": Mean(mean, k.shape[-2], heads // k.shape[-2]), "written": written, "rounding": _rounding(side),
        }  # fmt: skip
    warps = max(4, _padded(width) // 16)
    options = {"num_warps": warps if is_v else min(warps, 8), "num_stages": 1, **_registers(side)}
    if is_v:
        return Launch(quantize_columns, side.programs(), arguments, options)
    return Launch(quantize_rows, side.programs(_HEADS), arguments, options)


def _rounding(side: RoundedSide) -> Rounding:
    # The mean is taken off after the product: rounded to tf32 before it, float32 numbers with a large mean would be
    # left with few digits. Some of AMD's GPUs have no tf32.
    precision = "ieee" if side.capability is None else "tf32x3"
    bits = side.capability is None or side.capability < (8, 9)
    most = 2 * _MOST_AHEAD if side.capability in _ROOMY else _MOST_AHEAD
    if side.given.rotary_cos is not None:
        most = _MOST_AHEAD // 2
    stages = 2 if BLOCK * side.x.shape[-1] * side.x.element_size() <= most else 1
    rotate = precision if side.choices.rotate else None
    return Rounding(side.choices.seed, rotate, bits, search_of(side.batch), _HEADS, stages)


def _source(side: RoundedSide) -> Source:
    strides = side.x.stride()
    batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    return Source(pointer(side.x, side.name), batch, row, head, side.x.shape[-2], side.x.shape[-1], side.width)


def _angles(side: RoundedSide) -> Angles:
    cos, interleaved = side.given.rotary_cos, side.choices.rotary_interleaved
    if cos is None:
        return Angles(None, None, None, 0, interleaved)
    return Angles(
        pointer(cos, "rotary_cos"),
        pointer(side.given.rotary_sin, "rotary_sin"),
        cos.shape[0],
        2 * cos.shape[1],
        interleaved,
    )


class QuantizePlan(Plan):
    """Quantisation of tensors of the same layouts."""

    def __init__(self, given: Inputs, choices: Choices) -> None:
        """Prepares nothing yet.

        Args:
            given: Tensors, none of them empty. They are not kept.
            choices: What is asked for.
        """
        device = given.q.device
        super().__init__(device, functools.partial(_prepare, choices, compute_capability(device)))
        self._choices = choices

    def __call__(self, given: Inputs, lengths: tuple[int | None, int | None] = (None, None)) -> Quantized:
        """The record of tensors of the plan's layouts."""
        made = self.run(readable(given, self._choices), {})
        outs, scales = ([made[f"{name}_{what}"] for name in "qkv"] for what in ("out", "scale"))
        return record(given, self._choices, lengths, outs, scales, made.get("shift"))


def _prepare(
    choices: Choices, capability: tuple[int, int] | None, given: Inputs, *_: Any
) -> tuple[Memory, dict[str, Launch]]:
    q, k, v = (RoundedSide.of(name, given, choices, capability) for name in "qkv")
    device, memory = given.q.device, Memory()
    columns = *v.x.shape[-2:], v.blocks * BLOCK
    shapes = q.x.shape, k.x.shape, columns if v.bounds is not None else (v.batch, *columns)
    for side, shape in zip((q, k, v), shapes, strict=True):
        memory[f"{side.name}_out"] = empty(device, shape, E4M3)
        memory[f"{side.name}_scale"] = empty(device, side.scale_shape)
    if choices.scales != "block":
        memory["largest"] = functools.partial(torch.zeros, v.largest_at * 3 // 8, dtype=torch.int32, device=device)
    if choices.smooth_k:
        *lead, rows, heads, width = q.x.shape
        mean = k.batch, k.x.shape[-2], width
        memory["shift"] = empty(device, (*lead, heads, rows))
        memory["sums"], memory["mean"] = empty(device, (*mean, MEAN_SPLITS)), empty(device, mean)
    return memory, launches(given, choices, capability)


def readable(given: Inputs, choices: Choices) -> Inputs:
    """The tensors as kernels take them: copied where they need other strides, turned if they cannot turn them."""
    cos, copies = given.rotary_cos, {}
    if cos is not None and (cos.shape[1] % 8 if choices.rotary_interleaved else cos.shape[1] % 16):
        q, k = turned(given, choices)
        given = dataclasses.replace(given, q=q, k=k, rotary_cos=None, rotary_sin=None)
    for field in dataclasses.fields(given):
        x = getattr(given, field.name)
        if x is not None and (x.stride(-1) != 1 if field.name in ("q", "k", "v") else not x.is_contiguous()):
            copies[field.name] = x.contiguous()
    return dataclasses.replace(given, **copies) if copies else given
