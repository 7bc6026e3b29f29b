"""Helpers for a small inference loop around ``flashtile.attention_with_kvcache``: pages, and draft trees."""

from flashtile.serving.latent_rows import latent_rows
from flashtile.serving.page_lists import page_list_from_table, page_table_from_list, pages_from_flashinfer
from flashtile.serving.paged import OutOfPagesError, PagedBatch, PagedKVCache
from flashtile.serving.trees import (
    tree_depths,
    tree_from_flashinfer,
    tree_from_parents,
    tree_from_sglang,
    tree_from_vllm,
    tree_words,
)

__all__ = [
    "OutOfPagesError",
    "PagedBatch",
    "PagedKVCache",
    "latent_rows",
    "page_list_from_table",
    "page_table_from_list",
    "pages_from_flashinfer",
    "tree_depths",
    "tree_from_flashinfer",
    "tree_from_parents",
    "tree_from_sglang",
    "tree_from_vllm",
    "tree_words",
]
