"""Functions whose objects change between calls: what a call reads is what is there then, in compiled code too."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flashtile
from flashtile.mods import record
from tests.mods.functions import Held

FIRST, THEN = 2, 20
Change = Callable[[int], object]
width, other_width = FIRST, FIRST


def near(i: Tensor, j: Tensor) -> Tensor:
    return i - j <= FIRST


def far(i: Tensor, j: Tensor) -> Tensor:
    return i - j <= THEN


helper = near


def reads_width() -> int:
    return other_width


def reads(x: Any) -> Any:
    return x.value


class OfClass:
    value = FIRST


class Slots:
    __slots__ = ("value",)


class Computed:
    held = FIRST

    @property
    def value(self) -> int:
        return self.held

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i - j <= self.held


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.inner = FIRST, Held()
        self.register_buffer("limit", torch.tensor(FIRST))

    def forward(self, b, h, i, j):
        return i - j <= self.value

    def of_helper(self, b, h, i, j):
        return i - j <= self.found()

    def found(self) -> int:
        return self.inner.value

    def of_buffer(self, b, h, i, j):
        return i - j <= self.limit

    def of_global(self, b, h, i, j):
        return i - j <= reads_width()

    def of_inner(self, b, h, i, j):
        return (lambda x: x <= self.value)(i - j)

    def again(self, b, h, i, j, times=1):
        return self.again(b, h, i, j, times - 1) if times else i - j <= self.value


class Number(enum.Enum):
    FIRST, THEN = FIRST, THEN


class Pair(collections.namedtuple("Pair", "value other")):
    scale = 1


def put(x: Any, name: Any, make: Callable[[int], Any] = int) -> Change:
    """What writes a value onto an object or into a container."""
    return lambda n: setattr(x, name, make(n)) if isinstance(name, str) else x.__setitem__(name, make(n))


def cases() -> Iterator[tuple[str, Callable[..., Any], Change]]:
    def mask(read: Callable[[], Any]) -> Callable[..., Any]:
        return lambda b, h, i, j: i - j <= read()

    def of_globals(name: str, make: Callable[[int], Any] = int) -> Change:
        return lambda n: globals().update({name: make(n)})

    x, inner, computed, slots, module = Held(), types.SimpleNamespace(x=Held()), Computed(), Slots(), Module()
    yield "class", lambda b, h, i, j: i - j <= OfClass.value, put(OfClass, "value")
    yield "attribute", lambda b, h, i, j: i - j <= x.value, put(x, "value")
    yield "nested", lambda b, h, i, j: i - j <= inner.x.value, put(inner.x, "value")
    yield "getattr", mask(lambda: getattr(x, "value")), put(x, "value")  # noqa: B009
    yield "passed on", mask(lambda: reads(x)), put(x, "value")
    yield "__getitem__", mask(lambda: x[0]), put(x, "value")
    yield "partial", functools.partial(lambda x, b, h, i, j: i - j <= x.value, x), put(x, "value")
    yield "property", mask(lambda: computed.value), put(computed, "held")
    yield "callable", computed, put(computed, "held")
    slots.value = FIRST
    yield "slots", mask(lambda: slots.value), put(slots, "value")
    of_module = types.ModuleType("config")
    of_module.value = FIRST  # type: ignore[attr-defined]
    yield "module", mask(lambda: of_module.value), put(of_module, "value")
    yield "nn.Module", module, put(module, "value")
    yield "buffer", module.of_buffer, put(module, "limit", torch.tensor)
    for name in ("of_inner", "again"):
        yield name, getattr(module, name), put(module, "value")
    yield "method's helper", module.of_helper, put(module.inner, "value")
    yield "method's global", module.of_global, of_globals("other_width")
    yield "global", lambda b, h, i, j: i - j <= width, of_globals("width")
    to_helper = of_globals("helper", {FIRST: near, THEN: far}.__getitem__)
    yield "rebound helper", lambda b, h, i, j: helper(i, j), to_helper
    items, table, ordered = [FIRST], {"n": FIRST}, collections.OrderedDict(n=FIRST)
    yield "list", mask(lambda: items[0]), put(items, 0)
    yield "dict", mask(lambda: table["n"]), lambda n: table.update(n=n)
    yield "OrderedDict", mask(lambda: ordered["n"]), lambda n: ordered.update(n=n)
    last, members, array = collections.deque([FIRST]), {FIRST}, np.array([FIRST])
    yield "deque", mask(lambda: last[0]), put(last, 0)
    yield "set", mask(lambda: FIRST if FIRST in members else THEN), lambda n: (members.clear(), members.add(n))
    yield "array", mask(lambda: array[0].item()), put(array, 0)
    many: list[int] = []
    yield "len", mask(lambda: len(many)), lambda n: many.__setitem__(slice(None), [0] * n)
    modes = [""]
    yield "text", mask(lambda: FIRST if modes[0] == "2" else THEN), put(modes, 0, str)
    numbers, pairs = [Number.FIRST], [Pair(FIRST, 0)]
    yield "enum", mask(lambda: numbers[0].value), put(numbers, 0, Number)
    yield "namedtuple", mask(lambda: pairs[0].value), put(pairs, 0, lambda n: Pair(n, 0))
    drawn = random.Random(0)
    yield "random", mask(lambda: drawn.randint(*bounds)), lambda n: bounds.__setitem__(slice(None), [n, n])
    bounds = [FIRST, FIRST]

    def with_attribute(b, h, i, j):
        return i - j <= with_attribute.value  # type: ignore[attr-defined]

    yield "function's attribute", with_attribute, put(with_attribute, "value")
    tensors, held = [torch.tensor(FIRST)], [types.SimpleNamespace(t=torch.full((4,), FIRST))]
    yield "tensor in a list", mask(lambda: tensors[0]), put(tensors, 0, torch.tensor)
    yield (
        "tensor of an item",
        lambda b, h, i, j: i - j <= held[0].t[h],
        put(held[0], "t", lambda n: torch.full((4,), n)),
    )
    yield "tensor's attribute", mask(lambda: tensors[0].flag), lambda n: setattr(tensors[0], "flag", n)
    of_length = types.SimpleNamespace(t=torch.zeros(FIRST))
    for name, length in (
        ("len of a tensor", lambda: len(of_length.t)), ("shape", lambda: of_length.t.shape[0]),
        ("numel", lambda: of_length.t.numel()), ("expand_as", lambda: of_length.t[:1].expand_as(of_length.t).shape[0]),
    ):  # fmt: skip
        yield name, mask(length), put(of_length, "t", torch.zeros)
    rows = types.SimpleNamespace(t=torch.zeros(3, FIRST))
    yield (
        "length that is left",
        lambda b, h, i, j: i - j <= rows.t[h].shape[0],
        put(rows, "t", lambda n: torch.zeros(3, n)),
    )
    number = 0

    def to_number(n: int) -> None:
        nonlocal number
        number = 3 if n == FIRST else 5

    yield "number in a table", mask(lambda: {3: FIRST}.get(number, THEN)), to_number
    yield "text of a number", mask(lambda: FIRST if f"{number}" == "3" else THEN), to_number


CASES = list(cases())


def right(got: Tensor, n: int, q: Tensor) -> bool:
    return torch.allclose(got, flashtile.attention(q, q, q, causal=True, window_size=(n, 0)), atol=1e-5)


@pytest.mark.parametrize(("name", "mod", "change"), CASES, ids=[name for name, *_ in CASES])
def test_a_call_reads_what_is_there(name: str, mod: Callable[..., Any], change: Change) -> None:
    q = torch.randn(1, 64, 2, 16)
    blocks = []
    for n in (FIRST, THEN, FIRST, THEN):
        change(n)
        assert right(flashtile.attention(q, q, q, causal=True, mask_mod=mod), n, q), n
        blocks.append(flashtile.create_block_mask(mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=16).sparsity())
    assert blocks[0] > blocks[1] and blocks[:2] == blocks[2:]
    change(FIRST)


def test_calls_over_a_cache_read_what_is_there() -> None:
    config = Held()
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 64, 2, 16)

    def mod(b, h, i, j):
        return j < getattr(config, "value")  # noqa: B009

    for n in (5, 30):
        config.value = n
        lengths = torch.tensor([64], dtype=torch.int32)
        got = flashtile.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=False, mask_mod=mod)
        want = flashtile.attention(q, cache[:, :n], cache[:, :n])
        torch.testing.assert_close(got, want)


def test_new_tensors_of_objects_have_gradients() -> None:
    q, held = torch.randn(1, 8, 2, 16, dtype=torch.float64), [Held()]

    def mod(s, b, h, i, j):
        return s * held[0].value[h] + held[0].value[0]

    for _ in range(2):
        table = held[0].value = torch.randn(2, dtype=torch.float64, requires_grad=True)
        out = flashtile.attention(q, q, q, score_mod=mod)
        want = flashtile.attention(q * table[:, None], q, q)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), table)[0] for x in (out, want)))


def test_what_functions_capture_is_not_kept_alive() -> None:
    q, gone = torch.randn(1, 8, 2, 16), []

    def call() -> None:
        held, array, table = Held(), np.zeros(3), torch.zeros(8)
        held.value = torch.zeros(2)

        class Local:
            value = 3

        for mod in (
            lambda b, h, i, j: i <= j + held.value[h], lambda b, h, i, j: i >= j - Local.value,
            lambda b, h, i, j: i >= j + array[0].item(), lambda b, h, i, j: i >= j + getattr(held, "value")[h],  # noqa: B009
            lambda b, h, i, j: table.view_as(table)[i] == 0,
        ):  # fmt: skip
            flashtile.attention(q, q, q, mask_mod=mod)
            gone.extend(map(weakref.ref, (held, array, table, held.value, Local, mod)))

    call()
    gc.collect()
    assert not [x() for x in gone if x() is not None]


def test_what_is_watched_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    number, table, held, pair = 3, torch.randn(9), Held(), (4, torch.randn(2))
    held.value = 2
    both = flashtile.mods.and_masks(lambda b, h, i, j: i - j <= number, lambda b, h, i, j: j >= width)
    watched = [
        both, lambda b, h, i, j: table[i % table.shape[0]] > 0, lambda b, h, i, j: i - j <= held.value,
        lambda b, h, i, j: i - j <= pair[0] + pair[1][h], functools.partial(lambda n, b, h, i, j: i - j <= n, 3),
        Module().of_helper, Module(), lambda b, h, i, j: helper(i, j),
    ]  # fmt: skip
    before = [record.recorded(mod, "mask_mod", "mask")[0] for mod in watched]
    monkeypatch.setattr(record, "_traced", lambda f, found, *_: pytest.fail() if found is not None else None)
    for mod, kept in zip(watched, before, strict=True):
        if not isinstance(mod, nn.Module):  # whose hooks may be anything
            assert record.recorded(mod, "mask_mod", "mask")[0] is kept
