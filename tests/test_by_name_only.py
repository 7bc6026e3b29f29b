"""A backend that wants to be asked for is taken when it is, and only then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import flashtile
from flashtile import UnsupportedError, dispatch, ops, reference
from flashtile.backends.base import Capabilities, Direction
from flashtile.backends.cpu import BACKEND
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors


@pytest.fixture
def shy_backward() -> Iterator[None]:
    """The CPU's backward waits to be asked for."""
    known = {direction: BACKEND.capabilities(direction) for direction in ("forward", "backward")}

    def capabilities(self: object, direction: Direction) -> Capabilities | None:
        asked = "it is being tried" if direction == "backward" else None
        declared = known[direction]
        return None if declared is None else dataclasses.replace(declared, by_name_only=asked)

    with mock.patch.object(type(BACKEND), "capabilities", capabilities):
        dispatch._first.cache_clear()
        ops._KNOWN.clear()
        yield
    dispatch._first.cache_clear()
    ops._KNOWN.clear()


@pytest.mark.usefixtures("shy_backward")
def test_only_where_it_is_named() -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="asked for by name: it is being tried"):
        flashtile.attention(q, q, q)
    out = flashtile.attention(q, q, q, backend="cpu")
    (named,) = torch.autograd.grad(out.sum(), q)
    with torch.no_grad():
        assert torch.equal(flashtile.attention(q, q, q), out)
    problem = Problem.build(Tensors(q, q, q), Band(), needs_grad=True)
    assert dispatch.reasons("cpu", problem, "backward") == []
    assert "backward: cpu" in flashtile.explain(q, q, q, backend="cpu")
    exact = torch.autograd.grad(reference.attention(problem, Tensors(q, q, q))[0].sum(), q)[0]
    torch.testing.assert_close(named, exact.float())
