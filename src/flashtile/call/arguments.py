"""The table of a call's arguments, from which checks, schema and gradients are derived.

``Tensors`` and ``Options`` hold a call; a cached call's are in ``cached_arguments``. The ``Argument`` of each
field describes its allowed values; the checks, the operators' schema and the list of gradients are read from there. To
add an argument, add a field here and name it in the public signatures.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.masks import Band
from flashtile.core.settings import BACKENDS as BACKENDS
from flashtile.core.sizes import holds

R = TypeVar("R")
S = TypeVar("S")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Dtypes that a tensor may have, and their names in error messages.
_FLOAT = (DTYPES, "float16, bfloat16, float32 or float64")
FLOAT8 = torch.float8_e4m3fn
FLOAT32, INT32 = ((torch.float32,), "float32"), ((torch.int32,), "int32")
_BOOL, _INT64 = ((torch.bool,), "bool; attn_bias takes floats"), ((torch.int64,), "int64")

# Kernels get numbers as float32, here without subnormal ones, and lengths as int32.
_SMALLEST, _GREATEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_LONGEST = torch.iinfo(torch.int32).max


def finite(name: str, value: Any) -> float:
    """Checks a number and returns it as a float; raises InvalidInputError."""
    # Comparisons instead of math.isfinite, which torch.compile cannot trace on a symbolic number. NaN fails them.
    is_number = isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    if not is_number or not -_GREATEST <= value <= _GREATEST:
        raise InvalidInputError(name, f"is {shown(value)}, must be a finite number in float32's range")
    return float(value)


def _scale(name: str, value: object) -> float | None:
    """Checks softmax_scale."""
    return None if value is None else finite(name, value)


def _softcap(name: str, value: object) -> float:
    """Checks the softcap; 0 for none."""
    cap = 0.0 if value is None else finite(name, value)
    if cap != 0 and cap < _SMALLEST:
        raise InvalidInputError(
            name, f"is {shown(value)}, must be 0 or None (none) or positive, and not below {_SMALLEST:.1g}"
        )
    return cap


def probability(name: str, value: object) -> float:
    """Checks the probability of dropping and returns it as a float; raises InvalidInputError."""
    share = finite(name, value)
    if not 0 <= share < 1:
        raise InvalidInputError(name, f"is {shown(value)}, must be at least 0 and less than 1")
    return share


def flag(name: str, value: object) -> bool:
    """Checks a bool and returns it; raises InvalidInputError."""
    if not isinstance(value, bool):
        raise InvalidInputError(name, f"is {shown(value)}, must be a Python bool, True or False")
    return value


def _length(name: str, value: Any) -> Any:
    """Checks a longest length."""
    if value is None or isinstance(value, torch.SymInt):
        return value
    return integer(name, value, 0, " or None")


def integer(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """Checks a number of things and returns it as an int.

    Raises:
        InvalidInputError: If it is no integer, less than ``least``, or more than an int32 holds.
    """
    found = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else -1
    if holds(found < least) or holds(found > _LONGEST):
        most = ", at most 2**31 - 1" if holds(found > _LONGEST) else ""
        raise InvalidInputError(name, f"is {shown(value)}, must be an integer >= {least}{otherwise}{most}")
    return found


def _chunk(name: str, value: Any) -> int | None:
    """Checks attention_chunk; None for none."""
    return None if value is None or (value == 0 and value is not False) else integer(name, value, 1, ", or 0 or None")


# What batch_invariant becomes: rows of few and of many queries have bits of their own; or all rows have, of one kind.
BY_KIND, STRICT = "by kind", "strict"


def _invariance(name: str, value: object) -> str:
    """Checks batch_invariant; empty for False."""
    if not isinstance(value, bool) and value != STRICT:
        raise InvalidInputError(name, f"is {shown(value)}, must be True, False or 'strict'")
    return STRICT if value == STRICT else BY_KIND if value else ""


def _backend(name: str, value: object) -> str:
    """Checks the name of a backend; empty for none."""
    if value is not None and not (isinstance(value, str) and value in BACKENDS):
        raise InvalidInputError(name, f"is {shown(value)}, must be one of {', '.join(BACKENDS)}, or None to choose")
    return value or ""


@dataclass(frozen=True)
class Argument:
    """The description of one field of ``Tensors`` or ``Options``.

    Attributes:
        meaning: Description for the reader.
        axes: Names of a tensor's dimensions; one in brackets may be left out, and of two with a slash it is either. A
            packed call has ``total_q`` in place of ``batch seqlen_q``.
        dtypes: Those that a tensor may have; None for q's. q's also goes if ``like_q``, float64 with a float64 q if
            ``wide``.
        layout: Which strides kernels read: "any", "rows" (the last dimension contiguous) or "whole" (all contiguous).
        gradient: The field of ``Gradients`` with the tensor's gradient, None if it has none.
        broadcasts: Whether dimensions may be 1, and leading ones left out.
        like_q: See dtypes.
        wide: See dtypes.
        check: For non-tensor arguments: returns the value as stored in ``Options``, or raises.
        schema: Its type in the operators' schema, if that does not follow from the field's.
        keyword: The public keyword that it is part of, if that has another name.
    """

    meaning: str
    axes: str = ""
    dtypes: tuple[tuple[torch.dtype, ...], str] | None = None
    layout: str = "whole"
    gradient: str | None = None
    broadcasts: bool = False
    like_q: bool = False
    wide: bool = False
    check: Callable[[str, Any], Any] = lambda name, value: value
    schema: str = ""
    keyword: str = ""


_PAIRS = "batch num_heads_q seqlen_q seqlen_k"
_ROW_KEYS, _KEY_ROWS = "batch num_heads_q seqlen_q ends", "batch num_heads_q seqlen_k ends"
_ROW_BLOCKS, _KEY_BLOCKS = (f"batch num_heads_q/num_heads_kv blocks_{side} bounds" for side in "qk")


@dataclass(eq=False)
class Tensors:
    """The tensors of one call; absent ones are None. Treat it as immutable; frozen=True would cost 2.5 us."""

    q: Annotated[Tensor, Argument("Queries.", "batch seqlen_q num_heads_q head_dim", _FLOAT, "rows", "dq")]
    k: Annotated[Tensor, Argument("Keys.", "batch seqlen_k num_heads_kv head_dim", None, "rows", "dk")]
    v: Annotated[Tensor, Argument("Values.", "batch seqlen_k num_heads_kv head_dim_v", None, "rows", "dv")]
    alibi_slopes: Annotated[Tensor | None, Argument("ALiBi.", "[batch] num_heads_q", FLOAT32, wide=True)] = None
    attn_mask: Annotated[Tensor | None, Argument("True keeps a pair.", _PAIRS, _BOOL, "any", broadcasts=True)] = None
    attn_bias: Annotated[Tensor | None, Argument("Added scores.", _PAIRS, _FLOAT, "any", "dbias", broadcasts=True)] = (
        None
    )
    sinks: Annotated[Tensor | None, Argument("Logits per head.", "num_heads_q", _FLOAT, gradient="dsinks")] = None
    cu_seqlens_q: Annotated[Tensor | None, Argument("Bounds of packed queries.", "batch+1", INT32)] = None
    cu_seqlens_k: Annotated[Tensor | None, Argument("Bounds of packed keys.", "batch+1", INT32)] = None
    rng_state: Annotated[Tensor | None, Argument("Philox seed and offset.", "numbers", _INT64, "any")] = None
    # From ``flashtile.masks.Intervals``.
    row_keys: Annotated[
        Tensor | None, Argument("Keys of each row.", _ROW_KEYS, INT32, broadcasts=True, keyword="block_mask")
    ] = None
    key_rows: Annotated[
        Tensor | None, Argument("Rows of each key.", _KEY_ROWS, INT32, broadcasts=True, keyword="block_mask")
    ] = None
    # From ``mods.block_mask.BlockMask``.
    row_blocks: Annotated[
        Tensor | None, Argument("Lists by rows.", _ROW_BLOCKS, INT32, broadcasts=True, keyword="block_mask")
    ] = None
    key_blocks: Annotated[
        Tensor | None, Argument("Lists by keys.", _KEY_BLOCKS, INT32, broadcasts=True, keyword="block_mask")
    ] = None
    row_items: Annotated[Tensor | None, Argument("What row_blocks list.", "row_items", INT32, keyword="block_mask")] = (
        None
    )
    key_items: Annotated[Tensor | None, Argument("What key_blocks list.", "key_items", INT32, keyword="block_mask")] = (
        None
    )
    # No public function takes them: ``core.masks.Origin``.
    origins: Annotated[Tensor | None, Argument("Parts of sequences.", "batch origin", INT32)] = None
    # For ``Options.mods``, one mod's after the other's: ``mods.record``.
    operands: Annotated[tuple[Tensor, ...] | None, Argument("What mods read.", layout="any", schema="Tensor[]?")] = None
    numbers: Annotated[tuple[float, ...] | None, Argument("Numbers of mods.", layout="any", schema="float[]?")] = None


class Grads(NamedTuple):
    """Which tensors need a gradient, in the order of ``Tensors``; operands is empty if none of them does."""

    q: bool = False
    k: bool = False
    v: bool = False
    bias: bool = False
    sinks: bool = False
    operands: tuple[bool, ...] = ()

    @property
    def named(self) -> tuple[bool, ...]:
        """Those in the order of ``GRADIENTS``."""
        return self[:5]


def grads_of(name: str, value: Sequence[Any]) -> Grads:
    """``Grads`` from its flat form, or from one with the operands' together."""
    operands = value[5] if len(value) > 5 and isinstance(value[5], tuple) else tuple(value[5:])
    q, k, v, bias, sinks = (*value, *[False] * 5)[:5]
    return Grads(q, k, v, bias, sinks, operands if any(operands) else ())


