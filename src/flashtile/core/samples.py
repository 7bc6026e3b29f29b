"""Masks by sample: ``mask[b]``, and the division of a mask among the microbatches of a pipeline's schedule.

Schedules of ``torch.distributed.pipelining`` flatten a stage's arguments by PyTorch's pytrees, split each tensor leaf
along its first dimension, and pass other leaves whole. So a mask has two leaves: the numbers of its samples, and the
mask itself. Putting some of the numbers together again gives the mask of these samples.
"""

from __future__ import annotations

import operator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from flashtile.core.errors import InvalidInputError


class BySample:
    """A mask of a batch, or of one sample that all share."""

    # A mask that all samples share has no last sample, so an iteration over ``mask[0]``, ``mask[1]``, ... would not
    # end.
    __iter__ = None

    def __and__(self, other: object) -> Self:
        """As of intervals alone: what both keep.

        Raises:
            TypeError: They are not two masks of intervals.
        """
        raise TypeError(
            "& is of two masks of intervals: what others keep together is"
            " block_mask=create_block_mask(mods.and_masks(f, g), ...), of functions of a pair,"
            " or block_mask=intervals with mask_mod=g"
        )

    __rand__ = __and__

    def __or__(self, other: object) -> Self:
        """None of the masks has it.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "masks have no |: what one or the other keeps is"
            " block_mask=create_block_mask(mods.or_masks(f, g), ...), of functions of a pair"
        )

    __ror__ = __or__

    def __init_subclass__(cls) -> None:
        # A dataclass with slots would be created twice; masks have no slots.
        register_pytree_node(cls, _flatten, _unflatten)

    @property
    def batch(self) -> int:
        """The number of samples with masks of their own; 1 if all share one mask."""
        raise NotImplementedError

    def _some(self, first: int, stop: int) -> Self:
        """The mask of samples ``first`` to ``stop - 1``."""
        raise NotImplementedError

    def __getitem__(self, samples: int | slice) -> Self:
        """The mask of one sample, as a batch of 1, or of a slice of samples. A mask that all share is returned for any.

        Args:
            samples: A number, or ``first:stop``, as for a list.

        Raises:
            IndexError: There is no such sample.
            InvalidInputError: The slice has steps.
        """
        batch = self.batch
        if isinstance(samples, slice):
            first, stop, step = samples.indices(batch)
            if step != 1:
                raise InvalidInputError("samples", f"has steps of {step}, must be a number or first:stop")
            return self if batch == 1 else self._some(first, max(first, stop))
        number = operator.index(samples)
        if batch == 1:
            return self
        if not -batch <= number < batch:
            raise IndexError(f"sample {number} of a mask of {batch}")
        return self._some(number % batch, number % batch + 1)


class _Whole:
    """A leaf that is not a tensor: a mask, and the numbers of its samples; no numbers if all samples share it."""

    def __init__(self, mask: BySample) -> None:
        self.mask = mask
        self.numbers = None if mask.batch == 1 else torch.arange(mask.batch, device="cpu")


def _flatten(mask: BySample) -> tuple[list[Any], None]:
    whole = _Whole(mask)
    return [whole.numbers, whole], None


def _unflatten(leaves: Any, _: None) -> Any:
    numbers, whole = leaves
    if not isinstance(whole, _Whole):
        return [numbers, whole]  # a caller's values in place of leaves, such as how to split each
    if numbers is whole.numbers or not isinstance(numbers, Tensor):
        return whole.mask
    if numbers.is_meta:
        return whole.mask[: len(numbers)]
    found = numbers.tolist()
    first = found[0] if found else 0
    if found != list(range(first, first + len(found))):
        raise InvalidInputError("block_mask", f"is split into samples {found}, which do not follow one another")
    return whole.mask[first : first + len(found)]
