"""SGLang's attention backend class: one call over its pool for prompts, chunks and single tokens.

SGLang's pool holds keys and values by token, ``(slots, num_heads_kv, head_dim)``, which are pages of ``--page-size``
tokens. SGLang lets the backend write them. ``req_to_token`` has the slot of each token of a request.

Source: SGLang 0.5.23, ``srt/layers/attention/base_attn_backend.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

import flashtile
from flashtile.core.errors import UnsupportedError
from flashtile.integrations._calls import Calls

calls = Calls()


@dataclasses.dataclass
class Metadata:
    """The sequences of one step.

    Attributes:
        cache_seqlens: ``(batch,)`` int32, new tokens included.
        cu_seqlens_q: ``(batch + 1,)`` int32.
        page_table: ``(batch, pages)`` int32.
        max_seqlen_q: The most new tokens of a request.
        window_table: The same pages in the pool of layers with a window, if these have a separate pool.
        window_slots: The slots for those layers' new keys, ``(tokens,)``.
    """

    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    page_table: Tensor
    max_seqlen_q: int
    window_table: Tensor | None = None
    window_slots: Tensor | None = None

    def into(self, buffers: Metadata) -> Metadata:
        """Copies the step into fixed tensors, which graphs need."""
        kept: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            given, buffer = getattr(self, field.name), getattr(buffers, field.name)
            if isinstance(given, Tensor):
                given = buffer[: len(given)].copy_(given)
            kept[field.name] = given
        return Metadata(**kept)


class Backend(AttentionBackend):
    """The backend for ``--attention-backend flashtile``."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device, self.page_size = runner.device, runner.page_size
        # Models read both pools by these names.
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.invariant: Literal[False, "strict"] = (
            "strict" if runner.server_args.enable_deterministic_inference else False
        )
        self.most_pages = -(-runner.model_config.context_len // self.page_size)
        pool = self.token_to_kv_pool
        self.has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self.forward_metadata: Metadata | None = None
        self._buffers: Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes a step's record."""
        self.forward_metadata = self._metadata(forward_batch, None)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Makes a step's record in the tensors that a graph reads. The graph records none of this."""
        found = self._metadata(forward_batch, None if self._buffers is None else self.most_pages)
        self.forward_metadata = found if self._buffers is None else found.into(self._buffers)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the tensors that graphs read."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        table, slots = (max_bs, self.most_pages), zeros(max_num_tokens, dtype=torch.int64)
        self._buffers = Metadata(zeros(max_bs), zeros(max_bs + 1), zeros(*table), 1, zeros(*table), slots)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a request that only fills a graph."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels beside this backend."""
        return str(self.device) != "cpu"

    def _metadata(self, batch: Any, pages: int | None) -> Metadata:
        """A step's record, with tables of ``pages`` pages; None for as many as needed, if the host knows the number."""
        if batch.spec_info is not None:
            raise UnsupportedError("SGLang: flashtile has no speculative decoding here")
        count, mode = batch.batch_size, batch.forward_mode
        if mode.is_decode_or_idle():
            bounds, longest = torch.arange(count + 1, dtype=torch.int32, device=self.device), 1
        else:
            bounds = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=bounds[1:])
            longest = max(batch.extend_seq_lens_cpu)
        if pages is None:
            lengths = batch.seq_lens_cpu
            pages = self.most_pages if lengths is None else -(-int(lengths.max()) // self.page_size)
        firsts = torch.arange(pages, device=self.device) * self.page_size
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], firsts[None]]
        found = Metadata(batch.seq_lens.to(torch.int32), bounds, self._page_of(slots), longest)
        if self.has_window_pool:
            moved = self.token_to_kv_pool.translate_loc_from_full_to_swa
            found.window_table = self._page_of(moved(slots))
            found.window_slots = None if batch.out_cache_loc is None else moved(batch.out_cache_loc)
        return found

    def _page_of(self, slots: Tensor) -> Tensor:
        return (slots // self.page_size).to(torch.int32)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """A layer's attention, ``(tokens, num_heads_q * head_dim_v)``, for prompts, chunks and mixed steps."""
        m = self.forward_metadata
        assert m is not None
        packing = {"cu_seqlens_q": m.cu_seqlens_q, "max_seqlen_q": m.max_seqlen_q}
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs | packing).flatten(1)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """A layer's attention for one token of each request."""
        q = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs).flatten(1)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, saves: bool, given: dict[str, Any]
    ) -> Tensor:
        unknown = given.keys() - {"sinks", "cu_seqlens_q", "max_seqlen_q"}
        if unknown or layer.is_cross_attention:
            raise UnsupportedError(f"SGLang: flashtile has no {', '.join(unknown) or 'cross attention'} here")
        m, pool = self.forward_metadata, self.token_to_kv_pool
        assert m is not None
        calls.serve()
        if saves and k is not None:
            scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, m.window_slots), k, v, *scales)
        k_cache, v_cache = (
            self._pages(x) for x in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        in_window_pool = self.has_window_pool and pool.layers_mapping[layer.layer_id][1]
        if k_cache.dtype.itemsize == 1 and layer.k_scale is not None:
            given |= {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        causal, left = layer.attn_type == AttentionType.DECODER, layer.sliding_window_size
        if left is not None and left >= 0:  # without the query itself
            given |= {"window_size": (left, 0 if causal else left)}
        return flashtile.attention_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=m.cache_seqlens,
            page_table=m.window_table if in_window_pool else m.page_table,
            causal=causal, softmax_scale=layer.scaling, softcap=layer.logit_cap or 0.0, batch_invariant=self.invariant,
            **given | {"sinks": None if given.get("sinks") is None else given["sinks"].detach()},
        )  # fmt: skip

    def _pages(self, slots: Tensor) -> Tensor:
        """The slots as pages ``(pages, page_size, num_heads_kv, head_dim)``, a view."""
        count = slots.shape[0] // self.page_size
        return slots[: count * self.page_size].view(count, self.page_size, *slots.shape[1:])
