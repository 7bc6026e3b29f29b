"""The memory of a whole decoder transformer at a context length, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis.shape import STATE_BYTES, dtype_bytes, require_positive


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder of identical layers, all in one dtype. The defaults are those of a 7B model.

    `mlp_params_per_layer` is in units of `d_model ** 2`: 8 for two matrices of width `4 * d_model`, and also for a
    gated block of three matrices of width `8/3 * d_model`.
    """

    d_model: int = 4096
    num_layers: int = 32
    vocab_size: int = 32000
    num_heads: int = 32
    num_heads_kv: int = 32
    mlp_params_per_layer: int = 8
    dtype: str = "float16"

    def __post_init__(self) -> None:
        require_positive(
            d_model=self.d_model,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            mlp_params_per_layer=self.mlp_params_per_layer,
        )
        dtype_bytes(self.dtype)
        if self.d_model % self.num_heads:
            raise InvalidInputError("num_heads", f"{self.num_heads} does not divide d_model {self.d_model}")
        if self.num_heads % self.num_heads_kv:
            raise InvalidInputError("num_heads_kv", f"{self.num_heads_kv} does not divide num_heads {self.num_heads}")

    @property
    def kv_width(self) -> int:
        """Elements in the keys of one token in one layer; the values have as many."""
        return self.d_model // self.num_heads * self.num_heads_kv


@dataclass(frozen=True)
class TransformerMemory:
    """Bytes of a decoder at one context length. `lse_bytes` and `scores_bytes_per_layer` are not in the total."""

    seqlen: int
    embedding_bytes: int
    attention_weights_bytes: int
    mlp_weights_bytes: int
    kv_cache_bytes: int
    activations_bytes: int
    lse_bytes: int
    scores_bytes_per_layer: int

    @property
    def weights_bytes(self) -> int:
        """All the weights."""
        return self.embedding_bytes + self.attention_weights_bytes + self.mlp_weights_bytes

    @property
    def total_bytes(self) -> int:
        """Weights, key-value cache and kept activations."""
        return self.weights_bytes + self.kv_cache_bytes + self.activations_bytes


def transformer_memory(config: TransformerConfig, seqlen: int, batch_size: int = 1) -> TransformerMemory:
    """Memory of a decoder over `seqlen` tokens, in bytes; 1 GB is 1e9 bytes.

    Convention, with L layers of width d, vocabulary V, element size e, and n tokens in all:

    - embedding `V * d * e`, shared with the output layer;
    - attention weights `(2 d^2 + 2 d * d_kv) * L * e`: Q and output projections, K and V projections;
    - MLP weights `8 d^2 * L * e`. Norms and biases are left out (under 0.01%);
    - key-value cache `2 * d_kv * L * n * e`;
    - activations `3 * d * L * n * e`: in every layer the block's input, Q and the attention output. With K and V, which
      the cache holds, they are what tiled attention needs to run backward; the rest of a block is recomputed.

    Outside the total, for comparison: the float32 log-sum-exp (`lse_bytes`, 4 bytes per head, token and layer), and the
    score matrix that standard attention would add in each layer (`scores_bytes_per_layer`). Gradients, optimizer state
    and logits are not counted.

    Source: activations kept and recomputed as in FlashAttention (arXiv 2205.14135), section 3.1 and appendix B.
    """
    require_positive(seqlen=seqlen, batch_size=batch_size)
    size = dtype_bytes(config.dtype)
    d_model, layers, tokens = config.d_model, config.num_layers, seqlen * batch_size
    return TransformerMemory(
        seqlen=seqlen,
        embedding_bytes=config.vocab_size * d_model * size,
        attention_weights_bytes=2 * d_model * (d_model + config.kv_width) * layers * size,
        mlp_weights_bytes=config.mlp_params_per_layer * d_model**2 * layers * size,
        kv_cache_bytes=2 * config.kv_width * layers * tokens * size,
        activations_bytes=3 * d_model * layers * tokens * size,
        lse_bytes=config.num_heads * layers * tokens * STATE_BYTES,
        scores_bytes_per_layer=config.num_heads * batch_size * seqlen**2 * size,
    )
