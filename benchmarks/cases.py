"""The cells of each suite as frozen records, and their input tensors."""

from __future__ import annotations

import fnmatch
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flashtile.call.blocks import MOST_KEYS
from flashtile.core.masks import Band

Direction = Literal["forward", "backward", "quantized"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

TOTAL_TOKENS = 16384
HIDDEN_SIZE = 2048
HEAD_DIMS = (64, 128, 256)
OUTLIER_STD = 10.0
FORWARD_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
BACKWARD_SEQLENS = (512, 2048, 8192, 16384)
FP8_SEQLENS = (2048, 8192, 16384, 32768)
_OFTEN_ABSENT = ("head_dim_v", "bias", "softcap", "sinks", "dropout", "padded", "model")


@dataclass(frozen=True)
class Case:
    """The definition of a benchmark cell, without any measurement.

    ``direction`` backward is the gradients of q, k and v alone, given a saved forward; quantized is their rounding to 8
    bits. ``lengths`` are packed sequences' lengths, for both queries and keys: ``batch`` is then their number,
    ``seqlen_q`` and ``seqlen_k`` the longest. ``window`` is ``(left, right)`` with both ends inclusive. ``head_dim_v``
    is given where it differs from head_dim. ``bias`` says whether normal numbers of each head, row and key are added to
    the scores: ``constant``, or ``trained``, with a gradient from the backward too. ``softcap`` and ``sinks``, a normal
    number a head, are as in the library; so is ``dropout``, a probability. ``padded`` sequences end before seqlen_k, as
    ``key_lengths`` says, and a mask drops the keys behind. ``model`` names a cell of suite ``models`` or ``uses``.
    """

    direction: Direction
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    causal: bool = False
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] | None = None
    head_dim_v: int | None = None
    bias: Literal["", "constant", "trained"] = ""
    softcap: float = 0.0
    sinks: bool = False
    dropout: float = 0.0
    padded: bool = False
    model: str = ""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """The record that ``to_dict`` or a saved row describes."""
        pairs = {name: tuple(fields[name]) for name in ("window", "lengths") if fields.get(name) is not None}
        return cls(**{**fields, **pairs})

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        fields = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}
        return {name: x for name, x in fields.items() if x or name not in _OFTEN_ABSENT}

    @property
    def mask(self) -> str:
        if self.window is not None:
            return f"window{self.window[0]}"
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """A short name, such as ``forward-d128-causal-s4096``; ``--cells`` matches against it."""
        if self.model:
            return f"{self.direction}-{self.model}"
        dim_v = "" if self.head_dim_v is None else f"v{self.head_dim_v}"
        parts = [self.direction, f"d{self.head_dim}{dim_v}", self.mask, *(["bias"] if self.bias else [])]
        if self.lengths is not None:
            parts.append(f"packed{len(self.lengths)}")
        lengths = f"s{self.seqlen_k}" if self.seqlen_q == self.seqlen_k else f"q{self.seqlen_q}k{self.seqlen_k}"
        return "-".join([*parts, lengths] + ([self.dtype] if self.dtype != "bfloat16" else []))

    @property
    def needs(self) -> list[str]:
        """The features that not every provider has."""
        asked = {"bias": self.bias, "trained": self.bias == "trained", "softcap": self.softcap, "sinks": self.sinks}
        asked |= {"dropout": self.dropout, "padding": self.padded}
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def band(self) -> Band:
        left, right = self.window or (None, None)
        return Band(left, 0 if self.causal else right)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """``(seqlen_q, seqlen_k)`` of every sequence."""
        if self.lengths is not None:
            return [(n, n) for n in self.lengths]
        return [(self.seqlen_q, n) for n in self.key_lengths]

    @property
    def key_lengths(self) -> list[int]:
        """Keys of each dense sequence; if padded, from half of seqlen_k to all of it."""
        short = self.seqlen_k // 2 + 1 if self.padded else 1
        return [self.seqlen_k - (53 * b) % short for b in range(self.batch)]

    def kept_pairs(self) -> int:
        """(query, key) pairs of one head that the mask keeps; a square causal mask counts as exactly half."""
        if self.causal and self.window is None and self.seqlen_q == self.seqlen_k:
            return sum(q * k for q, k in self.sequences) // 2
        return sum(self.band.count(q, k) for q, k in self.sequences)

    @property
    def rounding_bytes(self) -> int:
        """Read and written to round q, k and v to 8 bits: some keys are read twice, first for their mean."""
        size, kept = self.torch_dtype.itemsize, self.batch * self.head_dim
        rows_q, rows_k = self.seqlen_q * self.num_heads_q, self.seqlen_k * self.num_heads_kv
        again = min(self.seqlen_k, MOST_KEYS) * self.num_heads_kv * size
        return kept * (rows_q * (size + 1) + rows_k * (2 * size + 2) + again)

    def flops(self) -> float:
        """Floating-point operations by the usual count: two products forward, 2.5 times that backward, else none."""
        dims = self.head_dim + (self.head_dim_v or self.head_dim)
        forward = 2.0 * self.num_heads_q * dims * self.kept_pairs()
        return forward * {"forward": 1.0, "backward": 2.5, "quantized": 0.0}[self.direction]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case, contiguous: ``(batch, seqlen, heads, head_dim)``, or ``(total, heads, head_dim)`` packed.

    ``dout`` has the shape of the output. ``cu_seqlens`` is ``(batch + 1,)`` int32 for packed sequences, else None.
    ``bias`` is ``(1, heads, seqlen_q, seqlen_k)`` and requires a gradient if it is trained; ``sinks`` are float32.
    ``mask`` is ``(batch, 1, 1, seqlen_k)`` bool, True for the keys of padded sequences.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None


