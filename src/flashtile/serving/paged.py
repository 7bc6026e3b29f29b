"""Pages of keys and values for all layers of a model, and the sequences that hold them: bookkeeping without kernels."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import DTYPES, check_tensor, integer
from flashtile.call.cached_arguments import EIGHT_BITS
from flashtile.core.errors import InvalidInputError, shown


class OutOfPagesError(RuntimeError):
    """Raised by an append if there are too few free pages. Nothing has changed.

    Args:
        needed: Pages that the append needs.
        free: Pages that are free.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)  # the arguments from which pickle and copy rebuild it
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"{self.needed} pages are needed, {self.free} are free: free a sequence, or give the cache more pages"


@dataclass(frozen=True)
class PagedBatch:
    """The sequences of one call as arguments of ``flashtile.attention_with_kvcache`` with packed queries.

    The attributes have the arguments' names, so that ``**batch`` passes them.

    Attributes:
        page_table: ``(batch, max_pages)`` int32; past a sequence's last page -1, or in fixed buffers any number.
        cache_seqlens: ``(batch,)`` int32, lengths before the append; in fixed buffers -1 for a missing sequence.
        cu_seqlens_q: ``(batch + 1,)`` int32, bounds of the appended tokens, packed in the order of the sequences.
        max_seqlen_q: The most tokens that a sequence appends; in fixed buffers the most that it may append.
    """

    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int

    def keys(self) -> tuple[str, ...]:
        """The arguments' names. ``**batch`` needs this and ``batch[name]``."""
        return "page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q"

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


