"""The check of tensors against one another: dtypes, devices, and sizes by the names of axes.

One checker for every table of arguments.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile.call.arguments import Argument, check_tensor, given
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.sizes import holds, is_dense

if TYPE_CHECKING:
    from flashtile.mods.record import ModKey


def checked_kinds(record: Any, rows: Mapping[str, Argument]) -> dict[str, tuple[Argument, Tensor]]:
    """The given tensors of a record with their rows by name, each of a dtype that its row allows and on q's device.

    Raises:
        InvalidInputError: Naming the tensor that is not.
        UnsupportedError: Under ``torch.jit.trace``. Sizes are tensors there, launches are not recorded, and what is
            recorded holds for one length alone.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise UnsupportedError("torch.jit.trace cannot record attention; torch.compile and torch.export can")
    found, q = given(record, rows), record.q
    for field, row, x in found:
        name = row.keyword or field
        check_tensor(name, x)
        if row.dtypes is None:
            if x.dtype != q.dtype:
                raise InvalidInputError(name, f"dtype is {x.dtype}, but q has {q.dtype}")
        else:
            wide = row.wide and q.dtype == torch.float64
            others = (q.dtype,) * row.like_q + (torch.float64,) * wide
            if x.dtype not in row.dtypes[0] + others:
                must = row.dtypes[1] + " or float64" * wide + f" or q's {q.dtype}" * row.like_q
                hint = f": give {name}.int()" if x.dtype == torch.int64 and torch.int32 in row.dtypes[0] else ""
                raise InvalidInputError(name, f"dtype is {x.dtype}, must be {must}{hint}")
        if x.device != q.device:
            raise InvalidInputError(name, f"is on {x.device}, but q is on {q.device}")
    return {name: (row, x) for name, row, x in found}


