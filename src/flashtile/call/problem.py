"""Problem: one frozen record of a call; and the GPU of a call, which need not be here to be built for.

``Problem.of`` checks shapes, dtypes and devices by named axes, ``check_values`` the contents of index tensors where it
costs no synchronisation. Everything below this layer may assume valid arguments.
"""

from __future__ import annotations

import functools
import re
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile.call.arguments import DTYPES as DTYPES
from flashtile.call.arguments import TENSORS, Grads, Options, differentiable, grads_of
from flashtile.call.arguments import Tensors as Tensors
from flashtile.call.axes import (
    Axes,
    checked_kinds,
    is_aligned,
    is_packed,
    mod_keys,
    packed_lengths,
    warned_of_heads_first,
)
from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.masks import Band, Origin
from flashtile.core.sizes import holds

if TYPE_CHECKING:
    from flashtile.mods.record import ModKey


# Up to so many queries and keys a dense call is tiny: a backend with tiles of more rows may not be the fastest.
TINY = 64


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The description of a call without tensor data; hashable, so it can be a key for tiles and caches.

    Attributes:
        device_type: ``cpu``, ``cuda`` (NVIDIA and AMD) or another PyTorch device type.
        compute_capability: ``(major, minor)`` of an NVIDIA device, else None.
        dtype: The dtype of q.
        kv_dtype: The dtype of k and v.
        out_dtype: The output's.
        grad_dtype: The dtype of the gradients of q, k and v.
        batch: Sequences.
        seqlen_q: Queries of a sequence; for packed sequences an upper bound: max_seqlen if given.
        seqlen_k: Keys of a sequence; for packed sequences and caches an upper bound: max_seqlen if given, the capacity.
        varlen: Whether sequences lie one after another, delimited by cu_seqlens; in a cached call, whether queries do.
        cached: Whether keys are in a cache; a tensor of lengths says how many each sequence uses.
        page_size: Rows of a cache's page, 0 where rows are not in pages.
        num_heads_q: Query heads, a multiple of ``num_heads_kv``.
        num_heads_kv: Key and value heads.
        head_dim: Width of q and k.
        head_dim_v: Width of v and of the output.
        softmax_scale: Factor of the scores.
        softcap: 0, or the cap c of ``c * tanh(scores / c)``.
        alibi: Whether slopes are given.
        bias_dtype: Dtype of the additive bias, None without one.
        score_function: The user's score mod, which comes first; None without one.
        band: Causal and window masks.
        mask: Whether a boolean mask is given.
        tree: Whether the last rows of a cached call are draft trees.
        causal_each: Whether a tensor says which sequences of a cached call are causal; the band is for the others.
        row_keys: Whether each row has an interval of keys.
        key_rows: Whether each key has an interval of rows.
        mirrored: Whether both are one mask, so that either will do.
        by_head: Whether intervals differ from head to head, or lists in a group of heads.
        listed: Rows and keys of the blocks that lists say are kept, and 1 if these have bits; empty without lists.
        mask_function: The user's mask mod, None without one.
        sinks: Whether sinks are given.
        origins: Whether packed sequences are parts of longer ones (``core.masks.Origin``).
        dropout_p: Probability of dropping, 0 for none.
        deterministic: Whether the backward must be bitwise repeatable.
        batch_invariant: Whether a row's bits must be its own, in the forward: ``arguments.BY_KIND`` or ``STRICT``.
        paged_scales: Whether the scales of an 8-bit cache differ from page to page.
        grads: Which tensors need a gradient; none if no backward will follow.
        aligned: Whether addresses and strides of q, k and v are multiples of 16 bytes, as bulk copies need.
        rotary_interleaved: Whether a cached call that rotates pairs features (2i, 2i + 1).
        qv: Whether a cached call adds scores of further queries with the values.
        row_scale: Whether these are latent rows of 656 bytes.
        max_scores: Whether lse comes with the largest score of each row: ``core.states.with_max_scores``.
        gpu: Name of the GPU, for tiles that were measured on it; empty where it does not matter or is not here.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype
    grad_dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    varlen: bool = False
    cached: bool = False
    page_size: int = 0
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    alibi: bool = False
    bias_dtype: torch.dtype | None = None
    score_function: ModKey | None = None
    band: Band = Band()  # noqa: RUF009
    mask: bool = False
    tree: bool = False
    causal_each: bool = False
    row_keys: bool = False
    key_rows: bool = False
    mirrored: bool = False
    by_head: bool = False
    listed: tuple[int, ...] = ()
    mask_function: ModKey | None = None
    sinks: bool = False
    origins: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    batch_invariant: str = ""
    paged_scales: bool = False
    grads: Grads = Grads()  # noqa: RUF009
    aligned: bool = True
    rotary_interleaved: bool = False
    qv: bool = False
    row_scale: bool = False
    max_scores: bool = False
    gpu: str = ""

    @functools.cached_property
    def lse_dtype(self) -> torch.dtype:
        """float32, the dtype of the softmax state; float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @functools.cached_property
    def group_size(self) -> int:
        """Query heads of a key head."""
        return self.num_heads_q // self.num_heads_kv

    @functools.cached_property
    def intervals(self) -> bool:
        """Whether an interval mask is given."""
        return self.row_keys or self.key_rows

    @functools.cached_property
    def has_bits(self) -> bool:
        """Whether lists have the bits of their partial blocks."""
        return len(self.listed) > 2

    @functools.cached_property
    def needs_grad(self) -> bool:
        """Whether any tensor needs a gradient."""
        return any(self.grads)

    @functools.cached_property
    def bias_grad(self) -> bool:
        """Whether the bias needs a gradient."""
        return self.grads.bias

    @functools.cached_property
    def operand_grad(self) -> bool:
        """Whether a tensor that a score mod reads needs a gradient."""
        return any(self.grads.operands)

    @functools.cached_property
    def large_scores(self) -> bool:
        """Whether a bias or a function may make scores beside which lse cannot hold the log of a count: lse_shape."""
        return self.bias_dtype is not None or self.score_function is not None

    @property
    def tiny(self) -> bool:
        """Whether sequences are dense and no longer than ``TINY``."""
        return not self.varlen and self.seqlen_q <= TINY and self.seqlen_k <= TINY

    def but(self, **changes: Any) -> Problem:
        """A copy with other values of fields, e.g. ``problem.but(varlen=True, softcap=30.0)``.

        dtype also replaces the dtypes of k, v, the output and the gradients, unless they are named. Unless grads is,
        ``needs_grad`` says whether q, k and v need gradients, and ``bias_grad`` whether the bias does.
        """
        if "dtype" in changes:
            changes = dict.fromkeys(("kv_dtype", "out_dtype", "grad_dtype"), changes["dtype"]) | changes
        wanted = dict.fromkeys("qkv", changes.pop("needs_grad")) if "needs_grad" in changes else {}
        if "bias_grad" in changes:
            wanted["bias"] = changes.pop("bias_grad")
        if wanted:
            changes = {"grads": self.grads._replace(**wanted)} | changes
        return replace(self, **changes)

    def lse_shape(self, q: Tensor) -> tuple[int, ...]:
        """Shape of lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)`` with total_q from q.

        With ``large_scores`` a last dimension of 2 follows, the parts of ``core.states.in_parts``; largest scores are
        not counted.
        """
        rows = (q.shape[1], q.shape[0]) if self.varlen else (q.shape[0], q.shape[2], q.shape[1])
        return (*rows, 2) if self.large_scores else rows

    @classmethod
    def of(cls, tensors: Tensors, options: Options) -> Problem:
        """Checks the tensors against one another and records the call.

        Raises:
            InvalidInputError: Naming the argument that does not match.
            UnsupportedError: The call is traced by ``torch.jit.trace``.
        """
        t, o, sizes = tensors, options, _check_tensors(tensors, options)
        if o.batch_invariant:
            _check_invariant(t, o)
        functions, heads = mod_keys(t, o.mods), sizes["num_heads_kv"]
        by_head = any(x is not None and holds(x.shape[1] > 1) for x in (t.row_keys, t.key_rows))
        by_head = by_head or (t.row_blocks is not None and holds(t.row_blocks.shape[1] not in (1, heads)))
        return checked_problem(
            t, o, sizes, (t.k, t.v),
            alibi=t.alibi_slopes is not None, bias_dtype=None if t.attn_bias is None else t.attn_bias.dtype,
            score_function=functions.get("score"), mask_function=functions.get("mask"),
            mask=t.attn_mask is not None, row_keys=t.row_keys is not None, key_rows=t.key_rows is not None,
            mirrored=o.mirrored, by_head=by_head, listed=o.listed, origins=t.origins is not None,
            dropout_p=o.dropout_p, deterministic=o.deterministic, grads=o.grads,
            gpu=gpu_name(t.q.device), max_scores=o.return_max_scores,
            batch_invariant=o.batch_invariant,
        )  # fmt: skip

    def resized(self, tensors: Tensors, options: Options) -> Problem:
        """The problem of another call of its shape class, see ``plans.class_key``, which needs no checks."""
        batch, seqlen_q, seqlen_k = tensors.q.shape[0], tensors.q.shape[-3], tensors.k.shape[-3]
        bounds = tensors.cu_seqlens_q
        if bounds is not None:
            batch, longest_q, longest_k = bounds.shape[0] - 1, options.max_seqlen_q, options.max_seqlen_k
            seqlen_q = seqlen_q if longest_q is None else longest_q
            seqlen_k = seqlen_k if longest_k is None else longest_k
        # Past __init__, which takes longer than all else here.
        made = object.__new__(Problem)
        vars(made).update(vars(self), batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        return made

    @classmethod
    def build(
        cls, tensors: Tensors, band: Band, *, needs_grad: bool = False, bias_grad: bool = False, **options: Any
    ) -> Problem:
        """Like ``of``, from a Band, gradients of all inputs but the bias or of none, and fields of ``Options``."""
        given = [needs_grad and x is not None for x in differentiable(tensors)]
        grads = grads_of("grads", given)._replace(bias=bias_grad)
        options |= {"window_left": band.left, "window_right": band.right, "attention_chunk": band.chunk}
        return cls.of(tensors, Options(grads=grads, **options))


def checked_problem(t: Any, o: Any, sizes: dict[str, int], keys_values: tuple[Tensor, Tensor], **own: Any) -> Problem:
    """The problem of a call of any kind, once its tensors have been checked.

    Args:
        t: Its tensors.
        o: Its options.
        sizes: Sizes by axis name.
        keys_values: Its keys and its values.
        own: Fields that this kind of call has, or has otherwise than most.
    """
    q, (k, v) = t.q, keys_values
    common: dict[str, Any] = {
        "device_type": q.device.type, "compute_capability": compute_capability(q.device),
        "dtype": q.dtype, "kv_dtype": k.dtype, "out_dtype": q.dtype, "grad_dtype": q.dtype,
        "seqlen_q": sizes["seqlen_q"], "seqlen_k": sizes.get("seqlen_k", 0), "varlen": t.cu_seqlens_q is not None,
        "softmax_scale": sizes["head_dim"] ** -0.5 if o.softmax_scale is None else o.softmax_scale,
        "softcap": o.softcap, "band": o.band, "sinks": t.sinks is not None,
        # On CPUs too an 8-bit cache is read in words.
        "aligned": (q.device.type == "cpu" and q.dtype == k.dtype) or all(map(is_aligned, (q, k, v))),
        **{name: sizes[name] for name in ("batch", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")},
    }  # fmt: skip
    return Problem(**common | own)


_NOTHING = Problem(
    device_type="cpu", compute_capability=None, dtype=torch.float32, kv_dtype=torch.float32, out_dtype=torch.float32,
    grad_dtype=torch.float32, batch=1, seqlen_q=1, seqlen_k=1, num_heads_q=1, num_heads_kv=1, head_dim=64,
    head_dim_v=64, softmax_scale=0.125,
)  # fmt: skip


def described(**values: Any) -> Problem:
    """A problem from values that ``Problem.but`` takes, for a call that is described but never run."""
    return _NOTHING.but(**values)


def _check_invariant(t: Tensors, o: Options) -> None:
    """Refuses calls of rows that have no bits of their own."""
    against = {
        "cu_seqlens_q": (t.cu_seqlens_q is None, "is None, but batch_invariant=True goes with packed sequences"),
        "dropout_p": (o.dropout_p > 0, "goes by a sequence's place in the batch: not with batch_invariant=True"),
        "block_mask": (
            t.row_blocks is not None,
            "is of lists of blocks, which rows share: not with batch_invariant=True",
        ),
    }
    for name, (is_given, why) in against.items():
        if is_given:
            raise InvalidInputError(name, why)


_warned = False  # of heads first, once in a process


def _check_tensors(t: Tensors, options: Options) -> dict[str, int]:
    """Checks dtypes, devices and shapes; returns sizes by axis name."""
    global _warned
    rows, axes = checked_kinds(t, TENSORS), Axes({"batch seqlen": "total"} if is_packed(t) else {})
    axes.fix("dropout's state", "numbers", 2)
    axes.fix("an origin", "origin", len(Origin._fields))
    axes.fix("an interval", "ends", 2)
    axes.fix("a list", "bounds", 3)
    longest = [options.max_seqlen_q, options.max_seqlen_k]
    if is_packed(t):  # of masks and biases the sizes are bounds too
        for side in range(2):
            shown = (size for size in _shown(t, side).values() if not holds(size == 1))
            longest[side] = next(shown, None) if longest[side] is None else longest[side]
            lists = t.key_blocks if side else t.row_blocks
            if lists is not None and longest[side] is None:
                longest[side] = lists.shape[2] * options.listed[side]
    packed = axes.bind_sides(t, rows, longest)
    if t.origins is not None and not packed:
        raise InvalidInputError("origins", "is given, but goes with cu_seqlens alone")
    if t.row_blocks is not None:
        for axis, block in zip("qk", options.listed[:2], strict=True):
            axes.fix("block_mask", f"blocks_{axis}", -(-axes.sizes[f"seqlen_{axis}"] // block))
    if not packed and not _warned:
        _warned = warned_of_heads_first(t.q.shape, t.k.shape)
    axes.bind_all(rows)
    return axes.sizes


def _shown(t: Tensors, side: int) -> dict[str, int]:
    """The rows, or for side 1 the keys, that masks and a bias have, by name."""
    given = {"attn_mask": t.attn_mask, "attn_bias": t.attn_bias}
    found = {name: m.shape[side - 2] for name, m in given.items() if m is not None and m.dim() >= 2 - side}
    intervals = t.key_rows if side else t.row_keys
    return found if intervals is None else found | {"block_mask": intervals.shape[2]}


def check_values(problem: Problem, tensors: Tensors) -> None:
    """Checks cu_seqlens: they start at 0, never decrease, stay within the rows and respect max_seqlen.

    On a GPU this waits for the device, so callers run it only when ``FLASHTILE_CHECK`` is set.

    Raises:
        InvalidInputError: Naming the tensor or the length that is wrong.
    """
    t = tensors
    if t.cu_seqlens_q is None or t.cu_seqlens_k is None:
        return
    packed_lengths("q", t.cu_seqlens_q, t.q.shape[0], problem.seqlen_q, functools.partial(_shown, t, 0))
    packed_lengths("k", t.cu_seqlens_k, t.k.shape[0], problem.seqlen_k, functools.partial(_shown, t, 1))


# A100, A10, L40S, H100, B200, RTX PRO 6000, MI300X, MI355X.
_MULTIPROCESSORS: dict[int | str, int] = {
    80: 108, 86: 72, 89: 142, 90: 132, 100: 148, 120: 188, "gfx942": 304, "gfx950": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, in Triton's words.

    Attributes:
        backend: ``"cuda"`` or ``"hip"``.
        arch: ``90`` or ``"gfx942"``.
        warp_size: Threads of a warp.
    """

    backend: str
    arch: int | str
    warp_size: int

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the architecture's usual device; as many as an H100 has, where that is not known here."""
        return _MULTIPROCESSORS.get(self.arch, 132)

    @property
    def capability(self) -> tuple[int, int] | None:
        """``(major, minor)`` as problems have it, None for AMD."""
        return divmod(self.arch, 10) if isinstance(self.arch, int) else None


