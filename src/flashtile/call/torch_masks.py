"""The masks of PyTorch's attention module as attn_mask, which keeps where it is True, and attn_bias."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call.arguments import check_tensor
from flashtile.core.errors import InvalidInputError
from flashtile.core.sizes import holds


def combined(
    mask: Tensor | None, bias: Tensor | None, padding: Tensor | None, k: Tensor, heads: int
) -> dict[str, Tensor | None]:
    """attn_mask and attn_bias of a call with a key_padding_mask; ``heads`` is 0 if attn_mask is not torch's."""
    kept, added = (mask, None) if mask is None or not heads else kept_or_added("attn_mask", mask, heads)
    if padding is not None:
        keys = kept_or_added("key_padding_mask", padding)
        if k.dim() == 3 or padding.shape != k.shape[:2]:
            must = "(batch, seqlen_context), of sequences that are not packed"
            raise InvalidInputError("key_padding_mask", f"has shape {tuple(padding.shape)}, must be {must}")
        if kept is not None:
            check_tensor("attn_mask", kept)
            if kept.dtype != torch.bool:
                raise InvalidInputError("attn_mask", f"dtype is {kept.dtype}, must be bool")
        kept_keys, added_to_keys = (None if x is None else x[:, None, None, :] for x in keys)
        try:
            kept = kept_keys if kept is None else kept if kept_keys is None else kept & kept_keys
            added = added_to_keys if added is None else added if added_to_keys is None else added + added_to_keys
        except RuntimeError as error:
            raise InvalidInputError("attn_mask", f"does not go with key_padding_mask: {error}") from error
    if bias is not None and added is not None:
        check_tensor("attn_bias", bias)
        added = bias + added
    return {"attn_mask": kept, "attn_bias": bias if added is None else added}


def kept_or_added(name: str, mask: Tensor, heads: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """What a mask of torch's module keeps, or what it adds to the scores; three dimensions are of batch * heads."""
    check_tensor(name, mask)
    if heads and mask.dim() == 3:
        if holds(mask.shape[0] % heads != 0):
            raise InvalidInputError(name, f"has shape {tuple(mask.shape)}, must begin with batch * num_heads")
        mask = mask.unflatten(0, (-1, heads))
    if not (mask.dtype.is_floating_point or mask.dtype == torch.bool):
        raise InvalidInputError(name, f"dtype is {mask.dtype}, must be bool or a float dtype")
    return (None, mask) if mask.dtype.is_floating_point else (~mask, None)
