"""The Hopper forward over a cache: where keys lie, and helpers that copy or widen them."""
