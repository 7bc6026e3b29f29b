"""The mask function that flashtile registers with transformers, and masks that are described instead of written out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from flashtile.core.errors import InvalidInputError
from flashtile.integrations import _transformers_ranks as ranks


class LazyMask:
    """A mask that is described and not written out. Any other use of it by a model uses the written-out tensor.

    Attributes:
        shape: The tensor's shape, ``(batch, 1, seqlen_q, number of keys)``.
        causal: Whether a query sees no later key. The last query is at key ``seqlen_k - 1``.
        window: ``(left, right)`` as in ``flashtile.attention``, or None.
        chunk: ``attention_chunk`` as in ``flashtile.attention``, or None.
        seqlen_k: The number of valid keys; the rest of a static cache is not filled yet.
        keys: ``(batch, seqlen_k)`` bool, False where a key is padding; None if none is.
        packed: Whether a row holds several sequences. Each attends to itself.
        ids: The number of each token's sequence, ``(batch, seqlen)``; None while tracing, which cannot count sequences.
        lengths: ``(batch,)`` int32, the number of valid keys in a static cache, if only the device knows it; else None.
        leftpad: ``(batch,)`` int32, the first valid key, together with lengths; None if all are valid.
        shared: The sequence over ranks, if the layer has some of its rows; None if it has all rows.
    """

    def __init__(self, write: Callable[[], Tensor], shape: tuple[int, ...], causal: bool, seqlen_k: int) -> None:
        self._write = write
        self._written: Tensor | None = None
        self.shape, self.ndim = shape, len(shape)
        self.causal, self.seqlen_k = causal, seqlen_k
        self.window: tuple[int, int] | None = None
        self.chunk: int | None = None
        self.keys: Tensor | None = None
        self.packed = False
        self.ids: Tensor | None = None
        self.lengths: Tensor | None = None
        self.leftpad: Tensor | None = None
        self.shared: ranks.Shared | None = None
        self._bounds: tuple[Any, ...] | None = None

    def dense(self) -> Tensor:
        """The mask as a bool tensor, ``(batch, 1, seqlen_q, number of keys)``, True where a key is seen."""
        if self._written is None:
            self._written = self._write()
        return self._written

    def bounds(self) -> tuple[Any, ...] | None:
        """The last four arguments of ``flashtile.attention_varlen``: all rows' sequences one after another."""
        if self._bounds is None and self.ids is not None:
            starts = torch.ones_like(self.ids, dtype=torch.bool)
            starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
            cu_seqlens = nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
            longest = int(cu_seqlens.diff().max())
            self._bounds = (cu_seqlens.to(torch.int32),) * 2 + (longest,) * 2
        return self._bounds

    def contiguous(self) -> LazyMask:
        """The mask itself. ``generate`` calls this."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyMask | Tensor:
        """The mask on another device, for models with layers on several; for another dtype the written-out tensor."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or dtype is not None:
            return self.dense().to(*args, **kwargs)
        moved = copy.copy(self)
        moved._write, moved._written, moved._bounds = lambda: self.dense().to(device), None, None
        for name in ("keys", "ids", "lengths", "leftpad"):
            x = getattr(self, name)
            setattr(moved, name, x if x is None else x.to(device))
        return moved

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | LazyMask:
    """The mask function for transformers; it takes the arguments of ``masking_utils.sdpa_mask``.

    Returns:
        A ``LazyMask`` for full and causal attention, padding, windows, chunks, packed sequences and caches. If only
        padding is masked, a bool tensor ``(batch, 1, q_length, kv_length)`` with rows that share memory. For any other
        mask the written-out bool tensor.
    """
    if isinstance(attention_mask, LazyMask):  # made by the model around this one
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        wanted = "must have 2, (batch, keys), or 4, (batch, heads, queries, keys)"
        raise InvalidInputError("attention_mask", f"has {attention_mask.dim()} dimensions, {wanted}")
    shared, shape = ranks.current(), (batch_size, 1, q_length, kv_length)
    if shared is not None:
        if attention_mask is not None or isinstance(q_offset, Tensor) or q_offset or q_length != kv_length:
            raise ranks.refuse("attention_mask, or a cache")
        kind = allow_is_causal_skip, allow_is_bidirectional_skip
        return _shared(shared, mask_function, local_size, kind, shape, config)
    tracing = is_tracing(attention_mask)

    def write(offset: Any = None) -> Tensor:
        offset = q_offset if offset is None else offset
        given = (batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask)
        return sdpa_mask(*given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs)

    # For a static cache transformers sets no flag that the mask is causal, but its function shows it.
    is_causal = mask_function is causal_mask_function and local_size is None
    is_window = not (allow_is_causal_skip or tracing or local_size is None) and _is_causal_window(mask_function)
    on_device = isinstance(q_offset, Tensor)
    # A single query sees all of a window. For CUDA graphs the filled length of the cache stays on the device.
    is_step = is_window and q_length == 1 and not on_device and kv_length <= (local_size or 0)
    if is_step or (is_causal and on_device and not kv_offset):
        length = q_offset + q_length - kv_offset  # each layer raises its own offset in place before it attends
        filled = LazyMask(lambda: write(length - q_length + kv_offset), shape, True, kv_length)
        if _is_filled(filled, length, attention_mask, kv_offset, kwargs.get("device")):
            return filled
    if on_device:
        if tracing or not allow_is_causal_skip:
            return write()
        q_offset = int(q_offset)
    ids, causal = None, allow_is_causal_skip or is_causal or is_window
    packed = attention_mask is None and not (causal or allow_is_bidirectional_skip or kwargs.get("use_vmap"))
    if packed:
        packed, ids = _packing(mask_function, local_size, tracing)
        causal = packed
    longest = max(q_offset + q_length, kv_offset + kv_length)
    inside = causal_mask_function if packed else mask_function
    is_band, window, chunk = _band(inside, causal, allow_is_bidirectional_skip, local_size, longest, config)
    if chunk is not None and not _starts_a_chunk(chunk, kv_offset, attention_mask, tracing):
        return write()
    seqlen_k = q_offset + q_length - kv_offset if causal else kv_length
    aligned = causal or window is None or q_offset - kv_offset == kv_length - q_length
    if not is_band or not aligned or not 0 < seqlen_k <= kv_length:
        return write()
    found = LazyMask(write, shape, causal, seqlen_k)
    found.window, found.chunk, found.packed, found.ids = window, chunk, packed, ids
    if attention_mask is not None:
        keys = attention_mask[:, kv_offset : kv_offset + seqlen_k]
        keys = nn.functional.pad(keys, (0, seqlen_k - keys.shape[1]))
        found.keys = keys if tracing or not keys.all() else None
    if window is not None or chunk is not None or packed or seqlen_k < kv_length or (causal and q_length > 1):
        return found
    if found.keys is not None:
        return found.keys[:, None, None, :].expand(found.shape)
    # With None, a layer would use its own is_causal and sliding_window, which not every layer has.
    return found


