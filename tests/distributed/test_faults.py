"""What goes wrong between ranks ends in an error on every rank that says what it was: no hang, no wrong numbers."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile import InvalidInputError, UnsupportedError, distributed
from flashtile.distributed import ExchangeError
from flashtile.distributed.exchange import RankLine
from tests.distributed.pool import Pool

# Of the pools that break. Enough for ranks that are slow and well.
TIMEOUT_S = 8.0


@pytest.fixture
def three() -> Iterator[Pool]:
    """Three ranks that may break."""
    made = Pool(3, TIMEOUT_S)
    yield made
    made.close()


def call(mesh: DeviceMesh, rows: int = 6, dtype: torch.dtype = torch.float32, **keywords: Any) -> Tensor:
    q, k, v = (torch.ones(1, rows, 6, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    keywords = {"causal": True, **keywords}
    found: Tensor = distributed.attention(q, k, v, mesh=mesh, **keywords)
    return found


def ending(action: Callable[..., None], *args: Any) -> None:
    """Runs it, and ends the process group if that raises, as a process does that ends."""
    try:
        action(*args)
    except BaseException:
        dist.destroy_process_group()
        raise


def leaves(mesh: DeviceMesh, how: str, when: str, comm: str) -> None:
    ending(die_or_stall, mesh, how, when, comm)


def die_or_stall(mesh: DeviceMesh, how: str, when: str, comm: str) -> None:
    """A call that goes well, and one that rank 1 leaves before it or before its backward."""
    call(mesh, comm=comm).sum().backward()
    out = call(mesh, comm=comm) if when == "backward" else None
    if mesh.get_rank() == 1:
        if how == "killed":
            os._exit(9)
        time.sleep(TIMEOUT_S + 2)
    (call(mesh, comm=comm) if out is None else out).sum().backward()


STEPS = {
    "ring": r"the exchange during step \d of the ring",
    "allgather": "the gathering of keys",
    "ulysses": "the exchange of heads",
}


@pytest.mark.long
@pytest.mark.parametrize(("how", "when", "comm"), [
    ("killed", "forward", "ring"), ("killed", "backward", "ring"), ("killed", "forward", "allgather"),
    ("killed", "backward", "ulysses"), ("stalled", "backward", "ring"),
])  # fmt: skip
def test_a_rank_that_dies_or_stalls(three: Pool, how: str, when: str, comm: str) -> None:
    start_s = time.monotonic()
    errors = three.errors(leaves, how, when, comm)
    assert time.monotonic() - start_s < 5 * TIMEOUT_S
    for rank, error in enumerate(errors):
        if rank == 1 and how == "killed":
            assert isinstance(error, EOFError)
            continue
        assert isinstance(error, ExchangeError), error
        with pytest.raises(ExchangeError, match=rf"^{STEPS[comm]}, with rank \d"):
            raise error
        assert rank not in error.peers or comm != "ring"
    # The neighbour that waits for the rank's keys names it.
    assert comm != "ring" or 1 in errors[2].peers  # type: ignore[union-attr]


def other_rows_later(mesh: DeviceMesh) -> None:
    call(mesh, comm="ring")
    ending(lambda: call(mesh, rows=5 if mesh.get_rank() == 1 else 6, comm="ring") and None)


@pytest.mark.long
def test_a_rank_with_another_length_after_calls_that_fit(three: Pool) -> None:
    """Its call is new, so it asks the others to compare it; theirs is not, so they send keys."""
    errors = three.errors(other_rows_later)
    assert all(isinstance(error, ExchangeError) for error in errors), errors
    assert "comparison of this call" in str(errors[1])
    assert "during step 0 of the ring" in str(errors[0])


def destroying(mesh: DeviceMesh) -> None:
    """Forward and backward along a group that ends then."""
    group = dist.new_group()
    call(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ring",))).sum().backward()
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None


def test_plans_keep_no_group_that_was_destroyed(three: Pool) -> None:
    """Its threads would run on; where the interpreter ended beside them, one process in five aborted."""
    three.run(destroying)
    group = torch.Generator()
    line = RankLine(group, 0, (0, 1))
    assert line.group is group
    del group
    with pytest.raises(InvalidInputError, match="mesh: is of a process group that was destroyed"):
        _ = line.group


def differing(mesh: DeviceMesh, usual: dict[str, Any], odd: dict[str, Any]) -> None:
    call(mesh, **{**usual, **(odd if mesh.get_rank() == 1 else {})})


BF16 = torch.bfloat16
DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"rows": 5}, "q: has 5 rows on rank 1 and 6 on rank 0: give seqlen_q"),
    ({"seqlen_q": 18, "seqlen_k": 18}, {"rows": 7}, "q: has 7 rows on rank 1, but of 18 rows in all it holds 6"),
    ({"seqlen_q": 18, "seqlen_k": 18}, {"seqlen_k": 17}, "seqlen_k: is .17. on rank 1, but .18. on rank 0"),
    ({}, {"dtype": BF16}, r"q: is torch.bfloat16 \(1, 6, 8\) a row on rank 1, but torch.float32 \(1, 6, 8\)"),
    ({}, {"causal": False}, r"causal: is .None, None. on rank 1, but .None, 0. on rank 0"),
    ({}, {"layout": "striped"}, "layout: is striped on rank 1, but zigzag on rank 0"),
    ({}, {"comm": "allgather"}, "comm: is allgather on rank 1, but auto on rank 0"),
    ({}, {"softcap": 2.0}, "softcap: is 2.0 on rank 1, but 0.0 on rank 0"),
    ({}, {"dropout_p": 0.5}, "dropout_p: is 0.5 on rank 1"),
    ({}, {"sinks": torch.zeros(6)}, "sinks: is torch.float32"),
    ({}, {"sinks": torch.zeros(5)}, "sinks: on rank 1: num_heads_q is 5, but q has 6"),
]


@pytest.mark.parametrize(("usual", "odd", "message"), DIFFERENCES, ids=[m[:24] for *_, m in DIFFERENCES])
def test_ranks_that_are_called_differently(pool: Pool, usual: Any, odd: Any, message: str) -> None:
    for error in pool.errors(differing, usual, odd, mesh=3)[:3]:
        assert isinstance(error, InvalidInputError), error
        with pytest.raises(InvalidInputError, match=message):
            raise error


def odd_keys(mesh: DeviceMesh, name: str, value: Any) -> None:
    given = {each: torch.ones(1, 6, 6, 8) for each in "qkv"}
    if mesh.get_rank() == 2:
        given[name] = value
    distributed.attention(**given, mesh=mesh)


def masked(mesh: DeviceMesh, name: str) -> None:
    rows = {name: torch.ones(6, 18, dtype=torch.bool if name == "attn_mask" else None)} if mesh.get_rank() else {}
    call(mesh, **rows)


def test_what_one_rank_refuses_all_refuse(pool: Pool) -> None:
    for error in pool.errors(odd_keys, "k", torch.ones(1, 6, 6, 8, dtype=torch.float64), mesh=3)[:3]:
        assert isinstance(error, InvalidInputError)
        assert str(error) == "k: on rank 2: dtype is torch.float64, but q has torch.float32"
    for error in pool.errors(odd_keys, "v", torch.ones(1, 5, 6, 8), mesh=3)[:3]:
        assert str(error) == "v: on rank 2: seqlen_k is 5, but k has 6"
    for name in ("attn_mask", "attn_bias"):
        for error in pool.errors(masked, name, mesh=2)[:2]:  # of this shape it fits no whole
            assert isinstance(error, InvalidInputError), error
            assert str(error).startswith(f"{name}: on rank 1: seqlen_q is 6, must be 1 or 12 to broadcast")


def packed_differently(mesh: DeviceMesh) -> None:
    x = torch.ones(4, 2, 8)
    bounds = (0, 5, 8) if mesh.get_rank() else (0, 4, 8)
    distributed.attention(x, x, x, mesh=mesh, cu_seqlens_q=bounds, cu_seqlens_k=bounds)


def with_many_documents(mesh: DeviceMesh) -> None:
    x = torch.ones(500, 2, 8)
    bounds = torch.arange(1001, dtype=torch.int32)
    bounds[700] += mesh.get_rank()
    distributed.attention(x, x, x, mesh=mesh, cu_seqlens_q=bounds, cu_seqlens_k=bounds)


def test_many_documents_are_compared_by_a_hash(pool: Pool) -> None:
    for error in pool.errors(with_many_documents, mesh=2)[:2]:
        with pytest.raises(
            InvalidInputError, match=r"^cu_seqlens_q: is \[1, 1, .*\.\.\. \(\w{12}\) on rank 1, but \[1, 1, "
        ):
            raise error


def test_other_documents(pool: Pool) -> None:
    for error in pool.errors(packed_differently, mesh=2)[:2]:
        assert str(error) == "cu_seqlens_q: is [5, 3] on rank 1, but [4, 4] on rank 0"


def refused(mesh: DeviceMesh, **keywords: Any) -> str:
    try:
        call(mesh, **keywords)
    except (InvalidInputError, UnsupportedError) as error:
        return str(error)
    return ""


def by_name(mesh: DeviceMesh, keywords: dict[str, Any]) -> str:
    return refused(mesh, **keywords)


@pytest.mark.parametrize(("keywords", "message"), [
    ({"layout": "spiral"}, "layout: is 'spiral', must be one of contiguous, zigzag, striped, or made by deal"),
    ({"comm": "pigeon"}, "comm: is 'pigeon', must be one of auto, ring, allgather, ulysses"),
    ({"comm": "ulysses"}, "q: on rank 0: has 6 heads over 6, which the 4 ranks that exchange heads do not divide"),
    ({"backend": "hopper"}, "backend 'hopper' cannot run this backward"),
    ({"cu_seqlens_q": (0, 24)}, "cu_seqlens_k: is None, but the other one is given"),
    ({"max_seqlen_q": 9}, "max_seqlen_q: is given, but goes with cu_seqlens alone"),
    ({"seqlen_q": -1}, "seqlen_q: is -1, must be an integer >= 0"),
    ({"cu_seqlens_q": (0, 24), "cu_seqlens_k": (0, 5, 3)}, "cu_seqlens_k: falls somewhere"),
    ({"cu_seqlens_q": (0, 24), "cu_seqlens_k": (0, 24), "max_seqlen_k": 9}, "max_seqlen_k: is 9, but cu_seqlens_k"),
    ({"window_size": (1, 2, 3)}, "window_size: "),
])  # fmt: skip
def test_arguments_are_refused_by_name(pool: Pool, keywords: dict[str, Any], message: str) -> None:
    for found in pool.run(by_name, keywords, mesh=4):
        assert message in found


def test_meshes_are_refused_by_name(pool: Pool) -> None:
    square = ((0, 1), (2, 3))
    ring = pool.run(by_name, {"comm": "ulysses"}, mesh=square, names=("ring", "ulysses"))
    assert all("comm: on rank 0: is 'ulysses', but the mesh has a ring of 2 ranks as well" in x for x in ring), ring
    assert all(x.endswith("'ring', 'allgather' and 'auto' exchange heads along its other dimension") for x in ring)
    for keywords, mesh, cure in (
        ({"comm": "ulysses"}, {"mesh": 4}, "comm='ring', 'allgather' or 'auto' exchanges none"),
        ({"comm": "ring"}, {"mesh": 4, "names": ("ulysses",)}, "comm='auto' exchanges none"),
        (
            {},
            {"mesh": ((0, 1, 2, 3), (4, 5, 6, 7)), "names": ("ring", "ulysses")},
            "make the mesh one ring of all ranks",
        ),
    ):
        for found in pool.run(by_name, keywords, **mesh):
            assert "4 ranks that exchange heads do not divide evenly" in found and found.endswith(f": {cure}")
    for found in pool.run(by_name, {}, mesh=square, names=("data", "ring")):
        assert found.startswith("mesh: has the dimensions data, ring, must have one, or two named ring and ulysses")
        assert found.endswith("of a larger mesh take mesh['ring', 'ulysses']")
    assert pool.run(by_name, {}, mesh=2, names=("cp",)) == ["", ""]


def elsewhere(mesh: DeviceMesh) -> list[str]:
    other = DeviceMesh("cpu", [0], mesh_dim_names=("ring",))
    found = [refused(other)] if dist.get_rank() else []
    found.append(refused("ring"))  # type: ignore[arg-type]
    with torch.device("meta"):
        found.append(refused(mesh))
    return found


def test_a_process_outside_and_other_devices(pool: Pool) -> None:
    _, found = pool.run(elsewhere, mesh=None)[:2]
    assert found[0] == "mesh: has no rank 1, which is this process"
    assert found[1] == "mesh: is 'ring', must be a DeviceMesh"
    assert found[2] == "mesh: is one of cpu devices, but q is on meta"
