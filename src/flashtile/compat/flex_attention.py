"""PyTorch's ``torch.nn.attention.flex_attention``: its functions, names and layout, with flashtile's kernels.

Tensors are ``(B, H, S, D)``. ``BlockMask``, ``and_masks``, ``or_masks``, ``noop_mask``, ``create_mask``, ``AuxRequest``
and ``AuxOutput`` are PyTorch's own. Nothing needs ``torch.compile``, and q, k and v have gradients on CPUs too.

    from flashtile.compat.flex_attention import create_block_mask, flex_attention
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from flashtile import reference
from flashtile.api import blocks
from flashtile.api.attention import attention
from flashtile.api.keywords import asked_of, options_of
from flashtile.call.problem import Problem
from flashtile.core.errors import InvalidInputError, UnsupportedError, shown
from flashtile.mods.converted import keep

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

# The length of PyTorch's placeholder mask, which fits any lengths.
_ANY_LENGTH = 1 << 30


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention with a user's functions; see PyTorch's function of this name.

    Args:
        query: ``(B, Hq, L, E)``.
        key: ``(B, Hkv, S, E)``; B may be 1 if block_mask has query's.
        value: ``(B, Hkv, S, Ev)``.
        score_mod: ``f(score, b, h, q_idx, kv_idx)``.
        block_mask: A result of ``create_block_mask`` for L and S.
        scale: Factor of the scores, ``E ** -0.5`` by default.
        enable_gqa: Whether Hq may be a multiple of Hkv.
        return_lse: Also return lse; use return_aux.
        kernel_options: Options of PyTorch's templates, by their names. They choose tiles, and promise properties that
            let templates leave out steps; no result depends on them, and flashtile has its own tiles.
        return_aux: ``AuxRequest(lse=True, max_scores=True)``, or one of the two, for ``(out, AuxOutput)``.

    Returns:
        out ``(B, Hq, L, Ev)``, rows first in memory; with lse and max_scores ``(B, Hq, L)``, natural log.

    Raises:
        ValueError: An argument does not fit, as in PyTorch.
        UnsupportedError: No backend can run the call.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise NotImplementedError(f"{name}: flex_attention does not support NestedTensor inputs")
        if x.dim() != 4:
            raise InvalidInputError(name, f"has {x.dim()} dimensions, NYI: must have 4: (B, H, S, D)")
    _check_dtypes(query, key, value)
    _check_heads(query, key, value, enable_gqa)
    _check_options(kernel_options)
    if return_aux is not None and return_lse:
        raise ValueError("Cannot specify both return_lse and return_aux: AuxRequest(lse=True) is what return_lse is")
    mask = _mask_of(block_mask, query, key)
    if query.shape[0] != key.shape[0]:
        _check_batch(query, key, block_mask)
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    wants_lse, wants_max = return_lse, False
    if return_aux is not None:
        wants_lse, wants_max = return_aux.lse, return_aux.max_scores
    slow = query.dtype == torch.float64 and query.device.type != "cpu"
    run: Any = attention_by_reference if slow else attention
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    asked = {"return_lse": wants_lse, "return_max_scores": wants_max}
    found = run(q, k, v, score_mod=score_mod, block_mask=mask, softmax_scale=scale, **asked)
    out, *others = found if wants_lse or wants_max else (found,)
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(others[0] if wants_lse else None, others[-1] if wants_max else None)
    return (out, *others) if return_lse else out


def attention_by_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_max_scores: bool = False, **others: Any
) -> Tensor | tuple[Tensor, ...]:
    """``attention`` in q's dtype by ``flashtile.reference``, with autograd's gradients: slow, in quadratic memory.

    Args:
        q: See ``attention``, like all others; without dropout.
        k: See there.
        v: See there.
        return_lse: See there.
        return_max_scores: See there.
        **others: See there.

    Raises:
        InvalidInputError: A ValueError that names the argument.
    """
    tensors, asked, _ = asked_of("attention", (q, k, v), others)
    problem = Problem.of(tensors, options_of(tensors, asked))
    out, lse, max_scores = reference.with_max_scores(problem, tensors, torch.promote_types(q.dtype, torch.float32))
    out = out.to(q.dtype)
    if not return_max_scores:
        return (out, lse) if return_lse else out
    return (out, lse, max_scores) if return_lse else (out, max_scores)


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """PyTorch's mask of a function, without a matrix of all pairs; see PyTorch's function of this name.

    Args:
        mask_mod: ``f(b, h, q_idx, kv_idx)``.
        B: The number of sequences with masks of their own, None if all share one.
        H: The same for query heads.
        Q_LEN: Rows.
        KV_LEN: Keys.
        device: By default the accelerator if there is one, as PyTorch does.
        BLOCK_SIZE: Rows and keys of a block, or one number for both.
        _compile: Has no effect: there is nothing to compile.
        separate_full_blocks: Whether full blocks are listed separately, so that the function is not called for them.
        compute_dq_write_order: Only False: an order of writes that PyTorch's FLASH kernels need.
        dq_kv_order: Only False; it belongs to compute_dq_write_order.

    Raises:
        ValueError: Names the argument that is wrong.
    """
    if compute_dq_write_order:
        raise UnsupportedError("compute_dq_write_order: is of PyTorch's FLASH kernels; here dq needs no order")
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    made = blocks.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    partial, full = made.dense()
    listed = _ordered(partial if separate_full_blocks else partial | full)
    of_full = _ordered(full) if separate_full_blocks else (None, None)
    mask = BlockMask.from_kv_blocks(
        *listed, of_full[0], of_full[1], made.block_size, mask_mod=mask_mod, seq_lengths=made.lengths
    )
    if separate_full_blocks and not torch.compiler.is_compiling():
        keep(mask, made)
    return mask


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each list, and all blocks with the listed ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        dtypes = f"query.dtype: {query.dtype}, key.dtype: {key.dtype}, and value.dtype: {value.dtype}"
        raise ValueError(f"Expected query, key, and value to have the same dtype, but got {dtypes} instead")
    if not query.device == key.device == value.device:
        devices = f"query.device: {query.device}, key.device: {key.device}, and value.device: {value.device}"
        raise ValueError(f"Expected query, key, and value to have the same device type, but got {devices} instead")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if query.shape[-1] != key.shape[-1]:
        sizes = f"E={query.shape[-1]} and E={key.shape[-1]}"
        raise ValueError(f"Expect query and key/value to have the same embedding dimension but got {sizes}")
    if value.shape[:3] != key.shape[:3]:
        raise InvalidInputError("value", f"has shape {tuple(value.shape)}, but key {tuple(key.shape)}")
    of_q, of_kv = query.shape[1], key.shape[1]
    if of_q != of_kv and not enable_gqa:
        raise ValueError(
            f"Expect query and key/value to have the same number of heads but got Hq={of_q} and Hkv={of_kv}. "
            "Try setting enable_gqa=True for GQA."
        )
    if of_q % of_kv:
        heads = f"Hq={of_q} and Hkv={of_kv}"
        raise ValueError(f"Expect number of query heads to be a multiple of kv heads for GQA but got {heads}")


def _check_batch(query: Tensor, key: Tensor, block_mask: BlockMask | None) -> None:
    of_mask = None if block_mask is None else block_mask.kv_num_blocks.shape[0]
    if key.shape[0] != 1 or of_mask != query.shape[0]:
        sizes = f"Bq={query.shape[0]}, Bkv={key.shape[0]}, B_block_mask={of_mask}"
        raise ValueError(f"Expect query and key/value to have the same batch size, or block_mask query's: {sizes}")


_OPTIONS = frozenset(FlexKernelOptions.__annotations__)


def _check_options(given: Any) -> None:
    for name in given or ():
        if name.removeprefix("fwd_").removeprefix("bwd_") not in _OPTIONS:
            raise InvalidInputError("kernel_options", f"has {shown(name)}, which PyTorch's templates do not have")


def _mask_of(mask: BlockMask | None, query: Tensor, key: Tensor) -> BlockMask | None:
    """The mask, or None for PyTorch's placeholder of no mask; checks that it is for these lengths."""
    if mask is None:
        return None
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    if mask.BLOCK_SIZE[0] == mask.BLOCK_SIZE[1] == _ANY_LENGTH:
        return None
    lengths = query.shape[-2], key.shape[-2]
    if lengths != tuple(mask.shape[-2:]):
        smaller = any(have > of for have, of in zip(lengths, mask.shape[-2:], strict=True))
        hint = (
            "create a new block mask"
            if smaller
            else "create a new one, or crop it by block_mask._adjust(q_len, kv_len)"
        )
        got = f"got q_len={lengths[0]} and kv_len={lengths[1]}"
        raise ValueError(
            f"block_mask was created for block_mask.shape={mask.shape} but {got}. As the block mask was created for a "
            f"{'smaller' if smaller else 'larger'} length than you're using it for: {hint}"
        )
    if mask.kv_num_blocks.device != query.device:
        devices = f"{query.device} and {mask.kv_num_blocks.device}"
        raise RuntimeError(f"Expect q/k/v and block_mask to be on the same device but got {devices}")
    return mask
