"""Serves a ``CharGPT`` by continuous batching over a paged cache: requests join and leave between any two steps.

A step is one forward over packed rows: the newest token of each request that writes, and of prompts that are still
being read as many tokens as there is room for. Requests that begin alike share the pages of their prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor

import flashtile
from flashtile.serving import PagedBatch, PagedKVCache
from flashtile_lab.examples.char_gpt import Attention, Block, CharGPT
from flashtile_lab.examples.plain_loops import Request, choose


class Server:
    """Runs up to ``max_batch`` requests at once, up to ``max_rows`` tokens a step; ``fixed``: with a ``FixedStep``."""

    def __init__(
        self, model: CharGPT, num_pages: int = 512, max_batch: int = 16, max_rows: int = 64, fixed: bool | None = None
    ) -> None:
        config, weight = model.config, model.head.weight
        shape = config.num_layers, num_pages, config.num_heads, config.d_model // config.num_heads
        self.model, self.max_batch, self.max_rows = model, max_batch, max(max_batch, max_rows)
        self.cache = PagedKVCache(*shape, dtype=weight.dtype, device=weight.device)
        positions = torch.arange(num_pages * self.cache.page_size, device=weight.device)
        angles = cast(Block, model.blocks[0]).rotate.angles
        self.cos, self.sin = angles(positions, torch.promote_types(weight.dtype, torch.float32))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.decode = FixedStep(self) if fixed or (fixed is None and weight.is_cuda) else None

    def share(self, prefix: Request) -> None:
        """Reads tokens that other requests begin with, and keeps them."""
        prefix.sequence = self.cache.allocate()
        while unread := self._unread(prefix):
            self.forward({prefix: unread[: self.max_rows]})

    def submit(self, *requests: Request) -> None:
        """Puts requests in the queue, each with at least one token behind those of its prefix."""
        self.waiting.extend(requests)

    def stream(self) -> Iterator[tuple[Request, int]]:
        """Each token as it is written, until no request is left; more may be submitted meanwhile."""
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[tuple[Request, int]]:
        """Runs the model once, and returns what was written."""
        self._admit()
        while not self._has_room(rows := self._rows()) and len(self.running) > 1:
            # The newest gives its pages to the others. It will be read again, with what it has written.
            self.waiting.appendleft(self.running[-1])
            self._leave(self.running[-1])
        logits = self.forward(rows)
        read = {i: request for i, request in enumerate(rows) if not self._unread(request)}
        written = list(zip(read.values(), choose(logits[[*read]], [*read.values()]), strict=True))
        for request, token in written:
            request.tokens.append(token)
            if len(request.tokens) >= request.length:
                self._leave(request)
        return written

    @torch.inference_mode()
    def forward(self, rows: dict[Request, list[int]]) -> Tensor:
        """Appends tokens to requests; logits ``(len(rows), vocab_size)`` after the last token of each."""
        counts = {request.sequence: len(row) for request, row in rows.items()}
        tokens = torch.tensor([*chain(*rows.values())])
        if self.decode is not None and max(counts.values()) == 1:
            return self.decode(counts, tokens)
        batch = self.cache.append(counts)
        return self.model(tokens.to(self.cache.k.device), self.attentions(batch))[batch.cu_seqlens_q[1:] - 1]

    def attentions(self, batch: PagedBatch) -> list[Attention]:
        """What each block attends with: the pages of its layer."""
        return [partial(self._attend, batch, layer) for layer in range(self.model.config.num_layers)]

    def _attend(self, batch: PagedBatch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(
            q, self.cache.k[layer], self.cache.v[layer], k=k, v=v, rotary_cos=self.cos, rotary_sin=self.sin,
            **batch,
        )  # fmt: skip

    def _unread(self, request: Request) -> list[int]:
        """The tokens of a request that are not in the cache yet."""
        return request.tokens[self.cache.length(request.sequence) :]

    def _rows(self) -> dict[Request, list[int]]:
        """What each request adds in this step; those that write come first, so that all of them have room."""
        rows, room = {}, self.max_rows
        for request in sorted(self.running, key=lambda each: len(self._unread(each)) > 1):
            if row := self._unread(request)[:room]:
                rows[request] = row
            room -= len(row)
        return rows

    def _has_room(self, rows: dict[Request, list[int]]) -> bool:
        counts = {request.sequence: len(row) for request, row in rows.items()}
        return self.cache.pages_needed(counts) <= self.cache.num_free_pages

    def _admit(self) -> None:
        """Lets requests in as long as there are pages for all that they have to read."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            request.sequence = self.cache.fork(request.prefix.sequence) if request.prefix else self.cache.allocate()
            if self.running and not self._has_room({request: self._unread(request)}):
                self.cache.free(request.sequence)
                break
            self.running.append(self.waiting.popleft())

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request.sequence)


class FixedStep:
    """Steps in which every sequence adds one token, in buffers that stay where they are: on a GPU a CUDA graph."""

    @torch.inference_mode()
    def __init__(self, server: Server) -> None:
        self._cache, device = server.cache, server.cache.k.device
        self._batch = self._cache.buffers(server.max_batch, self._cache.num_pages)
        self._tokens = torch.zeros(server.max_batch, dtype=torch.int64, device=device)
        self._run = partial(server.model, self._tokens, server.attentions(self._batch))
        self._graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if self._graph is not None:
            self._run()  # builds the kernels; there are no sequences yet, so nothing is appended
            with torch.cuda.graph(self._graph):
                self._logits = self._run()

    def __call__(self, counts: dict[int, int], tokens: Tensor) -> Tensor:
        """Logits ``(batch, vocab_size)`` after one token ``(batch,)`` of each sequence, which is appended to it."""
        self._cache.append(counts, out=self._batch)
        self._tokens[: len(tokens)].copy_(tokens)
        if self._graph is None:
            return self._run()[: len(tokens)]
        self._graph.replay()
        return self._logits[: len(tokens)]