class Options(NamedTuple):
    """The non-tensor arguments of one call, checked."""

    window_left: Annotated[int | None, Argument("Left bound of the Band.")] = None
    window_right: Annotated[int | None, Argument("Right bound of the Band.")] = None
    max_seqlen_q: Annotated[
        int | None, Argument("Longest packed queries, if known.", schema="SymInt?", check=_length)
    ] = None
    max_seqlen_k: Annotated[int | None, Argument("Longest packed keys, if known.", schema="SymInt?", check=_length)] = (
        None
    )
    grads: Annotated[Grads, Argument("Wanted gradients.", check=grads_of, schema="bool[]")] = Grads()
    softmax_scale: Annotated[float | None, Argument("None is head_dim ** -0.5.", check=_scale)] = None
    softcap: Annotated[float, Argument("Cap of the scores, 0 for none.", check=_softcap)] = 0.0
    dropout_p: Annotated[float, Argument("Probability of dropping.", check=probability)] = 0.0
    deterministic: Annotated[bool, Argument("Bitwise repeatable backward.", check=flag)] = False
    backend: Annotated[str, Argument("Explicit choice, empty for none.", check=_backend)] = ""
    attention_chunk: Annotated[int | None, Argument("Keys of a chunk of the Band.", check=_chunk)] = None
    mirrored: Annotated[bool, Argument("Whether row_keys and key_rows are one mask.", check=flag)] = False
    listed: Annotated[tuple[int, ...], Argument("Rows and keys of a listed block; bits.", schema="int[]?")] = ()
    return_max_scores: Annotated[bool, Argument("Whether lse comes with the largest scores.", check=flag)] = False
    batch_invariant: Annotated[str, Argument("Whether bits of a row are its own.", check=_invariance)] = ""
    # No keywords: what score_mod and mask_mod become, and what integrations give.
    mods: Annotated[tuple[str, ...], Argument("Texts of mods.", schema="str[]?")] = ()
    counted_by: Annotated[str, Argument("Name of what counts the call's runs.")] = ""

    @property
    def band(self) -> Band:
        """The bounds of windows, of causality and of chunks."""
        return Band(self.window_left, self.window_right, self.attention_chunk)