class Axes:
    """Sizes by axis name: the first tensor with an axis sets its size, every later one must match.

    Args:
        renamed: Other texts in place of parts of the rows' axes, for this kind of call.
    """

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self.renamed = renamed
        self.sizes: dict[str, int] = {}
        self.owners: dict[str, str] = {}

    def fix(self, argument: str, axis: str, size: int) -> None:
        """Sets or checks one size."""
        if holds(self.sizes.setdefault(axis, size) != size):
            owner = self.owners[axis]
            raise InvalidInputError(argument, f"{axis} is {size}, but {owner} has {self.sizes[axis]}")
        self.owners.setdefault(axis, argument)

    def bind(self, argument: str, tensor: Tensor, row: Argument) -> None:
        """Checks one tensor's dimensions against its row of the table."""
        argument = row.keyword or argument
        if row.broadcasts:
            self._broadcasts(argument, tensor, row.axes.split())
            return
        text = row.axes
        for old, new in self.renamed.items():
            text = text.replace(old, new)
        axes = text.split()
        shapes = [axes[1:], [axes[0].strip("[]"), *axes[1:]]] if axes[0].startswith("[") else [axes]
        named = next((shape for shape in shapes if len(shape) == tensor.dim()), None)
        if named is None:
            ranks, texts = " or ".join(str(len(shape)) for shape in shapes), " or ".join(map(_shape_text, shapes))
            raise InvalidInputError(argument, f"has {tensor.dim()} dimensions, must have {ranks}: {texts}")
        for axis, size in zip(named, tensor.shape, strict=True):
            self.fix(argument, axis, size)

    def _broadcasts(self, argument: str, tensor: Tensor, axes: list[str]) -> None:
        if tensor.dim() > len(axes):
            most = f"at most {len(axes)}: {_shape_text(axes)}"
            raise InvalidInputError(argument, f"has {tensor.dim()} dimensions, must have {most}")
        for axis, size in zip(axes[len(axes) - tensor.dim() :], tensor.shape, strict=True):
            axis, *others = axis.split("/")
            if holds(size != 1) and all(holds(size != self.sizes[each]) for each in (axis, *others)):
                shape = ", ".join(f"{name} {self.sizes[name.split('/')[0]]}" for name in axes)
                either = "".join(f" or {self.sizes[each]}" for each in dict.fromkeys((axis, *others)))
                must = f"must be 1{either} to broadcast to ({shape})"
                if tuple(tensor.shape) == (self.sizes["batch"], self.sizes.get("seqlen_k")):
                    must += f"; if it is by batch and key, give {argument}[:, None, None, :]"
                if axis == "num_heads_q" and size == self.sizes["batch"] * self.sizes[axis]:
                    rows = ", ".join(map(str, (self.sizes["batch"], self.sizes[axis], *tensor.shape[-2:])))
                    keeps = ", where True keeps" * (argument == "attn_mask")
                    must += f"; if it is by batch and head, give {argument}.view({rows}){keeps}"
                elif axis == "num_heads_q" and size == self.sizes["batch"]:
                    by_batch = (
                        "masks of start[:, None] and end[:, None]"
                        if argument == "block_mask"
                        else f"{argument}[:, None]"
                    )
                    must += f"; if it is by batch, give {by_batch}"
                raise InvalidInputError(argument, f"{axis} is {size}, {must}")

    def bind_sides(self, t: Any, rows: Mapping[str, tuple[Argument, Tensor]], longest: Sequence[int | None]) -> bool:
        """Checks q, k and v, the bounds of packed ones and the given longest lengths; returns whether they are packed.

        Args:
            t: The tensors of a call.
            rows: Those that are given, with their rows, by name.
            longest: max_seqlen_q and max_seqlen_k; where they are None all rows of a tensor bound a length.
        """
        packed = is_packed(t)
        for name in ("q", "k", "v"):
            self.bind(name, rows[name][1], rows[name][0])
        for side, length in zip("qk", longest, strict=True):
            bounds = f"cu_seqlens_{side}"
            if packed:
                self.bind_bounds(bounds, rows)
                rows_of_side = self.sizes[f"total_{side}"]
                self.fix(f"max_seqlen_{side}", f"seqlen_{side}", rows_of_side if length is None else length)
            elif length is not None:
                raise InvalidInputError(f"max_seqlen_{side}", "is given, but goes with cu_seqlens alone")
        self.check_heads()
        return packed

    def bind_all(self, rows: Mapping[str, tuple[Argument, Tensor]]) -> None:
        """Checks all tensors; those that were bound before fit."""
        for name, (row, x) in rows.items():
            self.bind(name, x, row)

    def bind_bounds(self, argument: str, rows: Mapping[str, tuple[Argument, Tensor]]) -> None:
        """Checks cu_seqlens, and sets or checks the batch by them."""
        if argument not in rows:
            raise InvalidInputError(argument, "is None, must be an int32 tensor of shape (batch + 1,)")
        row, bounds = rows[argument]
        self.bind(argument, bounds, row)
        if holds(self.sizes["batch+1"] == 0):
            raise InvalidInputError(argument, "is empty, must have shape (batch + 1,)")
        self.fix(argument, "batch", self.sizes["batch+1"] - 1)

    def check_heads(self) -> None:
        """Refuses heads and widths of 0, and query heads that key heads do not divide."""
        sizes = self.sizes
        for axis in ("num_heads_q", "num_heads_kv", "head_dim", "head_dim_v"):
            if holds(sizes[axis] == 0):
                raise InvalidInputError(self.owners[axis], f"{axis} is 0, must be at least 1")
        if holds(sizes["num_heads_q"] % sizes["num_heads_kv"] != 0):
            must = f"must be a multiple of {self.owners['num_heads_kv']}'s num_heads_kv {sizes['num_heads_kv']}"
            heads = f"num_heads_q is {sizes['num_heads_q']}, {must}"
            raise InvalidInputError("q", f"{heads}; heads are the dimension after seqlen")


def is_packed(t: Any) -> bool:
    """Whether the tensors of a call have bounds of packed sequences."""
    return t.cu_seqlens_q is not None or t.cu_seqlens_k is not None


# No model has more heads, and none that had them would attend to so few rows and keys.
_MOST_HEADS, _FEW_ROWS = 128, 128


def warned_of_heads_first(shape: tuple[int, ...], of_k: tuple[int, ...]) -> bool:
    """Warns of a dense call if its heads seem to come before its rows, and returns whether it did.

    It looks at sizes that are numbers alone: no guard of a traced call may follow from a warning.
    """
    if any(type(n) is not int for n in (*shape[1:3], of_k[1])):
        return False
    if max(shape[1], of_k[1]) > _FEW_ROWS or shape[2] <= _MOST_HEADS:
        return False
    read = f"q of shape {tuple(shape)} is read as (batch, seqlen, heads, head_dim), so as {shape[2]} heads"
    warnings.warn(f"{read} of {shape[1]} rows; if heads come before rows, give q.transpose(1, 2)", stacklevel=2)
    return True


def _shape_text(axes: list[str]) -> str:
    return f"({axes[0]},)" if len(axes) == 1 else f"({', '.join(axes)})"


