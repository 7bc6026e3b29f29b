"""Calls with functions of the user's, judged as the case table judges all calls."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

import flashtile
from flashtile.api.blocks import create_block_mask
from flashtile.api.keywords import Masked, masked_by
from flashtile.call.arguments import Options, grads_of
from flashtile.call.functions import functions_of
from flashtile.call.problem import Problem
from flashtile.mods.block_mask import BlockMask, with_bits
from tests.cases import Call, Case, build
from tests.mods.functions import MASKS, SCORES, Sizes


@dataclass(frozen=True, eq=False)
class ModCall(Call):
    """A ``Call`` whose leaves ``operand0`` and so on are captured by its functions."""

    def _with(self, leaves: dict[str, Tensor]) -> Call:
        named = {name: x for name, x in leaves.items() if not name.startswith("operand")}
        made = super()._with(named)
        operands = list(self.tensors.operands or ())
        for name, x in leaves.items():
            if name.startswith("operand"):
                operands[int(name[7:])] = x
        tensors = replace(made.tensors, operands=tuple(operands) if self.tensors.operands is not None else None)
        return replace(made, tensors=tensors, leaves=leaves)


def indices_are_cut(backend: str | None, dtype: torch.dtype, head_dim: int = 64, rows: int = 90) -> bool:
    """Whether what is read past a tensor's ends is its last element, as if the function cut the index itself.

    That is so bit for bit, and of gradients too.
    """
    made = torch.Generator().manual_seed(5)
    lengths = rows, rows + 30, rows + 30
    q, k, v = (torch.randn(2, n, 2, head_dim, generator=made).to(dtype).requires_grad_() for n in lengths)
    table = torch.randn(2, rows // 2 - 5, generator=made).to(dtype).requires_grad_()

    def cut_here(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx).abs()] + table[h, q_idx - kv_idx]

    def cut_by_hand(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        n, apart = table.shape[1], q_idx - kv_idx
        from_end = torch.where(apart < 0, apart + n, apart)
        return score + table[h, apart.abs().clamp(max=n - 1)] + table[h, from_end.clamp(0, n - 1)]

    found = []
    for function in (cut_here, cut_by_hand):
        out = flashtile.attention(q, k, v, score_mod=function, deterministic=True, backend=backend)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, table))))
    return all(map(torch.equal, *found))


def store_bits(lists: BlockMask, bits: Tensor, blocks: Tensor, over_keys: bool) -> None:
    """What ``portable.lists.store_bits`` stores, by PyTorch; of a mask without bits."""
    batch, heads, rows, keys = lists.shape
    (of_rows, of_keys), sizes = lists.block_size, (lists.row_blocks.shape[2], lists.key_blocks.shape[2])
    at = torch.meshgrid(*(torch.arange(n, device=bits.device) for n in lists.shape), indexing="ij")
    kept = torch.zeros(batch * heads, sizes[0] * of_rows, sizes[1] * of_keys, dtype=torch.long, device=bits.device)
    kept[:, :rows, :keys] = lists.mask_mod(*at).flatten(0, 1)
    own, other = (of_keys, of_rows) if over_keys else (of_rows, of_keys)
    places = (2 * torch.arange(16)[:, None, None] + torch.arange(2)).to(bits.device)
    for n, (group, block, across) in enumerate(blocks.tolist()):
        pairs = (kept[group].T if over_keys else kept[group])[block * own :, across * other :][:own, :other]
        numbers = (pairs.reshape(own, other // 128, 16, 4, 2) << places).sum((2, 4)).transpose(0, 1)
        bits[n * numbers.numel() :][: numbers.numel()] = numbers.flatten().to(torch.int32)


def stored_bits(lists: BlockMask) -> list[Tensor]:
    """The bits of a mask's partial blocks by rows and by keys, which begin on 16 bytes."""
    found = []
    for bounds, items in ((lists.row_blocks, lists.row_items), (lists.key_blocks, lists.key_items)):
        ranges, first = bounds.flatten(0, -2), int(items[0])
        assert first % 4 == 0
        count = int((ranges[:, 1] - ranges[:, 0]).sum())
        found.append(items[first:][: count * lists.block_size[0] * lists.block_size[1] // 32])
    return found


def with_functions(
    case: Case,
    score: str | None,
    mask: str | None,
    dtype: torch.dtype,
    seed: int = 0,
    frozen: bool = False,
    listed: tuple[int, int] | None = None,
    device: str = "cpu",
    bits: bool = False,
) -> ModCall:
    """A case with functions of ``functions``, by name.

    ``frozen``: of what they capture nothing learns; ``listed``: rows and keys of the blocks of the mask's lists;
    ``bits``: whether these have the bits that a device with kernels for them would have stored.
    """
    call = build(case, dtype, device, seed=seed)
    packed = call.problem.varlen
    sizes = Sizes(
        max(call.problem.batch, 1), case.heads, call.problem.seqlen_q, call.problem.seqlen_k, dtype,
        torch.Generator().manual_seed(seed + 1), device,
    )  # fmt: skip
    makers = {"score_mod": score and SCORES[score](sizes), "mask_mod": mask and MASKS[mask](sizes)}
    made = {name: each for name, each in makers.items() if each}
    leaves = dict(call.leaves)
    tensors = call.tensors
    if frozen or (case.wanted is not None and "o" not in case.wanted):
        for each in made.values():
            for x in each.leaves:
                x.requires_grad_(False)
    masked = Masked({}, False, (), None)
    if listed is not None:
        function = made["mask_mod"].function if mask else noop_mask
        groups = (sizes.batch, case.heads) if seed % 2 or mask in ("prefix", "heads_differ") else (None, None)
        lists = create_block_mask(function, *groups, sizes.rows, sizes.keys, device, listed)
        if bits:
            lists = with_bits(lists, functools.partial(store_bits, lists))
        masked = masked_by(lists, None)
    tensors = replace(tensors, **masked.tensors)
    functions = functions_of(
        *(makers[name] and (makers[name].plain or makers[name].function) for name in makers), tensors, case.softcap,
        tensors.cu_seqlens_q is tensors.cu_seqlens_k and listed is None,
    )  # fmt: skip
    tensors = replace(tensors, operands=functions.operands, numbers=functions.numbers)
    for n, x in enumerate(functions.operands or ()):
        if x.requires_grad:
            leaves[f"operand{n}"] = x
    p = call.problem
    asked = tuple(name in leaves for name in ("q", "k", "v", "bias", "sinks"))
    operands = tuple(f"operand{n}" in leaves for n in range(len(functions.operands or ())))
    options = Options(
        p.band.left, p.band.right, p.seqlen_q if packed else None, p.seqlen_k if packed else None,
        grads_of("grads", (*asked, *operands)), p.softmax_scale, p.softcap, p.dropout_p, p.deterministic,
        attention_chunk=p.band.chunk, mirrored=p.mirrored,
        listed=masked.listed,
    )  # fmt: skip
    options = functions.options(options, 0 if packed else p.seqlen_k - p.seqlen_q)
    read = tensors
    if case.layout == "last_dim_strided":
        read = replace(tensors, **{name: getattr(tensors, name).contiguous() for name in "qkv"})
    keywords = call.keywords | {name: each.function for name, each in made.items()}
    if listed is not None:
        keywords = {name: x for name, x in keywords.items() if name != "mask_mod"} | {"block_mask": lists}
    return ModCall(case, Problem.of(read, options), tensors, keywords, leaves)