class Plain(NamedTuple):
    """The fields of ``Options`` from softmax_scale to batch_invariant, as a caller gave them."""

    softmax_scale: Any = None
    softcap: Any = 0.0
    dropout_p: Any = 0.0
    deterministic: Any = False
    backend: Any = None
    attention_chunk: Any = None
    mirrored: bool = False
    listed: tuple[int, ...] = ()
    return_max_scores: Any = False
    batch_invariant: Any = False


def table(record: type) -> dict[str, Argument]:
    """The rows of a record's fields by name, with their types in the operators' schema."""
    found = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        kind, row = get_args(hint)
        given = [each for each in get_args(kind) if each is not type(None)]
        schema = row.schema or (f"{_SCHEMAS[given[0]]}?" if given else _SCHEMAS[kind])
        found[name] = replace(row, schema=schema)
    return found


_SCHEMAS = {
    Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip


TENSORS, OPTIONS = table(Tensors), table(Options)
# Tensor name -> field of Gradients, in the order of Grads.
GRADIENTS = {name: row.gradient for name, row in TENSORS.items() if row.gradient is not None}
_NO_GRADS, _MAY_BE = Grads(), {Tensor, type(None)}


# Generated code: torch.compile cannot trace operator.attrgetter, and a loop takes five times as long.
def fields_of(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that reads these fields of a record, as fast as hand-written code."""
    made: Callable[[Any], tuple[Any, ...]] = eval(f"lambda record: ({', '.join(f'record.{n}' for n in names)},)")
    return made


tensor_values, differentiable = fields_of(TENSORS), fields_of(GRADIENTS)
_OTHERS = list(TENSORS)[3:]
_plain = fields_of(n for n, row in TENSORS.items() if row.gradient is None and "[]" not in row.schema)
other_tensors, single_tensors = fields_of(_OTHERS[:-2]), fields_of(list(TENSORS)[:-2])
# Whether a call has only q, k and v.
is_plain: Callable[[Tensors], bool] = eval(f"lambda t: {' is '.join(f't.{name}' for name in _OTHERS)} is None")


def checked(**plain: object) -> dict[str, Any]:
    """Checks non-tensor arguments given by name; returns them as stored in ``Options``.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    return {name: OPTIONS[name].check(name, value) for name, value in plain.items()}


def read(
    tensors: Tensors,
    causal: bool,
    window_size: Sequence[int | None] | None,
    return_lse: bool,
    plain: Plain,
    lengths: tuple[object, object] = (None, None),
) -> Options:
    """Makes the options of a call from its keywords, and checks which tensors need gradients.

    The same arguments give the same object, unless one is unhashable.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    return _options(causal, window_size, return_lse, (*lengths, _grads(tensors), *plain))


def reader(options: type[S]) -> Callable[[Any, Any, Any, tuple[object, ...]], S]:
    """A function that makes options from ``causal``, ``window_size``, ``return_lse`` and a tuple of the other fields.

    It takes the keywords among the fields that follow window_right, in their order. The same arguments give the same
    object, unless one is unhashable. It raises InvalidInputError, naming the argument that is wrong.
    """
    rows = {n: row for n, row in table(options).items() if n not in ("mods", "counted_by")}
    new = cast(Callable[..., S], options)

    def make(causal: object, return_lse: object, *plain: object) -> S:
        causal, _ = flag("causal", causal), flag("return_lse", return_lse)
        left, right, *others = (row.check(name, x) for (name, row), x in zip(rows.items(), plain, strict=True))
        return new(left, 0 if causal else right, *others)

    # Typed, since True == 1 == 1.0, but each argument accepts only one of these types.
    made = functools.lru_cache(maxsize=4096, typed=True)(make)

    def read(causal: Any, window_size: Any, return_lse: Any, plain: tuple[object, ...]) -> S:
        left, right = (None, None) if window_size is None else window_bounds(window_size)
        if _is_compiling():
            return make(causal, return_lse, left, right, *plain)
        try:
            return made(causal, return_lse, left, right, *plain)
        except TypeError:  # a list or a symbolic number, which have no hash
            return make(causal, return_lse, left, right, *plain)

    return read


_is_compiling, _options = torch.compiler.is_compiling, reader(Options)


def _grads(t: Tensors) -> tuple[Any, ...]:
    """Which tensors need gradients; raises for values that are not tensors and for gradients that do not exist."""
    q, k, v = t.q, t.k, t.v
    plain = is_plain(t)
    if not (plain and type(q) is type(k) is type(v) is Tensor):
        _check_types(t)
    if not torch.is_grad_enabled():
        return _NO_GRADS
    if plain:
        return q.requires_grad, k.requires_grad, v.requires_grad, False, False
    wanted = tuple(x is not None and x.requires_grad for x in differentiable(t))
    return wanted if t.operands is None else (*wanted, *(x.requires_grad for x in t.operands))


def _check_types(t: Tensors) -> None:
    # First what finds no error in most calls, in a third of the time.
    is_usual = type(t.q) is type(t.k) is type(t.v) is Tensor and {type(t.attn_bias), type(t.sinks)} <= _MAY_BE
    if is_usual and not any(x is not None and (type(x) is not Tensor or x.requires_grad) for x in _plain(t)):
        return
    found = given(t, TENSORS)
    for name, row, x in found:
        if x.requires_grad and row.gradient is None:
            trained = "score_mod=flashtile.mods.alibi(slopes)" if name == "alibi_slopes" else "attn_bias"
            raise InvalidInputError(name, f"requires grad, but has no gradient: detach it, or use {trained}")
    refuse_mixed({row.keyword or name: x for name, row, x in found})


def is_dtensor(x: object) -> bool:
    """Whether a value is a DTensor."""
    return hasattr(x, "placements")


def refuse_mixed(tensors: Mapping[str, Any]) -> None:
    """Raises if some of these tensors are DTensors and some are not.

    Raises:
        InvalidInputError: Naming one of the fewer.
    """
    of_mesh = [name for name, x in tensors.items() if is_dtensor(x)]
    if of_mesh and len(of_mesh) < len(tensors):
        plain, kinds = [name for name in tensors if name not in of_mesh], ("a DTensor", "a plain tensor")
        few, many = (of_mesh, plain) if len(of_mesh) < len(plain) else (plain, of_mesh)
        is_, are = kinds if few is of_mesh else kinds[::-1]
        must = f"but {many[0]} is {are}: give all as DTensors, or the local tensors of all"
        raise InvalidInputError(few[0], f"is {is_}, {must}")


def given(record: object, rows: Mapping[str, Argument]) -> list[tuple[str, Argument, Tensor]]:
    """The tensors of a record that are not None, with their names and rows.

    Raises:
        InvalidInputError: Naming one that is no tensor, or has no strides.
    """
    found = []
    for name, row in rows.items():
        value = getattr(record, name)
        if "[]" in row.schema:
            continue
        optional = row.schema == "Tensor?"
        if value is None and optional:
            continue
        if type(value) is not Tensor:
            check_tensor(name, value, "a torch.Tensor or None" if optional else "a torch.Tensor")
        found.append((name, row, value))
    return found


def check_tensor(name: str, tensor: object, must: str = "a torch.Tensor") -> None:
    """Refuses what is no tensor or has no strides: nested and sparse tensors, and tensors in other libraries' layouts.

    Raises:
        InvalidInputError: Naming the argument.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidInputError(name, f"is of type {type(tensor).__name__}, must be {must}")
    if tensor.is_nested:
        raise InvalidInputError(
            name, "is a nested tensor, must be a dense one; attention_varlen takes packed sequences"
        )
    if tensor.layout is not torch.strided:
        raise InvalidInputError(name, f"has the layout {tensor.layout}, must be dense (torch.strided)")


def band_of(causal: bool, window_size: Sequence[int | None] | None) -> Band:
    """The Band of the keywords ``causal`` and ``window_size``; causal overrides the right bound.

    Raises:
        InvalidInputError: If either is invalid.
    """
    left, right = window_bounds(window_size)
    return Band(left, 0 if flag("causal", causal) else right)


def window_bounds(window_size: Sequence[int | None] | None) -> tuple[int | None, int | None]:
    """The bounds of the keyword ``window_size``, None where unbounded.

    Raises:
        InvalidInputError: If it is invalid.
    """
    if window_size is None:
        return None, None
    must = "must be a pair (left, right) of integers >= 0, with -1 or None for unbounded"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidInputError("window_size", f"is {shown(window_size)}, {must}")
    for bound in window_size:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, numbers.Integral) or bound < -1):
            raise InvalidInputError("window_size", f"has {shown(bound)}, {must}")
    # No sequence is longer than an int32 counts.
    left, right = (None if bound is None or not 0 <= bound <= _LONGEST else int(bound) for bound in window_size)
    return left, right
