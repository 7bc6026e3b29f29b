"""vLLM's attention backend classes: one call over its cache for prompts, chunks and single tokens.

The same call writes new keys and values. The cache is vLLM's own, ``(blocks, num_kv_heads, block_size,
2 * head_size)`` with any strides, keys beside values.

Source: vLLM 0.32 and 0.33, ``vllm/v1/attention/backend.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention import backend as vllm

import flashtile
from flashtile.core.errors import UnsupportedError
from flashtile.integrations._calls import Calls
from flashtile.integrations.vllm import NAME

# The dtypes for vLLM's names of a cache's dtype.
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# vLLM shows messages of its own loggers.
calls = Calls(log="vllm.flashtile")


@dataclasses.dataclass
class Metadata(vllm.AttentionMetadata):
    """The sequences of one step.

    Attributes:
        num_tokens: The number of valid rows; a graph may have more.
        query_start_loc: ``(num_reqs + 1,)`` int32: the bounds of each request's rows.
        max_query_len: The most rows of a request.
        lengths: ``(num_reqs,)`` int32: the keys of each request, new ones included.
        lengths_before: The keys of each request without the new ones; -1 for a request that only fills a graph.
        block_table: ``(num_reqs, blocks)`` int32.
        causal: Whether a query sees no later key; for some drafters ``(num_reqs,)`` bool.
        one_each: Whether each request has one row, so that rows need no bounds.
    """

    num_tokens: int
    query_start_loc: Tensor
    max_query_len: int
    lengths: Tensor
    lengths_before: Tensor
    block_table: Tensor
    causal: bool | Tensor
    one_each: bool


class Builder(vllm.AttentionMetadataBuilder[Metadata]):
    """Passes on vLLM's tensors, which have fixed places, like the tensors that are made here.

    No length is read on the host, so graphs of any step can be replayed.
    """

    _cudagraph_support = vllm.AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        self._before = torch.empty(most, dtype=torch.int32, device=device)
        self._causal = torch.empty(most, dtype=torch.bool, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The record for all layers of a step."""
        m = common_attn_metadata
        causal = m.causal
        if isinstance(causal, Tensor):
            causal = self._causal[: len(causal)].copy_(causal)
        one_each = m.max_query_len == 1 and m.num_actual_tokens == m.num_reqs
        before = self._before[: len(m.seq_lens)]
        torch.sub(m.seq_lens, 1 if one_each else m.query_start_loc.diff(), out=before)
        return Metadata(
            m.num_actual_tokens, m.query_start_loc, m.max_query_len, m.seq_lens, before, m.block_table_tensor, causal,
            one_each,
        )  # fmt: skip

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """The same step for layers with keys in other blocks."""
        return dataclasses.replace(metadata, block_table=blk_table)


class Impl(vllm.AttentionImpl[Metadata]):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = vllm.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if not Backend.supports_attn_type(attn_type):
            raise UnsupportedError(f"vLLM: flashtile runs no attention of type {attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kind_of_8_bits, self.attn_type = EIGHT_BITS.get(kv_cache_dtype), attn_type
        self.writes = kv_sharing_target_layer_name is None
        # vLLM counts the query itself.
        self.window = None if sliding_window is None else sliding_window - 1
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        # A step's tokens must not depend on the others', nor on how vLLM cut a prompt or began it anew.
        self.invariant: Literal[False, "strict"] = "strict" if envs.VLLM_BATCH_INVARIANT else False
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the layer's attention into output, ``(tokens, num_heads, head_size)``, and its keys into the cache."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("vLLM: flashtile does not quantise its output")
        m = attn_metadata
        if m is None:  # vLLM measures memory
            return output.fill_(0)
        calls.serve()
        rows, out = query[: m.num_tokens], output[: m.num_tokens]
        if self.attn_type == vllm.AttentionType.ENCODER_ONLY:
            given = rows, key[: m.num_tokens], value[: m.num_tokens], m.query_start_loc, m.query_start_loc
            longest = m.max_query_len, m.max_query_len
            flashtile.attention_varlen(*given, *longest, causal=False, out=out, **self._options(causal=False))
            return output
        options = self._options(m.causal is True) | {"causal": m.causal, "cache_seqlens": m.lengths, "out": out}
        if self.writes:
            new = {"k": key[: m.num_tokens], "v": value[: m.num_tokens]}
            options |= {"cache_seqlens": m.lengths_before, **new}
        if m.one_each:
            rows = rows[:, None]
            options |= {name: options[name][:, None] for name in ("k", "v", "out") if name in options}
        else:
            options |= {"cu_seqlens_q": m.query_start_loc, "max_seqlen_q": m.max_query_len}
        if self.kind_of_8_bits is not None:
            options |= {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        k_cache, v_cache = self._pages(kv_cache)
        flashtile.attention_with_kvcache(rows, k_cache, v_cache, page_table=m.block_table, **options)
        return output

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Keys and values as ``(pages, page_size, num_heads_kv, head_dim)``: views of the cache."""
        if self.kind_of_8_bits is not None:
            kv_cache = kv_cache.view(self.kind_of_8_bits)
        return kv_cache.transpose(1, 2).split([self.head_size, kv_cache.shape[-1] - self.head_size], dim=-1)

    def _options(self, causal: bool) -> dict[str, Any]:
        return {
            "window_size": None if self.window is None else (self.window, 0 if causal else self.window),
            "softmax_scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": None if self.sinks is None else self.sinks.detach(),
            "batch_invariant": self.invariant,
        }


class Backend(vllm.AttentionBackend):
    """The backend for ``--attention-backend FLASHTILE``."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  # as vLLM has it
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *EIGHT_BITS]  # noqa: RUF012
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM's registry has this backend."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """The class of one layer."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that makes a step's record."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Multiples of 16: TMA has no boxes for smaller pages."""
        return [vllm.MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        """True: a logit per head is added to the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True: some layers, or all, may have windows."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """True: queries of all requests, or of some, may see later keys."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True: what ``VLLM_BATCH_INVARIANT`` asks for."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """True for decoders, and for encoders without a cache."""
        return attn_type in (vllm.AttentionType.DECODER, vllm.AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The reason why no backend of flashtile runs such layers on this GPU; None if one does."""
        if device_capability is None:
            return None
        besides = [*["sinks"] * has_sink, *["batch_invariant"] * envs.VLLM_BATCH_INVARIANT]
        found = flashtile.supports(
            head_size, dtype=dtype, cache_dtype=EIGHT_BITS.get(kv_cache_dtype or ""),
            page_size=block_size or 16, besides=besides,
            compute_capability=(device_capability.major, device_capability.minor),
        )  # fmt: skip
        return None if found else "; ".join(f"{name}: {', '.join(why)}" for name, why in found.reasons.items())