def packed_lengths(
    side: str, bounds: Tensor, rows: int, longest: int, shown: Callable[[], dict[str, int]] = dict
) -> list[int]:
    """The lengths of a side's packed sequences.

    Args:
        side: "q" or "k".
        bounds: Its cu_seqlens.
        rows: Rows of the packed tensor.
        longest: No sequence is longer.
        shown: Gives the arguments besides max_seqlen that say how long sequences are, and what they say.

    Raises:
        InvalidInputError: The values of the bounds do not fit.
    """
    lengths = lengths_between(f"cu_seqlens_{side}", bounds.tolist(), rows, side)
    if lengths and max(lengths) > longest:
        who = next((name for name, size in shown().items() if size == longest), None)
        what = f"seqlen_{side} is" if who else "is"
        held = f"but cu_seqlens_{side} holds a sequence of {max(lengths)}"
        raise InvalidInputError(who or f"max_seqlen_{side}", f"{what} {longest}, {held}")
    return lengths


def lengths_between(argument: str, bounds: list[int], rows: int, owner: str) -> list[int]:
    """The lengths of packed sequences from the values of their cu_seqlens.

    Args:
        argument: The name of cu_seqlens.
        bounds: Its values.
        rows: Rows of the packed tensor.
        owner: Its name.

    Raises:
        InvalidInputError: They do not start at 0, fall, or pass the last row.
    """
    if bounds[0] != 0:
        raise InvalidInputError(argument, f"starts with {bounds[0]}, must start with 0")
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if any(length < 0 for length in lengths):
        raise InvalidInputError(argument, "falls somewhere, must never fall")
    if bounds[-1] > rows:
        raise InvalidInputError(argument, f"ends with {bounds[-1]}, but {owner} has {rows} rows")
    return lengths


def is_aligned(tensor: Tensor) -> bool:
    """Whether address and strides are multiples of 16 bytes."""
    if (type(tensor) is Tensor or not hasattr(tensor, "fake_mode")) and tensor.data_ptr() % 16:
        return False
    vector_width = 16 // tensor.element_size()
    if is_dense(tensor) and holds(tensor.shape[-1] % vector_width == 0):
        return True  # The strides are multiples of that size.
    strides = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    return not any(holds(s % vector_width != 0) and holds(n > 1) for s, n in strides)


_OPERAND_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


def mod_keys(t: Any, mods: Sequence[str]) -> dict[str, ModKey]:
    """The ``ModKey`` of each mod of a call by "score" or "mask"; checks what they read.

    Raises:
        InvalidInputError: A text is no graph, or the operands are not what it reads.
    """
    if not mods and t.operands is None:
        return {}
    from flashtile.mods.graph import GraphError, kind_of, parse  # what few programs need is not loaded by all
    from flashtile.mods.record import ModKey, OperandKind

    operands, numbers = t.operands or (), t.numbers or ()
    try:
        graphs = [parse(text) for text in mods]
    except GraphError as error:
        raise InvalidInputError("mods", str(error)) from error
    for name, given_, wanted in (
        ("operands", len(operands), sum(len(g.operands) for g in graphs)),
        ("numbers", len(numbers), sum(len(g.numbers) for g in graphs)),
    ):
        if given_ != wanted:
            raise InvalidInputError(name, f"has {given_}, but the mods read {wanted}")
    if [g.what for g in graphs] not in (["score"], ["mask"], ["score", "mask"]):
        raise InvalidInputError("mods", "must be a score mod, a mask mod, or the two in this order")
    keys, rest = {}, iter(operands)
    for graph, text in zip(graphs, mods, strict=True):
        read = tuple(itertools.islice(rest, len(graph.operands)))
        for kind, x in zip(graph.operands, read, strict=True):
            _check_operand(f"{graph.what}_mod", kind, kind_of, x, t.q)
        keys[graph.what] = ModKey(text, tuple(OperandKind(x.dtype, x.dim()) for x in read))
    return keys


def _check_operand(argument: str, kind: str, kind_of: Callable[[torch.dtype], str], x: Tensor, q: Tensor) -> None:
    check_tensor(argument, x)
    what = f"reads a tensor of shape {tuple(x.shape)}"
    if x.dtype not in _OPERAND_DTYPES:
        raise InvalidInputError(argument, f"{what} and dtype {x.dtype}, must be a float, integer or bool dtype")
    if x.device != q.device:
        raise InvalidInputError(argument, f"{what} on {x.device}, but q is on {q.device}")
    if f"{kind_of(x.dtype)}{x.dim()}" != kind:
        raise InvalidInputError(argument, f"{what} and dtype {x.dtype}, but its graph has {kind}")
    if holds(x.numel() == 0):
        raise InvalidInputError(argument, f"{what}, which has no element")
