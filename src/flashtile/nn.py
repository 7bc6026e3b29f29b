"""Modules for building models: multi-head attention, rotary embedding, a transformer block.

This module imports only PyTorch, the public functions and checks of arguments. ``import flashtile.nn`` loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from flashtile.api.attention import attention, attention_varlen
from flashtile.call import torch_masks
from flashtile.call.arguments import band_of, check_tensor, checked, flag, integer, probability
from flashtile.call.rotary import RotaryEmbedding, apply_rotary
from flashtile.core.errors import InvalidInputError, UnsupportedError, shown
from flashtile.core.sizes import holds

__all__ = ["MultiheadAttention", "RotaryEmbedding", "TransformerBlock", "apply_rotary"]


class ForwardKeywords(TypedDict, total=False):
    """The keywords of ``MultiheadAttention.forward`` but for return_max_scores."""

    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    attn_bias: Tensor | None
    need_weights: bool
    is_causal: bool
    positions: int | Tensor
    context_positions: int | Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    cu_seqlens_context: Tensor | None
    max_seqlen_context: int | None


class _InParts:
    """Where torch's encoder looks for one weight of all projections: its fused inference declines what is no tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"{function.__name__} of in_proj_weight: the weights are those of q_proj, k_proj and v_proj"
        )


class MultiheadAttention(nn.Module):
    """Multi-head attention with its projections: self- or cross-attention, padded or packed sequences.

    Called with query, key and value it is torch's module but for the weights, which are never made: its masks hide, its
    result is a pair. So it can stand in torch's ``TransformerEncoderLayer`` and ``TransformerDecoderLayer``. Called
    with x, or x and a context, masks keep as in ``flashtile.attention``, and the result is one tensor.

    Parameters are named ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``, each with ``weight`` and optionally
    ``bias``. Memory is linear in the sequence lengths.

    For tensor parallelism shard the first three by ``ColwiseParallel`` and ``out_proj`` by ``RowwiseParallel``. A shard
    computes its own heads; an attn_mask or attn_bias with a dimension of heads must hold these heads alone.

    Args:
        embed_dim: Features of x and of the result.
        num_heads: Query heads.
        batch_first: Whether the batch comes before the rows in x, context, value and the result. torch's default is
            False.
        num_kv_heads: Key and value heads, a divisor of num_heads: fewer is GQA, one is MQA. num_heads by default.
        head_dim: Features of a head; ``embed_dim / num_heads`` by default.
        context_dim: Features of the context of cross-attention; embed_dim by default.
        bias: Biases of the four projections.
        out_bias: Bias of ``out_proj`` alone; like bias by default.
        causal: Each row sees the keys up to its own position; the last row sees all keys.
        window_size: ``(left, right)``: each row sees that many keys before and after its own; -1 or None is unbounded.
        dropout: Probability with which attention probabilities are dropped, in training mode only.
        softmax_scale: Factor of the scores; ``head_dim ** -0.5`` by default.
        softcap: c > 0 caps the scores as ``c * tanh(scores / c)``.
        rotary: True for ``RotaryEmbedding(head_dim)``, or your own module with the same call; layers may share it.
        deterministic: Whether the backward must be bitwise repeatable.
        backend: As in ``flashtile.attention``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        InvalidInputError: Naming the argument that is wrong.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Ainslie et al. 2023, arXiv:2305.13245 (GQA).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        window_size: Sequence[int | None] | None = None,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        rotary: bool | nn.Module = False,
        deterministic: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = _head_dim(embed_dim, num_heads, num_kv_heads, head_dim)
        self.batch_first = flag("batch_first", batch_first)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.context_dim = embed_dim if context_dim is None else integer("context_dim", context_dim)
        band_of(causal, window_size)
        plain = {"softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic, "backend": backend}
        checked(**plain)
        self.causal = causal
        self.window_size = window_size
        self.dropout = probability("dropout", dropout)
        self.softmax_scale = softmax_scale
        self.softcap = softcap
        self.deterministic = deterministic
        self.backend = backend
        self.rotary = _rotary(rotary, head_dim)
        place = {"device": device, "dtype": dtype}
        out_bias = flag("bias", bias) if out_bias is None else flag("out_bias", out_bias)
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=flag("bias", bias), **place)
        self.k_proj = nn.Linear(self.context_dim, num_kv_heads * head_dim, bias=bias, **place)
        self.v_proj = nn.Linear(self.context_dim, num_kv_heads * head_dim, bias=bias, **place)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=out_bias, **place)
        self.reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **settings: Any) -> MultiheadAttention:
        """A module with the results of a ``torch.nn.MultiheadAttention``, and copies of its weights.

        Args:
            module: The module, with kdim equal to vdim, and without add_bias_kv and add_zero_attn.
            settings: Other settings of this class, such as causal or backend.

        Raises:
            InvalidInputError: The module has a feature that this class does not have.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise InvalidInputError("module", f"is of type {type(module).__name__}, must be a nn.MultiheadAttention")
        if module.kdim != module.vdim or module.bias_k is not None or module.add_zero_attn:
            raise InvalidInputError("module", "has kdim other than vdim, add_bias_kv or add_zero_attn")
        out, width = module.out_proj, module.embed_dim
        weights: Any = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        usual = dict(bias=out.bias is not None, dropout=module.dropout, batch_first=module.batch_first)
        place = dict(context_dim=module.kdim, device=out.weight.device, dtype=out.weight.dtype)
        made = cls(width, module.num_heads, **{**usual, **place, **settings})
        state: dict[str, Any] = {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
        if module.in_proj_bias is not None:
            state |= {f"{name}_proj.bias": b for name, b in zip("qkv", module.in_proj_bias.chunk(3), strict=True)}
        made.load_state_dict({**state, **{f"out_proj.{name}": x for name, x in out.state_dict().items()}})
        return made.train(module.training)

    def reset_parameters(self) -> None:
        """Draws weights of variance ``1 / fan_in``, so that the scale is the same for any head count; biases are 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            bound = (3 / projection.in_features) ** 0.5
            nn.init.uniform_(projection.weight, -bound, bound)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    # What torch's layers read: with these their fused inference, which would not call the module, is off.
    in_proj_weight, in_proj_bias, _qkv_same_embed_dim = _InParts(), None, False

    @overload
    def forward(
        self, x: Tensor, context: Tensor | None = None, value: None = None,
        *, return_max_scores: Literal[False] = False, **others: Unpack[ForwardKeywords],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, context: Tensor, value: Tensor,
        *, return_max_scores: Literal[False] = False, **others: Unpack[ForwardKeywords],
    ) -> tuple[Tensor, None]: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, context: Tensor | None = None, value: Tensor | None = None,
        *, return_max_scores: Literal[True], **others: Unpack[ForwardKeywords],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        need_weights: bool = False,
        is_causal: bool = False,
        positions: int | Tensor = 0,
        context_positions: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_context: Tensor | None = None,
        max_seqlen_context: int | None = None,
        return_max_scores: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attends from x to itself, or to a context; x, context and value are torch's query, key and value.

        Args:
            x: ``(batch, seqlen, embed_dim)``, or packed ``(total, embed_dim)`` with cu_seqlens.
            context: ``(batch, seqlen_context, context_dim)``, or packed ``(total_context, context_dim)``;
                x by default.
            value: The tensor that values are computed from, in context's shape; context by default. With it the call
                is torch's.
            key_padding_mask: bool, ``(batch, seqlen_context)``; **True hides** a key. Or float, added to the scores.
            attn_mask: bool, broadcastable to ``(batch, num_heads, seqlen, seqlen_context)``; **True keeps**. Valid keys
                ``(batch, seqlen_context)`` are ``valid[:, None, None, :]``. With value **True hides**; floats are
                added to the scores, and three dimensions are ``(batch * num_heads, seqlen, seqlen_context)``.
            attn_bias: float16 to float64, broadcastable to the same shape; added to the scores; has a gradient.
            need_weights: Must be False: no weights are made.
            is_causal: With value: says that attn_mask is the causal mask, so that it need not be read, as in torch's
                module. A wrong hint gives wrong results.
            positions: For rotary: the position of every sequence's first row, or of all rows: ``(seqlen,)``,
                ``(batch, seqlen)`` or packed ``(total,)``.
            context_positions: Like positions, for the context. x's if x attends to itself, else counted from 0.
            cu_seqlens: ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]`` of x.
            max_seqlen: The longest length, if known: on a GPU this saves empty programs.
            cu_seqlens_context: ``(batch + 1,)`` int32 of a packed context.
            max_seqlen_context: The longest length, if known.
            return_max_scores: Also return the largest score of each head, for QK-clip: docs/training.md.

        Returns:
            The output alone, like x; with value a pair of it and None, in the place of torch's weights. With
            return_max_scores a pair of it and of the largest scores, ``(num_heads,)`` float32 (float64 for float64
            inputs), over all rows and sequences, -inf if no row keeps a key; a shard has its own heads' alone.

        Raises:
            InvalidInputError: Naming the argument that is wrong.
            UnsupportedError: No backend can run the call.
        """
        apart, is_torchs = (context_positions, cu_seqlens_context, max_seqlen_context), value is not None
        _check_flags(need_weights, is_causal, attn_mask is not None and is_torchs)
        if context is x and (value is None or value is x) and not any(each is not None for each in apart):
            context = value = None
        itself = context is None
        source = x if context is None else context
        if itself:
            _refuse_without_context(value, *apart)
            if self.context_dim != self.embed_dim:
                wanted = f"context_dim {self.context_dim}, embed_dim is {self.embed_dim}"
                raise InvalidInputError("context", f"is None, must have {wanted}")
            context_positions, cu_seqlens_context, max_seqlen_context = positions, cu_seqlens, max_seqlen
        _check_rows("x", x, self.embed_dim, "cu_seqlens", cu_seqlens)
        _check_rows("context", source, self.context_dim, "cu_seqlens_context", cu_seqlens_context)
        if source.dim() != x.dim():
            raise InvalidInputError("context", f"has {source.dim()} dimensions, but x has {x.dim()}")
        if value is not None:
            _check_rows("value", value, self.context_dim, "cu_seqlens_context", cu_seqlens_context)
        if cu_seqlens is None:
            _refuse_longest(max_seqlen=max_seqlen, max_seqlen_context=max_seqlen_context)
        q, k, v = self._projected(x, source, source if value is None else value)
        options = {**self._options(), "return_max_scores": return_max_scores}
        if is_causal and q.dim() == 4 and holds(q.shape[1] == k.shape[1]):
            options["causal"], attn_mask = True, None
        options |= torch_masks.combined(attn_mask, attn_bias, key_padding_mask, k, q.shape[-2] if is_torchs else 0)
        if self.rotary is not None:
            q = self.rotary(q, positions, cu_seqlens)
            k = self.rotary(k, 0 if context_positions is None else context_positions, cu_seqlens_context)
        named = {} if itself else {**_CONTEXT_NAMES, "v": "context" if value is None else "value"}
        named |= {"attn_bias": "attn_mask"} if attn_bias is None else {}
        lengths = (cu_seqlens, cu_seqlens_context, max_seqlen, max_seqlen_context)
        found = _attended(q, k, v, lengths, options, {**_OWN_NAMES, **named})
        out, max_scores = found if return_max_scores else (found, None)
        out = self.out_proj(out.flatten(-2))
        out = out if self.batch_first or out.dim() == 2 else out.transpose(0, 1)
        largest = None if max_scores is None else _of_heads(max_scores)
        return (out, largest) if is_torchs or return_max_scores else out

    if TYPE_CHECKING:
        __call__ = forward

    def _projected(self, x: Tensor, context: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of q, k and v, batch first. Refuses a shard with query heads that would meet the wrong key heads."""
        if not self.batch_first and x.dim() == 3:
            x, context, value = (each.transpose(0, 1) for each in (x, context, value))
        q = _split("q_proj", self.q_proj(x), self.head_dim)
        k = _split("k_proj", self.k_proj(context), self.head_dim)
        v = _split("v_proj", self.v_proj(value), self.head_dim)
        heads = q.shape[-2]
        for name, kv in (("k_proj", k.shape[-2]), ("v_proj", v.shape[-2])):
            if self.num_kv_heads > 1 and heads * self.num_kv_heads != kv * self.num_heads:
                whole = f"whole they have {self.num_kv_heads} and {self.num_heads}; shard them alike"
                raise InvalidInputError(name, f"gives {kv} heads and q_proj {heads}, but {whole}")
        return q, k, v

    def _options(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _DEFAULTS if name != "dropout"}
        return {**plain, "dropout_p": self.dropout if self.training else 0.0}

    def extra_repr(self) -> str:
        """The settings that differ from their defaults, for printing."""
        sizes = {"num_kv_heads": self.num_heads, "head_dim": self.embed_dim // self.num_heads}
        defaults = {"batch_first": True, **sizes, "context_dim": self.embed_dim, **_DEFAULTS}
        shown = [f"{name}={getattr(self, name)}" for name, usual in defaults.items() if getattr(self, name) != usual]
        return ", ".join([f"embed_dim={self.embed_dim}, num_heads={self.num_heads}", *shown])


# The names of ``attention``'s arguments here.
_OWN_NAMES = {
    **dict.fromkeys(("q", "k", "v"), "x"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen"),
    "dropout_p": "dropout",
}
_CONTEXT_NAMES = {
    **dict.fromkeys(("k", "v"), "context"),
    "cu_seqlens_k": "cu_seqlens_context",
    "max_seqlen_k": "max_seqlen_context",
}
# Settings that ``attention`` takes, with their default values.
_DEFAULTS = {
    "causal": False,
    "window_size": None,
    "dropout": 0.0,
    "softmax_scale": None,
    "softcap": 0.0,
    "deterministic": False,
    "backend": None,
}


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        attention: Self-attention; its embed_dim is the block's.
        mlp_dim: Hidden features of the two-layer GELU network; ``4 * embed_dim`` by default.
        dropout: Probability with which features are dropped after attention and after the MLP, in training mode only.

    Source: Xiong et al. 2020, arXiv:2002.04745, figure 1b.
    """

    def __init__(self, attention: MultiheadAttention, *, mlp_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if not isinstance(attention, MultiheadAttention):
            raise InvalidInputError("attention", f"is of type {type(attention).__name__}, must be a MultiheadAttention")
        if attention.context_dim != attention.embed_dim:
            raise InvalidInputError("attention", "has a context_dim other than embed_dim, must attend to its input")
        width, like = attention.embed_dim, attention.q_proj.weight
        hidden = 4 * width if mlp_dim is None else integer("mlp_dim", mlp_dim)
        place: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.attn_norm = nn.LayerNorm(width, **place)
        self.attn = attention
        self.mlp_norm = nn.LayerNorm(width, **place)
        self.mlp = nn.Sequential(nn.Linear(width, hidden, **place), nn.GELU(), nn.Linear(hidden, width, **place))
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        positions: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Runs the block; arguments and shapes as in ``MultiheadAttention.forward``."""
        check_tensor("x", x)
        attended = self.attn(
            self.attn_norm(x), attn_mask=attn_mask, attn_bias=attn_bias, positions=positions, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )  # fmt: skip
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    if TYPE_CHECKING:
        __call__ = forward


def _attended(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], options: dict[str, Any], named: dict[str, str]
) -> Any:
    """The attention of the module's heads; errors have the module's names of the arguments."""
    try:
        if lengths[0] is None or lengths[1] is None:
            return attention(q, k, v, **options)
        return attention_varlen(q, k, v, *lengths, **options)
    except InvalidInputError as error:
        raise error.renamed(named) from None


def _of_heads(max_scores: Tensor) -> Tensor:
    """``(num_heads,)``, the largest score of each head, from all rows' scores, packed or not."""
    rows = max_scores.transpose(0, -2).flatten(1)
    return rows.new_full(rows.shape[:1], -torch.inf) if holds(rows.shape[1] == 0) else rows.amax(dim=1)


def _rotary(rotary: bool | nn.Module, head_dim: int) -> nn.Module | None:
    """The module of the argument ``rotary``."""
    if not isinstance(rotary, (bool, nn.Module)):
        raise InvalidInputError("rotary", f"is {shown(rotary)}, must be True, False or a module")
    if rotary is True and head_dim % 2:
        raise InvalidInputError("rotary", f"turns pairs of features, but head_dim is {head_dim}")
    if isinstance(rotary, RotaryEmbedding) and rotary.dim > head_dim:
        raise InvalidInputError("rotary", f"turns {rotary.dim} features, but head_dim is {head_dim}")
    return RotaryEmbedding(head_dim) if rotary is True else rotary if isinstance(rotary, nn.Module) else None


def _head_dim(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """Checks the sizes and fills in head_dim."""
    for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        integer(name, size)
    if num_heads % num_kv_heads:
        raise InvalidInputError("num_kv_heads", f"is {num_kv_heads}, must divide num_heads {num_heads}")
    if head_dim is not None:
        return integer("head_dim", head_dim)
    if embed_dim % num_heads:
        raise InvalidInputError("num_heads", f"is {num_heads}, must divide embed_dim {embed_dim}, or give head_dim")
    return embed_dim // num_heads


def _split(name: str, rows: Tensor, head_dim: int) -> Tensor:
    """The heads of a projection: all of them, or this shard's if the projection is sharded."""
    width = rows.shape[-1]
    if width % head_dim:
        raise InvalidInputError(name, f"gives {width} features, must be whole heads of {head_dim}: use fewer shards")
    return rows.unflatten(-1, (width // head_dim, head_dim))


def _check_flags(need_weights: bool, is_causal: bool, has_torchs_mask: bool) -> None:
    if flag("need_weights", need_weights):
        raise InvalidInputError("need_weights", "is True, but no weights are made: it must be False")
    if flag("is_causal", is_causal) and not has_torchs_mask:
        must = "says of attn_mask, in a call with value, that it is causal; build the module with causal=True"
        raise InvalidInputError("is_causal", f"is True, but {must}")


def _refuse_longest(**lengths: int | None) -> None:
    for name, length in lengths.items():
        if length is not None:
            raise InvalidInputError(name, "is given, but goes with packed sequences alone")


def _check_rows(name: str, rows: Tensor, width: int, cu_name: str, cu_seqlens: Tensor | None) -> None:
    """Checks the rank, 3 or, with cu_seqlens, 2, and the last dimension."""
    check_tensor(name, rows)
    if not rows.dtype.is_floating_point:
        raise InvalidInputError(name, f"dtype is {rows.dtype}, must be a float dtype")
    if rows.dim() not in (2, 3):
        raise InvalidInputError(name, f"has {rows.dim()} dimensions, must have 3, or 2 for packed sequences")
    if rows.shape[-1] != width:
        raise InvalidInputError(name, f"has {rows.shape[-1]} features, must have {width}")
    if (rows.dim() == 2) != (cu_seqlens is not None):
        needs = f"is None, but {name} is packed" if cu_seqlens is None else f"is given, but {name} is not packed"
        raise InvalidInputError(cu_name, f"{needs}: it goes with 2 dimensions")


def _refuse_without_context(*given: object) -> None:
    for name, each in zip(
        ("value", "context_positions", "cu_seqlens_context", "max_seqlen_context"), given, strict=True
    ):
        if each is not None:
            raise InvalidInputError(name, "is given, but there is no context")