def _shared(
    shared: ranks.Shared,
    function: Callable,
    local_size: int | None,
    kind: tuple[bool, bool],
    shape: tuple[int, ...],
    config: Any,
) -> LazyMask:
    """The mask of a sequence over ranks. The gaps in a rank's positions look like packing, but are not."""
    causal, bidirectional = kind
    if not (causal or bidirectional) and _packing(function, local_size, False)[0]:
        function, causal = causal_mask_function, True
    is_band, window, chunk = _band(function, causal, bidirectional, local_size, shared.longest, config)
    if not is_band or chunk is not None:
        raise ranks.refuse("a mask that is neither causal nor full, nor a window of either")
    found = LazyMask(ranks.whole_mask, shape, causal, shape[3])
    found.window, found.shared = window, shared
    return found


def _is_filled(causal: LazyMask, length: Tensor | int, attention_mask: Tensor | None, first: int, device: Any) -> bool:
    """Whether a mask is causal over ``length`` keys from ``first``, except for left padding; records it in the mask."""
    if torch.is_grad_enabled() or (attention_mask is not None and is_tracing(attention_mask)):
        return False
    if isinstance(length, int):
        length = torch.full((), length, device=device)
    causal.lengths = length.to(torch.int32).expand(causal.shape[0]).contiguous()
    if attention_mask is None:
        return True
    seen = attention_mask[:, first : first + causal.shape[3]]
    # Each step checks the mask, first for any padding, which takes few operations.
    if seen.all() & (length <= seen.shape[1]):
        return True
    keys = torch.arange(seen.shape[1], dtype=torch.int32, device=seen.device)
    causal.leftpad = seen.int().argmax(1).int()
    seen_or_behind = seen | (keys >= causal.lengths[:, None])
    return bool((seen_or_behind == (keys >= causal.leftpad[:, None])).all() & (length <= len(keys)))


def _band(
    function: Callable, causal: bool, bidirectional: bool, local_size: int | None, longest: int, config: Any
) -> tuple[bool, tuple[int, int] | None, int | None]:
    """Whether a mask is causal or full attention, apart from a window or a chunk; and the window and the chunk.

    transformers sets a flag that a mask is causal or bidirectional if it is so apart from the window or chunk of
    local_size.
    """
    if not (causal or bidirectional):
        return False, None, None
    if local_size is None:
        return function is (causal_mask_function if causal else bidirectional_mask_function), None, None
    if longest <= local_size:
        return True, None, None
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if (local_size == window) == (local_size == chunk) or (local_size == chunk and not causal):
        return False, None, None
    if local_size == chunk:
        return True, None, chunk
    return True, (local_size - 1, 0) if causal else (local_size, local_size), None


def _starts_a_chunk(chunk: int, kv_offset: int, attention_mask: Any, tracing: bool) -> bool:
    """Whether a layer's first key begins a chunk: transformers counts chunks from the first key that is not padding."""
    if kv_offset % chunk:
        return False
    return attention_mask is None or (not tracing and bool(attention_mask[:, 0].all()))


def _packing(function: Callable, local_size: int | None, tracing: bool) -> tuple[bool, Tensor | None]:
    """Whether a mask is for packed sequences, and the number of each token's sequence, ``(batch, seqlen)``."""
    if tracing:  # the function cannot be inspected; only packing joins masks without a size
        return function.__name__ == "and_mask" and local_size is None, None
    parts, made_by = _parts(function)
    if made_by != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return False, None
    return True, inspect.getclosurevars(parts[0]).nonlocals["packed_sequence_mask"]


def _is_causal_window(function: Callable) -> bool:
    """Whether ``sliding_window_causal_mask_function`` made a mask."""
    return _parts(function)[1] == ["sliding_window_overlay", "causal_mask_function"]


def _parts(function: Callable) -> tuple[Sequence[Callable], list[str]]:
    """The masks that a mask combines by "and", and the functions that made them."""
    if function.__name__ != "and_mask":
        return (), []
    parts = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
    return parts, [part.__qualname__.partition(".")[0] for part in parts]
