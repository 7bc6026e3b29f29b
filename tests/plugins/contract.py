"""What vLLM and SGLang call of an attention backend, as a table; and stand-ins for their modules, made of it.

The stand-ins let our classes be loaded and called where neither is installed. Where one is, the tests hold the table
against it.
"""

from __future__ import annotations

import collections
import enum
import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CALL = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
# Module -> class -> method -> its parameters, but for self and keywords of any name.
METHODS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "vllm.v1.attention.backend": {
        "AttentionBackend": {
            "get_name": (), "get_impl_cls": (), "get_builder_cls": (), "supports_sink": (), "supports_non_causal": (),
            "supports_sliding_window": (), "supports_attn_type": ("attn_type",),
            "supports_batch_invariance": (), "get_supported_kernel_block_sizes": ("kv_cache_spec",),
            "supports_combination": (
                "head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse",
                "use_mm_prefix", "device_capability",
            ),
        },
        "AttentionMetadataBuilder": {
            "__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
            "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
            "update_block_table": ("metadata", "blk_table", "slot_mapping"),
        },
        "AttentionImpl": {
            "__init__": (
                "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
                "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
            ),
            "forward": (
                "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
                "output_block_scale",
            ),
        },
    },
    "sglang.srt.layers.attention.base_attn_backend": {
        "AttentionBackend": {
            "init_forward_metadata": ("forward_batch",),
            "init_forward_metadata_out_graph": ("forward_batch", "in_capture"),
            "init_cuda_graph_state": ("max_bs", "max_num_tokens"),
            "get_cuda_graph_seq_len_fill_value": (), "support_triton": (),
            "update_verify_buffers_to_fill_after_draft": ("spec_info", "cuda_graph_bs"),
            "forward_extend": _CALL, "forward_decode": _CALL,
        },
    },
    # A drafter's backends have no class above theirs.
    "sglang.srt.layers.attention.triton_backend": {
        "TritonMultiStepDraftBackend": {
            "init_forward_metadata": ("forward_batch",),
            "init_forward_metadata_out_graph": ("forward_batch", "in_capture"),
            "init_forward_metadata_in_graph": ("forward_batch",),
            "init_cuda_graph_state": ("max_bs", "max_num_tokens"),
        },
    },
    "sglang.srt.speculative.draft_utils": {
        "DraftBackendFactory": {
            "_create_backend": ("backend_name", "backend_map", "error_template", "stamps_children"),
        },
    },
}  # fmt: skip
# Module -> class -> what our classes read of its objects. vLLM's layers have more, which is no class of theirs alone.
READ: dict[str, dict[str, set[str]]] = {
    "vllm.v1.attention.backend": {
        "CommonAttentionMetadata": {
            "query_start_loc", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "block_table_tensor",
            "causal",
        },
        "AttentionLayer": {"_k_scale_float", "_v_scale_float"},
    },
    "sglang.srt.model_executor.forward_batch_info": {
        "ForwardBatch": {
            "batch_size", "forward_mode", "spec_info", "seq_lens", "seq_lens_cpu", "extend_seq_lens",
            "extend_seq_lens_cpu", "req_pool_indices", "out_cache_loc",
        },
    },
    "sglang.srt.speculative.spec_info": {"SpecInputType": {"EAGLE_DRAFT", "EAGLE_DRAFT_EXTEND", "EAGLE_VERIFY"}},
    "sglang.srt.speculative.eagle_info": {"EagleVerifyInput": {"draft_token_num", "topk", "custom_mask"}},
    "sglang.srt.layers.attention.verify_mask": {"VerifyMask": {"buffer", "mode", "max_bs"}},
    "sglang.srt.server_args": {"ServerArgs": {"enable_deterministic_inference"}},
    "sglang.srt.mem_cache.swa_memory_pool": {
        "SWAKVPool": {"translate_loc_from_full_to_swa", "get_key_buffer", "get_value_buffer", "set_kv_buffer"},
    },
}  # fmt: skip


class _Base:
    """A class of theirs: it may be subscripted, and holds what it is made with."""

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = args, kwargs


def _stand_ins() -> dict[str, types.ModuleType]:
    found: dict[str, dict[str, Any]] = {
        module: {name: type(name, (_Base,), {}) for name in classes} for module, classes in METHODS.items()
    }
    found["vllm.v1.attention.backend"] |= {
        "AttentionMetadata": type("AttentionMetadata", (), {}),
        "AttentionCGSupport": enum.Enum("AttentionCGSupport", ["ALWAYS"]),
        "AttentionType": types.SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder_only"),
        "MultipleOf": type("MultipleOf", (_Base,), {}),
    }
    found["vllm.envs"] = {"VLLM_BATCH_INVARIANT": False}
    found["sglang.srt.layers.radix_attention"] = {
        "AttentionType": enum.Enum("AttentionType", ["DECODER", "ENCODER_ONLY"])
    }
    found["sglang.srt.layers.attention.verify_mask"] = {
        "TreeMaskMode": enum.Enum("TreeMaskMode", ["QLEN_ONLY"]),
        "VerifyMask": collections.namedtuple("VerifyMask", ["buffer", "mode", "max_bs"]),
    }
    found["sglang.srt.mem_cache.memory_pool"] = {"KVWriteLoc": lambda loc, swa_loc: (loc, swa_loc)}
    found["sglang.srt.mem_cache.swa_memory_pool"] = {"SWAKVPool": type("SWAKVPool", (), {})}
    modules = {}
    for path, names in found.items():
        for stop in range(1, path.count(".") + 2):
            part = ".".join(path.split(".")[:stop])
            modules.setdefault(part, types.ModuleType(part))
            if stop > 1:
                setattr(modules[part.rpartition(".")[0]], part.rpartition(".")[2], modules[part])
        vars(modules[path]).update(names)
    return modules


@contextmanager
def stand_ins(*ours: str) -> Iterator[list[Any]]:
    """Our modules of these names, loaded on stand-ins for vLLM and SGLang."""
    modules = _stand_ins()
    # No other module: what PyTorch loads meanwhile stays.
    before = {name: sys.modules.pop(name, None) for name in (*modules, *ours)}
    sys.modules.update(modules)
    try:
        yield [importlib.import_module(name) for name in ours]
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