class PagedKVCache:
    """Keys and values of all layers of a model, in pages, which sequences take as they grow and share after a fork.

    A sequence is the int that ``allocate`` or ``fork`` returns; every sequence has a different one. ``append`` makes
    room for the next tokens. It returns the arguments with which ``flashtile.attention_with_kvcache``, called once for
    each layer, writes and reads them. Lengths and page numbers are kept on the host, so nothing here waits for the
    device. Pages are copied on the current stream, which must be the stream that attends.

    Args:
        num_layers: Layers of the model. A page holds the same positions in all of them.
        num_pages: Pages for all sequences together.
        num_heads_kv: Key and value heads.
        head_dim: Width of keys.
        page_size: Tokens in a page.
        head_dim_v: Width of values; head_dim by default.
        dtype: float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2; PyTorch's default dtype by default.
        device: Device of the pages.
        k_scale: With float8 alone: float32 ``(num_layers, num_heads_kv)``, or ``(num_layers, num_pages,
                num_heads_kv)``; a key is its 8-bit number times the scale. 1 by default. A scale by page belongs to the
                page: set
                it before the page's first key is written; a copied page has the same scale.
        v_scale: The same for values.

    Attributes:
        k: ``(num_layers, num_pages, page_size, num_heads_kv, head_dim)``, not initialised; ``k[layer]`` is a layer's
            k_cache.
        v: The same for values, with head_dim_v.
        k_scale: As given, on the device; None without float8.
        v_scale: The same for values.

    Raises:
        InvalidInputError: Names the argument that is wrong.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_heads_kv: int,
        head_dim: int,
        *,
        page_size: int = 16,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (*DTYPES, *EIGHT_BITS):
            must = "must be float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2"
            raise InvalidInputError("dtype", f"is {shown(dtype)}, {must}")
        self.page_size = integer("page_size", page_size)
        self.num_pages = integer("num_pages", num_pages)
        shape = (
            integer("num_layers", num_layers),
            self.num_pages,
            self.page_size,
            integer("num_heads_kv", num_heads_kv),
        )
        widths = integer("head_dim", head_dim), integer("head_dim_v", head_dim if head_dim_v is None else head_dim_v)
        self.k, self.v = (torch.empty(*shape, width, dtype=dtype, device=device) for width in widths)
        self.k_scale, self.v_scale = self._scale("k_scale", k_scale), self._scale("v_scale", v_scale)
        # The tensors to copy with a page: their second dimension is pages.
        scales = (scale for scale in (self.k_scale, self.v_scale) if scale is not None and scale.dim() == 3)
        self._paged = (self.k, self.v, *scales)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._references = [0] * self.num_pages
        # The pages of each sequence, as many as its length needs. An array's bytes are a row of the page table.
        self._pages: dict[int, array[int]] = {}
        self._lengths: dict[int, int] = {}
        self._made = 0

    def __repr__(self) -> str:
        layers, pages, page_size, heads, width = self.k.shape
        what = f"num_layers={layers}, num_pages={pages}, num_heads_kv={heads}, head_dim={width}, page_size={page_size}"
        place = f"{str(self.k.dtype).removeprefix('torch.')} on {self.k.device}"
        return f"PagedKVCache({what}: {place}, {len(self._pages)} sequences, {len(self._free)} pages free)"

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence."""
        return self._lengths[self._known(sequence)]

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in its order. Other sequences may share some of them."""
        return tuple(self._pages[self._known(sequence)])

    def allocate(self) -> int:
        """A new sequence of length 0, which holds no pages yet."""
        return self._add(array("i"), 0)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the tokens of another one, and shares their pages.

        A fork takes no page. If the last shared page is not full, the sequence that appends first gets a copy of it.

        Args:
            sequence: The sequence to share with; it may go on growing, or be freed.
            length: Tokens to share; all by default.
        """
        length = self._prefix(sequence, length)
        shared = self._pages[sequence][: self._pages_for(length)]
        for page in shared:
            self._references[page] += 1
        return self._add(shared, length)

    def truncate(self, sequence: int, length: int) -> None:
        """Drops all tokens after the first ``length``, such as a rejected draft, and releases their pages."""
        length, pages = self._prefix(sequence, length), self._pages[sequence]
        self._release(pages[self._pages_for(length) :])
        del pages[self._pages_for(length) :]
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        """Removes a sequence. Pages that no other sequence shares become free."""
        self._release(self._pages.pop(self._known(sequence)))
        del self._lengths[sequence]

    def pages_needed(self, counts: Mapping[int, int] | Sequence[int]) -> int:
        """The number of pages that ``append(counts)`` needs: new ones, and copies of shared pages that are not full."""
        counts = _counts(counts)
        needed, writers = 0, Counter[int]()
        for sequence, count in counts.items():
            length, pages = self._lengths[self._known(sequence)], self._pages[sequence]
            needed += self._pages_for(length + integer("counts", count, 0)) - len(pages)
            if count and length % self.page_size:
                writers[pages[-1]] += 1
        # If all sequences that share a page append to it, the last one need not copy it.
        return needed + sum(min(count, self._references[page] - 1) for page, count in writers.items())

    def append(self, counts: Mapping[int, int] | Sequence[int], out: PagedBatch | None = None) -> PagedBatch:
        """Makes room for the next tokens of some sequences; for none if pages are missing.

        Args:
            counts: For each sequence of the batch, in its order, the number of tokens that follow; it may be 0. A list
                of sequences means one token for each.
            out: Fixed buffers from ``buffers`` to write into. Entries beyond the sequences in counts get no tokens and
                length -1, which tells a call that there is no sequence.

        Returns:
            The arguments of this step's calls; ``out`` itself if it is given. Without ``out``, ``max_pages`` is a power
            of two, so that calls have few different layouts.

        Raises:
            OutOfPagesError: There are too few free pages; nothing has changed.
            InvalidInputError: A sequence is unknown, a count is negative, or ``out`` is too small.
        """
        counts = _counts(counts)
        needed = self.pages_needed(counts)
        before = [self._lengths[sequence] for sequence in counts]
        longest = max((self._pages_for(self._lengths[s] + count) for s, count in counts.items()), default=0)
        if out is not None:
            _check_room(out, len(counts), longest, max(counts.values(), default=0))
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free))
        for sequence, count in counts.items():
            self._grow(sequence, count)
        bounds, most = [0, *accumulate(counts.values())], max(counts.values(), default=0)
        if out is None:
            width = 1 << max(longest - 1, 0).bit_length()
            host = self._table(counts, width), self._host(before), self._host(bounds)
            table, lengths, cu_seqlens_q = (each.to(self.k.device, non_blocking=True) for each in host)
            return PagedBatch(table, lengths, cu_seqlens_q, most)
        spare = out.cache_seqlens.shape[0] - len(counts)
        out.page_table[: len(counts), :longest].copy_(self._table(counts, longest), non_blocking=True)
        out.cache_seqlens.copy_(self._host(before + [-1] * spare), non_blocking=True)
        out.cu_seqlens_q.copy_(self._host(bounds + bounds[-1:] * spare), non_blocking=True)
        return out

    def buffers(self, max_batch: int, max_pages: int, max_seqlen_q: int = 1) -> PagedBatch:
        """A batch of fixed tensors, for calls that a CUDA graph replays; ``append`` fills it.

        It starts without sequences, so that the calls of a capture append nothing.

        Args:
            max_batch: The most sequences.
            max_pages: The most pages of a sequence.
            max_seqlen_q: The most tokens that a sequence appends.
        """
        batch, pages = integer("max_batch", max_batch), integer("max_pages", max_pages)
        table, lengths, bounds = (
            torch.full(shape, value, dtype=torch.int32, device=self.k.device)
            for shape, value in (((batch, pages), -1), ((batch,), -1), ((batch + 1,), 0))
        )
        return PagedBatch(table, lengths, bounds, integer("max_seqlen_q", max_seqlen_q))

    def _scale(self, name: str, scale: Tensor | None) -> Tensor | None:
        layers, pages, _, heads, _ = self.k.shape
        if self.k.dtype not in EIGHT_BITS:
            if scale is not None:
                raise InvalidInputError(name, f"is given, but dtype is {self.k.dtype}: it goes with float8")
            return None
        if scale is None:
            return torch.ones(layers, heads, dtype=torch.float32, device=self.k.device)
        check_tensor(name, scale)
        if scale.dtype != torch.float32:
            raise InvalidInputError(name, f"dtype is {scale.dtype}, must be float32")
        if scale.shape not in ((layers, heads), (layers, pages, heads)):
            raise InvalidInputError(
                name, f"has shape {tuple(scale.shape)}, must be {(layers, heads)} or, by page, {(layers, pages, heads)}"
            )
        return scale.to(self.k.device)

    def _known(self, sequence: int) -> int:
        if sequence not in self._pages:
            raise InvalidInputError("sequence", f"is {shown(sequence)}, which was never allocated, or has been freed")
        return sequence

    def _prefix(self, sequence: int, length: int | None) -> int:
        whole = self.length(sequence)
        if length is not None and integer("length", length, 0) > whole:
            raise InvalidInputError("length", f"is {length}, but the sequence has {whole} tokens")
        return whole if length is None else length

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _add(self, pages: array[int], length: int) -> int:
        sequence = self._made
        self._made += 1
        self._pages[sequence], self._lengths[sequence] = pages, length
        return sequence

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, pages: array[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def _grow(self, sequence: int, count: int) -> None:
        length, pages = self._lengths[sequence], self._pages[sequence]
        if count and length % self.page_size and self._references[pages[-1]] > 1:
            shared, pages[-1] = pages[-1], self._take()
            self._references[shared] -= 1
            for tensor in self._paged:
                tensor[:, pages[-1]].copy_(tensor[:, shared])
        while len(pages) < self._pages_for(length + count):
            pages.append(self._take())
        self._lengths[sequence] = length + count

    def _table(self, sequences: Collection[int], width: int) -> Tensor:
        """The page table of sequences on the host, made by joining bytes: a list of ints would take long."""
        rows = bytearray().join(self._pages[each].tobytes().ljust(4 * width, b"\xff") for each in sequences)
        table = torch.frombuffer(rows, dtype=torch.int32) if rows else torch.empty(0, dtype=torch.int32)
        return self._pinned(table.view(len(sequences), width))

    def _host(self, numbers: list[int]) -> Tensor:
        return self._pinned(torch.tensor(numbers, dtype=torch.int32))

    def _pinned(self, numbers: Tensor) -> Tensor:
        """The numbers in pinned memory, from which a copy to the device does not block; on a CPU the numbers."""
        return numbers.pin_memory() if self.k.device.type == "cuda" else numbers


def _counts(counts: Mapping[int, int] | Sequence[int]) -> Mapping[int, int]:
    if isinstance(counts, Mapping):
        return counts
    if not isinstance(counts, Sequence) or len(set(counts)) < len(counts):
        raise InvalidInputError("counts", f"is {shown(counts)}, must be tokens by sequence, or different sequences")
    return dict.fromkeys(counts, 1)


def _check_room(out: PagedBatch, batch: int, pages: int, seqlen_q: int) -> None:
    for name, has, room in (
        ("sequences", batch, out.page_table.shape[0]),
        ("pages of a sequence", pages, out.page_table.shape[1]),
        ("tokens of a sequence", seqlen_q, out.max_seqlen_q),
    ):
        if has > room:
            raise InvalidInputError("out", f"has room for {room} {name}, but the batch has {has}")
