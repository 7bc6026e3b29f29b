"""What a small inference loop needs around ``flashtile.attention_with_kvcache``: pages of keys and values."""

from flashtile.serving.paged import OutOfPagesError, PagedBatch, PagedKVCache

__all__ = ["OutOfPagesError", "PagedBatch", "PagedKVCache"]
