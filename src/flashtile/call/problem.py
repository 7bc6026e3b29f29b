"""Problem: one frozen record of a call, made of records for groups of features.

``Problem.of`` checks shapes, dtypes and devices by named axes, ``check_values`` the contents of index tensors where it
costs no synchronisation. Everything below this layer may assume valid arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import DTYPES as DTYPES
from flashtile.call.arguments import TENSORS, Grads, Options
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
from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band, Origin
from flashtile.core.sizes import holds

if TYPE_CHECKING:
    from flashtile.mods.record import ModKey


class SequenceLayout(NamedTuple):
    """The memory layout of the rows of one side, queries or keys.

    Attributes:
        length: Rows per sequence; for packed sequences and caches an upper bound: max_seqlen if given, the capacity.
        packed: Whether sequences lie one after another, delimited by cu_seqlens.
        used: Whether each sequence uses the first rows only, as many as a tensor of lengths says: a cache.
        page_size: Rows of a page, 0 where rows are not in pages.
    """

    length: int
    packed: bool = False
    used: bool = False
    page_size: int = 0


@dataclass(frozen=True)
class Precision:
    """Dtypes of q, of k and v, of the output, and of the gradients of q, k and v."""

    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype
    grad: torch.dtype

    @property
    def lse(self) -> torch.dtype:
        """float32, the dtype of the softmax state; float64 for float64 inputs."""
        return torch.float64 if self.q == torch.float64 else torch.float32


@dataclass(frozen=True)
class ScoreMod:
    """The modifications of the scaled scores.

    Attributes:
        softcap: 0, or the cap c of ``c * tanh(scores / c)``.
        alibi: Whether slopes are given.
        bias: Dtype of the additive bias, None without one.
        function: The user's, which comes first; None without one.
    """

    softcap: float = 0.0
    alibi: bool = False
    bias: torch.dtype | None = None
    function: ModKey | None = None


@dataclass(frozen=True)
class MaskMod:
    """Which pairs are kept.

    Attributes:
        band: Causal and window masks.
        tensor: Whether a boolean mask is given.
        tree: Whether the last rows of a cached call are draft trees.
        causal_each: Whether a tensor says which sequences of a cached call are causal; the band is that of the others.
        row_keys: Whether each row has an interval of keys.
        key_rows: Whether each key has an interval of rows.
        mirrored: Whether both are one mask, so that either will do.
        by_head: Whether intervals or lists differ from head to head.
        listed: Rows and keys of the blocks that lists say are kept, and 1 if these have bits; empty without lists.
        function: The user's, None without one.
    """

    band: Band = Band()  # noqa: RUF009
    tensor: bool = False
    tree: bool = False
    causal_each: bool = False
    row_keys: bool = False
    key_rows: bool = False
    mirrored: bool = False
    by_head: bool = False
    listed: tuple[int, ...] = ()
    function: ModKey | None = None


T = TypeVar("T")


class _Short(Generic[T]):
    """A read-only attribute of Problem that is shorthand for a field of one of its records, or of several.

    Once read, it is in the instance's ``__dict__``, where Python finds it faster.
    """

    def __init__(self, read: Callable[[Problem], T], *places: str) -> None:
        self._read, self.places = read, places

    def __set_name__(self, owner: object, name: str) -> None:
        self._name = name

    def __get__(self, problem: Problem, owner: object = None) -> T:
        value = vars(problem)[self._name] = self._read(problem)
        return value


# Up to so many queries and keys a dense call is tiny: a backend whose tiles have more rows may not be the fastest.
TINY = 64


@dataclass(frozen=True)
class Problem:
    """The description of a call without tensor data; hashable, so it can be a key for tiles and caches.

    Attributes:
        device_type: ``cpu``, ``cuda`` (NVIDIA and AMD) or another PyTorch device type.
        compute_capability: ``(major, minor)`` of an NVIDIA device, else None.
        precision: Dtypes.
        batch: Sequences.
        queries: Layout of q and the output.
        keys: Layout of k and v.
        num_heads_q: Query heads, a multiple of ``num_heads_kv``.
        num_heads_kv: Key and value heads.
        head_dim: Width of q and k.
        head_dim_v: Width of v and of the output.
        softmax_scale: Factor of the scores.
        score_mod: The modifications of the scaled scores.
        mask_mod: Which pairs are kept.
        sinks: Whether sinks are given.
        origins: Whether packed sequences are parts of longer ones (``core.masks.Origin``).
        dropout_p: Probability of dropping, 0 for none.
        deterministic: Whether the backward must be bitwise repeatable.
        grads: Which tensors need a gradient; none if no backward will follow.
        aligned: Whether addresses and strides of q, k and v are multiples of 16 bytes, as bulk copies need.
        rotary_interleaved: Whether a cached call that rotates pairs features (2i, 2i + 1).
        qv: Whether scores of a cached call are also those of further queries with the values.
        row_scale: Whether these are latent rows of 656 bytes.
        gpu: Name of the GPU, for tiles that were measured on it; empty where it does not matter or is not here.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    precision: Precision
    batch: int
    queries: SequenceLayout
    keys: SequenceLayout
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    score_mod: ScoreMod = ScoreMod()
    mask_mod: MaskMod = MaskMod()
    sinks: bool = False
    origins: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    grads: Grads = Grads()  # noqa: RUF009
    aligned: bool = True
    rotary_interleaved: bool = False
    qv: bool = False
    row_scale: bool = False
    gpu: str = ""

    # Shorthand: how it is read, and the fields that ``but`` sets.
    dtype = _Short(lambda p: p.precision.q, "precision.q", "precision.kv", "precision.out", "precision.grad")
    out_dtype = _Short(lambda p: p.precision.out, "precision.out")
    grad_dtype = _Short(lambda p: p.precision.grad, "precision.grad")
    lse_dtype = _Short(lambda p: p.precision.lse)
    varlen = _Short(lambda p: p.queries.packed, "queries.packed", "keys.packed")
    seqlen_q = _Short(lambda p: p.queries.length, "queries.length")
    seqlen_k = _Short(lambda p: p.keys.length, "keys.length")
    group_size = _Short(lambda p: p.num_heads_q // p.num_heads_kv)
    softcap = _Short(lambda p: p.score_mod.softcap, "score_mod.softcap")
    alibi = _Short(lambda p: p.score_mod.alibi, "score_mod.alibi")
    bias_dtype = _Short(lambda p: p.score_mod.bias, "score_mod.bias")
    band = _Short(lambda p: p.mask_mod.band, "mask_mod.band")
    mask = _Short(lambda p: p.mask_mod.tensor, "mask_mod.tensor")
    tree = _Short(lambda p: p.mask_mod.tree, "mask_mod.tree")
    causal_each = _Short(lambda p: p.mask_mod.causal_each, "mask_mod.causal_each")
    intervals = _Short(lambda p: p.mask_mod.row_keys or p.mask_mod.key_rows)
    listed = _Short(lambda p: p.mask_mod.listed, "mask_mod.listed")
    has_bits = _Short(lambda p: len(p.listed) > 2)
    needs_grad = _Short(lambda p: any(p.grads), "grads.q", "grads.k", "grads.v")
    bias_grad = _Short(lambda p: p.grads.bias, "grads.bias")
    score_function = _Short(lambda p: p.score_mod.function, "score_mod.function")
    mask_function = _Short(lambda p: p.mask_mod.function, "mask_mod.function")
    operand_grad = _Short(lambda p: any(p.grads.operands))
    # Whether a bias or a function may make scores beside which lse cannot hold the log of a count: see lse_shape.
    large_scores = _Short(lambda p: p.bias_dtype is not None or p.score_function is not None)

    @property
    def tiny(self) -> bool:
        """Whether sequences are dense and no longer than ``TINY``."""
        return not self.varlen and self.seqlen_q <= TINY and self.seqlen_k <= TINY

    def but(self, **changes: Any) -> Problem:
        """A copy with other values of fields or of shorthand, e.g. ``problem.but(varlen=True, softcap=30.0)``."""
        fields: dict[str, Any] = {}
        for name, value in changes.items():
            short = vars(Problem).get(name)
            for place in short.places if isinstance(short, _Short) else (name,):
                field, _, inner = place.partition(".")
                old = fields.get(field, getattr(self, field))
                change = old._replace if isinstance(old, (Grads, SequenceLayout)) else functools.partial(replace, old)
                fields[field] = change(**{inner: value}) if inner else value
        return replace(self, **fields)

    def lse_shape(self, q: Tensor) -> tuple[int, ...]:
        """Shape of lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)`` with total_q from q.

        With ``large_scores`` a last dimension of 2 follows, the parts of ``core.states.in_parts``.
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
        bias = None if t.attn_bias is None else t.attn_bias.dtype
        by_head = t.row_keys, t.key_rows, t.row_blocks
        functions = mod_keys(t, o.mods)
        return checked_problem(
            t, o, sizes, (t.k, t.v),
            score_mod=ScoreMod(o.softcap, t.alibi_slopes is not None, bias, functions.get("score")),
            mask_mod=MaskMod(
                o.band, t.attn_mask is not None, False, False, t.row_keys is not None, t.key_rows is not None,
                o.mirrored, any(x is not None and holds(x.shape[1] > 1) for x in by_head),
                o.listed, functions.get("mask"),
            ),
            origins=t.origins is not None, dropout_p=o.dropout_p, deterministic=o.deterministic, grads=o.grads,
            gpu=gpu_name(t.q.device),
        )  # fmt: skip

    def resized(self, tensors: Tensors, options: Options) -> Problem:
        """The problem of another call of its shape class, see ``plans.class_key``, which needs no checks."""
        batch, seqlen_q, seqlen_k = tensors.q.shape[0], tensors.q.shape[-3], tensors.k.shape[-3]
        bounds = tensors.cu_seqlens_q
        if bounds is not None:
            batch, longest_q, longest_k = bounds.shape[0] - 1, options.max_seqlen_q, options.max_seqlen_k
            seqlen_q = seqlen_q if longest_q is None else longest_q
            seqlen_k = seqlen_k if longest_k is None else longest_k
        queries, keys = SequenceLayout(seqlen_q, bounds is not None), SequenceLayout(seqlen_k, bounds is not None)
        # Past __init__, which takes longer than all else here. Shorthand of lengths must not be that of self.
        made = object.__new__(Problem)
        vars(made).update(vars(self), batch=batch, queries=queries, keys=keys, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        return made


def checked_problem(t: Any, o: Any, sizes: dict[str, int], keys_values: tuple[Tensor, Tensor], **own: Any) -> Problem:
    """The problem of a call of any kind whose tensors have been checked.

    Args:
        t: Its tensors.
        o: Its options.
        sizes: Sizes by axis name.
        keys_values: Its keys and its values.
        own: Fields that this kind of call has, or has otherwise than most.
    """
    q, (k, v), packed = t.q, keys_values, t.cu_seqlens_q is not None
    common: dict[str, Any] = {
        "device_type": q.device.type, "compute_capability": compute_capability(q.device),
        "precision": Precision(q.dtype, k.dtype, q.dtype, q.dtype),
        "queries": SequenceLayout(sizes["seqlen_q"], packed), "keys": SequenceLayout(sizes.get("seqlen_k", 0), packed),
        "softmax_scale": sizes["head_dim"] ** -0.5 if o.softmax_scale is None else o.softmax_scale,
        "score_mod": ScoreMod(o.softcap), "mask_mod": MaskMod(o.band), "sinks": t.sinks is not None,
        # On CPUs too an 8-bit cache is read in words.
        "aligned": (q.device.type == "cpu" and q.dtype == k.dtype) or all(map(is_aligned, (q, k, v))),
        **{name: sizes[name] for name in ("batch", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")},
    }  # fmt: skip
    return Problem(**common | own)


_NOTHING = Problem(
    "cpu", None, Precision(*[torch.float32] * 4), 1, SequenceLayout(1), SequenceLayout(1), 1, 1, 64, 64, 0.125
)


def described(**values: Any) -> Problem:
    """A problem from the names of fields and shorthand, for a call that is described but never run."""
    return _NOTHING.but(**values)


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


# The ``gpus.Gpu`` that is built for in place of the one that is here.
AHEAD: ContextVar[Any] = ContextVar("AHEAD", default=None)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """``(major, minor)`` of an NVIDIA device, None for any other; that of the GPU that is built for, if one is."""
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
