"""The keywords of the public functions as types, for the overloads by results and for what takes any call's.

And what score_mod and mask_mod are made into.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from flashtile.call.arguments import TENSORS, Options, Plain, Tensors, read
from flashtile.call.cached_arguments import CacheTensors
from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.sizes import holds, number
from flashtile.masks import Intervals
from flashtile.mods.block_mask import BlockMask
from flashtile.mods.converted import lists_of

if TYPE_CHECKING:
    from flashtile.call.functions import Functions

# What other libraries call a keyword -> what it is called here.
_ELSEWHERE = {
    "is_causal": "causal, aligned with the last key and not the first", "scale": "softmax_scale",
    "sm_scale": "softmax_scale", "dropout": "dropout_p", "mask": "attn_mask (True keeps) or attn_bias (added)",
    "block_table": "page_table", "key_padding_mask": "attn_mask=valid[:, None, None, :], where True keeps",
}  # fmt: skip


class Common(TypedDict, total=False):
    """Keywords of every call, but ``causal``, ``return_lse`` and ``return_max_scores``."""

    window_size: Sequence[int | None] | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    backend: str | None


class Keywords(Common, total=False):
    """Keywords of ``attention`` and ``attention_varlen``."""

    causal: bool
    attn_mask: Tensor | None
    attn_bias: Tensor | None
    dropout_p: float
    deterministic: bool
    attention_chunk: int | None
    block_mask: Intervals | BlockMask | Any | None
    precision: str | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None


class PackedKeywords(Keywords, total=False):
    """Keywords of ``attention_varlen``."""

    batch_invariant: bool | Literal["strict"]
    out: Tensor | None


class DenseKeywords(Keywords, total=False):
    """Keywords of ``attention`` and of no packed call."""

    selected: Tensor | None


class Cached(TypedDict, total=False):
    """Keywords of ``attention_with_kvcache`` that no other call has."""

    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    cu_seqlens_k_new: Tensor | None
    tree_mask: Tensor | None
    slot_mapping: Tensor | None
    page_indptr: Tensor | None
    page_indices: Tensor | None
    qv: Tensor | None
    out: Tensor | None
    selected: Tensor | None
    selected_slots: Tensor | None


class CacheKeywords(Common, Cached, total=False):
    """Keywords of ``attention_with_kvcache`` but ``cache_seqlens``."""

    causal: bool | Tensor
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    attention_chunk: int | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    block_mask: Intervals | None
    batch_invariant: bool | Literal["strict"]


class CachedCall(Cached, total=False):
    """What ``explain`` and ``warm_up`` take besides for a call over a cache."""

    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor | int


class AnyCall(Keywords, CachedCall, total=False):
    """What ``explain`` and ``warm_up`` take by name."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch_invariant: bool | Literal["strict"]
    return_lse: bool
    return_max_scores: bool


class Asked(NamedTuple):
    """What a public function was asked for besides tensors, as the caller gave it.

    Attributes:
        precision: None or "fp8".
        causal: See ``attention``, like the next two.
        window_size: See there.
        return_lse: See there.
        plain: What most calls have.
        packed: Whether the function takes packed sequences; None if either.
        lengths: max_seqlen_q and max_seqlen_k.
        functions: score_mod and mask_mod.
    """

    precision: Any = None
    causal: Any = False
    window_size: Any = None
    return_lse: Any = False
    plain: Plain = Plain()
    packed: bool | None = None
    lengths: tuple[Any, Any] = (None, None)
    functions: tuple[Any, Any] = (None, None)

    def read(self, t: Tensors, lengths: tuple[Any, Any] | None = None) -> Options:
        """The options of a call of these tensors, without functions; see ``arguments.read``."""
        return read(t, self.causal, self.window_size, self.return_lse, self.plain, lengths or self.lengths)


class Masked(NamedTuple):
    """What the keyword block_mask becomes.

    Attributes:
        tensors: Fields of ``Tensors``, by name.
        mirrored: See ``Options``.
        listed: See there.
        mask_mod: The mask's function, if it has one, or the call's.
    """

    tensors: dict[str, Tensor | None]
    mirrored: bool
    listed: tuple[int, ...]
    mask_mod: Callable[..., Any] | None


def masked_by(block_mask: object, mask_mod: Callable[..., Any] | None, q: object = None, k: object = None) -> Masked:
    """What block_mask becomes beside a call's mask_mod; a list needs no mask_mod.

    Args:
        block_mask: The keyword.
        mask_mod: The keyword.
        q: A dense call's; a list must be made for the lengths of q and k.
        k: Likewise.

    Raises:
        InvalidInputError: It is none, is for other lengths, or has another function than mask_mod.
    """
    if isinstance(block_mask, Intervals):
        of_intervals = {"row_keys": block_mask.row_keys, "key_rows": block_mask.key_rows}
        return Masked(of_intervals, block_mask.mirrored, (), mask_mod)
    lists = lists_of(block_mask)
    own = lists.mask_mod
    if own is not None and mask_mod is not None and own is not mask_mod:
        raise InvalidInputError("mask_mod", "is given, but block_mask has its own: make it of and_masks of the two")
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4:
        for name, x, length in zip("qk", (q, k), lists.lengths, strict=True):
            if holds(x.shape[1] != length):
                raise InvalidInputError("block_mask", f"is for seqlen_{name} {length}, but {name} has {x.shape[1]}")
    names = ("row_blocks", "key_blocks", "row_items", "key_items")
    return Masked({name: getattr(lists, name) for name in names}, False, lists.listed, own or mask_mod)