def make_inputs(case: Case, device: torch.device, seed: int = 0, outliers: float = 0.0) -> Inputs:
    """Normally distributed tensors, drawn in float32 and rounded: kernels run faster on zeros.

    ``outliers`` is the share of the elements of q, k and v to which a normal number of standard deviation 10 is added.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(seqlen: int, heads: int, dim: int, outliers: float = outliers) -> Tensor:
        lead = (case.batch, seqlen) if case.lengths is None else (sum(case.lengths),)
        shape = (*lead, heads, dim)
        x = torch.randn(shape, generator=generator, device=device)
        if outliers:
            struck = torch.rand(shape, generator=generator, device=device) < outliers
            x += OUTLIER_STD * struck * torch.randn(shape, generator=generator, device=device)
        return x.to(case.torch_dtype)

    cu_seqlens = None
    if case.lengths is not None:
        bounds = torch.tensor((0, *case.lengths)).cumsum(0)
        cu_seqlens = bounds.to(device=device, dtype=torch.int32)
    dim_v = case.head_dim_v or case.head_dim
    q = draw(case.seqlen_q, case.num_heads_q, case.head_dim)
    k, v = (draw(case.seqlen_k, case.num_heads_kv, dim) for dim in (case.head_dim, dim_v))
    dout, bias, sinks = draw(case.seqlen_q, case.num_heads_q, dim_v, outliers=0.0), None, None
    if case.bias:
        shape = (1, case.num_heads_q, case.seqlen_q, case.seqlen_k)
        bias = torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)
        bias.requires_grad_(case.bias == "trained" and case.direction == "backward")
    if case.sinks:
        sinks = torch.randn(case.num_heads_q, generator=generator, device=device)
    mask = None
    if case.padded:
        lengths = torch.tensor(case.key_lengths, device=device)
        mask = (torch.arange(case.seqlen_k, device=device) < lengths[:, None])[:, None, None]
    return Inputs(q, k, v, dout, cu_seqlens, bias, sinks, mask)


def _grid(direction: Direction, seqlens: tuple[int, ...], dtype: str) -> list[Case]:
    """16k tokens in total, in one sequence if longer, and hidden size 2048 for every sequence length and head dim."""
    return [
        Case(direction, dtype, max(1, TOTAL_TOKENS // n), n, n, HIDDEN_SIZE // dim, HIDDEN_SIZE // dim, dim, causal)
        for dim in HEAD_DIMS
        for causal in (False, True)
        for n in seqlens
    ]


# Sixteen documents of uneven length, 8192 tokens in total, as in packed pretraining batches.
_DOCUMENTS = (37, 64, 113, 150, 211, 256, 300, 333, 401, 512, 640, 700, 811, 1024, 1100, 1540)


def _cpu_cases() -> list[Case]:
    longest = max(_DOCUMENTS)
    return [
        Case("forward", "float32", 1, 2048, 2048, 8, 8, 64),
        Case("forward", "float32", 1, 2048, 2048, 8, 8, 64, causal=True),
        Case("forward", "float32", 1, 8192, 8192, 4, 4, 64, causal=True),
        Case("forward", "float32", 1, 8192, 8192, 4, 4, 64, causal=True, window=(256, 0)),
        Case("forward", "float32", 16, longest, longest, 4, 4, 64, causal=True, lengths=_DOCUMENTS),
        Case("forward", "float32", 1, 1, 8192, 32, 8, 128),
        Case("backward", "float32", 1, 2048, 2048, 8, 8, 64, causal=True),
        *(Case(each, "bfloat16", 1, 1024, 1024, 8, 8, 64, causal=True) for each in DIRECTIONS),
        *(Case(each, "float32", 1, 1024, 1024, 8, 8, 64, bias="constant") for each in DIRECTIONS),
    ]


# Documents of a packed batch of 16k tokens; and sentences, half of them short.
_PACKED = (12000, 100, 3000, 7, 900, 377)
_SENTENCES = tuple(16 + (i * 37) % 113 for i in range(96)) + tuple(128 + (i * 53) % 385 for i in range(32))
# Attention as models have it: name -> (batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim), and the rest.
_Cells = dict[str, tuple[tuple[int, int, int, int, int, int], dict[str, Any]]]
_MODELS: _Cells = {
    "llama8b-8k": ((1, 8192, 8192, 32, 8, 128), {"causal": True}),
    "llama8b-4x2k": ((4, 2048, 2048, 32, 8, 128), {"causal": True}),
    "llama8b-packed": ((6, 12000, 12000, 32, 8, 128), {"causal": True, "lengths": _PACKED}),
    "llama70b-8k": ((1, 8192, 8192, 64, 8, 128), {"causal": True}),
    "llama70b-prefill-1k-of-8k": ((1, 1024, 8192, 64, 8, 128), {"causal": True}),
    "qwen3-16x8-4k": ((2, 4096, 4096, 16, 8, 128), {"causal": True}),
    "qwen3-64x4-3000": ((1, 3000, 3000, 64, 4, 128), {"causal": True}),
    "gemma3-full-4k": ((2, 4096, 4096, 16, 8, 256), {"causal": True}),
    "gemma3-window-8k": ((1, 8192, 8192, 16, 8, 256), {"causal": True, "window": (1023, 0)}),
    "gptoss-full-4k": ((2, 4096, 4096, 64, 8, 64), {"causal": True}),
    "gptoss-window-8k": ((1, 8192, 8192, 64, 8, 64), {"causal": True, "window": (127, 0)}),
    "falcon-2k": ((2, 2048, 2048, 71, 1, 64), {"causal": True}),
    "neox-d96-2k": ((4, 2048, 2048, 64, 64, 96), {"causal": True}),
    "mqa-full-4k": ((2, 4096, 4096, 16, 1, 128), {}),
    "mla-192x128-4k": ((1, 4096, 4096, 128, 128, 192), {"causal": True, "head_dim_v": 128}),
    "d192-4k": ((4, 4096, 4096, 16, 16, 192), {"causal": True}),
    "vit-l-577": ((64, 577, 577, 16, 16, 64), {}),
    "siglip-d72-729": ((64, 729, 729, 16, 16, 72), {}),
    "vit-b-197": ((256, 197, 197, 12, 12, 64), {}),
    "flux-4608": ((1, 4608, 4608, 24, 24, 128), {}),
    "wan-32k": ((1, 32760, 32760, 12, 12, 128), {}),
    "whisper-1500": ((16, 1500, 1500, 20, 20, 64), {}),
    "cross-3x1777-2345": ((3, 1777, 2345, 24, 24, 64), {}),
    "bert-packed": ((128, max(_SENTENCES), max(_SENTENCES), 16, 16, 64), {"lengths": _SENTENCES}),
    "alphafold-d32-384": ((96, 384, 384, 4, 4, 32), {}),
    "swin-d32-49": ((4096, 49, 49, 4, 4, 32), {}),
    "gemma2-softcap-4k": ((2, 4096, 4096, 16, 8, 256), {"causal": True, "softcap": 50.0}),
    "gptoss-sinks-4k": ((2, 4096, 4096, 64, 8, 64), {"causal": True, "sinks": True}),
    "gptoss-sinks-window-8k": ((1, 8192, 8192, 64, 8, 64), {"causal": True, "window": (127, 0), "sinks": True}),
    "t5-bias-1k": ((16, 1024, 1024, 16, 16, 64), {"bias": "trained"}),
    "alphafold-bias-384": ((96, 384, 384, 4, 4, 32), {"bias": "trained"}),
    "swin-bias-49": ((4096, 49, 49, 4, 4, 32), {"bias": "constant"}),
}


# What else users run, likewise.
_USES: _Cells = {
    "query-1-of-32k": ((1, 1, 32768, 32, 8, 128), {}),
    "query-8x1-of-8k": ((8, 1, 8192, 16, 16, 64), {}),
    "queries-16-of-16k": ((1, 16, 16384, 32, 8, 128), {"causal": True}),
    "queries-64-of-4k-d64": ((4, 64, 4096, 16, 16, 64), {}),
    "float32-4x2k": ((4, 2048, 2048, 16, 16, 64), {"dtype": "float32"}),
    "float32-causal-d128-2x2k": ((2, 2048, 2048, 16, 16, 128), {"dtype": "float32", "causal": True}),
    "dropout-bert-512": ((32, 512, 512, 16, 16, 64), {"dropout": 0.1}),
    "dropout-gpt-2k": ((8, 2048, 2048, 16, 16, 64), {"dropout": 0.1, "causal": True}),
    "dropout-d128-2k": ((4, 2048, 2048, 16, 16, 128), {"dropout": 0.1, "causal": True}),
    "cross-4096x77": ((8, 4096, 77, 10, 10, 64), {}),
    "cross-1024x77": ((8, 1024, 77, 20, 20, 64), {}),
    "cross-77x4096": ((8, 77, 4096, 10, 10, 64), {}),
    "vision-49-d32": ((2048, 49, 49, 8, 8, 32), {}),
    "vision-49-d32-bias": ((2048, 49, 49, 8, 8, 32), {"bias": "trained"}),
    "text-padded-512": ((32, 512, 512, 12, 12, 64), {"padded": True}),
    "text-padded-128": ((256, 128, 128, 12, 12, 64), {"padded": True}),
    "bias-2k": ((2, 2048, 2048, 16, 16, 64), {"bias": "trained"}),
    "bias-d128-2k": ((2, 2048, 2048, 8, 8, 128), {"bias": "trained"}),
    "sinks-window-4x4k": ((4, 4096, 4096, 64, 8, 64), {"causal": True, "window": (127, 0), "sinks": True}),
    "d16-1k": ((16, 1024, 1024, 16, 16, 16), {}),
    "d24-1k": ((16, 1024, 1024, 16, 16, 24), {}),
    "d32-causal-1k": ((16, 1024, 1024, 16, 16, 32), {"causal": True}),
    "d40-4k": ((4, 4096, 4096, 8, 8, 40), {}),
    "causal-131k": ((1, 131072, 131072, 4, 1, 128), {"causal": True}),
    "tiny-16": ((8192, 16, 16, 8, 8, 64), {}),
    "tiny-32-causal": ((4096, 32, 32, 8, 8, 64), {"causal": True}),
}


def _named_cases(dtype: str, cells: _Cells) -> list[Case]:
    made = []
    for each in DIRECTIONS:
        for name, (sizes, more) in cells.items():
            others = {x: more[x] for x in more if x != "dtype"}
            made.append(Case(each, more.get("dtype", dtype), *sizes, model=name, **others))
    return made


# Global layers of Gemma 4, of 26B, 31B and 12B parameters; and how long documents are in a packed batch of 16k tokens.
_BIG_HEADS = {"26b": (8, 4), "31b": (32, 4), "12b": (16, 1)}
BIG_SEQLENS = (4096, 8192, 16384)


def _big_cases(dtype: str) -> list[Case]:
    """16k tokens of 8 heads past head_dim 256; the heads of models, and packed sequences, under a causal mask."""
    made = [
        Case(each, dtype, TOTAL_TOKENS // n, n, n, 8, 8, dim, causal)
        for each in DIRECTIONS
        for dim in (512, 384, 320)
        for causal in (False, True)
        for n in BIG_SEQLENS
    ]
    for each in DIRECTIONS:
        for name, heads in _BIG_HEADS.items():
            made.append(Case(each, dtype, 1, 8192, 8192, *heads, 512, True, model=f"gemma4-{name}-8k"))
        packed: dict[str, Any] = {"lengths": _PACKED, "model": "gemma4-26b-packed"}
        made.append(Case(each, dtype, len(_PACKED), max(_PACKED), max(_PACKED), 8, 4, 512, True, **packed))
    return made


def suite(name: str, dtype: str = "bfloat16") -> list[Case]:
    """Cells of a suite; the last of ``ablations`` is table 2's of FlashAttention-3's paper, arXiv:2407.08608."""
    rounding = [case for case in _grid("quantized", FP8_SEQLENS[:1], dtype) if not case.causal]
    made = {
        "forward": lambda: _grid("forward", FORWARD_SEQLENS, dtype),
        "backward": lambda: _grid("backward", BACKWARD_SEQLENS, dtype),
        "models": lambda: _named_cases(dtype, _MODELS),
        "models-portable": lambda: _named_cases(dtype, _MODELS),
        "uses": lambda: _named_cases(dtype, _USES),
        "ablations": lambda: [
            *_grid("forward", (2048, 8192), dtype),
            Case("forward", dtype, 4, 8448, 8448, 16, 16, 128),
        ],
        "big-heads": lambda: _big_cases(dtype),
        "fp8": lambda: _grid("forward", FP8_SEQLENS, dtype) + rounding,
        "cpu": _cpu_cases,
    }
    if name not in made:
        raise ValueError(f"suite is {name!r}, must be one of {', '.join(made)}")
    return made[name]()


def select(cases: list[Any], pattern: str | None) -> list[Any]:
    """The cases (or other named things) that a comma-separated pattern matches: a glob, or a part of the name."""
    if not pattern:
        return cases
    wanted = [p.strip() for p in pattern.split(",") if p.strip()]
    globs = [p if any(c in p for c in "*?[") else f"*{p}*" for p in wanted]
    return [c for c in cases if any(fnmatch.fnmatchcase(c.name, g) for g in globs)]
