"""SGLang's attention backend class: one call over its pool for prompts, chunks, single tokens and drafts.

SGLang's pool holds keys and values by token, ``(slots, num_heads_kv, head_dim)``, which are pages of ``--page-size``
tokens. SGLang lets the backend write them. ``req_to_token`` has the slot of each token of a request.

A round of EAGLE has three parts. The drafter extends ``topk`` branches of each request by a token a step
(``DraftSteps``). The target computes all drafts of a request in one step, as a tree behind its context. The drafter
reads what the target accepted, which is a chunk of a prompt.

Source: SGLang 0.5.23, ``srt/layers/attention/base_attn_backend.py``, ``srt/speculative/eagle_worker_v2.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

import flashtile
from flashtile.core.errors import UnsupportedError
from flashtile.integrations._calls import Calls
from flashtile.serving.trees import tree_from_sglang

calls = Calls()
# EAGLE, EAGLE3, NEXTN and STANDALONE: the drafter's steps, what it reads of the target's, the target's own step.
_SPECULATES = ("EAGLE_DRAFT", "EAGLE_DRAFT_EXTEND", "EAGLE_VERIFY")


@dataclasses.dataclass
class Metadata:
    """The sequences of one step.

    Attributes:
        cache_seqlens: ``(batch,)`` int32, new tokens included.
        cu_seqlens_q: ``(batch + 1,)`` int32; None if every request has ``max_seqlen_q`` new tokens.
        page_table: ``(batch, pages)`` int32.
        max_seqlen_q: The most new tokens of a request.
        window_table: The same pages in the pool of layers with a window, if these have a separate pool.
        window_slots: The slots for those layers' new keys, ``(tokens,)``.
        tree_words: What each new token sees of its request's, ``(tokens,)`` int64; None if it is what comes before it.
    """

    cache_seqlens: Tensor
    cu_seqlens_q: Tensor | None
    page_table: Tensor
    max_seqlen_q: int
    window_table: Tensor | None = None
    window_slots: Tensor | None = None
    tree_words: Tensor | None = None

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
    """The backend for ``--attention-backend flashtile``.

    Args:
        runner: SGLang's model runner.
        topk: The branches of a request, which have its pages and behind them their own.
        num_steps: The most tokens of a branch.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int = 1, num_steps: int = 0) -> None:
        super().__init__()
        self.topk, self.num_steps = topk, num_steps
        self.device, self.page_size = runner.device, runner.page_size
        # Models read both pools by these names.
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.invariant: Literal[False, "strict"] = (
            "strict" if runner.server_args.enable_deterministic_inference else False
        )
        # Drafts go past the longest context.
        self.most_pages = -(-self.req_to_token_pool.req_to_token.shape[1] // self.page_size)
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
        words = torch.zeros_like(slots)
        self._buffers = Metadata(zeros(max_bs), zeros(max_bs + 1), zeros(*table), 1, zeros(*table), slots, words)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a request that only fills a graph."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels beside this backend."""
        return str(self.device) != "cpu"

    @property
    def verify_mask(self) -> Any:
        """Asks SGLang for masks of a request's drafts alone, in a tensor of its own."""
        from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask

        return VerifyMask(torch.empty(0, dtype=torch.bool, device=self.device), TreeMaskMode.QLEN_ONLY, max_bs=0)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Does nothing: SGLang makes the step's record after the drafts."""

    def _metadata(self, batch: Any, pages: int | None) -> Metadata:
        """A step's record, with tables of ``pages`` pages; None for as many as needed, if the host knows the number."""
        spec, count, mode = batch.spec_info, batch.batch_size, batch.forward_mode
        if spec is not None and spec.spec_input_type.name not in _SPECULATES:
            raise UnsupportedError(f"SGLang: flashtile has no {spec.spec_input_type.name} here, EAGLE's drafts alone")
        lengths, ahead, bounds, longest, words = batch.seq_lens, self.num_steps, None, 1, None
        if mode.is_target_verify():
            ahead = longest = spec.draft_token_num
            lengths = lengths + ahead
            if spec.topk > 1:
                # A graph has more requests than the mask, or is recorded with a longer one. Each row sees itself.
                missing = count * ahead**2 - spec.custom_mask.numel()
                words = tree_from_sglang(F.pad(spec.custom_mask, (0, missing)), ahead)
                words = (words | 1 << torch.arange(ahead, device=self.device)).flatten()
        elif not mode.is_decode_or_idle():
            bounds = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=bounds[1:])
            longest = max(batch.extend_seq_lens_cpu)
        if pages is None:
            known = batch.seq_lens_cpu
            pages = self.most_pages if known is None else -(-(int(known.max()) + ahead) // self.page_size)
        places = self._places(batch.seq_lens, pages)
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], places.flatten(1)]
        slots = slots.view(-1, pages)
        if self.topk > 1:
            lengths = lengths.repeat_interleave(self.topk)
        found = Metadata(lengths.to(torch.int32), bounds, self._page_of(slots), longest, tree_words=words)
        if self.has_window_pool:
            moved = self.token_to_kv_pool.translate_loc_from_full_to_swa
            found.window_table = self._page_of(moved(slots))
            found.window_slots = None if batch.out_cache_loc is None else moved(batch.out_cache_loc)
        return found

    def _places(self, seq_lens: Tensor, pages: int) -> Tensor:
        """Where the pages of requests' branches begin in ``req_to_token``, ``(1 or batch, topk, pages)``.

        A branch has its request's whole pages. The branches' own pages follow these, one branch after the other; SGLang
        begins each with a copy of the request's last page if that is not whole.
        """
        size = self.page_size
        firsts = torch.arange(pages, device=self.device) * size
        if self.topk == 1:
            return firsts[None, None]
        whole = (seq_lens // size * size)[:, None, None]
        own = (seq_lens[:, None, None] - whole + self.num_steps + size - 1) // size * size
        branch = torch.arange(self.topk, device=self.device)[:, None]
        # What a table has behind a request's pages is not read.
        most = self.req_to_token_pool.req_to_token.shape[1] - 1
        return torch.where(firsts < whole, firsts, firsts + branch * own).clamp(max=most)

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
        """A layer's attention, ``(tokens, num_heads_q * head_dim_v)``, in every kind of step."""
        m, heads = self.forward_metadata, (layer.tp_q_head_num, layer.qk_head_dim)
        assert m is not None
        if m.cu_seqlens_q is None:
            q = q.reshape(-1, m.max_seqlen_q, *heads)
        else:
            q = q.reshape(-1, *heads)
            kwargs |= {"cu_seqlens_q": m.cu_seqlens_q, "max_seqlen_q": m.max_seqlen_q}
        if m.tree_words is not None:
            kwargs |= {"tree_mask": m.tree_words.view(-1, m.max_seqlen_q)}
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs).flatten(-2).flatten(0, -2)

    forward_decode = forward_extend

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, saves: bool, given: dict[str, Any]
    ) -> Tensor:
        unknown = given.keys() - {"sinks", "cu_seqlens_q", "max_seqlen_q", "tree_mask"}
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


class DraftSteps:
    """A drafter's backends, one for each of its steps but the last, which reads no keys.

    All steps read the same pages, and each reads a token more of every branch than the step before.

    Args:
        runner: SGLang's model runner of the drafter.
        topk: Branches of a request.
        num_steps: Tokens of a branch.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self._whole = Backend(runner, topk, num_steps)
        self.attn_backends = [Backend(runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the steps' records."""
        self._whole.init_forward_metadata(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Makes what the steps have in common, in the tensors that a graph reads."""
        self._whole.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Makes the steps' records of what they have in common. A graph records this."""
        whole = self._whole.forward_metadata
        assert whole is not None
        for step, each in enumerate(self.attn_backends):
            slots = whole.window_slots
            if slots is not None:  # of all steps, by branch
                slots = slots.view(-1, len(self.attn_backends) + 1)[:, step]
            lengths = whole.cache_seqlens + (step + 1)
            each.forward_metadata = dataclasses.replace(whole, cache_seqlens=lengths, window_slots=slots)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the tensors that graphs read, for ``max_num_tokens`` branches."""
        steps = len(self.attn_backends) + 1
        self._whole.init_cuda_graph_state(max_num_tokens, max_num_tokens * steps)