def intervals_of(block_mask: object) -> tuple[Tensor | None, Tensor | None, bool]:
    """row_keys, key_rows and mirrored of a call over a cache.

    Raises:
        InvalidInputError: block_mask is nothing that ``flashtile.masks`` has made.
    """
    if not isinstance(block_mask, Intervals):
        made = "must be made by flashtile.masks, or None: calls over a cache take no lists of blocks"
        raise InvalidInputError("block_mask", f"is of type {type(block_mask).__name__}, {made}")
    return block_mask.row_keys, block_mask.key_rows, block_mask.mirrored


def refused(function: str, more: tuple[object, ...], unknown: dict[str, object]) -> TypeError:
    """The error of a call with more positions than a function has, or with keywords that it does not know."""
    if more:
        first = "cache_seqlens" if function.endswith("kvcache") else "causal"
        return TypeError(f"{function}() got a position too many, {shown(more[0])}: give {first} and the rest by name")
    name = next(iter(unknown))
    others = {*Keywords.__annotations__, *CacheKeywords.__annotations__} - {name}
    near = difflib.get_close_matches(name, sorted(others), 1)
    hint = f": it is called {_ELSEWHERE[name]}" if name in _ELSEWHERE else f", did you mean {near[0]}?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def counter_of(function: str, more: tuple[object, ...], unknown: dict[str, Any]) -> str:
    """The name of what counts the call's runs: integrations give it by ``counted_by``, which is no public keyword."""
    name: str = unknown.pop("counted_by", "")
    if more or unknown:
        raise refused(function, more, unknown)
    return name


def asked_of(
    function: str, sides: tuple[Any, Any, Any], given: Mapping[str, Any], known: Any = AnyCall
) -> tuple[Tensors, Asked, dict[str, Any]]:
    """The tensors of a call, what else it is, and the arguments that a call over a cache alone has, by name.

    Raises:
        TypeError: ``known``, the type of the keywords that the function has, lacks one of those given.
    """
    unknown = {name: value for name, value in given.items() if name not in known.__annotations__}
    if unknown:
        raise refused(function, (), unknown)
    if given.get("block_mask") is not None:
        masked = masked_by(given["block_mask"], given.get("mask_mod"), *sides[:2])
        given = {**given, **masked.tensors, "mirrored": masked.mirrored, "listed": masked.listed}
        given["mask_mod"] = masked.mask_mod
    tensors = Tensors(*sides, **{name: x for name, x in given.items() if name in TENSORS})
    cached = {name: x for name, x in given.items() if name in CachedCall.__annotations__}
    if cached.keys() == {"out"}:  # packed calls have it too
        cached = {}
    causal, lengths = given.get("causal"), (given.get("max_seqlen_q"), given.get("max_seqlen_k"))
    plain = Plain(**{name: given[name] for name in Plain._fields if name in given})
    return tensors, Asked(
        given.get("precision"), bool(cached) if causal is None else causal, given.get("window_size"),
        given.get("return_lse", False), plain, None, lengths, (given.get("score_mod"), given.get("mask_mod")),
    ), cached  # fmt: skip


def options_of(t: Tensors, asked: Asked) -> Options:
    """A call's options; tensors get what its functions read."""
    if asked.functions == (None, None):
        return asked.read(t)
    functions = with_functions(t, *asked.functions, asked.plain.softcap)
    return functions.options(asked.read(t), shift_of(t) or 0)


def with_functions(
    t: Tensors | CacheTensors,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    softcap: object,
) -> Functions:
    """The functions of a call; t gets what they read."""
    from flashtile.call.functions import functions_of  # what few programs need is not loaded by all

    # Where packed sequences may have other lengths than their keys, and in a cache, no band is known for all.
    # A list's full blocks are kept whatever its function says, so no band is taken from that function.
    has_shift = isinstance(t, Tensors) and t.cu_seqlens_q is t.cu_seqlens_k and t.row_blocks is None
    has_shift = has_shift and shift_of(t) is not None  # type: ignore[arg-type]
    found = functions_of(score_mod, mask_mod, t, softcap, has_shift)
    t.operands, t.numbers = found.operands, found.numbers
    if found.is_mapped:
        for x in found.operands or ():
            # A transform finds a call by its tensors, not by those in a list.
            t.q = t.q.masked_fill(x.detach().new_zeros((), dtype=torch.bool), 0)
    return found


def shift_of(t: Tensors) -> int | None:
    """``seqlen_k - seqlen_q`` of a dense call, None for a symbol; 0 of ranks that do not fit, refused elsewhere."""
    of_q, of_k = getattr(t.q, "shape", None), getattr(t.k, "shape", None)
    return 0 if of_q is None or of_k is None or not len(of_q) == len(of_k) == 4 else number(of_k[1] - of_q[1])


def refuse_functions(score_mod: object, mask_mod: object) -> None:
    """Raises for a function in a call of 8 bits."""
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            raise InvalidInputError(name, "is given, but does not go with 8 bits")
