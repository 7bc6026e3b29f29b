"""What SGLang's speculative decoding runs on GPUs alone, in plain PyTorch; to be imported in each of its processes.

Slots of drafts, trees of drafts, and which rows of a tree are accepted, for greedy requests. The file that the variable
``ACCEPTED`` names gets a line of these rows for each request and round.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import sglang.srt.speculative.eagle_worker_v2  # noqa: F401  # all modules that have names of these
import torch
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor


def build_tree_kernel_efficient_func(
    parent_list: Tensor, top_scores_index: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor,
    retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, topk: int, spec_steps: int,
    num_verify_tokens: int, tree_mask_mode: Any,
) -> None:  # fmt: skip
    """Masks, positions and links of trees: a row's first child, and a row's next brother."""
    rows = num_verify_tokens
    assert tree_mask_mode.name == "QLEN_ONLY"
    masks = torch.eye(rows, dtype=torch.bool).repeat(len(seq_lens), 1, 1)
    for b, chosen in enumerate(top_scores_index.tolist()):
        # The nodes of a step come in groups of topk, one for each node that went on.
        groups = [node // topk for node in chosen]
        parents = [0 if x == 0 else chosen.index(int(parent_list[b, x])) + 1 for x in groups]
        for row, parent in enumerate(parents, 1):
            masks[b, row] |= masks[b, parent]
        for row in range(rows - 1, 0, -1):
            retrieve_next_sibling[b, row] = retrieve_next_token[b, parents[row - 1]]
            retrieve_next_token[b, parents[row - 1]] = row
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    positions.copy_((seq_lens[:, None] + masks.sum(-1) - 1).flatten())
    tree_mask.copy_(masks.flatten())


def verify_tree_greedy_func(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrieve_index: Tensor,
    retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, target_predict: Tensor, topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Goes from each root to the child that the target would have written, as far as there is one."""
    told = []
    for b, wanted in enumerate(target_predict.view_as(candidates).tolist()):
        path, row = [0], int(retrieve_next_token[b, 0])
        while row >= 0:
            if candidates[b, row] == wanted[path[-1]]:
                path.append(row)
                row = int(retrieve_next_token[b, row])
            else:
                row = int(retrieve_next_sibling[b, row])
        accept_index[b, : len(path)] = retrieve_index[b, path]
        accept_token_num[b] = len(path) - 1
        predicts[retrieve_index[b, path]] = torch.tensor([wanted[row] for row in path], dtype=predicts.dtype)
        told.append(f"{path}\n")
    with open(os.environ["ACCEPTED"], "a") as file:
        file.writelines(told)
    return predicts, accept_index, accept_token_num


def slots(req_pool_indices: Tensor, req_to_token: Tensor, starts: Tensor, count: int) -> Tensor:
    places = starts[:, None].long() + torch.arange(count)
    return req_to_token[req_pool_indices[:, None].long(), places].long().flatten()


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor, topk: int, num_cols: int,
    positions: Tensor | None = None, mrope: Tensor | None = None,
) -> None:  # fmt: skip
    """The slots of a drafter's branches."""
    assert positions is mrope is None
    out_cache_loc.copy_(slots(req_pool_indices, req_to_token, seq_lens, topk * num_cols))


def assign_extend_cache_locs_uniform_func(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, batch_size: int, draft_token_num: int,
    device: Any,
) -> Tensor:  # fmt: skip
    """The slots of the drafts that the target computes."""
    return slots(req_pool_indices, req_to_token, start_offset, draft_token_num)


def assign_req_to_token_pool_func(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    batch_size: int,
) -> None:  # fmt: skip
    """Gives requests the slots that were found for them."""
    starts, stops = start_offset.tolist(), end_offset.tolist()
    parts = out_cache_loc.split([stop - start for start, stop in zip(starts, stops, strict=True)])
    for request, start, stop, part in zip(req_pool_indices.tolist(), starts, stops, parts, strict=True):
        req_to_token[request, start:stop] = part.to(req_to_token.dtype)


def fill_front_out_cache_loc_func(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    """The first slots of each request's drafts."""
    of_each = out_cache_loc.view(len(num_front), -1)
    found = of_each[torch.arange(of_each.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(found)] = found


def fill_accept_out_cache_loc_func(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int
) -> None:
    """The slots of the drafts that are accepted."""
    found = out_cache_loc[accept_index[accept_index >= 0]]
    accept_out_cache_loc[: len(found)] = found


def fill_bonus_tokens_func(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """The last token of each request."""
    bonus_tokens.copy_(accept_tokens.view(batch_size, accept_stride).gather(1, accept_lens[:, None].long() - 1)[:, 0])


def move(self: Any, tgt_loc: Tensor, src_loc: Tensor) -> None:
    for buffer in (*self.k_buffer, *self.v_buffer):
        buffer[tgt_loc] = buffer[src_loc]


allocation.get_last_loc_triton = allocation.get_last_loc_torch
MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
MHATokenToKVPool._move_kv_cache_impl = move
for _name, _ours in [*vars().items()]:
    if _name.endswith("_func"):
        for _module in [*sys.modules.values()]:
            if _module.__name__.startswith("sglang.") and hasattr(_module, _name):
                setattr(_module, _name, _ours)
