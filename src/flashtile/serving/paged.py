"""Pages of keys and values for all layers of a model, and who holds which: bookkeeping, with nothing of kernels."""

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
    """An append for which pages are missing; nothing has changed.

    Args:
        needed: Pages that the append would take.
        free: Pages there are.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)  # the arguments from which pickle and copy rebuild it
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"{self.needed} pages are needed, {self.free} are free: free a sequence, or give the cache more pages"


@dataclass(frozen=True)
class PagedBatch:
    """The sequences of one call, as arguments of ``flashtile.attention_with_kvcache`` with packed queries.

    Attributes have the arguments' names, so that ``**batch`` passes them.

    Attributes:
        page_table: ``(batch, max_pages)`` int32; -1, or anything in fixed buffers, past a sequence's last page.
        cache_seqlens: ``(batch,)`` int32, lengths before the append; in fixed buffers -1 where there is no sequence.
        cu_seqlens_q: ``(batch + 1,)`` int32, bounds of the appended tokens, packed in the order of the sequences.
        max_seqlen_q: The most tokens that a sequence appends; in fixed buffers, that one may append.
    """

    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int

    def keys(self) -> tuple[str, ...]:
        """The arguments' names; with ``batch[name]`` all that ``**batch`` needs."""
        return "page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q"

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


class PagedKVCache:
    """Keys and values of all layers of a model, in pages that sequences take as they grow and share after a fork.

    A sequence is the int that ``allocate`` or ``fork`` returns; no two get the same. ``append`` makes room for the next
    tokens and returns what ``flashtile.attention_with_kvcache``, called once for each layer, needs to write and read
    them. Lengths and page numbers are kept on the host, so nothing here waits for the device; pages are copied on the
    current stream, which must be the one that attends.

    Args:
        num_layers: Layers of the model; a page holds the same positions in all of them.
        num_pages: Pages there are for all sequences.
        num_heads_kv: Key and value heads.
        head_dim: Width of keys.
        page_size: Tokens in a page.
        head_dim_v: Width of values; head_dim by default.
        dtype: float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2; PyTorch's default dtype by default.
        device: Device of the pages.
        k_scale: With float8 alone: float32 ``(num_layers, num_heads_kv)``, or ``(num_layers, num_pages,
            num_heads_kv)``; a key is its 8 bits times the scale. 1 by default. Scales by page belong to the page: set
            one before its first key is written; a copied page takes its scale along.
        v_scale: The same for values.

    Attributes:
        k: ``(num_layers, num_pages, page_size, num_heads_kv, head_dim)``, not initialised; ``k[layer]`` is a layer's
            k_cache.
        v: The same for values, with head_dim_v.
        k_scale: As given, on the device; None without float8.
        v_scale: The same for values.

    Raises:
        InvalidInputError: Naming the argument that is wrong.

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
        # Copied with a page: all that has a dimension of pages behind that of layers.
        scales = (scale for scale in (self.k_scale, self.v_scale) if scale is not None and scale.dim() == 3)
        self._paged = (self.k, self.v, *scales)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._references = [0] * self.num_pages
        # Of each sequence its pages, as many as its length needs. An array's bytes are a row of the page table.
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
        """Tokens of a sequence."""
        return self._lengths[self._known(sequence)]

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in its order; some may be shared with others."""
        return tuple(self._pages[self._known(sequence)])

    def allocate(self) -> int:
        """A new sequence of length 0, which holds no pages yet."""
        return self._add(array("i"), 0)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the tokens of another, and shares the pages they are in.

        It takes no page. Where the last shared page is not full, whichever of the two appends first gets a copy of it.

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
        """Drops all but the first ``length`` tokens, such as a draft that was rejected, and the pages they leave."""
        length, pages = self._prefix(sequence, length), self._pages[sequence]
        self._release(pages[self._pages_for(length) :])
        del pages[self._pages_for(length) :]
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        """Forgets a sequence; pages that no other shares can be taken again."""
        self._release(self._pages.pop(self._known(sequence)))
        del self._lengths[sequence]

    def pages_needed(self, counts: Mapping[int, int] | Sequence[int]) -> int:
        """Pages that ``append(counts)`` would take: new ones, and copies of shared pages that are partly filled."""
        counts = _counts(counts)
        needed, writers = 0, Counter[int]()
        for sequence, count in counts.items():
            length, pages = self._lengths[self._known(sequence)], self._pages[sequence]
            needed += self._pages_for(length + integer("counts", count, 0)) - len(pages)
            if count and length % self.page_size:
                writers[pages[-1]] += 1
        # Who comes last need not copy, if all that share a page append to it.
        return needed + sum(min(count, self._references[page] - 1) for page, count in writers.items())

    def append(self, counts: Mapping[int, int] | Sequence[int], out: PagedBatch | None = None) -> PagedBatch:
        """Makes room for the next tokens of some sequences: for all of them, or for none if pages are missing.

        Args:
            counts: For each sequence of the batch, in its order, how many tokens follow; 0 is allowed. A
                list of sequences is one token for each.
            out: Fixed buffers from ``buffers`` to write into. Sequences that they have room for beyond those in
                counts get length -1, by which a call knows that they are not there, and no tokens.

        Returns:
            The arguments of this step's calls; ``out`` itself if given. ``max_pages`` is a power of two otherwise, so
            that the layouts of calls are few.

        Raises:
            OutOfPagesError: If the free pages are too few; nothing has changed.
            InvalidInputError: If a sequence is unknown, a count is negative, or ``out`` is too small.
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
        """A batch whose tensors stay where they are, for calls that a CUDA graph replays; ``append`` fills it.

        It begins without sequences, so that the calls of a capture append nothing.

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
        """The page table of sequences on the host; rows of bytes are joined, since a list of ints would take long."""
        rows = bytearray().join(self._pages[each].tobytes().ljust(4 * width, b"\xff") for each in sequences)
        table = torch.frombuffer(rows, dtype=torch.int32) if rows else torch.empty(0, dtype=torch.int32)
        return self._pinned(table.view(len(sequences), width))

    def _host(self, numbers: list[int]) -> Tensor:
        return self._pinned(torch.tensor(numbers, dtype=torch.int32))

    def _pinned(self, numbers: Tensor) -> Tensor:
        """From pinned memory a copy to the device does not wait for it."""
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