# What GPUs are called -> their architecture.
_ARCHS = {
    "A100": "sm_80", "A800": "sm_80", "A10": "sm_86", "A40": "sm_86", "RTX3090": "sm_86", "L4": "sm_89", "L40": "sm_89",
    "L40S": "sm_89", "RTX4090": "sm_89", "H20": "sm_90", "H100": "sm_90", "H200": "sm_90", "GH200": "sm_90",
    "H800": "sm_90", "B200": "sm_100", "GB200": "sm_100", "RTX5090": "sm_120", "MI300X": "gfx942", "MI325X": "gfx942",
    "MI350X": "gfx950", "MI355X": "gfx950",
}  # fmt: skip


def gpu_of(name: object) -> Gpu:
    """The GPU of a name, of an architecture's, or of a compute capability.

    Raises:
        InvalidInputError: It is not one.
    """
    text = name if isinstance(name, str) else ""
    text = _ARCHS.get(text.upper().replace(" ", ""), text)
    if found := re.fullmatch(r"sm_?(\d{2,3})a?", text) or re.fullmatch(r"(\d{1,2}\.\d)", text):
        return Gpu("cuda", int(found[1].replace(".", "")), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", text):
        return Gpu("hip", text, 64 if text.startswith("gfx9") else 32)
    raise InvalidInputError("gpu", f"is {shown(name)}, must be a GPU, like 'H100', 'sm_90', '9.0' or 'gfx942'")


# The GPU that is built for in place of the one that is here.
AHEAD: ContextVar[Gpu | None] = ContextVar("AHEAD", default=None)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """``(major, minor)`` of an NVIDIA device, None for any other; of the GPU that is built for, if one is."""
    gpu = AHEAD.get() if device.type == "cuda" else None
    return _compute_capability(device) if gpu is None else gpu.capability


@functools.lru_cache(maxsize=64)
def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    is_here = device.type == "cuda" and not torch.version.hip and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_here else None


@functools.lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str:
    """The name of a GPU that is here, empty for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
