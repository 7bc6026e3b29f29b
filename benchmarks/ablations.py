"""The Hopper forward with one thing in its design changed, for suite ``ablations``: what each is worth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.session import NotTimedError
from flashtile.backends.hopper.forward import config as tiles
from flashtile.backends.hopper.forward.config import ForwardTiles, two_warpgroups
from flashtile.call.problem import described
from flashtile.ops import plans

# What a provider's name ends with -> the design's tiles, changed so.
CHANGES: dict[str, Callable[[ForwardTiles], ForwardTiles]] = {
    "pingpong": lambda c: replace(c, pingpong=True),
    "no-pingpong": lambda c: replace(c, pingpong=False),
    "softmax-apart": lambda c: replace(c, in_turn=True),
    "tiles-apart": lambda c: replace(c, overlap=False),
    "all-apart": lambda c: replace(c, pingpong=False, in_turn=True, overlap=False),
    "fixed-order": lambda c: replace(c, dynamic=False),
    "2-stages": lambda c: replace(c, stages=2),
    "2-warpgroups": lambda c: c if c.num_warpgroups == 2 else two_warpgroups(c.block_d, c.block_dv),
}


def changed(attend: Callable[..., Tensor], case: Case, change: str) -> Callable[..., Tensor]:
    """A forward with such tiles; ``NotTimedError`` if they are the design's own."""
    facts: dict[str, Any] = {"device_type": "cuda", "dtype": case.torch_dtype, "band": case.band, "batch": case.batch}
    facts |= {name: getattr(case, name) for name in ("seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim")}
    design = tiles.choose(described(**facts, head_dim_v=case.head_dim_v or case.head_dim))
    config, kept = CHANGES[change](design), OrderedDict[Any, Any]()
    if config == design:
        raise NotTimedError("refused: so is the design")

    def attend_by(*tensors: Tensor) -> Tensor:
        with mock.patch.object(tiles, "choose", lambda *args, **given: config), plans.own_plans(kept):
            return attend(*tensors)

    return attend_by
